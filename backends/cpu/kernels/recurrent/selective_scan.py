"""The selective scan of state space models: Mamba 1 (Gu and Dao, 2023) and Mamba 2 (Dao and Gu, 2024).

Two kernels run one after the other:

1. The step sizes (`make_step_sizes_and_decays_kernel`): ``size = softplus(dt)`` for each token and head, and
   ``decay = exp(size a)`` if `a` has one number per head.
2. The scan (`make_selective_scan_kernel`): update rows of the state, one row per channel: ``S = decay S + (size x) b``,
   ``y = S . c``. A block of rows processes all tokens before the next block does, so that it stays in the first cache.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ....fusion.operands import BoundInstruction
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.vectors import (
    LANES,
    fma,
    lane_sum,
    mul,
    splat_from,
    store_scalar,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes, store_lanes
from ..vector.vector_functions import exp, softplus
from .head_addresses import compute_address_and_strides, compute_head_vector_address

BLOCK_ROWS = 16
"""Rows of a state that see all tokens before the next rows do."""
STEP_SIZES = declare_args("sequences tokens heads dt[4] rates sizes decays")
SCAN = declare_args(
    "sequences tokens heads groups channels columns x[4] b[4] c[4] out[4] rates sizes decays state new snapshots"
)
"""A tensor of four words: its address, and bytes from sequence to sequence, token to token, and head to head. All other
tensors are dense."""
DT, X, B, C, OUT = STEP_SIZES.first_word_index("dt"), *(SCAN.first_word_index(name) for name in ("x", "b", "c", "out"))


@cache
def make_step_sizes_and_decays_kernel(per_head: bool) -> Kernel:
    """Make the kernel that computes the step sizes of a selective scan: ``sizes = softplus(dt)``.

    If each head has one decay rate (`per_head`), it also computes ``decays = exp(sizes * rates)``.
    """

    def body(a, thread, threads):
        tokens, heads = STEP_SIZES.tokens(a), STEP_SIZES.heads(a)
        first, last = compute_thread_range(STEP_SIZES.sequences(a) * tokens, thread, threads)
        for i in range(first, last):
            dt, to = compute_head_vector_address(a, DT, i // tokens, i % tokens, 0), 4 * heads * i
            for h in range(0, heads, LANES):
                size = softplus(load_lanes(dt, h, heads, 4))
                store_lanes(STEP_SIZES.sizes(a) + to, h, heads, size)
                if per_head:
                    store_lanes(
                        STEP_SIZES.decays(a) + to,
                        h,
                        heads,
                        exp(mul(size, load_lanes(STEP_SIZES.rates(a), h, heads, 4))),
                    )
        return 0

    return Kernel(f"selective_scan.step_sizes.{'head' if per_head else 'column'}", body)


@cache
def make_compute_decays_of_16_columns(per_head: bool) -> Subroutine:
    """Make the subroutine that returns the decays of 16 columns of a state row for one token.

    The subroutine is ``(size, decay, rates, column, columns)``. With `per_head` the decay is the same in all columns:
    `decay`. Otherwise it is computed from the step size `size` and the rates from `column` on.
    """

    def decay_columns(size, decay, rates, column, columns):
        return decay if per_head else exp(mul(size, load_lanes(rates, column, columns, 4)))

    return subroutine(decay_columns)


@cache
def make_update_state_row(per_head: bool) -> Subroutine:
    """Make the subroutine that updates one row of the state of a selective scan with one token.

    The subroutine is ``(old, new, columns, x, size, decay, rates, b, c, out)``:

    - `old` and `new` are the addresses of the row before and after the token; it has `columns` columns.
    - `x` and `out` are the addresses of the row's input and output.
    - `size` is the step size of the token, as a vector.
    - `decay` is the decay of the head, `rates` the address of the decay rates of the columns.
    - `b` and `c` are the addresses of the vectors that write and read the state.
    """
    decay_columns = make_compute_decays_of_16_columns(per_head)

    def update_row(old, new, columns, x, size, decay, rates, b, c, out):
        write, y = mul(size, splat_from(x)), zeros()
        for i in range(0, columns, LANES):
            decayed = mul(load_lanes(old, i, columns, 4), decay_columns(size, decay, rates, i, columns))
            s = fma(write, load_lanes(b, i, columns, 4), decayed)
            y = fma(s, load_lanes(c, i, columns, 4), y)
            store_lanes(new, i, columns, s)
        store_scalar(out, lane_sum(y))

    return subroutine(update_row)


@cache
def make_update_four_state_rows(per_head: bool) -> Subroutine:
    """Make the subroutine that updates four neighbouring state rows of one head with one token.

    It loads the vectors `b` and `c` once for all four rows. Parameters are as in `make_update_state_row`.
    """
    decay_columns = make_compute_decays_of_16_columns(per_head)

    def update_four_rows(old, new, columns, x, size, decay, rates, b, c, out):
        row = 4 * columns
        write_0, write_1 = mul(size, splat_from(x)), mul(size, splat_from(x + 4))
        write_2, write_3 = mul(size, splat_from(x + 8)), mul(size, splat_from(x + 12))
        y_0, y_1, y_2, y_3 = zeros(), zeros(), zeros(), zeros()
        for i in range(0, columns, LANES):
            factor = decay_columns(size, decay, rates, i, columns)
            key, query = load_lanes(b, i, columns, 4), load_lanes(c, i, columns, 4)
            s = fma(write_0, key, mul(load_lanes(old, i, columns, 4), factor))
            y_0 = fma(s, query, y_0)
            store_lanes(new, i, columns, s)
            s = fma(write_1, key, mul(load_lanes(old + row, i, columns, 4), factor))
            y_1 = fma(s, query, y_1)
            store_lanes(new + row, i, columns, s)
            s = fma(write_2, key, mul(load_lanes(old + 2 * row, i, columns, 4), factor))
            y_2 = fma(s, query, y_2)
            store_lanes(new + 2 * row, i, columns, s)
            s = fma(write_3, key, mul(load_lanes(old + 3 * row, i, columns, 4), factor))
            y_3 = fma(s, query, y_3)
            store_lanes(new + 3 * row, i, columns, s)
        store_scalar(out, lane_sum(y_0))
        store_scalar(out + 4, lane_sum(y_1))
        store_scalar(out + 8, lane_sum(y_2))
        store_scalar(out + 12, lane_sum(y_3))

    return subroutine(update_four_rows)


@cache
def make_selective_scan_kernel(per_head: bool) -> Kernel:
    """Make the kernel of the selective scan (Mamba), which updates the state token by token and computes the outputs.

    With `per_head` each head has one decay rate, otherwise each column of the state has its own.
    """
    update_row, update_four_rows = make_update_state_row(per_head), make_update_four_state_rows(per_head)

    def body(a, thread, threads):
        tokens, heads, channels, columns = SCAN.tokens(a), SCAN.heads(a), SCAN.channels(a), SCAN.columns(a)
        heads_per_group, row_bytes, snapshots = heads // SCAN.groups(a), 4 * columns, SCAN.snapshots(a)
        # A block is some channels of one head, or all channels of some heads.
        block_channels, block_heads = min(channels, BLOCK_ROWS), max(1, BLOCK_ROWS // channels)
        in_head = (channels + block_channels - 1) // block_channels
        blocks = (heads + block_heads - 1) // block_heads * in_head
        first_unit, last_unit = compute_thread_range(SCAN.sequences(a) * blocks, thread, threads)
        for unit in range(first_unit, last_unit):
            n, block = unit // blocks, unit % blocks
            first_head, first = block // in_head * block_heads, block % in_head * block_channels
            last_head, last = min(heads, first_head + block_heads), min(channels, first + block_channels)
            state = SCAN.state(a) + row_bytes * channels * heads * n
            new = SCAN.new(a) + row_bytes * channels * heads * n * snapshots
            for t in range(tokens):
                at, old = 4 * heads * (n * tokens + t), state if t == 0 else new
                for h in range(first_head, last_head):
                    group = h // heads_per_group
                    x, out = compute_head_vector_address(a, X, n, t, h), compute_head_vector_address(a, OUT, n, t, h)
                    b, c = (
                        compute_head_vector_address(a, B, n, t, group),
                        compute_head_vector_address(a, C, n, t, group),
                    )
                    size, decay = splat_from(SCAN.sizes(a) + at + 4 * h), splat_from(SCAN.decays(a) + at + 4 * h)
                    rates, e = SCAN.rates(a) + row_bytes * h, first
                    while e < last:
                        row, to = row_bytes * (h * channels + e), 4 * e
                        if e + 4 <= last:
                            update_four_rows(old + row, new + row, columns, x + to, size, decay, rates, b, c, out + to)
                            e += 4
                        else:
                            update_row(old + row, new + row, columns, x + to, size, decay, rates, b, c, out + to)
                            e += 1
                after = tokens - 1 - t
                if 0 < after < snapshots:
                    for h in range(first_head, last_head):
                        start = row_bytes * (h * channels + first)
                        size_floats = columns * (last - first)
                        target = new + row_bytes * channels * heads * after + start
                        for i in range(0, size_floats, LANES):
                            store_lanes(target, i, size_floats, load_lanes(new + start, i, size_floats, 4))
        return 0

    return Kernel(f"selective_scan.scan.{'head' if per_head else 'column'}", body)


def _has_selective_scan_kernel(call: BoundInstruction) -> bool:
    """Return whether the kernels of this file can compute an `ssm_scan`."""
    x, dt, rates, b, c, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    batched, tokens, snapshots = len(x.shape) == 4, x.shape[-3], call.attrs["snapshots"]
    if call.attrs["pool"] != "none" or len(x.shape) not in (3, 4) or not tokens or not isinstance(snapshots, int):
        return False
    floats = all(o.is_float for o in (x, dt, rates, b, c, state, out, new))
    dense = all(o.is_dense for o in (rates, state, new)) and all(o.is_dense_along(-1) for o in (x, dt, b, c, out))
    return (
        floats and dense and 0 not in (*x.shape, *b.shape) and snapshots <= tokens and batched == (len(dt.shape) == 3)
    )


def _bind_ssm_scan(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    if not _has_selective_scan_kernel(call):
        return False
    x, dt, rates, b, c, state = (call.operand(i) for i in range(6))
    out, new = call.dst
    batched, per_head = len(x.shape) == 4, rates.shape[-1] == 1
    tokens, heads, channels = x.shape[-3:]
    sequences, columns = x.shape[0] if batched else 1, b.shape[-1]
    each = 4 * sequences * tokens * heads
    sizes, decays = steps.scratch(f"step sizes {each}", each), steps.scratch(f"decays {each}", each)
    counts = {"sequences": sequences, "tokens": tokens, "heads": heads}
    memory = {"rates": rates.address, "sizes": sizes.address, "decays": decays.address}
    steps.add(
        make_step_sizes_and_decays_kernel(per_head),
        STEP_SIZES(**counts, dt=compute_address_and_strides(dt, 2, batched), **memory),
        reads=[dt, rates],
        writes=[sizes, decays],
    )
    steps.add(
        make_selective_scan_kernel(per_head),
        SCAN(
            **counts,
            groups=b.shape[-2],
            channels=channels,
            columns=columns,
            **{
                name: compute_address_and_strides(o, 3, batched)
                for name, o in {"x": x, "b": b, "c": c, "out": out}.items()
            },
            **memory,
            state=state.address,
            new=new.address,
            snapshots=int(np.asarray(call.attrs["snapshots"])),
        ),
        reads=[x, b, c, rates, sizes, decays, state],
        writes=[out, new],
    )
    return True


BINDINGS = {"ssm_scan": _bind_ssm_scan}
