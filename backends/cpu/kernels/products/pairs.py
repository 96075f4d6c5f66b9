"""Gated matmuls of few rows: two products of the same activations and their gated unit, in one kernel.

The products themselves are not written to memory. Each thread computes its rows of the gate weight, then its rows of
the up weight, then the unit. Each weight is read front to back, because two alternating streams are a third slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from ....chains import gated_unit
from ....flow import Flow
from ....operands import Bound, Operand, need
from ...compiler import Kernel
from ...fetching import ahead
from ...simd.vectors import load, load_int, zeros
from ...steps import Chain, Fused, Share, Steps
from ...words import words
from ..functions import GATED
from ..rows import put
from .experts import sorted_slots
from .formats import FORMATS, Format
from .gated import UNITS, operands_of
from .grouped import PAIR, ROWS, bounds_of, in_order, is_dealt, lying_of
from .products import blocks_of, bytes_of, is_compiled, wanted_of
from .rounding import Target, round_row, rounded, rounded_bytes

ARGS = words(
    "weights[2] stride between rows columns x pitch starts experts used shared sums[2] wide y step passing near far "
    "rounding[*]"
)
ROUNDING = ARGS.start("rounding")
"""First word of `QuantisedTarget.rounding_words`."""


@cache
def pair_few(form: Format, kind: str) -> Kernel:
    """Make the kernel ``y[i] = unit(gate[expert of slot i] @ x[row of slot i], up[...] @ x[...])`` for packed weights.

    The kernel also quantises y. `weights` are gate and up. `sums` is memory for whole groups of both products, with
    `wide` bytes per slot. `grouped.make_matmul_kernel` explains the other words.
    """
    lie, unit = lying_of(blocks_of(form)), GATED[kind]

    def body(a, thread, threads):
        stride, between, rows, columns = ARGS.stride(a), ARGS.between(a), ARGS.rows(a), ARGS.columns(a)
        x, pitch, starts, experts = ARGS.x(a), ARGS.pitch(a), ARGS.starts(a), ARGS.experts(a)
        used, shared, y, step = ARGS.used(a), ARGS.shared(a), ARGS.y(a), ARGS.step(a)
        slots, near, far = starts + 4 * (experts + 2), ARGS.near(a), ARGS.far(a)
        gate, up, wide = ARGS.sums(a, 0), ARGS.sums(a, 1), ARGS.wide(a)
        for expert in range(experts + 1):
            start, end = load_int(starts + 4 * expert), load_int(starts + 4 * (expert + 1))
            for k in range(2 if expert < experts and start < end else 0):
                matrix, sums = ARGS.weights(a, k) + expert * between, ARGS.sums(a, k)
                for row in range(0, rows, PAIR):
                    at, to, left = matrix + row * stride, sums + 4 * row, wide // 4 - row
                    lie(start, end, slots, used, shared, x, pitch, to, wide, at, stride, left, columns, near, far)
            for i in range(start, end):
                slot = load_int(slots + 4 * i)
                to = y + slot * step
                for c in range(0, rows, ROWS):
                    if expert < experts:
                        at = slot * wide + 4 * c
                        put(to, c, rows, unit(load(gate + at), load(up + at)))
                    else:
                        put(to, c, rows, zeros())
                round_row(a, ROUNDING, slot, to, rows)
        return 0

    return Kernel(f"pairs.pair.{form.dtype}.{kind}", body)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two products and their gated unit.

    Attributes:
        instruction_numbers: The instructions of the products and of the unit.
        matmuls: The products.
        unit: The gated unit.
        unit_kind: A key of `GATED`.
        weight_addresses: Addresses of the weight rows of the gate and of its other operand.
    """

    numbers: Sequence[int]
    products: Sequence[Bound]
    call: Bound
    kind: str
    begins: Sequence[int]


def pair_of(flow: Flow, number: int) -> Pair:
    """Match the gated matmul that contains this product.

    Raises:
        NoKernelError: There is none, or its weight rows are incomplete groups.
    """
    numbers, unit = gated_unit(flow, number, UNITS)
    products, call = [flow.call(n) for n in numbers], flow.call(unit)
    (kind, *units), first, y = operands_of(call), products[0], call.out
    need(kind in GATED, "the unit has no kernel")
    need(all(is_compiled(p) and _alike(p, first) for p in products) and y.is_dense, "products differ")
    begins = [at for o in units if (at := _rows_of(o, products)) is not None and o.shape == y.shape]
    need(len(begins) == len(units), "operands are not products of whole groups of rows")
    return Pair([*numbers, unit], products, call, kind, begins)


