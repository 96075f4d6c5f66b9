"""The gated delta net: token by token for decoding, by chunks on tensor cores for prefill.

A chunk has 32 tokens. For one value head, with G the cumulative log decays of a chunk, two launches compute:

1. Prepare, for all chunks at once: L = strict lower part of ``beta_r (k_r . k_s) e^(G_r - G_s)``, then ``X = (I + L)^-1
   diag(beta)``, and P = lower part of ``(q_r . k_s) e^(G_r - G_s) / sqrt(d)``.
2. Scan, chunk after chunk with the state S: ``U = X (V - e^G K S)``, outputs ``O = e^G Q S / sqrt(d) + P U``, and the
   next state ``S = e^(G_last) S + (e^(G_last - G) K)^T U``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from .....graph.dtypes import DType
from ....chains import changed_state
from ....flow import Flow, apart, lies_as
from ....operands import Bound, Operand, need
from ...binding.chains import Fused
from ...binding.launches import Binding, Launches, Word, blocks
from ...device.driver import Kernel, Source
from ...device.limits import KIB
from ..elementwise import as_float
from .states import RECURRENT, STATES, Carried, carry, has_quads, rows

THREADS = 128
TILE = 8
"""Tokens that a block loads into shared memory together."""
FILLED = 264
"""Blocks that fill the largest devices: two for each of 132 multiprocessors."""

SHAPES: Mapping[int, tuple[int, int]] = MappingProxyType(
    {16: (4, 1), 32: (8, 1), 64: (8, 1), 128: (8, 1), 256: (16, 2)}
)
"""Warp lanes that share a row of a state, and rows of a lane, by key size."""
PLAIN = (8, 1)
"""The same for operands without 16-byte alignment, and for other key sizes."""


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _step_name(size: int, channels: bool, whole: bool, shape: tuple[int, int]) -> str:
    return f"delta_net<{size}, {_flag(channels)}, {_flag(whole)}, {shape[0]}, {shape[1]}>"


def _step_names(size: int) -> tuple[str, ...]:
    kinds = [(True, SHAPES[size])] + [(False, PLAIN)] * (size >= 32)
    return tuple(_step_name(size, channels, *kind) for channels in (False, True) for kind in kinds)


STEPS: Mapping[int, Source] = MappingProxyType(
    {size: Source("gated_delta_net.cu", _step_names(size), before=(RECURRENT,)) for size in SHAPES}
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The operands of the delta rule and its output.

    Without `has_tiled_heads`, adjacent value heads share a key head.
    """

    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    out: Operand
    tiled: bool

    @property
    def tokens(self) -> int:
        return self.v.shape[-3]

    @property
    def sequences(self) -> int:
        return math.prod(self.v.shape[:-3])

    @property
    def key_size(self) -> int:
        return self.k.shape[-1]

    @property
    def value_size(self) -> int:
        return self.v.shape[-1]

    @property
    def value_heads(self) -> int:
        return self.v.shape[-2]

    @property
    def channels(self) -> bool:
        """Whether each key channel has its own decay."""
        return self.g.shape[-1] != 1

    @property
    def run(self) -> int:
        """Adjacent value heads that share a key head; 0 with tiled heads."""
        return 0 if self.tiled else self.value_heads // max(self.k.shape[-2], 1)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.key_size)

    @property
    def has_quads(self) -> bool:
        """Whether every row is contiguous and begins at a multiple of 16 bytes."""
        read = (self.q, self.k, self.v, *([self.g] if self.channels else []))
        return self.value_size % 4 == 0 and all(has_quads(x) for x in read)

    def part(self, start: int, count: int) -> Rule:
        """Return the operands of `count` tokens from `start`."""

        def cut(x: Operand, inner: int = 3) -> Operand:
            return x.part(len(x.shape) - inner, start, count)

        q, k, v, g, out = (cut(x) for x in (self.q, self.k, self.v, self.g, self.out))
        return replace(self, q=q, k=k, v=v, g=g, out=out, beta=cut(self.beta, 2))


