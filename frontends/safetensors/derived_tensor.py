"""Tensors with elements that are computed from a tensor of a file at each read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ...ops.quantisation import dequantise
from ...scheduler.runtime.packed_weight_files import WeightOrigin
from ..gguf import Tensor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DerivedTensor(Tensor):
    """A tensor with entries that are computed from another tensor of the file whenever they are read.

    `compute` gets the entries of `source`, and returns the entries of this tensor. File and offset are as in `source`.
    """

    source: Tensor
    change: str
    """Name of the computation, a part of the identity of the elements."""
    compute: Callable[[np.ndarray], np.ndarray]

    @property
    def cache_identity(self) -> WeightOrigin:
        """The identity of the elements for caches: the identity of the source and the name of the computation."""
        source = self.source.cache_identity
        return WeightOrigin(source.file, f"{source.version} {self.change}", source.offset)

    @property
    def stored_elements(self) -> np.ndarray:
        """The computed elements in the storage dtype ``dtype.storage``, [*shape], as a new array."""
        return np.ascontiguousarray(self.compute(self.source.stored_elements))

    def dequantise(self) -> npt.NDArray[np.float32]:
        """Return the values as float32 [*shape], a new array."""
        return dequantise(self.stored_elements, self.dtype)


def derive_tensor(
    source: Tensor,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: DType,
    change: str,
    compute: Callable[[np.ndarray], np.ndarray],
) -> DerivedTensor:
    """Return a tensor that is computed from `source` when it is read.

    Args:
        source: The tensor of a file.
        name: Name of the new tensor.
        shape: Shape of the result in NumPy order.
        dtype: Dtype of the result.
        change: Name of the computation, different for different results.
        compute: Function from the stored elements of the source to the elements of the result.
    """
    return DerivedTensor(name, shape, dtype, source.file, source.offset, source, change, compute)
