"""Conversion of PyTorch tensors to NumPy arrays that share their memory, and of outputs to PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError

if TYPE_CHECKING:
    import torch


def view_tensor_as_array(data: torch.Tensor, name: str) -> npt.NDArray[Any]:
    """Return a NumPy array over the memory of a PyTorch tensor.

    bfloat16 is returned as its bits in uint16, and bool is converted to float32.

    Raises:
        ModelError: The tensor is on the meta device, or it is complex.
    """
    import torch

    if data.is_meta or data.device.type == "meta":
        raise ModelError(f"%{name} is on the meta device, so it has no numbers; load the model's weights first")
    if data.is_complex():
        raise ModelError(f"%{name} is of {str(data.dtype).removeprefix('torch.')}; hocket has real numbers only")
    plain = data.detach().cpu()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16)
    return plain.float().numpy() if plain.dtype == torch.bool else plain.numpy()


def as_torch_tensor(array: npt.NDArray[Any], shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return an output array as a PyTorch tensor of the given shape and PyTorch dtype name."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(shape).to(kind)
