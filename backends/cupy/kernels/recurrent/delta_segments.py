"""Scans of a long prompt in segments at once, for gated delta rules with few heads.

The last state of a segment is linear in its first state S: ``S Φ + Ψ``. A scan from zeros ends with Ψ. A scan from the
identity without values ends with Φ. With P segments of equal length, the launches are:

1. Scan segments 1 to P - 2 for Φ, and segments 0 to P - 2 for Ψ. Segment 0 begins with the state of the prompt.
2. Carry: the first state of segment p + 1 is ``S Φ + Ψ`` of segment p.
3. Scan segments 1 to P - 1 from their first states, and then the tokens that are left.

The serial part is 3 / P of one scan of all tokens. FlashQLA and FlashInfer scan segments too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .....graph.dtypes import DType
from ....fusion.operands import Operand
from ...binding.launch_builder import LaunchBuilder, LaunchWord
from ...device.driver import KernelSource
from .states import DeltaRuleOperands

SEGMENTS_SOURCE = KernelSource(
    "gated_delta_net_segments.cu", ("begin_segments", *(f"carry_segments<{size}>" for size in (64, 128)))
)
CARRIED_ROWS = 16
"""Rows of a state that a block carries from segment to segment."""
BEGIN_THREADS = 256
TARGET_BLOCKS = 128
"""Blocks of the scans that run at once."""
MIN_SEGMENTS, MAX_SEGMENTS, MIN_SEGMENT_CHUNKS = 6, 16, 8
"""PromptSegments from which they are faster by an estimate, the most segments, and the fewest chunks of a segment."""


@dataclass(frozen=True, slots=True)
class PromptSegments:
    """The division of a long prompt into `count` segments of `tokens` tokens, which are scanned in parallel.

    At least one token is left after the segments.
    """

    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PreparedChunkScan:
    """A scan (token chunks in order, with a running state) over keys and values that scratch memory holds.

    Sequence n ends with the stored state ``n * end_step``.
    """

    rule: DeltaRuleOperands
    memory: tuple[Operand, Operand]
    begin_fields: tuple[LaunchWord, ...]
    end_fields: tuple[LaunchWord, ...]
    end_step: int
    fault_fields: tuple[LaunchWord, ...]


def choose_prompt_segments(tokens: int, blocks: int, chunk_tokens: int) -> PromptSegments | None:
    """Choose the segments of a prompt that keep all multiprocessors busy; `None` if they would be too few or too short.

    Args:
        tokens: Tokens of the prompt.
        blocks: Blocks of a scan of one segment.
        chunk_tokens: Tokens of a chunk.
    """
    count = min(MAX_SEGMENTS, TARGET_BLOCKS // blocks, (tokens - 1) // (chunk_tokens * MIN_SEGMENT_CHUNKS))
    return (
        PromptSegments(count, (tokens - 1) // (chunk_tokens * count) * chunk_tokens) if count >= MIN_SEGMENTS else None
    )


def launch_state_carries_between_segment_scans(
    launches: LaunchBuilder,
    scan: PreparedChunkScan,
    segments: PromptSegments,
    chunk_bytes: tuple[int, int],
    chunk_tokens: int = 32,
) -> Iterator[PreparedChunkScan]:
    """Launch the kernels that compute the first state of each prompt segment, and yield the scans between them.

    The caller launches each scan that is yielded. The module docstring explains the steps.

    Args:
        launches: Receives the launches.
        scan: The scan of all tokens of one sequence, with values as long as its keys.
        segments: The segments.
        chunk_bytes: Prepared bytes of a chunk: of keys, and of value heads.
        chunk_tokens: Tokens of a chunk.
    """
    rule, count = scan.rule, segments.count
    heads, size = rule.value_heads, rule.key_size
    state = (heads, rule.value_size, size)
    identity, changes = launches.allocate_scratch(state), launches.allocate_scratch((count - 2, *state))
    begins, ends = launches.allocate_scratch((count, *state)), launches.allocate_scratch((count - 1, *state))
    no_values, is_later = launches.allocate_scratch((rule.value_size,)), launches.allocate_scratch((count,), DType.I32)
    words: list[LaunchWord] = [
        identity,
        changes,
        begins,
        ends,
        no_values,
        is_later,
        heads,
        rule.value_size,
        size,
        count,
    ]
    launches.add_launch(SEGMENTS_SOURCE["begin_segments"], (heads, count), BEGIN_THREADS, words)

    def select(first: int, end: int, begin: tuple[LaunchWord, ...], end_states: Operand) -> PreparedChunkScan:
        """Return the scan of segments `first` to ``end - 1`` as sequences of their own."""
        tokens = rule.slice_tokens(first * segments.tokens, (end - first) * segments.tokens)
        v, out = (_split_token_axis_into_segments(x, end - first, segments.tokens) for x in (tokens.v, tokens.out))
        memory = _slice_prepared_memory_after_chunks(scan, first * segments.tokens // chunk_tokens, chunk_bytes)
        own = replace(rule, v=v, out=out)
        return PreparedChunkScan(own, memory, begin, (end_states, 0, end - first), 1, scan.fault_fields)

    of_changes = select(1, count - 1, (identity, 0, 1, 0, 0, 0), changes)
    v = of_changes.rule.v
    zeros = replace(v, address=no_values.address, tensor=replace(no_values.tensor, shape=v.shape, strides=(0, 0, 0, 1)))
    yield replace(of_changes, rule=replace(of_changes.rule, v=zeros))
    yield select(0, count - 1, (*scan.begin_fields[:3], 0, begins, is_later), ends)
    grid = rule.value_size // CARRIED_ROWS, heads
    launches.add_launch(SEGMENTS_SOURCE[f"carry_segments<{size}>"], grid, size, words)
    later = begins.slice_axis(0, 1, count - 1)
    yield select(1, count, (later, 0, count - 1, 1, 0, 0), ends)
    done = count * segments.tokens
    yield replace(
        scan,
        rule=rule.slice_tokens(done, rule.tokens - done),
        memory=_slice_prepared_memory_after_chunks(scan, done // chunk_tokens, chunk_bytes),
        begin_fields=(ends.slice_axis(0, count - 2, 1), 0, 1, 1, 0, 0),
    )


def _split_token_axis_into_segments(x: Operand, segments: int, tokens: int) -> Operand:
    """Split the token axis: [..., segments * tokens, heads, elements] to [segments, tokens, heads, elements]."""
    steps = x.strides[-3:]
    tensor = replace(x.tensor, shape=(segments, tokens, *x.shape[-2:]), strides=(tokens * steps[0], *steps))
    return replace(x, tensor=tensor)


def _slice_prepared_memory_after_chunks(
    scan: PreparedChunkScan, chunks: int, chunk_bytes: tuple[int, int]
) -> tuple[Operand, Operand]:
    """Return the scratch memory of prepared keys and value heads from chunk number `chunks` on."""
    keys, heads = (
        x.slice_axis(0, chunks * n, x.shape[0] - chunks * n) for x, n in zip(scan.memory, chunk_bytes, strict=True)
    )
    return keys, heads
