"""Elementwise integer arithmetic, which wraps around in two's complement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..declaration.broadcasting import tile_to_shape
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template


def _replace_zeros(b: Array) -> Array:
    return np.where(b == 0, np.ones_like(b), b)


def _divide_truncated_or_zero(a: Array, b: Array) -> Array:
    """Return the quotient rounded towards zero, and 0 where `b` is 0."""
    by = _replace_zeros(b)
    crosses = (a % by != 0) & ((a < 0) != (by < 0))  # no absolute values: the least integer has none
    return np.where(b == 0, 0, a // by + crosses).astype(a.dtype)


INTEGER_OPERATIONS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "floor_div": lambda a, b: np.where(b == 0, 0, a // _replace_zeros(b)),
        "trunc_div": _divide_truncated_or_zero,
        "floor_mod": lambda a, b: np.where(b == 0, 0, a % _replace_zeros(b)),
        "trunc_mod": lambda a, b: np.where(b == 0, 0, a - _divide_truncated_or_zero(a, b) * b),
        "max": np.maximum,
        "min": np.minimum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shift_left": np.left_shift,
        "shift_right": np.right_shift,
    }
)
"""The function of each kind of integer operation."""


def _check_operation(kind: str, **_: object) -> str | None:
    return None if kind in INTEGER_OPERATIONS else f"kind is {kind!r}; one of {', '.join(INTEGER_OPERATIONS)}"


@op(
    "a[...]: integer, b[~...]: integer -> [...]",
    check=_check_operation,
    inplace="a",
    samples=(
        *expand_template('a=i32[3,5], b=i32[5], kind="{kind}"', kind=tuple(INTEGER_OPERATIONS)),
        *expand_template('a={x}[2,3,4], b={x}[{b}], kind="sub"', x=("i8", "i16", "i64"), b=("2,3,4", "")),
        'a=i64[0,5], b=i64[5], kind="add"',
    ),
    errors=(
        ('a=f32[3], b=i32[3], kind="add"', "a is f32"),
        ('a=i32[3], b=i32[2], kind="add"', "do not divide"),
        ('a=i32[3], b=i32[3], kind="pow"', "one of add"),
    ),
    ranges={"a": LegalRange(0, 9), "b": LegalRange(1, 3)},
    compare="exact",
    is_required=False,
)
def calculate(a: Array, b: Array, *, kind: str) -> Array:
    """Compute the integer operation `kind` of `a` and `b` elementwise, in the dtype of `a`.

    `kind` is ``add``, ``sub``, ``mul``, ``floor_div``, ``trunc_div``, ``floor_mod``, ``trunc_mod``, ``max``, ``min``,
    ``and``, ``or``, ``xor``, ``shift_left`` or ``shift_right``. `b` is repeated as tiles to the shape of `a`. Division
    by 0 gives 0. NumPy (Harris et al., 2020).
    """
    return np.asarray(INTEGER_OPERATIONS[kind](a, tile_to_shape(b, a.shape))).astype(a.dtype)
