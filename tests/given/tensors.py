"""How far tensors of PyTorch are from each other, and a layer to make some."""

from __future__ import annotations

import numpy as np


def nmse(ours, theirs) -> float:
    """The squared error over the square, where the reference is finite; infinities must be the same."""
    a, b = (x.detach().double().numpy() for x in (ours, theirs))
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True)
    return float(np.sum((a - b)[finite] ** 2) / max(1e-30, np.sum(b[finite] ** 2)))


def encoder_layer():
    """A small layer of an encoder with random weights."""
    import torch

    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu").eval()
