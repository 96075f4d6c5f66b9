"""Matrix products with packed weights: activations quantised to 8 bits, integer dot products, float32 sums.

Each code is unpacked once for a chunk of activation rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from .....graph.dtypes import DType
from ....operands import Bound, Operand
from ...compiler import Kernel, Part, part
from ...simd.tiles import RECORD, SUMS, VECTORS, Tile, load_codes, store_codes, tile
from ...simd.vectors import MANY, load, store, sub, vectors_in_registers
from ...steps import Steps, like
from . import dense, matrices, tiled
from .formats import COLUMNS, FORMATS, ROWS, UNIT, Format
from .grouped import Blocks, Slots, add_product, fetch, in_order, is_dealt, product_of
from .rounding import TERMS, Wanted, rounded, rounded_bytes

SCALES, BIASES, EXPANDED = 64 * VECTORS, 64 * VECTORS + 128, 64 * VECTORS + 256
"""Offsets into an expanded block, and its bytes: codes as bytes, then scales and biases of both halves as float32."""
WIDE, CHUNK = 3 * UNIT, 256
GROUP = WIDE * EXPANDED


def expand_of(form: Format) -> Part:
    """Make `WeightTiling.expand_blocks`: codes become bytes, scales and biases become float32."""
    codes, scales, biases, nbytes, width = form.codes, form.scales, form.biases, form.nbytes, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    biased = form.zero == 0

    def expand(to, group, stride, left, columns, first, count):
        for start in range(first, first + count, UNIT):
            blocks, planes = min(UNIT, first + count - start), group + start * nbytes
            second = planes + blocks * 64 * width
            last = second + blocks * 64 * high
            for b in range(blocks):
                store_codes(to, codes(planes + b * 64 * width, second + b * 64 * high))
                d, e = scales(last, b)
                store(to + SCALES, d)
                store(to + SCALES + 64, e)
                if biased:
                    m, o = biases(last, b)
                    store(to + BIASES, m)
                    store(to + BIASES + 64, o)
                to += EXPANDED

    return part(expand)


def add_of(form: Format, rows: Tile) -> Part:
    """Make ``(acc, codes, scales, biases, r, at) -> acc`` for a block of one group.

    The part adds the products of the block and the rows `r`. Byte `at` of `r` holds the records of the same columns.
    """
    biased, centred, halves = rows.biased, form.zero != 0, form.halves
    meet = rows.meet_centred if centred else rows.meet

    def add(acc, codes, scales, biases, r, at):
        # acc[i, row] += w_scale[row] * x_scale[i] * (codes[row] . x_codes[i]), for both halves of the block
        acc = meet(acc, codes, scales[0], scales[1], r, at)
        if not centred:
            acc = biased(acc, biases[0], r, at + SUMS)  # acc[i, row] += bias[row] * sum(x[i])
            if halves:
                acc = biased(acc, sub(biases[1], biases[0]), r, at + SUMS + 4)
        return acc

    return part(add)


def add_one_of(form: Format, rows: Tile) -> Part:
    """Make `WeightTiling.add_block` for tiles of one group."""
    add = add_of(form, rows)

    def add_one(acc, p, r, at):
        scales, biases = (load(p + SCALES), load(p + SCALES + 64)), (load(p + BIASES), load(p + BIASES + 64))
        return add(acc, load_codes(p), scales, biases, r, at)

    return part(add_one)


def add_two_of(form: Format, rows: Tile) -> Part:
    """Make ``(acc, u, v, scales_u, scales_v, biases_u, biases_v, r, at) -> acc``: `make_add_block` for two groups."""
    biased, centred, halves = rows.biased, form.zero != 0, form.halves
    meet = rows.meet_centred if centred else rows.meet

    def add(acc, u, v, s, f, m, o, r, at):
        acc = meet(acc, u, v, s[0], f[0], s[1], f[1], r, at)
        if not centred:
            acc = biased(acc, m[0], o[0], r, at + SUMS)
            if halves:
                acc = biased(acc, sub(m[1], m[0]), sub(o[1], o[0]), r, at + SUMS + 4)
        return acc

    return part(add)


@part
def load_two(p):
    """Return the two vectors at `p` and ``p + 64``."""
    return load(p), load(p + 64)


def add_pair_of(form: Format, rows: Tile) -> Part:
    """Make `WeightTiling.add_block` for tiles of two groups."""
    add = add_two_of(form, rows)

    def add_pair(acc, p, r, at):
        q = p + GROUP
        scales, biases = load_two(p + SCALES), load_two(p + BIASES)
        return add(acc, load_codes(p), load_codes(q), scales, load_two(q + SCALES), biases, load_two(q + BIASES), r, at)

    return part(add_pair)


def meet_of(form: Format, groups: int, rows: Tile) -> Part:
    """Make ``(acc, p, h, last, b, apart, x, at) -> acc``: multiply block `b` of 1 or 2 packed groups with the rows `x`.

    `p` and `h` are the codes of the first group in both planes; its scales are behind `last`. Groups are `apart` bytes
    apart.
    """
    codes, scales, biases = form.codes, form.scales, form.biases
    if groups == 1:
        add = add_of(form, rows)

        def meet(acc, p, h, last, b, apart, x, at):
            return add(acc, codes(p, h), scales(last, b), biases(last, b), x, at)
    else:
        add = add_two_of(form, rows)

        def meet(acc, p, h, last, b, apart, x, at):
            u, v = codes(p, h), codes(p + apart, h + apart)
            s, f, m, o = scales(last, b), scales(last + apart, b), biases(last, b), biases(last + apart, b)
            return add(acc, u, v, s, f, m, o, x, at)

    return part(meet)


def few_of(form: Format, groups: int, count: int) -> Part:
    """Make the product of `count` activation rows with `groups` unexpanded groups (`WeightTiling.make_few_rows`).

    Codes are unpacked once for all rows and stay in registers. Each activation load serves all groups, because loads
    take longer than products here.
    """
    rows = tile(count, groups, form.known)
    nbytes, width, high = form.nbytes, form.planes[0], form.planes[1] if len(form.planes) > 1 else 0
    zeros, put, meet = rows.zeros, rows.put, meet_of(form, groups, rows)
    lines = groups * (nbytes // 64)
    more = groups * (nbytes % 64 * UNIT // 64)

    def few(to, group, stride, left, columns, x, near, far):
        n, acc, apart = columns // COLUMNS, zeros(), ROWS * stride if left > ROWS else 0
        for first in range(0, n, UNIT):
            count, passed = min(UNIT, n - first), first * nbytes
            planes = group + passed
            ahead = planes + (groups - 1) * passed  # prefetches start behind both groups
            second = planes + count * 64 * width
            last = second + count * 64 * high
            fetch(ahead, more, near, far)
            for b in range(count):
                fetch(ahead + 64 * (more + b * lines), lines, near, far)
                p, h = planes + b * 64 * width, second + b * 64 * high
                acc = meet(acc, p, h, last, b, apart, x, (first + b) * RECORD)
        put(to, acc, left)

    return part(few)


@cache
def blocks_of(form: Format) -> Blocks:
    """Make the tiling of a packed weight type. A tile has as many rows and groups as registers can hold.

    Each load is used at least twice, because processors broadcast from memory more slowly than they multiply.
    """
    rows, groups = (4, 2) if vectors_in_registers() == MANY else (2, 1)
    some = tile(rows, groups, form.known)
    add, slow = (add_pair_of if groups == 2 else add_one_of)(form, some), form.halves or len(form.planes) > 1
    lying = 8 if slow else 16  # slowly unpacked codes are expanded sooner
    expand, few = expand_of(form), partial(few_of, form, 1)
    two = partial(few_of, form, 2) if groups == 2 else None
    return Blocks(COLUMNS, RECORD, EXPANDED, WIDE, CHUNK, rows, groups, 2, lying, expand, add, few, two)


@cache
def product(form: Format) -> Kernel:
    """Make the product kernel of a packed weight type."""
    return product_of(f"products.product.{form.dtype}", blocks_of(form))


# ----------------------------------------------------------------------------------------------------- binding


def stand_ins(steps: Steps, call: Bound) -> Sequence[Operand] | None:
    """Return one copy of a result per thread, so that each thread computes the whole result for itself.

    Returns:
        Scratch operands with the shape of the result. None if an op other than a product reads the result, or if it is
        too large to be computed by every thread.
    """
    y = call.out
    if steps.threads == 1 or not steps.is_repeated([y]) or not y.is_dense:
        return None
    readers = call.readers()
    if not readers or not all(_reads_stand_ins(r, y) for r in readers):
        return None
    if not any(is_dealt(steps, r) for r in readers):
        return None
    return [like(o, y) for o in steps.copies("own", y.tensor.spec.nbytes)]


def wanted_of(steps: Steps, call: Bound) -> Wanted:
    """Return the consumers of a result: the quantised forms, float32, and whether threads share a product."""
    y, readers = call.out, call.readers()
    if readers is None or not y.is_dense:
        return Wanted(y, (), True, False)
    products = [r for r in readers if _reads_stand_ins(r, y) and r.operand(1).shape[-1] == y.shape[-1]]
    kinds = [(r, kind) for r in products if (kind := tiled.kind_of(r)) is not None]
    rounded = tuple((r.operand(1).tensor, kind) for r, kind in kinds)
    return Wanted(y, rounded, len(kinds) < len(readers), any(is_dealt(steps, r) for r, _ in kinds))


def _reads_stand_ins(call: Bound, y: Operand) -> bool:
    """Return whether a reader is a product that can read copies per thread instead of `y`."""
    x = call.optional(1)
    if x is None or x.region != y.region or not x.is_dense or not is_compiled(call):
        return False
    return not any(o is not None and o is not x and o.region.overlaps(y.region) for o in call.src)


def is_compiled(call: Bound) -> bool:
    """Return whether `bind_matmul` can bind this product."""
    if call.op not in ("mul_mat", "mul_mat_id"):
        return False
    w, x = call.operand(0), call.operand(1)
    experts = call.op == "mul_mat_id"
    if len(w.shape) != 2 + experts or not (x.is_float and x.has_rows and call.out.has_rows):
        return False
    if experts and not slots_fit(call):
        return False
    if w.dtype in FORMATS:
        return w.is_packed and w.starts_row(ROWS, w.dtype.bytes_of(w.shape[-1]))
    return dense.fits(w)


def slots_fit(call: Bound) -> bool:
    """Return whether kernels can read the expert ids: dense int32."""
    x, ids = call.operand(1), call.operand(2)
    return ids.is_dense and ids.dtype is DType.I32 and bool(x.shape[-1])


def bind_product(steps: Steps, call: Bound, slots: Slots) -> None:
    """Add the steps of a product with a weight of any type."""
    w, x = call.operand(0), call.operand(1)
    kind = tiled.kind_of(call)
    if kind is None:
        own = steps.stand_ins(x) or [x] * steps.threads
        add_product(
            steps, call, dense.product(w.dtype), dense.blocks_of(w.dtype), *bytes_of(w), own, own[0].row_step, slots
        )
    elif kind in TERMS:
        tiled.bind(steps, call, bytes_of(w)[0])
    else:
        form, q = FORMATS[w.dtype], rounded(steps, x, kind, for_all=is_dealt(steps, call))
        pitch = rounded_bytes(1, w.shape[-1], kind)
        add_product(steps, call, product(form), blocks_of(form), *bytes_of(w), q, pitch, slots)


def bytes_of(w: Operand) -> tuple[int, int]:
    """Return the bytes of a weight row and of a matrix. A matrix of a packed weight has whole groups of rows."""
    if w.dtype not in FORMATS:
        *between, stride, _ = (w.dtype.storage.itemsize * s for s in w.strides)
        return stride, sum(between)
    assert w.stored is not None
    stride = w.shape[-1] // w.dtype.block * w.dtype.block_bytes
    return stride, w.stored.shape[-2] * stride


def _mul_mat(steps: Steps, call: Bound) -> bool:
    if is_compiled(call):
        bind_product(steps, call, in_order(steps, call.operand(1)))
        return True
    return dense.bind_columns(steps, call) or matrices.bind(steps, call)


BINDINGS = {"mul_mat": _mul_mat}