def launch_steps(
    launches: Launches, rule: Rule, begin: Sequence[Word], carried: Carried, stored: int, saved: Operand | None = None
) -> None:
    """Process all tokens one after the other.

    Args:
        launches: Receives the launch.
        rule: The operands.
        begin: Fields of the initial states.
        carried: The states and snapshots.
        stored: Snapshots to write.
        saved: Receives the states before the first token.
    """
    size = next((n for n in SHAPES if n >= rule.key_size), 0)
    need(size, f"keys of {rule.key_size} are too long")
    whole = size == rule.key_size and rule.has_quads
    size = size if whole else max(size, 32)
    lanes, held = SHAPES[size] if whole else PLAIN
    block_rows = THREADS // lanes * held
    tile = min(TILE, max(rule.tokens, 1))
    token = 2 * size + (size if rule.channels else 0) + block_rows + 4
    words = [*rows(rule.q), *rows(rule.k), *rows(rule.v), *rows(rule.g), *rows(rule.beta, 2), *rows(rule.out)]
    words += [*begin, *carried.kept(), *carried.faults, rule.tokens, rule.k.shape[-2], rule.value_heads, rule.run]
    words += [rule.key_size, rule.value_size, carried.snapshots, stored, tile, rule.scale, saved or 0]
    grid = blocks(rule.value_size, block_rows), rule.value_heads, rule.sequences
    shared = 4 * token * tile * (2 if rule.tokens > tile else 1)
    launches.add(STEPS[size][_step_name(size, rule.channels, whole, (lanes, held))], grid, THREADS, words, shared)


