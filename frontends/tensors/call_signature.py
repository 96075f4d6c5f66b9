"""Arguments and results of imported programs: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...graph import DType
from ..errors import ModelError

MAX_CONSTANT_BYTES = 1 << 12
"""Bytes of the largest constant in a graph; a larger one becomes a weight."""

DTYPES_BY_NAME: Mapping[str, tuple[DType, bool]] = MappingProxyType(
    {
        "float32": (DType.F32, False),
        "float16": (DType.F16, False),
        "bfloat16": (DType.BF16, False),
        "int8": (DType.I8, False),
        "int16": (DType.I16, False),
        "int32": (DType.I32, False),
        "int64": (DType.I64, False),
        "bool": (DType.F32, True),
    }
)
"""The dtype of a value and whether it is boolean, by the dtype names of NumPy and PyTorch."""


def resolve_dtype_name(name: str, value_name: object) -> tuple[DType, bool]:
    """Resolve a NumPy or PyTorch dtype name to a hocket dtype, and whether it is boolean.

    Args:
        name: The dtype name, such as ``float32``.
        value_name: The value of this dtype, for the error message.

    Raises:
        ModelError: hocket has no such dtype.
    """
    if name not in DTYPES_BY_NAME:
        raise ModelError(f"%{value_name} is of {name}; hocket has {', '.join(DTYPES_BY_NAME)}")
    return DTYPES_BY_NAME[name]


@dataclass(frozen=True, slots=True)
class ProgramArgument:
    """One argument of a call of a program, in the flattened list of all arguments.

    It is the graph input `name`, or the value `constant_value`, which was fixed at export.
    """

    name: str
    constant_value: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """One result of a call of a program, in the flattened list of all results.

    It is the graph output `name`, or the value `constant_value`, which depends on no argument.
    """

    name: str
    constant_value: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
