"""All data types of GGML, with the number in a file, elements per block, bytes per block and NumPy storage.

Source: ``ggml.h`` (numbers) and ``ggml-common.h`` (block layouts) of llama.cpp.
"""

from __future__ import annotations

from enum import Enum, EnumType
from typing import Any, TypeAlias

import numpy as np

from .errors import GraphError, format_count
from .old_names import RenamedAttribute
from .validation import did_you_mean, format_value


class DTypeMeta(EnumType):
    """The metaclass of `DType`, which lets ``DType(...)`` accept a name such as ``"f32"`` or a NumPy dtype."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1:
            raise GraphError(
                f"DType: got {format_count(len(args) + len(kwargs), 'argument')}; it takes one, the name of a type"
            )
        return parse_dtype(*args, *kwargs.values())


class DType(Enum, metaclass=DTypeMeta):
    """A data type of tensor elements, with the memory formats of GGML.

    Elements are stored in blocks: `block` neighbours along the last axis occupy `block_bytes` bytes. Types without
    quantisation have blocks of one element. `storage` is the NumPy dtype of the memory. NumPy has no bf16 and no
    quantised types: ``uint16`` has the bits of ``bf16``, and ``uint8`` has the bytes of quantised blocks.
    """

    F32 = ("f32", 0, 1, 4, "<f4")
    F16 = ("f16", 1, 1, 2, "<f2")
    Q4_0 = ("q4_0", 2, 32, 18)
    Q4_1 = ("q4_1", 3, 32, 20)
    Q5_0 = ("q5_0", 6, 32, 22)
    Q5_1 = ("q5_1", 7, 32, 24)
    Q8_0 = ("q8_0", 8, 32, 34)
    Q8_1 = ("q8_1", 9, 32, 36)
    Q2_K = ("q2_K", 10, 256, 84)
    Q3_K = ("q3_K", 11, 256, 110)
    Q4_K = ("q4_K", 12, 256, 144)
    Q5_K = ("q5_K", 13, 256, 176)
    Q6_K = ("q6_K", 14, 256, 210)
    Q8_K = ("q8_K", 15, 256, 292)
    IQ2_XXS = ("iq2_xxs", 16, 256, 66)
    IQ2_XS = ("iq2_xs", 17, 256, 74)
    IQ3_XXS = ("iq3_xxs", 18, 256, 98)
    IQ1_S = ("iq1_s", 19, 256, 50)
    IQ4_NL = ("iq4_nl", 20, 32, 18)
    IQ3_S = ("iq3_s", 21, 256, 110)
    IQ2_S = ("iq2_s", 22, 256, 82)
    IQ4_XS = ("iq4_xs", 23, 256, 136)
    I8 = ("i8", 24, 1, 1, "<i1")
    I16 = ("i16", 25, 1, 2, "<i2")
    I32 = ("i32", 26, 1, 4, "<i4")
    I64 = ("i64", 27, 1, 8, "<i8")
    F64 = ("f64", 28, 1, 8, "<f8")
    IQ1_M = ("iq1_m", 29, 256, 56)
    BF16 = ("bf16", 30, 1, 2, "<u2")
    TQ1_0 = ("tq1_0", 34, 256, 54)
    TQ2_0 = ("tq2_0", 35, 256, 66)
    MXFP4 = ("mxfp4", 39, 32, 17)
    NVFP4 = ("nvfp4", 40, 64, 36)
    Q1_0 = ("q1_0", 41, 128, 18)
    Q2_0 = ("q2_0", 42, 64, 18)

    bytes_of = RenamedAttribute("count_bytes")

    def __init__(self, text: str, ggml: int, block: int, block_bytes: int, storage: str = "|u1") -> None:
        self.text = text
        self.ggml = ggml
        self.block = block
        self.block_bytes = block_bytes
        self.storage: np.dtype[Any] = np.dtype(storage)

    def __reduce_ex__(self, protocol: object) -> tuple[type[DType], tuple[str]]:
        return DType, (self.text,)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    @property
    def is_quantised(self) -> bool:
        """Whether the dtype is quantised: several elements share one block, so that a single element has no address."""
        return self.block > 1

    def count_bytes(self, count: int) -> int:
        """Return the number of bytes of `count` adjacent elements; `count` is a multiple of `block`."""
        return count // self.block * self.block_bytes

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers outside blocks: f32, f16, bf16 or f64."""
        return self in FLOAT_DTYPES or self is DType.F64

    @property
    def is_integer(self) -> bool:
        """Whether the elements are signed integers: i8, i16, i32 or i64."""
        return self in INTEGER_DTYPES


DType.__hash__ = object.__hash__  # type: ignore[method-assign]  # Enum would hash the name, in Python

FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)
INTEGER_DTYPES = (DType.I8, DType.I16, DType.I32, DType.I64)
QUANTISED_DTYPES = tuple(d for d in DType if d.is_quantised)
CACHE_DTYPES = (
    *FLOAT_DTYPES,
    *(DType.Q8_0, DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.IQ4_NL),
)
"""The dtypes of cached keys and values, as in llama.cpp; quantised ones have blocks of 32 numbers."""
STATE_DTYPES = (
    *CACHE_DTYPES,
    *(DType.MXFP4, DType.NVFP4, DType.Q1_0, DType.Q2_0, DType.TQ1_0, DType.TQ2_0),
    *(DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K, DType.IQ4_XS),
)
"""The dtypes of states into which a run can write rows; the rows are rounded to that dtype.

They are the dtypes to which GGML's CPU backend can round. It cannot round to IQ1, IQ2 and IQ3, which need importances.
"""
DTYPE_BY_NAME = {d.text: d for d in DType}
DTYPE_BY_GGML_NUMBER = {d.ggml: d for d in DType}
DTYPE_BY_NUMPY_NAME = {d.storage.name: d for d in DType if d.block == 1 and d is not DType.BF16} | {
    "bfloat16": DType.BF16
}
DTypeLike: TypeAlias = "DType | str | np.dtype[Any] | type[np.generic]"
"""A `DType`, its name in GGML or NumPy (``"f32"``, ``"float32"``), or a NumPy type (``np.float32``)."""


def find_dtype(value: object) -> DType | None:
    """Return the `DType` for a `DType`, a name or a NumPy type, or None for any other value."""
    if isinstance(value, DType):
        return value
    if isinstance(value, np.dtype):
        value = value.name
    elif isinstance(value, type) and issubclass(value, np.generic):
        value = value.__name__
    return (DTYPE_BY_NAME.get(value) or DTYPE_BY_NUMPY_NAME.get(value)) if isinstance(value, str) else None


def parse_dtype(value: object) -> DType:
    """Return the `DType` for a `DType`, a name or a NumPy type; raise `GraphError` for any other value."""
    dtype = find_dtype(value)
    if dtype is not None:
        return dtype
    if isinstance(value, str):
        hint = did_you_mean(value, (*DTYPE_BY_NAME, *DTYPE_BY_NUMPY_NAME)) or f"; one of {', '.join(DTYPE_BY_NAME)}"
        raise GraphError(f"unknown dtype {format_value(value)}{hint}")
    raise GraphError(f"dtype is {format_value(value)}; it must be a DType or the name of one")
