"""The short convolution of a delta-net layer: alone, or fused with its saved rows, SiLU and the norms of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product

from .....graph.dtypes import DType
from .....ops.declaration import scalar
from ....fusion.dataflow import Dataflow
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_short_convolution
from ...compilation.compiler import Kernel, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.permute_lanes import fourth_0, fourth_1, fourth_2, fourth_3
from ...simd.vectors import (
    LANES,
    fma,
    gather_lanes,
    load,
    load_int,
    load_long,
    make_clamped_lane_indices,
    mul,
    mul_int,
    splat,
    splat_int,
    store,
    store_16_floats_streaming,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder
from ..packed.weight_packing import INVALID_ROW
from ..rows.norms import NORM_FACTORS, compute_sum_of_squares, select_norm_factor_name
from ..vector.elementwise import load_lanes, store_lanes
from ..vector.lower_expressions import make_lane_function

silu = make_lane_function(scalar.silu, 1)

TAP_COUNT = 4
TILE_TOKENS = 8
"""Tokens per tile: their heads stay in the first cache from the convolution to the norm."""


CONVOLUTION_ARGS = declare_args("sequences tokens channels x x_between x_row w y y_between y_row")


@cache
def make_four_tap_convolution_kernel() -> Kernel:
    """Make the kernel of the convolution with four taps: ``y[t, c] = sum over j of w[c, j] * x[t + j, c]``.

    `w` is [channels, 4]. ``*_between`` and ``*_row`` are bytes from sequence to sequence and from row to row.
    """

    def body(a, thread, threads):
        tokens, channels = CONVOLUTION_ARGS.tokens(a), CONVOLUTION_ARGS.channels(a)
        blocks = (channels + LANES - 1) // LANES
        lo, hi = compute_thread_range(CONVOLUTION_ARGS.sequences(a) * blocks, thread, threads)
        for unit in range(lo, hi):
            n, c = unit // blocks, unit % blocks * LANES
            x = CONVOLUTION_ARGS.x(a) + n * CONVOLUTION_ARGS.x_between(a)
            y = CONVOLUTION_ARGS.y(a) + n * CONVOLUTION_ARGS.y_between(a)
            w = CONVOLUTION_ARGS.w(a) + 16 * c
            w0, w1 = load_lanes(w, 0, 4 * (channels - c), 4), load_lanes(w, LANES, 4 * (channels - c), 4)
            w2, w3 = load_lanes(w, 2 * LANES, 4 * (channels - c), 4), load_lanes(w, 3 * LANES, 4 * (channels - c), 4)
            k0, k1 = fourth_0(w0, w1, w2, w3), fourth_1(w0, w1, w2, w3)
            k2, k3 = fourth_2(w0, w1, w2, w3), fourth_3(w0, w1, w2, w3)
            step = CONVOLUTION_ARGS.x_row(a)
            x0, x1 = load_lanes(x, c, channels, 4), load_lanes(x + step, c, channels, 4)
            x2 = load_lanes(x + 2 * step, c, channels, 4)
            for t in range(tokens):
                x3 = load_lanes(x + (t + 3) * step, c, channels, 4)
                store_lanes(
                    y + t * CONVOLUTION_ARGS.y_row(a), c, channels, fma(x0, k0, fma(x1, k1, fma(x2, k2, mul(x3, k3))))
                )
                x0, x1, x2 = x1, x2, x3
        return 0

    return Kernel("short_convolution.plain", body)


TAPPED = declare_args("sequences tokens channels x x_between x_row w w_row y y_between y_row taps scratch")


@kernel
def convolve_tokens_with_any_taps(a, thread, threads):
    """Convolve tokens with any number of taps: ``y[t, c] = sum_j w[c, j] x[t + j, c]``.

    Each thread has `taps` vectors of scratch.
    """
    tokens, channels, taps = TAPPED.tokens(a), TAPPED.channels(a), TAPPED.taps(a)
    columns = TAPPED.scratch(a) + thread * 4 * LANES * taps
    blocks = (channels + LANES - 1) // LANES
    first, last = compute_thread_range(TAPPED.sequences(a) * blocks, thread, threads)
    for unit in range(first, last):
        n, c = unit // blocks, unit % blocks * LANES
        x, y = TAPPED.x(a) + n * TAPPED.x_between(a), TAPPED.y(a) + n * TAPPED.y_between(a)
        rows = mul_int(make_clamped_lane_indices(c, channels), splat_int(TAPPED.w_row(a)))
        for j in range(taps):
            store(columns + 4 * LANES * j, gather_lanes(TAPPED.w(a) + 4 * j, rows))
        for t in range(tokens):
            total = zeros()
            for j in range(taps):
                row = load_lanes(x + (t + j) * TAPPED.x_row(a), c, channels, 4)
                total = fma(row, load(columns + 4 * LANES * j), total)
            store_lanes(y + t * TAPPED.y_row(a), c, channels, total)
    return 0


def _bind_short_convolution(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a short convolution along tokens; return False if kernels cannot read the operands.

    Four taps have a kernel of their own.
    """
    x, w, y = call.operand(0), call.operand(1), call.out
    plain = all(o.is_float and o.strides[-1] == 1 for o in (x, y)) and w.is_float and w.is_dense_along(-1)
    taps = w.shape[-1]
    if not plain or len(x.shape) not in (2, 3) or 4 * w.shape[0] * abs(w.strides[0]) >= 2**31:
        return False
    batched = len(x.shape) == 3
    shared = {
        "sequences": x.shape[0] if batched else 1,
        "tokens": y.shape[-2],
        "channels": y.shape[-1],
        "w": w.address,
        "x": x.address,
        "x_between": 4 * x.strides[0] if batched else 0,
        "x_row": 4 * x.strides[-2],
        "y": y.address,
        "y_between": 4 * y.strides[0] if batched else 0,
        "y_row": 4 * y.strides[-2],
    }
    if taps == TAP_COUNT and w.is_dense:
        steps.add(make_four_tap_convolution_kernel(), CONVOLUTION_ARGS(**shared), reads=[x, w], writes=[y])
        return True
    nbytes = 4 * LANES * taps * steps.threads
    scratch = steps.scratch(f"taps {nbytes}", nbytes)
    words = TAPPED(**shared, w_row=4 * w.strides[0], taps=taps, scratch=scratch.address)
    steps.add(convolve_tokens_with_any_taps, words, reads=[x, w], writes=[y])
    return True


