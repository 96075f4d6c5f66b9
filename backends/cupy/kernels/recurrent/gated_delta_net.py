"""The gated delta net: token by token for decoding, by chunks on tensor cores for prefill.

A chunk has 32 tokens, or 64 as in FlashQLA. For one value head, with G the cumulative log decays of a chunk, two
launches compute:

1. Prepare, for all chunks at once: L = strict lower part of ``beta_r (k_r . k_s) e^(G_r - G_s)``, then ``X = (I + L)^-1
   diag(beta)``, and P = lower part of ``(q_r . k_s) e^(G_r - G_s) / sqrt(d)``.
2. Scan, chunk after chunk with the state S: ``U = X (V - e^G K S)``, outputs ``O = e^G Q S / sqrt(d) + P U``, and the
   next state ``S = e^(G_last) S + (e^(G_last - G) K)^T U``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from .....graph.dtypes import DType
from ....fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_saved_state_update
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ...device.device_limits import KIB, UnmeasuredKernelCandidate
from ...device.driver import CUDA_HEADER, KernelInstance, KernelSource
from ..elementwise import as_float
from .delta_segments import (
    SEGMENTS_SOURCE,
    PreparedChunkScan,
    PromptSegments,
    choose_prompt_segments,
    launch_state_carries_between_segment_scans,
)
from .delta_tokens import COMPUTING_STEP_SOURCES, STEP_SOURCES, format_bool, launch_delta_rule_by_token
from .states import (
    RECURRENT_HEADER,
    STATES_SOURCE,
    DeltaRuleOperands,
    StateOperands,
    bind_states_and_prepare_memory,
    make_rows_struct_fields,
)

FULL_DEVICE_BLOCKS = 264
"""Blocks that fill the largest devices: two for each of 132 multiprocessors."""

CHUNKED_KEY_SIZES = (64, 128)
CHUNK_TOKENS, LONG_CHUNK_TOKENS = 32, 64
"""Tokens of a chunk, and of a long one: half as many serial steps, but more shared memory and more arithmetic."""
MIN_LONG_CHUNKED_TOKENS = 1024
"""Tokens from which chunks may be long; an estimate."""
MIN_CHUNKED_TOKENS = (25, 32)
"""Tokens from which chunks are faster than single tokens on an H100: with a decay per head, and per channel."""
SLICE_ROWS = (64, 32, 16)
"""Rows of a state that one block of the scan carries."""
MIN_SCAN_BLOCKS = 64
"""Blocks of the scan that remain with a longer slice.

