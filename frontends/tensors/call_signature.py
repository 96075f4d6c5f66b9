"""What programs of other frameworks are called with and return: arguments and results by name, and their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...graph import DType
from ..errors import ModelError

MAX_CONSTANT_BYTES = 1 << 12
"""Larger constants, in bytes, are loaded as weights instead of standing in the graph."""

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
"""Types by NumPy's and PyTorch's names: the type of a value, and whether they are truth values."""


def find_dtype(name: str, where: object) -> tuple[DType, bool]:
    """The row of `TYPES`.  Raises `ModelError` for a type that hocket has not, which names the value `where` has it."""
    if name not in DTYPES_BY_NAME:
        raise ModelError(f"%{where} is of {name}; hocket has {', '.join(DTYPES_BY_NAME)}")
    return DTYPES_BY_NAME[name]


@dataclass(frozen=True, slots=True)
class ProgramArgument:
    """One argument of a program, in the order of its flattened call: an input by `name`, or what was fixed when it was
    exported."""

    name: str
    constant_value: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """One result: an output by `name`, or what does not depend on arguments."""

    name: str
    constant_value: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