@subroutine
def copy_float_vectors(x, y, n):
    """Copy `n` float32 from address `x` to address `y`; `n` is a multiple of 16."""
    for c in range(0, n, LANES):
        store(y + 4 * c, load(x + 4 * c))


@subroutine
def convolve_tokens_with_silu(x, step, y, pace, first, last, w, old, size):
    """Convolve some tokens of 16 channels with four taps, and apply SiLU.

    Args:
        x: address of the input of token 0.
        step: bytes from token to token of the input.
        y: address of the result of token 0.
        pace: bytes from token to token of the result.
        first: number of the first token.
        last: number after the last token.
        w: address of the taps of the channels.
        old: address of the three rows before the first token; afterwards it has the last three rows.
        size: float32 from row to row of `old`.
    """
    w0, w1, w2, w3 = load(w), load(w + 4 * LANES), load(w + 8 * LANES), load(w + 12 * LANES)
    k0, k1 = fourth_0(w0, w1, w2, w3), fourth_1(w0, w1, w2, w3)
    k2, k3 = fourth_2(w0, w1, w2, w3), fourth_3(w0, w1, w2, w3)
    x0, x1, x2 = load(old), load(old + 4 * size), load(old + 8 * size)
    for t in range(first, last):
        x3 = load(x + t * step)
        # y[t, c] = silu(sum over j of w[c, j] * x[t + j - 3, c])
        store(y + t * pace, silu(fma(x0, k0, fma(x1, k1, fma(x2, k2, mul(x3, k3))))))
        x0, x1, x2 = x1, x2, x3
    store(old, x0)
    store(old + 4 * size, x1)
    store(old + 8 * size, x2)


