"""Which model it is: what a saved state and other processes have to share with the one that goes on."""

from __future__ import annotations

import hashlib

from .models import Model


def model_digest(model: Model) -> str:
    """SHA-256 of a model: architecture, tensors, their shapes and types, and the entries of the small ones and of all
    adapters."""
    sha = hashlib.sha256(model.architecture.encode())
    sha.update(" ".join(map(repr, model.adapters.scales)).encode())
    adapted = model.adapters.tensors
    for name, tensor in sorted(model.tensors.items()):
        sha.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        if tensor.nbytes <= 1 << 16 or name in adapted:  # norms and biases tell two fine-tunings of one shape apart
            sha.update(tensor.raw.tobytes())
    return sha.hexdigest()
