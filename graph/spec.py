"""Specs: the shape and the dtype of a value, with a check of legal shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache

from .dtypes import DType, DTypeLike, parse_dtype
from .errors import GraphError
from .lazy_dataclass import dataclass
from .validation import format_value, validate_constructor

MAX_RANK = 5
INTEGER = frozenset({int})
MAX_SIZE = 2**63 - 1


@validate_constructor(GraphError)
@dataclass(frozen=True, slots=True)
class Spec:
    """The shape and the dtype of a value, written as ``f32[1,8192]``.

    The shape is in NumPy order, so the last axis is contiguous. The rank is 0 to 5.
    """

    shape: tuple[int, ...]
    dtype: DType = DType.F32
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or not INTEGER.issuperset(map(type, self.shape)):
            raise GraphError(f"Spec: shape is {format_value(self.shape)}; it must be a tuple of integers")
        if not isinstance(self.dtype, DType):
            raise GraphError(
                f"Spec: dtype is {format_value(self.dtype)}; it must be a DType, as DType.F32 or DType('f32')"
            )
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int:
        """The size: the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of a contiguous value. Rows of a quantised dtype are complete blocks."""
        if self.dtype.block == 1:
            return math.prod(self.shape) * self.dtype.block_bytes
        return math.prod(self.shape[:-1]) * self.dtype.count_bytes(self.shape[-1])

    def __str__(self) -> str:
        return f"{self.dtype.text}[{','.join(map(str, self.shape))}]"

    __repr__ = __str__


@lru_cache(maxsize=1 << 14)  # each layer and device checks the same specs
def check_spec(spec: Spec) -> str | None:
    """Return the reason why a spec is illegal, or None if it is legal."""
    shape, dtype = spec.shape, spec.dtype
    if any(n > MAX_SIZE for n in shape):  # no number here: Python refuses to print more than 4,300 digits
        return f"an axis of a {dtype} value holds more than 2^63 - 1 entries"
    if len(shape) > MAX_RANK:
        return f"{spec} has rank {len(shape)}; at most {MAX_RANK} is allowed"
    if any(n < 0 for n in shape):
        return f"{spec} has a negative size"
    if spec.size > MAX_SIZE:
        return f"{spec} holds more than 2^63 - 1 elements"
    if dtype.is_quantised and (not shape or shape[-1] % dtype.block):
        return f"{spec}: rows of {dtype} are blocks of {dtype.block}, so the last axis must be a multiple of it"
    return None


def make_spec(shape: Sequence[int], dtype: DTypeLike = DType.F32) -> Spec:
    """Make a legal spec from a shape and a dtype. Raises `GraphError` for an illegal shape or an unknown dtype."""
    parsed_dtype = parse_dtype(dtype)
    try:
        spec = Spec(tuple(map(operator.index, shape)), parsed_dtype)
    except TypeError:
        raise GraphError(f"shape is {format_value(shape)}; it must be a sequence of integers") from None
    if problem := check_spec(spec):
        raise GraphError(problem)
    return spec
