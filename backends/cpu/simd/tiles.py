"""Several vectors as one value, and products of a packed block with several rows of activations at once.

The code of a weight stands for ``d (code - zero)``, that of an activation for ``s x``, with one d and one s for 16 or
32 columns.  Dot products add up ``code x`` in integers; the record of the activations holds what they begin with, from
which ``zero`` times the sum of x is taken already.  Of four columns:

>>> import numpy as np
>>> codes, zero, x = np.array([9, 15, 0, 8]), 8, np.array([3, -2, 7, 1])
>>> start = ITS_BITS - zero * x.sum()
>>> bits = np.int32(start + (codes * x).sum())
>>> float(bits.view(np.float32) - np.float32(ONE_AND_A_HALF))
-67.0
>>> int(((codes - zero) * x).sum())
-67

So the bits of the sum, read as a float32, are the sum plus a constant, and a fused product and sum with ``s`` and
``-ONE_AND_A_HALF s`` takes that away: no conversion from integers is needed.

Halves and rows take turns, dot product by dot product: an instruction that adds to the result of the last one waits
for it, and only others have work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from . import vectors as simd
from .bytes import four_everywhere, look_up, moved_bits
from .dots import Codes, Products
from .order import fold_4, fold_8
from .vectors import ADDRESS, BYTES, FLOATS, LANES, NOTHING, Intrinsic, intrinsic, several

VECTORS, HALVES = 8, 2
"""Vectors of codes in 32 columns, and parts of these columns that may have a scale of their own."""
CODES = several(BYTES, VECTORS)
_CHAR = ir.IntType(8).as_pointer()

RECORD, SCALES, STARTS, SUMS = 56, 32, 40, 48
"""Bytes of 32 rounded activations, and where in them stand, behind the codes: the scales of both halves; these times
minus `ONE_AND_A_HALF`; then two numbers.  For weights with biases these are float32 sums of the activations, of all
columns and of the second half.  For others they are int32, what the products of either half begin with."""

ONE_AND_A_HALF, ITS_BITS = 1.5 * 2**23, 0x4B400000
"""Sums of products begin at this float32, whose lowest bit counts as one: so their bits are a float32, and they need no
conversion, which would wait for the unit that multiplies."""


def bundle(b: Any, values: Sequence[Any]) -> Any:
    whole = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        whole = b.insert_value(whole, value, i)
    return whole


def members(b: Any, whole: Any) -> list[Any]:
    return [b.extract_value(whole, i) for i in range(whole.type.count)]


def _at(b: Any, address: Any, offset: int) -> Any:
    """So many bytes on.  As a pointer on its way: sums of integers LLVM turns around, until each is a register."""
    pointer = b.gep(b.inttoptr(address, _CHAR), [ir.Constant(address.type, offset)], inbounds=True)
    return b.ptrtoint(pointer, address.type)


def _record(b: Any, row: Any, at: Any, offset: int = 0) -> Any:
    pointer = b.gep(b.inttoptr(row, _CHAR), [at], inbounds=True)
    return b.ptrtoint(b.gep(pointer, [ir.Constant(at.type, offset)], inbounds=True), at.type)


# -------------------------------------------------------------------------------------------------------- codes


def codes_of(widths: tuple[int, ...], table: Intrinsic | None = None) -> Intrinsic:
    """``(p, h) -> codes``: of as many bits each as the first width says from the plane at `p`, with those of a second
    one on top from the plane at `h`, or looked up in a table."""

    @intrinsic(CODES, ADDRESS, ADDRESS)
    def codes(b, p, h):
        vectors = _fields(b, p, widths[0])
        for high in widths[1:]:
            vectors = [b.or_(x, y) for x, y in zip(vectors, _fields(b, h, high, widths[0]), strict=True)]
        if table is not None:
            vectors = [look_up.body(b, table.body(b), x) for x in vectors]
        return bundle(b, vectors)

    return codes


def _fields(b: Any, plane: Any, width: int, to: int = 0) -> list[Any]:
    """Vector j is field ``j % fields`` of each byte of vector ``j // fields`` of the plane, from bit `to` on."""
    fields = 8 // width
    vectors = [simd.load_bytes.body(b, _at(b, plane, 64 * i)) for i in range(width)]
    return [moved_bits(b, vectors[j // fields], j % fields * width, width, to) for j in range(VECTORS)]


@intrinsic(NOTHING, ADDRESS, CODES)
def store_codes(b, to, codes):
    for i, vector in enumerate(members(b, codes)):
        simd.store_bytes.body(b, _at(b, to, 64 * i), vector)


@intrinsic(CODES, ADDRESS)
def load_codes(b, p):
    return bundle(b, [simd.load_bytes.body(b, _at(b, p, 64 * i)) for i in range(VECTORS)])


# ------------------------------------------------------------------------------------------------ rows at a time


ANY = Codes()


@dataclass(frozen=True, slots=True)
class Tile:
    """Intrinsics for some rows of activations, whose addresses are one value, and one or two groups of the weight,
    whose codes, scales and biases are arguments of their own.

    ``rows(p, step, n)``: every `step` bytes from `p`, the last of `n` again where fewer are left.
    ``chosen(slots, n, used, shared, p, step)``: of the rows that slots of a mixture read.
    ``meet(acc, codes..., first..., second..., rows, at)``: add products with the records at `at` times the scales of
    the first and of the second half of the columns; ``meet_centred``: of codes less what is subtracted from each.
    ``biased(acc, biases..., rows, at)``: what biases add, times the float32 at `at`.
    ``outer(acc, weights..., rows, at)``: add products of one column of float32 weights with the float32 at `at`.
    ``inner(acc, weights, rows, at)``: add products of lanes with 16 float32 at `at`; ``inner_some(..., left)``: with
    as many as are left; ``joined(acc, acc)``: both sums; ``put_totals(rows, at, acc)``: store the sum of all lanes;
    ``folded(acc, acc, acc, acc)``: of four sums four lanes each, to be folded with those of twelve others.
    ``put(rows, acc, left)``: store the lanes of which `left` exist; ``held(rows)``: sums that stand there; ``save(p,
    acc)``, ``saved(p)``: all side by side.
    """

    rows: Intrinsic
    chosen: Intrinsic
    zeros: Intrinsic
    meet: Intrinsic
    meet_centred: Intrinsic
    biased: Intrinsic
    outer: Intrinsic
    inner: Intrinsic
    inner_some: Intrinsic
    joined: Intrinsic
    put_totals: Intrinsic
    folded: Intrinsic
    put: Intrinsic
    held: Intrinsic
    save: Intrinsic
    saved: Intrinsic


@cache
def tile(count: int, groups: int, codes: Codes = ANY) -> Tile:
    """A tile of `count` rows of activations by `groups` of 16 rows of the weight, of which `codes` are known.  The sums
    of the first row come first."""
    known = codes
    rows_of = several(ADDRESS, count)
    sums_of = several(FLOATS, count * groups)
    places = [(i, g) for i in range(count) for g in range(groups)]
    # Where registers have no room for the integers of both halves, the first go to the sums before the others come.
    together = [(0, 1)] if simd.vectors_in_registers() == simd.MANY or len(places) == 1 else [(0,), (1,)]

    def smaller(b: Any, i: int, n: Any) -> Any:
        last, number = b.sub(n, ir.Constant(n.type, 1)), ir.Constant(n.type, i)
        return b.select(b.icmp_signed("<", number, last), number, last)

    @intrinsic(rows_of, ADDRESS, ADDRESS, ADDRESS)
    def rows(b, p, step, n):
        return bundle(b, [b.add(p, b.mul(step, smaller(b, i, n))) for i in range(count)])

    @intrinsic(rows_of, *[ADDRESS] * 6)
    def chosen(b, slots, n, used, shared, p, step):
        own = [
            simd.load_int.body(b, b.add(slots, b.mul(smaller(b, i, n), ir.Constant(n.type, 4)))) for i in range(count)
        ]
        alone, before = [b.mul(slot, shared) for slot in own], b.block
        with b.if_then(
            b.icmp_unsigned("!=", used, ir.Constant(used.type, 1))
        ):  # divisions take as long as the products
            several_of = [b.add(b.mul(b.udiv(s, used), shared), b.urem(b.urem(s, used), shared)) for s in own]
            behind = b.block
        addresses = []
        for one, other in zip(alone, several_of, strict=True):
            row = b.phi(one.type)
            row.add_incoming(one, before)
            row.add_incoming(other, behind)
            addresses.append(row)
        return bundle(b, [b.add(p, b.mul(step, row)) for row in addresses])

    @intrinsic(sums_of)
    def zeros(b):
        return bundle(b, [simd.zeros.body(b)] * len(places))

    def ones(b: Any, rows: Any, at: Any, offset: int = 0) -> list[Any]:
        return [simd.splat_from.body(b, _record(b, row, at, offset)) for row in members(b, rows)]

    def dots(b: Any, vectors: Sequence[Any], records: Sequence[Any], halves: Sequence[int], begun: bool) -> Any:
        """By half, row and group, with the records' columns of some halves."""
        first = {half: [_first(b, record, SUMS + 4 * half if begun else None) for record in records] for half in halves}
        products = Products(b, known, {(half, i, g): first[half][i] for half in halves for i, g in places})
        for j in range(VECTORS // HALVES):
            for half in halves:
                column = half * VECTORS // HALVES + j
                weights = [products.weight(vector[column]) for vector in vectors]
                for i, record in enumerate(records):
                    four = four_everywhere.body(b, _at(b, record, 4 * column))
                    for g in range(groups):
                        products.add((half, i, g), weights[g], four)
        return products.done()

    def meet(begun: bool) -> Intrinsic:
        @intrinsic(sums_of, sums_of, *[CODES] * groups, *[FLOATS] * (HALVES * groups), rows_of, ADDRESS)
        def made(b, acc, *given):
            codes, scales, (rows, at) = given[:groups], given[groups:-2], given[-2:]
            vectors, records = [members(b, c) for c in codes], [_record(b, row, at) for row in members(b, rows)]
            sums = members(b, acc)
            for halves in together:
                ints, products = dots(b, vectors, records, halves, begun), list[list[Any]]()
                for half in halves:
                    factors, starts = ones(b, rows, at, SCALES + 4 * half), ones(b, rows, at, STARTS + 4 * half)
                    floats = [(i, simd.bits_to_float.body(b, ints[half, i, g])) for i, g in places]
                    # `STARTS` are exact, so this is up to one rounding.
                    products.append([simd.fma.body(b, x, factors[i], starts[i]) for i, x in floats])
                if len(halves) == HALVES and not known.halves:  # one scale: some processors have units that only add
                    products = [[b.fadd(*pair) for pair in zip(*products, strict=True)]]
                for half, terms in zip(halves, products, strict=False):
                    own = scales[half * groups :]
                    sums = [simd.fma.body(b, own[g], *pair) for (_, g), *pair in zip(places, terms, sums, strict=True)]
            return bundle(b, sums)

        return made

    @intrinsic(sums_of, sums_of, *[FLOATS] * groups, rows_of, ADDRESS)
    def biased(b, acc, *given):
        *biases, rows, at = given
        sums = ones(b, rows, at)
        pairs = zip(places, members(b, acc), strict=True)
        return bundle(b, [simd.fma.body(b, biases[g], sums[i], total) for (i, g), total in pairs])

    @intrinsic(sums_of, sums_of, *[FLOATS] * groups, rows_of, ADDRESS)
    def outer(b, acc, *given):
        *weights, rows, at = given
        values = ones(b, rows, at)
        pairs = zip(places, members(b, acc), strict=True)
        return bundle(b, [simd.fma.body(b, weights[g], values[i], total) for (i, g), total in pairs])

    @intrinsic(sums_of, sums_of, FLOATS, rows_of, ADDRESS)
    def inner(b, acc, weights, rows, at):
        values = [simd.load.body(b, _record(b, row, at)) for row in members(b, rows)]
        return bundle(b, [simd.fma.body(b, weights, *pair) for pair in zip(values, members(b, acc), strict=True)])

    @intrinsic(sums_of, sums_of, FLOATS, rows_of, ADDRESS, ADDRESS)
    def inner_some(b, acc, weights, rows, at, left):
        values = [simd.load_some.body(b, _record(b, row, at), left) for row in members(b, rows)]
        return bundle(b, [simd.fma.body(b, weights, *pair) for pair in zip(values, members(b, acc), strict=True)])

    @intrinsic(sums_of, sums_of, sums_of)
    def joined(b, x, y):
        return bundle(b, [b.fadd(*pair) for pair in zip(members(b, x), members(b, y), strict=True)])

    @intrinsic(NOTHING, rows_of, ADDRESS, sums_of)
    def put_totals(b, rows, at, acc):
        for row, sums in zip(members(b, rows), members(b, acc), strict=True):
            simd.store_scalar.body(b, _record(b, row, at), simd.total.body(b, sums))

    @intrinsic(sums_of, *[sums_of] * 4)
    def folded(b, *four):
        lanes = zip(*(members(b, acc) for acc in four), strict=True)
        return bundle(b, [fold_4.body(b, fold_8.body(b, w, x), fold_8.body(b, y, z)) for w, x, y, z in lanes])

    def put_vectors(b: Any, rows: Any, acc: Any, store: Callable[[Any, int, Any], None]) -> None:
        starts = members(b, rows)
        for (i, g), total in zip(places, members(b, acc), strict=True):
            store(_at(b, starts[i], 4 * LANES * g), g, total)

    @intrinsic(NOTHING, rows_of, sums_of, ADDRESS)
    def put(b, rows, acc, left):
        whole = b.icmp_signed(">=", left, ir.Constant(left.type, LANES * groups))
        with b.if_else(whole) as (then, otherwise):
            with then:
                put_vectors(b, rows, acc, lambda to, _, total: simd.store.body(b, to, total))
            with otherwise:
                lefts = [b.sub(left, ir.Constant(left.type, LANES * g)) for g in range(groups)]
                put_vectors(b, rows, acc, lambda to, g, total: simd.store_some.body(b, to, total, lefts[g]))

    @intrinsic(sums_of, rows_of)
    def held(b, rows):
        starts = members(b, rows)
        return bundle(b, [simd.load.body(b, _at(b, starts[i], 4 * LANES * g)) for i, g in places])

    @intrinsic(NOTHING, ADDRESS, sums_of)
    def save(b, p, acc):
        for i, total in enumerate(members(b, acc)):
            simd.store.body(b, _at(b, p, 4 * LANES * i), total)

    @intrinsic(sums_of, ADDRESS)
    def saved(b, p):
        return bundle(b, [simd.load.body(b, _at(b, p, 4 * LANES * i)) for i in range(len(places))])

    return Tile(
        rows=rows,
        chosen=chosen,
        zeros=zeros,
        meet=meet(begun=False),
        meet_centred=meet(begun=not codes.signed),
        biased=biased,
        outer=outer,
        inner=inner,
        inner_some=inner_some,
        joined=joined,
        put_totals=put_totals,
        folded=folded,
        put=put,
        held=held,
        save=save,
        saved=saved,
    )


def _first(b: Any, record: Any, start: int | None) -> Any:
    """What a chain of dot products begins with: no products, or the int32 that stands `start` bytes into its record."""
    if start is None:
        return simd.ints_of(ITS_BITS)
    return simd.splat_int.body(b, simd.load_int.body(b, _at(b, record, start)))