@subroutine
def load_row_id(ids, nbytes, i):
    """Load entry `i` of the row ids `ids`; an id has `nbytes` bytes, 4 or 8."""
    return load_int(ids + 4 * i) if nbytes == 4 else load_long(ids + 8 * i)


@subroutine
def save_and_overwrite_state_rows(state, saved_state, old, ids, nbytes, x, step, channels, size):
    """Copy the three state rows of a head to `saved_state` and `old`, then overwrite them by the rows that `ids` names.

    Args:
        state: address of the state rows.
        saved_state: address of the saved rows.
        old: address of the thread's copy.
        ids: address of three row ids; 0 to 2 are old state rows, larger ids are rows of `x`.
        nbytes: bytes of an id, 4 or 8.
        x: address of the new rows.
        step: bytes from row to row of `x`.
        channels: float32 of a state row.
        size: float32 of the head.
    """
    for j in range(3):
        for c in range(0, 4 * size, 4 * LANES):
            row = load(state + 4 * j * channels + c)
            store(old + 4 * j * size + c, row)
            store_16_floats_streaming(saved_state + 4 * j * channels + c, row)
    for j in range(3):
        row = load_row_id(ids, nbytes, j)
        copy_float_vectors(old + 4 * row * size if row < 3 else x + (row - 3) * step, state + 4 * j * channels, size)


HEAD_ARGS = declare_args(
    "sequences tokens heads size state saved_state x x_between x_row w y y_between y_row "
    "ids id_bytes first[3] second[3] eps:f32 scratch"
)
"""`first` and `second`: the first and the end head of two normed ranges, and the address of the result."""


@cache
def make_convolution_norm_and_state_kernel(norm: str) -> Kernel:
    """Make the fused kernel of a short convolution, SiLU and head norms, which also updates the rows of the state.

    The old state rows are copied to `saved_state`. Normed heads are not written to y. Kernel arguments:

    - `size`: numbers of a head.
    - `state`: f32[sequences, 3, channels], and `w`: [channels, 4].
    - `ids` [sequences, 3]: the rows of the next state, as numbers of rows of the old state followed by x.
    - ``*_between`` and ``*_row``: bytes from sequence to sequence and from row to row.
    - `scratch`: for each thread, 3 rows and `TILE_TOKENS` heads.
    """
    factor = NORM_FACTORS[norm]

    def body(a, thread, threads):
        tokens, count, size = HEAD_ARGS.tokens(a), HEAD_ARGS.heads(a), HEAD_ARGS.size(a)
        channels, step, pace, ids = count * size, HEAD_ARGS.x_row(a), HEAD_ARGS.y_row(a), HEAD_ARGS.ids(a)
        for i in range(3 * HEAD_ARGS.sequences(a)):
            row = load_row_id(ids, HEAD_ARGS.id_bytes(a), i)
            if row < 0 or row >= tokens + 3:
                return INVALID_ROW | row << 8
        eps, tile = HEAD_ARGS.eps(a), HEAD_ARGS.scratch(a) + thread * (3 * channels + TILE_TOKENS * size) * 4
        lo, hi = compute_thread_range(count, thread, threads)
        for n in range(HEAD_ARGS.sequences(a)):
            x, out = HEAD_ARGS.x(a) + n * HEAD_ARGS.x_between(a), HEAD_ARGS.y(a) + n * HEAD_ARGS.y_between(a)
            for first in range(0, tokens, TILE_TOKENS):
                last = min(tokens, first + TILE_TOKENS)
                for head in range(lo, hi):
                    at = 4 * head * size
                    old = tile + 4 * TILE_TOKENS * size + (3 * at if tokens > TILE_TOKENS else 0)
                    if first == 0:
                        rows = ids + 3 * n * HEAD_ARGS.id_bytes(a)
                        state = HEAD_ARGS.state(a) + 12 * n * channels + at
                        saved_state = HEAD_ARGS.saved_state(a) + 12 * n * channels + at
                        save_and_overwrite_state_rows(
                            state, saved_state, old, rows, HEAD_ARGS.id_bytes(a), x + at, step, channels, size
                        )
                    low, high, to = HEAD_ARGS.first(a, 0), HEAD_ARGS.first(a, 1), HEAD_ARGS.first(a, 2)
                    if head < low or high <= head:
                        low, high, to = HEAD_ARGS.second(a, 0), HEAD_ARGS.second(a, 1), HEAD_ARGS.second(a, 2)
                    normed = low <= head and head < high
                    y, between = (tile - 4 * first * size, 4 * size) if normed else (out + at, pace)
                    for c in range(0, 4 * size, 4 * LANES):
                        w = HEAD_ARGS.w(a) + 4 * (at + c)
                        convolve_tokens_with_silu(x + at + c, step, y + c, between, first, last, w, old + c, size)
                    if normed:
                        many = high - low
                        z = to + 4 * size * (n * tokens * many + head - low)
                        for t in range(first, last):
                            source, target = y + t * between, z + 4 * t * many * size
                            f = splat(factor(compute_sum_of_squares(source, size), size, eps))
                            for c in range(0, 4 * size, 4 * LANES):
                                store(target + c, mul(load(source + c), f))
        return 0

    return Kernel(f"short_convolution.heads.{norm}", body)