def _pair(flow: Flow, number: int) -> Chain:
    """Fuse a gated matmul of few rows with a packed weight."""
    pair = pair_of(flow, number)
    first = pair.products[0]
    w, x, given = first.operand(0), first.operand(1), 2 if first.op == "mul_mat_id" else 1
    need(w.dtype in FORMATS, "weights are not packed")
    lying = blocks_of(FORMATS[w.dtype]).lying
    need(math.prod(x.shape[:-given]) <= lying, "many rows use the expanded weight")
    return Chain(pair.numbers, partial(_add_pair, pair=pair))


def _add_pair(steps: Steps, pair: Pair) -> None:
    """Add the step of a gated matmul of few rows."""
    first, call, y = pair.products[0], pair.call, pair.call.out
    w, x = first.operand(0), first.operand(1)
    form, (stride, between) = FORMATS[w.dtype], bytes_of(w)
    wanted, dealt = wanted_of(steps, call), is_dealt(steps, first)
    slots = sorted_slots(steps, first) if first.op == "mul_mat_id" else in_order(steps, x)
    q = rounded(steps, x, form.zero, for_all=dealt)
    records, bounds = wanted.records(steps, shared=True), bounds_of(call, 2 * ROWS, steps.threads if dealt else 1)
    targets = wanted.targets(steps, records, bounds)
    count, rows = math.prod(y.shape[:-1]), max(end - start for start, end in pairwise(bounds))
    wide = 4 * -(-rows // ROWS) * ROWS
    memory = steps.scratch("pair", 2 * count * wide * steps.threads)
    near, far = ahead(w.dtype, several=count > slots.experts)

    def share(thread: int, to: Target) -> Share:
        low, own = bounds[thread], bounds[thread + 1] - bounds[thread]
        words = ARGS(
            weights=[at + low * stride for at in pair.begins],
            stride=stride,
            between=between,
            rows=own,
            columns=w.shape[-1],
            x=q[thread].address,
            pitch=rounded_bytes(1, w.shape[-1], form.zero),
            starts=slots.operand.address,
            experts=slots.experts,
            used=slots.used,
            shared=slots.shared,
            sums=[memory.address + (2 * thread + k) * count * wide for k in range(2)],
            wide=wide,
            y=to.floats.address,
            step=to.step,
            passing=to.between,
            near=near,
            far=far,
            rounding=to.rounding,
        )
        return Share(words, [*(p.operand(0) for p in pair.products), q[thread], slots.operand], to.writes)

    shares = [None if to is None else share(thread, to) for thread, to in enumerate(targets)]
    if dealt:
        steps.deal_columns(pair_few(form, pair.kind), shares, y, bounds)
    else:
        steps.deal(pair_few(form, pair.kind), shares)
    wanted.remember(steps, records)


def _alike(product: Bound, first: Bound) -> bool:
    """Return whether two products have the same activations, and weights of one type and shape."""
    w, v = product.operand(0), first.operand(0)
    return (w.dtype, w.shape, product.src[1:], product.attrs) == (v.dtype, v.shape, first.src[1:], first.attrs)


def _rows_of(unit: Operand, products: Sequence[Bound]) -> int | None:
    """Find the first weight row of a unit operand; None for other operands, and for rows that begin within a group."""
    for product in products:
        out, skipped = product.out, (unit.address - product.out.address) // 4
        within = unit.tensor.buffer == out.tensor.buffer and 0 <= skipped <= out.shape[-1] - unit.shape[-1]
        if within and (unit.shape[:-1], unit.strides) == (out.shape[:-1], out.strides) and skipped % ROWS == 0:
            return product.operand(0).address + skipped * bytes_of(product.operand(0))[0]
    return None


FUSED: Mapping[str, tuple[Fused, ...]] = dict.fromkeys(("mul_mat", "mul_mat_id"), (_pair,))
