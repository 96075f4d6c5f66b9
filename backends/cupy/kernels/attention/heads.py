"""Fusions of the norm, RoPE and cache stores of all heads of an attention, with each other and with the attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from .....graph.dtypes import DType
from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operands import require_supported
from ....fusion.patterns import ROPE_OPS
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder
from ..elementwise import CUDA_TYPE_NAMES
from ..rotary import (
    SOURCE,
    HeadPatternLaunch,
    NormRopeStoreInstructions,
    build_head_pattern_launch,
    match_norm_and_rope_pattern,
    match_optional_norm_rope_and_store,
)
from ..rows import choose_row_threads
from .attention import launch_attention_with_heads


@dataclass(frozen=True, slots=True)
class AttentionHeadPreparation:
    """The instructions that compute the operands of an attention: norms, RoPE, and the stores into its cache.

    Attributes:
        attention: The number of the attention instruction.
        instruction_numbers: The numbers of the instructions that prepare its queries, keys and values.
        launches: The kernel launches that replace these instructions.
    """

    attention: int
    instruction_numbers: Sequence[int]
    launches: Sequence[HeadPatternLaunch]


def match_attention_heads(launches: LaunchBuilder, flow: Dataflow, first: int) -> AttentionHeadPreparation:
    """Match the instructions that prepare the heads of an attention, and build the launches that compute them.

    They are the norm and RoPE of queries and keys, and the stores of keys and values into the cache.
    """
    query = (
        match_norm_and_rope_pattern(flow, first)
        if flow.bound_instruction(first).op == "rms_norm"
        else NormRopeStoreInstructions(rope=first)
    )
    assert query.rope is not None
    attention = flow.require_sole_reader(query.rope, "attention")
    chains = [query, *(match_optional_norm_rope_and_store(flow, flow.require_producer(attention, k)) for k in (1, 2))]
    call = flow.bound_instruction(attention)
    head_launches = [
        build_head_pattern_launch(launches, flow, chain, call.operand(k).shape[-1]) for k, chain in enumerate(chains)
    ]
    require_supported(
        head_launches[0].dtype is DType.F32 and head_launches[1].dtype is head_launches[2].dtype,
        "caches differ in type",
    )
    for one, other in permutations(head_launches, 2):
        for out in one.written_operands:
            require_no_alias(out, [*other.read_operands, *other.written_operands])
    return AttentionHeadPreparation(
        attention, [n for chain in chains for n in chain.instruction_numbers], head_launches
    )


def _fuse_query_key_value_head_patterns(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Fuse norm, RoPE and cache store of all queries, keys and values of an attention into one launch."""
    found = match_attention_heads(launches, flow, first)
    columns, ends = max(m.columns for m in found.launches), [*accumulate(m.rows for m in found.launches)]
    launches.add_launch(
        SOURCE[f"place_heads<{CUDA_TYPE_NAMES[found.launches[1].dtype]}>"],
        ends[-1],
        choose_row_threads(columns),
        [*ends[:2], *(word for m in found.launches for word in m.words)],
        4 * columns,
    )
    return found.instruction_numbers


def _fuse_heads_and_attention(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Fuse the attention of one token with norm, RoPE and cache store of its queries, keys and values into one launch.

    Each block computes the queries of its key head. One block for each key head stores the new key and value: the
    block that alone reads their cells.
    """
    require_supported(launches.limits.computes_operands, "attention computes no heads")
    found = match_attention_heads(launches, flow, first)
    call, stores = flow.bound_instruction(found.attention), found.launches[1:]
    for index, store in enumerate(stores, 1):
        cells, cache = call.operand(index), store.written_operands[0]
        require_supported(
            cells.address == cache.address and cells.dtype is cache.dtype and cells.is_dense,
            "the cache is read from another row on",
        )
        require_supported(
            cells.shape[-2] * cells.shape[-1] == cache.shape[-1] and cells.shape[-1] == store.columns,
            "heads of the cache are others",
        )
        require_supported(store.rows == cells.shape[-2], "keys of several tokens are stored")
    require_supported(found.launches[0].columns == call.operand(0).shape[-1], "attention has queries of another size")
    reads = [o for m in found.launches for o in m.read_operands]
    reads += [o for i in (3, 4) if (o := call.optional_operand(i)) is not None]
    writes = [o for m in stores for o in m.written_operands]
    for out in (call.out, *([] if call.scratch is None else [call.scratch])):
        require_no_alias(out, [*reads, *writes])
    launches.use_scratch_of_fused_instruction(call.scratch)
    launches.number = found.attention
    launch_attention_with_heads(launches, call, [word for m in found.launches for word in m.words])
    return [*found.instruction_numbers, found.attention]


FUSED: Mapping[str, Sequence[FusionBinder]] = dict.fromkeys(
    ("rms_norm", *ROPE_OPS), (_fuse_query_key_value_head_patterns, _fuse_heads_and_attention)
)
