"""The launch of the gated delta rule token by token, for decoding and short prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ....fusion.operands import Operand, require_supported
from ...binding.launch_builder import LaunchBuilder, LaunchWord, count_blocks
from ...device.driver import KernelSource
from .states import (
    DELTA_INPUTS_HEADER,
    RECURRENT_HEADER,
    DeltaRuleOperands,
    StateOperands,
    make_rows_struct_fields,
)

DELTA_NET_THREADS = 128
TOKENS_PER_TILE = 8
"""Tokens that a block loads into shared memory together."""
LANES_AND_ROWS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {16: (4, 1), 32: (8, 1), 64: (8, 1), 128: (8, 1), 256: (16, 2)}
)
"""Warp lanes that share a row of a state, and rows of a lane, by key size."""
FALLBACK_LANES_AND_ROWS = (8, 1)
"""Lanes and rows for operands without 16-byte alignment, and for other key sizes."""


def format_bool(value: bool) -> str:
    """Format a truth value as C++."""
    return "true" if value else "false"


def _format_step_name(size: int, channels: bool, whole: bool, shape: tuple[int, int], computes: bool = False) -> str:
    arguments = size, format_bool(channels), format_bool(whole), *shape, *(["true"] if computes else [])
    return f"delta_net<{', '.join(map(str, arguments))}>"


def _list_step_names(size: int) -> tuple[str, ...]:
    kinds = [(True, LANES_AND_ROWS[size])] + [(False, FALLBACK_LANES_AND_ROWS)] * (size >= 32)
    return tuple(_format_step_name(size, channels, *kind) for channels in (False, True) for kind in kinds)


STEP_SOURCES: Mapping[int, KernelSource] = MappingProxyType(
    {
        size: KernelSource("gated_delta_net.cu", _list_step_names(size), (RECURRENT_HEADER, "plain_inputs.cuh"))
        for size in LANES_AND_ROWS
    }
)
COMPUTING_STEP_SOURCES: Mapping[int, KernelSource] = MappingProxyType(
    {
        size: KernelSource(
            "gated_delta_net.cu",
            (_format_step_name(size, False, True, LANES_AND_ROWS[size], computes=True),),
            (RECURRENT_HEADER, DELTA_INPUTS_HEADER, "computed_inputs.cuh"),
            architectures=("sm_90a",),
        )
        for size in (16, 32, 64, 128)
    }
)
"""Kernels that also compute queries, keys, values and gates."""


def launch_delta_rule_by_token(
    launches: LaunchBuilder,
    rule: DeltaRuleOperands,
    begin: Sequence[LaunchWord],
    carried: StateOperands,
    stored: int,
    saved: Operand | None = None,
    inputs: Sequence[LaunchWord] | None = None,
) -> None:
    """Launch the delta rule for all tokens, one token after the other.

    Args:
        launches: Receives the launch.
        rule: The operands.
        begin: Fields of the initial states.
        carried: The states and snapshots.
        stored: Number of snapshots to write.
        saved: Receives the states before the first token.
        inputs: The fields of ``computed_inputs.cuh``: the kernel computes q, k, v and gates of few tokens itself.
    """
    size = next((n for n in LANES_AND_ROWS if n >= rule.key_size), 0)
    require_supported(size, f"keys of {rule.key_size} are too long")
    whole = size == rule.key_size and rule.is_vector_aligned
    size = size if whole else max(size, 32)
    lanes, lane_rows = LANES_AND_ROWS[size] if whole else FALLBACK_LANES_AND_ROWS
    block_rows = DELTA_NET_THREADS // lanes * lane_rows
    tile = min(TOKENS_PER_TILE, max(rule.tokens, 1))
    token = 2 * size + (size if rule.has_channel_decay else 0) + block_rows + 4
    words = [
        *(word for x in (rule.q, rule.k, rule.v, rule.g) for word in make_rows_struct_fields(x)),
        *make_rows_struct_fields(rule.beta, 2),
        *make_rows_struct_fields(rule.out),
    ]
    words += [
        *begin,
        *carried.make_fields_without_newer_snapshots(),
        *carried.fault_fields,
        rule.tokens,
        rule.k.shape[-2],
        rule.value_heads,
        rule.adjacent_value_heads_per_key_head,
    ]
    words += [rule.key_size, rule.value_size, carried.snapshots, stored, tile, rule.scale, saved or 0]
    words += [0] if inputs is None else inputs
    grid = count_blocks(rule.value_size, block_rows), rule.value_heads, rule.sequences
    shared = 4 * token * tile * (2 if rule.tokens > tile else 1)
    if inputs is not None:
        require_supported(
            whole and size in COMPUTING_STEP_SOURCES and rule.value_size == size and rule.tokens <= TOKENS_PER_TILE,
            "operands are not computed in one stage",
        )
    source = (STEP_SOURCES if inputs is None else COMPUTING_STEP_SOURCES)[size]
    launches.add_launch(
        source[_format_step_name(size, rule.has_channel_decay, whole, (lanes, lane_rows), inputs is not None)],
        grid,
        DELTA_NET_THREADS,
        words,
        shared,
    )
