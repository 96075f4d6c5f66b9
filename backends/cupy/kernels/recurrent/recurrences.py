"""Recurrences except the gated delta net: selective state spaces, RWKV 6 and 7, gated linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from .....ops.declaration.attributes import float_attribute
from ....operands import Bound, Operand, need
from ...binding.launches import Binding, Launches, Word, blocks
from ...device.driver import Source
from ..elementwise import as_float
from .states import RECURRENT, carry, is_dense, rows

WARPS, COLUMN_WARPS = 8, 16
EACH = (1, 2, 4, 8, 0)
"""Elements of a state row that a lane has in registers, half of its elements of a column; 0: any number, in memory."""


def _name(kind: str, each: int, flag: bool) -> str:
    return f"{kind}<{each}, {'true' if flag else 'false'}>"


def _source(kind: str, each: tuple[int, ...]) -> Source:
    return Source("recurrences.cu", tuple(_name(kind, n, f) for n in each for f in (False, True)), before=(RECURRENT,))


BY_VALUE = _source("recurrence_by_value", EACH)
BY_KEY = _source("recurrence_by_key", tuple(2 * n for n in EACH))


def _each(size: int) -> int:
    """Return the registers of a lane for a row of `size` keys, or 0 if they are too many."""
    return next((n for n in EACH if 32 * n >= size), 0)


def _floats(launches: Launches, call: Bound, count: int) -> list[Operand]:
    return [as_float(launches, call.operand(i)) for i in range(count)]


def _ssm_scan(launches: Launches, call: Bound) -> None:
    x, dt, a, b, c = _floats(launches, call, 5)
    need(is_dense(a), "rates have to be dense")
    none: list[Word] = [0] * 10
    walked = [*rows(x), *rows(dt, 2), *rows(b), *rows(c), *none]
    heads = x.shape[-2]
    _by_value(launches, call, x, walked, a, heads // max(b.shape[-2], 1), b.shape[-1], a.shape[-1])


def _rwkv_wkv7(launches: Launches, call: Bound) -> None:
    r, decay, k, v, a, b = _floats(launches, call, 6)
    walked = [word for x in (v, decay, k, r, a, b) for word in rows(x)]
    _by_value(launches, call, v, walked, None, 1, k.shape[-1], 1)


def _by_value(
    launches: Launches, call: Bound, x: Operand, walked: list[Word], a: Operand | None, run: int, keys: int, rates: int
) -> None:
    """Launch a recurrence with a warp for each value row of the state."""
    *leading, tokens, heads, values = x.shape
    carried = carry(launches, call, prod(leading), tokens, operand=5 if a is not None else 6)
    words = [*walked, *rows(call.out), 0 if a is None else a, *carried.begin, *carried.kept(), *carried.faults]
    words += [tokens, heads, max(run, 1), values, keys, rates, carried.snapshots, carried.stored]
    grid = blocks(values, WARPS), heads, carried.sequences
    launches.add(BY_VALUE[_name("recurrence_by_value", _each(keys), a is None)], grid, 32 * WARPS, words)


def _rwkv_wkv6(launches: Launches, call: Bound) -> None:
    k, v, r, bonus, decay, state = _floats(launches, call, 6)
    need(is_dense(bonus), "the bonus has to be dense")
    _by_key(launches, call, [k, v, r, decay], state, bonus, 1.0)


def _gated_linear_attn(launches: Launches, call: Bound) -> None:
    k, v, q, g, state = _floats(launches, call, 5)
    _by_key(launches, call, [k, v, q, g], state, None, float(float_attribute(call.attrs, "scale")))


def _by_key(
    launches: Launches, call: Bound, walked: list[Operand], state: Operand, bonus: Operand | None, scale: float
) -> None:
    """Launch a recurrence with a lane for each value column of the state."""
    new, v = call.dst[1], walked[1]
    need(is_dense(state) and is_dense(new), "states have to be dense")
    *leading, tokens, heads, values = v.shape
    keys = walked[0].shape[-1]
    words = [word for x in (*walked, call.out) for word in rows(x)]
    words += [0 if bonus is None else bonus, state, new, tokens, heads, keys, values, scale]
    grid = blocks(values, 32), heads, prod(leading)
    kernel = BY_KEY[_name("recurrence_by_key", 2 * _each(keys), bonus is not None)]
    launches.add(kernel, grid, 32 * COLUMN_WARPS, words)


BINDINGS: Mapping[str, Binding] = MappingProxyType(
    {
        "ssm_scan": _ssm_scan,
        "rwkv_wkv6": _rwkv_wkv6,
        "rwkv_wkv7": _rwkv_wkv7,
        "gated_linear_attn": _gated_linear_attn,
    }
)
SOURCES = (BY_VALUE, BY_KEY)