def _fuse_convolution_and_head_norms(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse the short convolution of a delta-net layer with its state, SiLU, and the norms of queries and keys."""
    chain = match_short_convolution(flow, number)
    require_supported(chain.save is not None, "the state is not saved")
    assert chain.save is not None
    join, mix, active, keep, save = (
        flow.bound_instruction(n) for n in (number, chain.convolution, chain.activation, chain.state_update, chain.save)
    )
    norms = [flow.bound_instruction(n) for n in chain.norms]
    state, new, saved_state, weights, ids = join.operand(0), join.operand(1), save.out, mix.operand(1), keep.operand(1)
    y, size = active.out, norms[0].out.shape[-1]
    require_supported(
        save.op == "cont" and state.tensor == save.operand(0).tensor == keep.out.tensor,
        "the saved state is another tensor",
    )
    require_supported(
        int(str(join.attrs["axis"])) % 3 == 1 and len(join.out.shape) == len(y.shape) == 3,
        "rows are not joined along axis 1 of 3",
    )
    require_supported(
        state.shape == (y.shape[0], TAP_COUNT - 1, y.shape[2]) and weights.shape[-1] == TAP_COUNT,
        "the convolution needs four taps",
    )
    require_supported(ids.dtype in (DType.I32, DType.I64), "rows are numbered otherwise")
    floats = [state, new, saved_state, weights, y, *(n.out for n in norms)]
    require_supported(all(o.is_float for o in floats) and new.strides[-1] == 1, "operands are not rows of float32")
    require_supported(
        all(o.is_dense for o in (state, saved_state, weights, y, ids, *(n.out for n in norms))),
        "operands are not dense",
    )
    require_supported(size % LANES == y.shape[2] % size == saved_state.address % 64 == 0, "heads are not whole vectors")
    require_supported(all(n.attrs == norms[0].attrs and n.out.shape[-1] == size for n in norms), "norms differ")
    normed = [
        c
        for n in norms
        if (c := _find_columns_viewed_as_heads(n.operand(0), y)) is not None and c[0] % size == c[1] % size == 0
    ]
    require_supported(len(normed) == 2, "the normed columns are not whole heads")
    others = [flow.bound_instruction(n) for n in flow.require_readers(chain.activation) if n not in chain.norms]
    _require_disjoint_results(join, mix, active, keep, save, norms, others, normed)
    kernel, eps = (
        make_convolution_norm_and_state_kernel(select_norm_factor_name(norms[0])),
        norms[0].float_attribute_bits("eps"),
    )
    sequences, tokens, channels = y.shape

    def bind(steps: StepTableBuilder) -> None:
        scratch = steps.scratch("convolved heads", 4 * steps.threads * (3 * channels + TILE_TOKENS * size))
        ranges = [(low // size, high // size, n.out.address) for (low, high), n in zip(normed, norms, strict=True)]
        words = HEAD_ARGS(
            sequences=sequences,
            tokens=tokens,
            heads=channels // size,
            size=size,
            eps=eps,
            state=state.address,
            saved_state=saved_state.address,
            w=weights.address,
            scratch=scratch.address,
            x=new.address,
            x_between=4 * new.strides[0],
            x_row=4 * new.strides[1],
            y=y.address,
            y_between=4 * y.strides[0],
            y_row=4 * y.strides[1],
            ids=ids.address,
            id_bytes=ids.dtype.storage.itemsize,
            first=ranges[0],
            second=ranges[1],
        )
        steps.instruction_number = chain.state_update
        writes = [y, state, saved_state, *(n.out for n in norms), scratch]
        steps.add_units(
            kernel,
            words,
            channels // size,
            reads=[state, new, weights, ids],
            writes=writes,
            of_units=[new, y] if sequences * tokens == 1 else [],
            stops=True,
        )

    return FusedBinding(
        [number, chain.convolution, chain.activation, *chain.norms, chain.state_update, chain.save], bind
    )


def _find_columns_viewed_as_heads(x: Operand, y: Operand) -> tuple[int, int] | None:
    """Find the columns (first, end) of ``y`` [n, t, c] that `x` views as heads [n, t, heads, numbers].

    The result is None if `x` is another view.
    """
    start = (x.address - y.address) // 4
    stop = start + x.shape[-1] * x.shape[-2] if len(x.shape) == 4 else -1
    fits = x.tensor.buffer == y.tensor.buffer and start >= 0 and stop <= y.shape[-1]
    if not fits or stop < 0 or x.shape[:2] != y.shape[:2]:
        return None
    expected_strides = (*y.strides[:2], x.shape[-1], 1)
    walked = all(n == 1 or s == w for n, s, w in zip(x.shape, x.strides, expected_strides, strict=True))
    return (start, stop) if walked else None


def _require_disjoint_results(
    join: BoundInstruction,
    mix: BoundInstruction,
    active: BoundInstruction,
    keep: BoundInstruction,
    save: BoundInstruction,
    norms: Sequence[BoundInstruction],
    others: Sequence[BoundInstruction],
    normed: Sequence[tuple[int, int]],
) -> None:
    """Require that fused results overlap neither operands nor each other.

    Require also that only norms read the normed heads. Otherwise the fusion is rejected.

    Args:
        join: The concatenation of old state rows and new rows.
        mix: The convolution.
        active: The SiLU of the convolution.
        keep: The update of the state.
        save: The copy of the old state.
        norms: The norms of heads.
        others: Other instructions that read the result of the SiLU.
        normed: The pair (first column, end column) of the heads of each norm.
    """
    y, new = active.out, join.operand(1)
    for seen in (o for call in others for o in call.src if o is not None and o.region.overlaps(y.region)):
        low, high = _find_columns_viewed_as_heads(seen, y) or (0, y.shape[-1])
        require_supported(
            not any(first < high and low < last for first, last in normed), "another op reads the normed heads"
        )
    require_supported(normed[0][1] <= normed[1][0], "the norms read the same heads")
    written = [save.out, y, *(n.out for n in norms)]
    in_place = new.address == y.address and new.strides[1:] == y.strides[1:] and new.shape == y.shape
    read = [join.operand(0), mix.operand(1), keep.operand(1)] + ([] if in_place else [new])
    pairs = [*combinations(written, 2), *product(written, read)]
    pairs += [(o, new) for o in written if in_place and o is not y]
    require_supported(
        not any(a.region.overlaps(b.region) for a, b in pairs),
        "a result lies where something is still read",
    )


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"concat": (_fuse_convolution_and_head_norms,)}
BINDINGS = {"ssm_conv": _bind_short_convolution}