On an H100, 8,192 tokens of 32 heads take 731 microseconds in 64 blocks, 889 in 128 and 1,252 in 256. 8 heads take 398
in 64, 408 in 32 and 614 in 16.
"""
CLUSTER_SIZES = (8, 4, 2)
"""Blocks of a cluster that share the prepared values of a head, on devices with clusters."""
PAIR_BLOCK_BYTES = 16 * 16 * 2
"""Bytes of bfloat16 numbers for 16 x 16 pairs of tokens."""
CHUNKS_FILE, PREPARE_FILE = "gated_delta_net_chunks.cuh", "gated_delta_net_prepare.cu"
SCAN_FILE = "gated_delta_net_scan.cu"


@dataclass(frozen=True, slots=True)
class ChunkedDeltaRuleVariant:
    """The sizes of the kernels that compute the gated delta rule in chunks of tokens.

    - `size`: the size of a key.
    - `channels`: whether each key channel has its own decay, instead of one decay per head.
    - `is_exact`: whether a number is a pair of bfloat16 numbers: relative error 2^-16 instead of 2^-8.
    - `tokens`: the tokens of a chunk.

    The byte counts agree with `Record` in the kernel.
    """

    size: int
    channels: bool
    is_exact: bool
    tokens: int = CHUNK_TOKENS

    @property
    def keys_bytes(self) -> int:
        return (3 if self.channels else 2) * (2 if self.is_exact else 1) * 2 * self.tokens * self.size

    @property
    def heads_bytes(self) -> int:
        factors, side = self.size if self.channels else 2 * self.tokens, self.tokens // 16
        return 2 * (2 if self.is_exact else 1) * side * (side + 1) // 2 * PAIR_BLOCK_BYTES + 4 * factors

    @property
    def prepare_name(self) -> str:
        kernel = "delta_prepare_channels" if self.channels else "delta_prepare"
        return f"{kernel}<{self.size}, {self.tokens}, {format_bool(self.is_exact)}>"

    def compute_prepare_bytes_of_value_heads(self, together: int) -> int:
        """Compute the shared-memory bytes of a block of the prepare kernel, which prepares `together` value heads."""
        square = 8 * self.tokens * (self.tokens + 4) + self.heads_bytes
        if self.channels:
            return square + 4 * self.tokens + 16 * self.tokens * (self.size + 4)
        return square + 8 * self.tokens * together + self.keys_bytes

    def format_scan_name(self, values: int, cluster: int = 1) -> str:
        kernel = "delta_scan" if cluster == 1 else "delta_scan_clusters"
        switches = f"{format_bool(self.channels)}, {format_bool(self.is_exact)}"
        return f"{kernel}<{self.size}, {self.tokens}, {values}, {switches}>"

    def compute_scan_shared_bytes(self, values: int, cluster: int = 1) -> int:
        """Compute the shared-memory bytes of a block that scans chunks; clusters need more of them, for more stages."""
        stage, sums = self.keys_bytes + self.heads_bytes + 4 * self.tokens * (values + 4), 12 * self.tokens * values
        if cluster > 1:
            stages = 4 if 4 * stage + sums <= 225 * KIB else 3
            return stages * (stage + 16) + sums
        return 2 * stage + sums

    def can_scan_fit_shared_memory(self, values: int, cluster: int = 1) -> bool:
        """Return whether a block of the scan fits into the largest shared memory of any device."""
        return LaunchBuilder(len).can_allocate_shared_bytes(self.compute_scan_shared_bytes(values, cluster))

    def list_scan_names(self, cluster: int = 1) -> tuple[str, ...]:
        """List the names of the scan kernels that fit into a block of the largest devices."""
        return tuple(
            self.format_scan_name(values, cluster)
            for values in SLICE_ROWS
            if self.can_scan_fit_shared_memory(values, cluster)
        )

    def make_source(self, file: str, names: Sequence[str], *headers: str) -> KernelSource:
        """Make the source of kernels. Candidates are compiled only for devices that can measure them."""
        architectures = ("sm_90a",) if headers or self.tokens > CHUNK_TOKENS else ()
        return KernelSource(file, tuple(names), (RECURRENT_HEADER, CHUNKS_FILE, *headers), CUDA_HEADER, architectures)

    @property
    def prepare_kernel(self) -> KernelInstance:
        return PREPARE_SOURCES[self][self.prepare_name]

    def select_scan_kernel(self, values: int, cluster: int) -> KernelInstance:
        """Select the scan kernel for slices of `values` state rows and clusters of `cluster` blocks."""
        return (SCAN_SOURCES if cluster == 1 else CLUSTER_SCAN_SOURCES)[self][self.format_scan_name(values, cluster)]


CHUNK_VARIANTS = tuple(
    ChunkedDeltaRuleVariant(size, channels, is_exact, tokens)
    for tokens, size, channels, is_exact in product(
        (CHUNK_TOKENS, LONG_CHUNK_TOKENS), CHUNKED_KEY_SIZES, (False, True), (True, False)
    )
    if tokens == CHUNK_TOKENS or not channels
)
PREPARE_SOURCES: Mapping[ChunkedDeltaRuleVariant, KernelSource] = MappingProxyType(
    {c: c.make_source(PREPARE_FILE, (c.prepare_name,)) for c in CHUNK_VARIANTS}
)
SCAN_SOURCES: Mapping[ChunkedDeltaRuleVariant, KernelSource] = MappingProxyType(
    {c: c.make_source(SCAN_FILE, c.list_scan_names()) for c in CHUNK_VARIANTS}
)
CLUSTER_SCAN_SOURCES: Mapping[ChunkedDeltaRuleVariant, KernelSource] = MappingProxyType(
    {
        c: c.make_source("gated_delta_net_clusters.cu", names, SCAN_FILE, "wgmma.cuh", "cluster.cuh")
        for c in CHUNK_VARIANTS
        if (names := c.list_scan_names(CLUSTER_SIZES[0]))
    }
)


def uses_chunk_kernels(rule: DeltaRuleOperands, tokens: int) -> bool:
    """Return whether the delta rule of `tokens` tokens uses the chunk kernels."""
    return (
        tokens >= MIN_CHUNKED_TOKENS[rule.has_channel_decay]
        and rule.key_size in CHUNKED_KEY_SIZES
        and rule.value_size % SLICE_ROWS[-1] == 0
    )


def allocate_key_and_value_chunk_scratch(
    launches: LaunchBuilder, rule: DeltaRuleOperands, tokens: int, chunk: ChunkedDeltaRuleVariant
) -> tuple[Operand, Operand]:
    """Allocate scratch for the prepared data of all chunks of `tokens` tokens: an array of keys, one of value heads."""
    count = rule.sequences * count_blocks(tokens, chunk.tokens)
    keys, heads = (launches.allocate_scratch((count * n,), DType.I8) for n in _count_chunk_bytes(rule, chunk))
    return keys, heads


def _count_chunk_bytes(rule: DeltaRuleOperands, chunk: ChunkedDeltaRuleVariant) -> tuple[int, int]:
    """Count the prepared bytes of a chunk of one sequence: of all keys, and of all value heads."""
    keyed = rule.value_heads if rule.has_channel_decay else rule.k.shape[-2]
    return keyed * chunk.keys_bytes, rule.value_heads * chunk.heads_bytes


def launch_delta_rule_by_chunks(
    launches: LaunchBuilder,
    rule: DeltaRuleOperands,
    carried: StateOperands,
    memory: tuple[Operand, Operand],
    chunk: ChunkedDeltaRuleVariant,
    values: int | None = None,
) -> None:
    """Launch the delta rule for all tokens in chunks; the state after them becomes the oldest snapshot.

    Args:
        launches: Receives the launches.
        rule: The operands.
        carried: The states and snapshots.
        memory: The scratch of `allocate_key_and_value_chunk_scratch`.
        chunk: The kernel variant.
        values: State rows of a block, one of `SLICE_ROWS`, or `None` for an automatic choice.
    """
    count, heads, sequences = count_blocks(rule.tokens, chunk.tokens), rule.value_heads, rule.sequences
    words = [
        *(word for x in (rule.q, rule.k, rule.g) for word in make_rows_struct_fields(x)),
        *make_rows_struct_fields(rule.beta, 2),
        *memory,
    ]
    together = _choose_value_heads_per_block(rule, chunk)
    words += [rule.tokens, rule.k.shape[-2], heads, rule.adjacent_value_heads_per_key_head, together, rule.scale]
    grid, shared = (count, heads // together, sequences), chunk.compute_prepare_bytes_of_value_heads(together)
    launches.add_launch(chunk.prepare_kernel, grid, 4 * chunk.tokens, words, shared)
    end_fields = tuple(carried.make_fields_without_newer_snapshots(carried.snapshots - 1))
    scan = PreparedChunkScan(rule, memory, carried.begin_fields, end_fields, carried.snapshots, carried.fault_fields)
    if values is None and (segments := _choose_parallel_prompt_segments(launches, rule, chunk)):
        for part in launch_state_carries_between_segment_scans(
            launches, scan, segments, _count_chunk_bytes(rule, chunk), chunk.tokens
        ):
            _launch_scan(launches, part, chunk, SLICE_ROWS[0])
    else:
        _launch_scan(launches, scan, chunk, values or _choose_scan_block_rows(launches, rule, chunk))


def _launch_scan(launches: LaunchBuilder, scan: PreparedChunkScan, chunk: ChunkedDeltaRuleVariant, values: int) -> None:
    """Launch a scan of prepared chunks in blocks of `values` state rows."""
    rule, heads = scan.rule, scan.rule.value_heads
    keyed, run = (heads, 0) if chunk.channels else (rule.k.shape[-2], rule.adjacent_value_heads_per_key_head)
    words: list[LaunchWord] = [
        *scan.memory,
        *make_rows_struct_fields(rule.v),
        *make_rows_struct_fields(rule.out),
        *scan.begin_fields,
        *scan.end_fields,
    ]
    words += [scan.end_step, *scan.fault_fields, rule.tokens, keyed, heads, run, rule.value_size]
    slices = rule.value_size // values
    cluster = _choose_scan_cluster_size(launches, chunk, values, slices)
    shared, grid = chunk.compute_scan_shared_bytes(values, cluster), (slices, heads, rule.sequences)
    launches.add_launch(chunk.select_scan_kernel(values, cluster), grid, 4 * values, words, shared, (cluster, 1, 1))


def _choose_parallel_prompt_segments(
    launches: LaunchBuilder, rule: DeltaRuleOperands, chunk: ChunkedDeltaRuleVariant
) -> PromptSegments | None:
    """Choose the segments of a prompt to scan in parallel; `None` if one scan of all tokens is better."""
    blocks, rest = divmod(rule.value_size, SLICE_ROWS[0])
    fits = launches.can_allocate_shared_bytes(chunk.compute_scan_shared_bytes(SLICE_ROWS[0]))
    if rest or not fits or rule.sequences != 1 or rule.value_size != rule.key_size:
        return None
    if UnmeasuredKernelCandidate.DELTA_SEGMENTS not in launches.limits.candidates:
        return None
    return choose_prompt_segments(rule.tokens, blocks * rule.value_heads, chunk.tokens)


def _choose_scan_cluster_size(launches: LaunchBuilder, chunk: ChunkedDeltaRuleVariant, values: int, slices: int) -> int:
    """Choose the number of blocks in a cluster of the scan; the blocks process different row slices of one state."""
    if not launches.limits.has_warpgroups or not chunk.can_scan_fit_shared_memory(values, CLUSTER_SIZES[0]):
        return 1
    return next((n for n in CLUSTER_SIZES if slices % n == 0), 1)


def choose_chunk_variant(launches: LaunchBuilder, rule: DeltaRuleOperands, is_exact: bool) -> ChunkedDeltaRuleVariant:
    """Choose the chunk kernels of a prompt: long chunks if the device enables them and the prompt is long."""
    chunk = ChunkedDeltaRuleVariant(rule.key_size, rule.has_channel_decay, is_exact)
    is_long = rule.tokens >= MIN_LONG_CHUNKED_TOKENS and not rule.has_channel_decay
    long_chunk = replace(chunk, tokens=LONG_CHUNK_TOKENS)
    uses_candidate = is_long and UnmeasuredKernelCandidate.DELTA_LONG_CHUNKS in launches.limits.candidates
    return long_chunk if uses_candidate and _can_both_kernels_fit_shared_memory(launches, rule, long_chunk) else chunk


def _choose_value_heads_per_block(rule: DeltaRuleOperands, chunk: ChunkedDeltaRuleVariant) -> int:
    """Choose how many value heads of one key head a thread block computes.

    It is all of them if there still are blocks for all multiprocessors, else one."""
    filled = count_blocks(rule.tokens, chunk.tokens) * rule.k.shape[-2] * rule.sequences >= FULL_DEVICE_BLOCKS
    return rule.value_heads // rule.k.shape[-2] if filled and not rule.has_channel_decay else 1


def _can_both_kernels_fit_shared_memory(
    launches: LaunchBuilder, rule: DeltaRuleOperands, chunk: ChunkedDeltaRuleVariant
) -> bool:
    """Return whether blocks of both chunk kernels can fit into the shared memory of the device."""
    return launches.can_allocate_shared_bytes(
        chunk.compute_prepare_bytes_of_value_heads(_choose_value_heads_per_block(rule, chunk))
    ) and launches.can_allocate_shared_bytes(
        chunk.compute_scan_shared_bytes(_choose_scan_block_rows(launches, rule, chunk))
    )


def _choose_scan_block_rows(launches: LaunchBuilder, rule: DeltaRuleOperands, chunk: ChunkedDeltaRuleVariant) -> int:
    """Choose how many rows of the state a block of the scan computes.

    They fit into shared memory, and enough blocks are left to fill the device. Many rows are better, because each
    block reads all prepared values.
    """
    possible = [n for n in SLICE_ROWS if rule.value_size % n == 0]
    fitting = [
        n for n in possible if launches.can_allocate_shared_bytes(chunk.compute_scan_shared_bytes(n))
    ] or possible
    rows_of_all = rule.sequences * rule.value_heads * rule.value_size
    return next((n for n in fitting if rows_of_all // n >= MIN_SCAN_BLOCKS), fitting[-1])


def _bind_gated_delta_net(launches: LaunchBuilder, call: BoundInstruction) -> None:
    q, k, v, g, beta = (as_float(launches, call.operand(i)) for i in range(5))
    rule = DeltaRuleOperands(q, k, v, g, beta, call.out, call.attrs["heads"] == "tiled")
    launch_delta_rule(launches, call, rule, bool(call.attrs["exact"]))


def launch_delta_rule(launches: LaunchBuilder, call: BoundInstruction, rule: DeltaRuleOperands, exact: bool) -> None:
    """Launch the gated delta rule of an instruction: in chunks of tokens if possible, else token by token.

    If the instruction has snapshots, the last tokens are always processed one by one.

    Args:
        launches: Receives the launches.
        call: The instruction, with states, slots and snapshots.
        rule: The other operands.
        exact: Whether operands in chunks are pairs of bfloat16 numbers.
    """
    carried = bind_states_and_prepare_memory(launches, call, rule.sequences, rule.tokens)
    last = carried.snapshots - 1
    first = rule.tokens - last
    chunk = choose_chunk_variant(launches, rule, exact)
    if uses_chunk_kernels(rule, first) and _can_both_kernels_fit_shared_memory(launches, rule, chunk):
        memory = allocate_key_and_value_chunk_scratch(launches, rule, first, chunk)
        if rule.is_vector_aligned:
            launch_delta_rule_by_chunks(launches, rule.slice_tokens(0, first), carried, memory, chunk)
            if last:
                rest, resume_fields = rule.slice_tokens(first, last), carried.make_resume_fields(last)
                launch_delta_rule_by_token(launches, rest, resume_fields, carried, last)
            return
    launch_delta_rule_by_token(launches, rule, carried.begin_fields, carried, carried.stored_snapshots)


def _fuse_state_save_and_delta_rule(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Fuse the save of a state for a rollback and the delta rule that then updates the state in place."""
    save, writer = flow.bound_instruction(number), match_saved_state_update(flow, number, "gated_delta_net").update
    state, call = save.operand(0), flow.bound_instruction(writer)
    require_supported(call.optional_operand(6) is None, "states are in slots")
    require_supported(
        len(call.dst) == 2 and has_same_elements(call.operand(5), call.dst[1]), "the state is not changed in place"
    )
    require_supported(has_same_elements(state, call.operand(5)) and save.out.is_dense, "not all of the state is saved")
    q, k, v, g, beta = sources = [call.operand(i) for i in range(5)]
    require_supported(all(x.is_float for x in sources), "operands are of other types")
    rule = DeltaRuleOperands(q, k, v, g, beta, call.out, call.attrs["heads"] == "tiled")
    require_supported(not uses_chunk_kernels(rule, rule.tokens), "prompts go by chunks")
    require_no_alias(save.out, [*sources, state])
    launches.number = writer
    carried = bind_states_and_prepare_memory(launches, call, rule.sequences, rule.tokens)
    launch_delta_rule_by_token(launches, rule, carried.begin_fields, carried, carried.stored_snapshots, save.out)
    return number, writer


FUSED: Mapping[str, Sequence[FusionBinder]] = MappingProxyType({"cont": (_fuse_state_save_and_delta_rule,)})
BINDINGS: Mapping[str, OpBinder] = {"gated_delta_net": _bind_gated_delta_net}
SOURCES = (
    STATES_SOURCE,
    SEGMENTS_SOURCE,
    *STEP_SOURCES.values(),
    *COMPUTING_STEP_SOURCES.values(),
    *PREPARE_SOURCES.values(),
    *SCAN_SOURCES.values(),
    *CLUSTER_SCAN_SOURCES.values(),
)
