"""Recurrences except the gated delta net: selective state spaces, RWKV 6 and 7, gated linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from .....ops.declaration.attributes import float_attribute
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ...device.driver import KernelSource
from ..elementwise import as_float
from .states import RECURRENT_HEADER, bind_states_and_prepare_memory, make_rows_struct_fields

VALUE_WARPS, COLUMN_WARPS = 8, 16
ELEMENTS_PER_LANE = (1, 2, 4, 8, 0)
"""Elements of a state row in a lane's registers, half of its elements of a column; 0: any number, in memory."""


def _format_kernel_name(kind: str, each: int, flag: bool) -> str:
    return f"{kind}<{each}, {'true' if flag else 'false'}>"


def _make_recurrence_source(kind: str, each: tuple[int, ...]) -> KernelSource:
    return KernelSource(
        "recurrences.cu",
        tuple(_format_kernel_name(kind, n, f) for n in each for f in (False, True)),
        before=(RECURRENT_HEADER,),
    )


VALUE_SOURCE = _make_recurrence_source("recurrence_by_value", ELEMENTS_PER_LANE)
KEY_SOURCE = _make_recurrence_source("recurrence_by_key", tuple(2 * n for n in ELEMENTS_PER_LANE))


def _choose_elements_per_lane(size: int) -> int:
    """Return the number of elements of a state row that a warp lane keeps in registers.

    The result is 0 if there would be too many.

    Args:
        size: The elements of a row, which is the size of a key.
    """
    return next((n for n in ELEMENTS_PER_LANE if 32 * n >= size), 0)


def _as_float_operands(launches: LaunchBuilder, call: BoundInstruction, count: int) -> list[Operand]:
    return [as_float(launches, call.operand(i)) for i in range(count)]


def _bind_ssm_scan(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, dt, a, b, c = _as_float_operands(launches, call, 5)
    require_supported(a.is_dense, "rates have to be dense")
    none: list[LaunchWord] = [0] * 10
    walked = [
        *make_rows_struct_fields(x),
        *make_rows_struct_fields(dt, 2),
        *make_rows_struct_fields(b),
        *make_rows_struct_fields(c),
        *none,
    ]
    heads = x.shape[-2]
    _launch_recurrence_with_warp_per_value_row(
        launches, call, x, walked, a, heads // max(b.shape[-2], 1), b.shape[-1], a.shape[-1]
    )


def _bind_rwkv_wkv7(launches: LaunchBuilder, call: BoundInstruction) -> None:
    r, decay, k, v, a, b = _as_float_operands(launches, call, 6)
    walked = [word for x in (v, decay, k, r, a, b) for word in make_rows_struct_fields(x)]
    _launch_recurrence_with_warp_per_value_row(launches, call, v, walked, None, 1, k.shape[-1], 1)


def _launch_recurrence_with_warp_per_value_row(
    launches: LaunchBuilder,
    call: BoundInstruction,
    x: Operand,
    token_fields: list[LaunchWord],
    a: Operand | None,
    heads_per_group: int,
    keys: int,
    rates_per_head: int,
) -> None:
    """Launch a recurrence in which each warp computes one value row of the state.

    Args:
        launches: Receives the launches.
        call: The instruction.
        x: The values [..., tokens, heads, values].
        token_fields: The fields of the six operands with one row per token.
        a: Decay rates of a state space model; `None` for RWKV 7.
        heads_per_group: Number of adjacent heads that share the operands b and c.
        keys: Elements of a key.
        rates_per_head: Decay rates of a head: 1, or one for each element of a key.
    """
    *leading, tokens, heads, values = x.shape
    carried = bind_states_and_prepare_memory(launches, call, prod(leading), tokens, operand=5 if a is not None else 6)
    words = [
        *token_fields,
        *make_rows_struct_fields(call.out),
        0 if a is None else a,
        *carried.begin_fields,
        *carried.make_fields_without_newer_snapshots(),
        *carried.fault_fields,
    ]
    words += [tokens, heads, max(heads_per_group, 1), values, keys, rates_per_head]
    words += [carried.snapshots, carried.stored_snapshots]
    grid = count_blocks(values, VALUE_WARPS), heads, carried.sequences
    launches.add_launch(
        VALUE_SOURCE[_format_kernel_name("recurrence_by_value", _choose_elements_per_lane(keys), a is None)],
        grid,
        32 * VALUE_WARPS,
        words,
    )


def _bind_rwkv_wkv6(launches: LaunchBuilder, call: BoundInstruction) -> None:
    k, v, r, bonus, decay, state = _as_float_operands(launches, call, 6)
    require_supported(bonus.is_dense, "the bonus has to be dense")
    _launch_recurrence_with_lane_per_value_column(launches, call, [k, v, r, decay], state, bonus, 1.0)


def _bind_gated_linear_attn(launches: LaunchBuilder, call: BoundInstruction) -> None:
    k, v, q, g, state = _as_float_operands(launches, call, 5)
    _launch_recurrence_with_lane_per_value_column(
        launches, call, [k, v, q, g], state, None, float(float_attribute(call.attrs, "scale"))
    )


def _launch_recurrence_with_lane_per_value_column(
    launches: LaunchBuilder,
    call: BoundInstruction,
    token_operands: list[Operand],
    state: Operand,
    bonus: Operand | None,
    scale: float,
) -> None:
    """Launch a recurrence in which each warp lane computes one value column of the state.

    Args:
        launches: Receives the launch.
        call: The instruction.
        token_operands: The operands with one row per token: keys, values, queries and decays.
        state: The old states.
        bonus: Factors of the current token, or `None`.
        scale: Factor of the results.
    """
    new, v = call.dst[1], token_operands[1]
    require_supported(state.is_dense and new.is_dense, "states have to be dense")
    *leading, tokens, heads, values = v.shape
    keys = token_operands[0].shape[-1]
    words = [word for x in (*token_operands, call.out) for word in make_rows_struct_fields(x)]
    words += [0 if bonus is None else bonus, state, new, tokens, heads, keys, values, scale]
    grid = count_blocks(values, 32), heads, prod(leading)
    kernel = KEY_SOURCE[
        _format_kernel_name("recurrence_by_key", 2 * _choose_elements_per_lane(keys), bonus is not None)
    ]
    launches.add_launch(kernel, grid, 32 * COLUMN_WARPS, words)


BINDINGS: Mapping[str, OpBinder] = MappingProxyType(
    {
        "ssm_scan": _bind_ssm_scan,
        "rwkv_wkv6": _bind_rwkv_wkv6,
        "rwkv_wkv7": _bind_rwkv_wkv7,
        "gated_linear_attn": _bind_gated_linear_attn,
    }
)
SOURCES = (VALUE_SOURCE, KEY_SOURCE)