CHUNK_SIZES = (64, 128)
LENGTH = 32
"""Tokens of a chunk."""
CHUNKED = (25, 32)
"""Tokens from which chunks are faster than single tokens on an H100: with a decay per head, and per channel."""
SLICES = (64, 32, 16)
"""Rows of a state that one block of the scan carries."""
BLOCKS = 64
"""Blocks of the scan that remain with a longer slice.

On an H100, 8,192 tokens of 32 heads take 731 microseconds in 64 blocks, 889 in 128 and 1,252 in 256. 8 heads take 398
in 64, 408 in 32 and 614 in 16.
"""
CLUSTERS = (8, 4, 2)
"""Blocks of a cluster that share the prepared values of a head, on devices with clusters."""
BLOCK_BYTES = 16 * 16 * 2
"""Bytes of bfloat16 numbers for 16 x 16 pairs of tokens."""
CHUNKS_FILE, SCAN_FILE = "gated_delta_net_chunks.cuh", "gated_delta_net_scan.cu"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A variant of the chunk kernels, by key size and by decays per key channel.

    With `is_exact`, bfloat16 operands are pairs (relative error 2^-16 instead of 2^-8). `Record` in the kernel has the
    same byte counts.
    """

    size: int
    channels: bool
    exact: bool

    @property
    def keys_bytes(self) -> int:
        return (3 if self.channels else 2) * (2 if self.exact else 1) * 2 * LENGTH * self.size

    @property
    def heads_bytes(self) -> int:
        factors, side = self.size if self.channels else 2 * LENGTH, LENGTH // 16
        return 2 * (2 if self.exact else 1) * side * (side + 1) // 2 * BLOCK_BYTES + 4 * factors

    @property
    def prepare_name(self) -> str:
        kernel = "delta_prepare_channels" if self.channels else "delta_prepare"
        return f"{kernel}<{self.size}, {LENGTH}, {_flag(self.exact)}>"

    def prepare_bytes(self, together: int) -> int:
        """Return the shared memory of a block that prepares `together` value heads."""
        square = 8 * LENGTH * (LENGTH + 4) + self.heads_bytes
        if self.channels:
            return square + 4 * LENGTH + 16 * LENGTH * (self.size + 4)
        return square + 8 * LENGTH * together + self.keys_bytes

    def scan_name(self, values: int, cluster: int = 1) -> str:
        kernel = "delta_scan" if cluster == 1 else "delta_scan_clusters"
        return f"{kernel}<{self.size}, {LENGTH}, {values}, {_flag(self.channels)}, {_flag(self.exact)}>"

    def scan_bytes(self, values: int, cluster: int = 1) -> int:
        """Return the shared memory of a scan block. Clusters have as many stages as fit, with two mbarriers each."""
        stage, sums = self.keys_bytes + self.heads_bytes + 4 * LENGTH * (values + 4), 12 * LENGTH * values
        if cluster > 1:
            stages = 4 if 4 * stage + sums <= 225 * KIB else 3
            return stages * (stage + 16) + sums
        return 2 * stage + sums

    @property
    def prepare(self) -> Kernel:
        return PREPARE[self][self.prepare_name]

    def scan(self, values: int, cluster: int) -> Kernel:
        """Return the scan kernel for slices of `values` rows and `cluster` blocks."""
        return (SCAN if cluster == 1 else SCAN_BY_CLUSTERS)[self][self.scan_name(values, cluster)]


CHUNKS = tuple(Chunk(size, c, x) for size in CHUNK_SIZES for c in (False, True) for x in (True, False))
_BEFORE = (RECURRENT, CHUNKS_FILE)
PREPARE: Mapping[Chunk, Source] = MappingProxyType(
    {c: Source("gated_delta_net_prepare.cu", (c.prepare_name,), before=_BEFORE) for c in CHUNKS}
)
SCAN: Mapping[Chunk, Source] = MappingProxyType(
    {c: Source(SCAN_FILE, tuple(map(c.scan_name, SLICES)), before=_BEFORE) for c in CHUNKS}
)
SCAN_BY_CLUSTERS: Mapping[Chunk, Source] = MappingProxyType(
    {
        c: Source(
            "gated_delta_net_clusters.cu",
            tuple(c.scan_name(values, CLUSTERS[0]) for values in SLICES),
            before=(*_BEFORE, SCAN_FILE, "wgmma.cuh", "cluster.cuh"),
            architectures=("sm_90a",),
        )
        for c in CHUNKS
    }
)


def in_chunks(rule: Rule, tokens: int) -> bool:
    """Return whether this many tokens use the chunk kernels."""
    return tokens >= CHUNKED[rule.channels] and rule.key_size in CHUNK_SIZES and rule.value_size % SLICES[-1] == 0


def chunk_memory(launches: Launches, rule: Rule, tokens: int, chunk: Chunk) -> tuple[Operand, Operand]:
    """Allocate scratch for prepared chunks.

    Args:
        launches: Allocates the scratch.
        rule: The operands.
        tokens: Tokens that are processed by chunks.
        chunk: The kernel variant.

    Returns:
        Scratch for the keys, and for the heads.
    """
    count = rule.sequences * blocks(tokens, LENGTH)
    keyed = rule.value_heads if rule.channels else rule.k.shape[-2]
    keys = launches.scratch((count * keyed * chunk.keys_bytes,), DType.I8)
    return keys, launches.scratch((count * rule.value_heads * chunk.heads_bytes,), DType.I8)


def launch_chunks(
    launches: Launches,
    rule: Rule,
    carried: Carried,
    memory: tuple[Operand, Operand],
    chunk: Chunk,
    values: int | None = None,
) -> None:
    """Process all tokens by chunks. The final state becomes the oldest snapshot.

    Args:
        launches: Receives the launches.
        rule: The operands.
        carried: The states and snapshots.
        memory: The scratch of `allocate_chunk_scratch`.
        chunk: The kernel variant.
        values: One of `SLICE_ROWS`, or `None` for an automatic choice.
    """
    count, heads, sequences = blocks(rule.tokens, LENGTH), rule.value_heads, rule.sequences
    words = [*rows(rule.q), *rows(rule.k), *rows(rule.g), *rows(rule.beta, 2), *memory]
    together = _together(rule)
    words += [rule.tokens, rule.k.shape[-2], heads, rule.run, together, rule.scale]
    grid = count, heads // together, sequences
    launches.add(chunk.prepare, grid, 4 * LENGTH, words, chunk.prepare_bytes(together))
    values = values or _slice(launches, rule, chunk)
    keyed, run = (heads, 0) if chunk.channels else (rule.k.shape[-2], rule.run)
    words = [*memory, *rows(rule.v), *rows(rule.out), *carried.begin, *carried.kept(carried.snapshots - 1)]
    words += [carried.snapshots, *carried.faults, rule.tokens, keyed, heads, run, rule.value_size]
    slices = rule.value_size // values
    cluster = _cluster(launches, slices)
    shared, grid = chunk.scan_bytes(values, cluster), (slices, heads, sequences)
    launches.add(chunk.scan(values, cluster), grid, 4 * values, words, shared, (cluster, 1, 1))


def _cluster(launches: Launches, slices: int) -> int:
    """Return the number of blocks with slices of one state that form a cluster."""
    return next((n for n in CLUSTERS if slices % n == 0), 1) if launches.limits.has_warpgroups else 1


def _together(rule: Rule) -> int:
    """Return the value heads of a key head that one block prepares: all, if one block per key head fills a device."""
    filled = blocks(rule.tokens, LENGTH) * rule.k.shape[-2] * rule.sequences >= FILLED
    return rule.value_heads // rule.k.shape[-2] if filled and not rule.channels else 1


def _fits(launches: Launches, rule: Rule, chunk: Chunk) -> bool:
    """Return whether the chunk kernels fit into the shared memory of the device."""
    return launches.fits(chunk.prepare_bytes(_together(rule))) and launches.fits(
        chunk.scan_bytes(_slice(launches, rule, chunk))
    )


def _slice(launches: Launches, rule: Rule, chunk: Chunk) -> int:
    """Return the longest slice that fits and leaves enough blocks. Each slice reads the prepared values once."""
    possible = [n for n in SLICES if rule.value_size % n == 0]
    fitting = [n for n in possible if launches.fits(chunk.scan_bytes(n))] or possible
    rows_of_all = rule.sequences * rule.value_heads * rule.value_size
    return next((n for n in fitting if rows_of_all // n >= BLOCKS), fitting[-1])


def _gated_delta_net(launches: Launches, call: Bound) -> None:
    q, k, v, g, beta = (as_float(launches, call.operand(i)) for i in range(5))
    rule = Rule(q, k, v, g, beta, call.out, call.attrs["heads"] == "tiled")
    launch_rule(launches, call, rule, bool(call.attrs["exact"]))


def launch_rule(launches: Launches, call: Bound, rule: Rule, exact: bool) -> None:
    """Launch the delta rule with the states of an instruction.

    With snapshots, the last tokens go one by one.

    Args:
        launches: Receives the launches.
        call: The instruction, with states, slots and snapshots.
        rule: The other operands.
        exact: Use pairs of bfloat16 operands in chunks.
    """
    carried = carry(launches, call, rule.sequences, rule.tokens)
    last = carried.snapshots - 1
    first = rule.tokens - last
    chunk = Chunk(rule.key_size, rule.channels, exact)
    if in_chunks(rule, first) and _fits(launches, rule, chunk):
        memory = chunk_memory(launches, rule, first, chunk)
        if rule.has_quads:
            launch_chunks(launches, rule.part(0, first), carried, memory, chunk)
            if last:
                launch_steps(launches, rule.part(first, last), carried.after(last), carried, last)
            return
    launch_steps(launches, rule, carried.begin, carried, carried.stored)


def _with_save(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse the save of a state and the delta rule that updates it in place."""
    save, writer = flow.call(number), changed_state(flow, number, "gated_delta_net").change
    state, call = save.operand(0), flow.call(writer)
    need(call.optional(6) is None, "states are in slots")
    need(len(call.dst) == 2 and lies_as(call.operand(5), call.dst[1]), "the state is not changed in place")
    need(lies_as(state, call.operand(5)) and save.out.is_dense, "not all of the state is saved")
    q, k, v, g, beta = sources = [call.operand(i) for i in range(5)]
    need(all(x.is_float for x in sources), "operands are of other types")
    rule = Rule(q, k, v, g, beta, call.out, call.attrs["heads"] == "tiled")
    need(not in_chunks(rule, rule.tokens), "prompts go by chunks")
    apart(save.out, [*sources, state])
    launches.number = writer
    carried = carry(launches, call, rule.sequences, rule.tokens)
    launch_steps(launches, rule, carried.begin, carried, carried.stored, save.out)
    return number, writer


FUSED: Mapping[str, Sequence[Fused]] = MappingProxyType({"cont": (_with_save,)})
BINDINGS: Mapping[str, Binding] = {"gated_delta_net": _gated_delta_net}
SOURCES = (STATES, *STEPS.values(), *PREPARE.values(), *SCAN.values(), *SCAN_BY_CLUSTERS.values())
