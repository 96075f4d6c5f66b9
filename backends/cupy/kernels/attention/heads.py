"""Fusion of the attention of one token with the norm, RoPE and cache stores of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operands import require_supported
from ....fusion.patterns import ROPE_OPS
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder
from ..rotary import match_attention_heads
from .attention import launch_attention_with_heads


def _fuse_heads_and_attention(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Fuse attention over two caches with all head patterns of its queries, keys and values.

    Each block computes the queries of its key head. One block for each key head stores the new key and value: the block
    that alone reads their cells.
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
    reads = [o for m in found.launches for o in m.read_operands]
    reads += [o for i in (3, 4) if (o := call.optional_operand(i)) is not None]
    writes = [o for m in stores for o in m.written_operands]
    for out in (call.out, *([] if call.scratch is None else [call.scratch])):
        require_no_alias(out, [*reads, *writes])
    launches.begin_scratch_of_member(call.scratch)
    launches.number = found.attention
    launch_attention_with_heads(launches, call, [word for m in found.launches for word in m.words])
    return [*found.instruction_numbers, found.attention]


FUSED: Mapping[str, Sequence[FusionBinder]] = dict.fromkeys(("rms_norm", *ROPE_OPS), (_fuse_heads_and_attention,))
