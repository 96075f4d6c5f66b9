"""Register tiles for products of a packed weight block with several rows of activations.

A weight code stands for ``d (code - zero)``, an activation code for ``s x``. One d and one s apply to 16 or 32 columns.
Dot products add up ``code x`` in integers. The initial value of a dot product is in the record of the activations, and
already contains minus ``zero`` times the sum of x. With four columns:

>>> import numpy as np
>>> codes, zero, x = np.array([9, 15, 0, 8]), 8, np.array([3, -2, 7, 1])
>>> start = ONE_AND_A_HALF_BITS - zero * x.sum()
>>> bits = np.int32(start + (codes * x).sum())
>>> float(bits.view(np.float32) - np.float32(ONE_AND_A_HALF))
-67.0
>>> int(((codes - zero) * x).sum())
-67

The bits of the sum, read as a float32, are the sum plus a constant. A fused multiply-add with ``s`` and
``-ONE_AND_A_HALF s`` subtracts the constant, so no conversion from integers is needed.

Dot products alternate between halves and rows. An instruction that adds to the result of the previous instruction waits
for that result. Only independent instructions can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from . import vectors as simd
from .byte_vectors import look_up_in_16_byte_table, move_bit_field, splat_4_bytes
from .int8_dots import Int8DotProductEmitter, WeightCodeProperties
from .permute_lanes import fold_1, fold_2, fold_4, fold_8
from .vectors import ADDRESS, BYTES, FLOATS, LANES, NOTHING, Intrinsic, format_tuple_type, intrinsic

CODE_VECTORS, COLUMN_HALVES = 8, 2
"""Number of 64-byte vectors of codes in 32 columns; and number of column halves, which may have scales of their own."""
CODES_TYPE, TWO_CODES_TYPE = (format_tuple_type(BYTES, count * CODE_VECTORS) for count in (1, 2))
_CHAR, _INT = ir.IntType(8).as_pointer(), ir.IntType(32)

RECORD_BYTES, SCALES_OFFSET, STARTS_OFFSET, SUMS_OFFSET = 56, 32, 40, 48
"""Bytes of the record of 32 quantised activations, and the offsets of the fields after the 32 codes.

The fields are the scales of both halves, these scales times minus `ONE_AND_A_HALF`, and two numbers. For weights with
biases the numbers are float32 sums of the activations: of all columns, and of the second half. For other weights the
numbers are int32: the initial values of the dot products of both halves.
"""

ONE_AND_A_HALF, ONE_AND_A_HALF_BITS = 1.5 * 2**23, 0x4B400000
"""The initial value of integer dot products, as a float32 and as bits: the lowest bit of the float32 has the value 1.

The bits of a sum are a valid float32. A conversion, which would wait for the multiplication unit, is not needed.
"""


def pack_vectors_into_array(b: Any, vectors: Sequence[Any]) -> Any:
    """Pack several vectors of one type into one LLVM array value."""
    whole = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for i, value in enumerate(vectors):
        whole = b.insert_value(whole, value, i)
    return whole


def unpack_vectors_from_array(b: Any, packed: Any) -> list[Any]:
    """Return the vectors of an LLVM array value that `pack_vectors_into_array` made."""
    return [b.extract_value(packed, i) for i in range(packed.type.count)]


def _offset_address_as_pointer(b: Any, address: Any, offset: int) -> Any:
    """Return `address` plus `offset` bytes, computed as a pointer instead of an integer.

    LLVM would reorder sums of integers so that each sum occupies a register.
    """
    pointer = b.gep(b.inttoptr(address, _CHAR), [ir.Constant(address.type, offset)], inbounds=True)
    return b.ptrtoint(pointer, address.type)


def _compute_record_address(b: Any, row: Any, at: Any, offset: int = 0) -> Any:
    pointer = b.gep(b.inttoptr(row, _CHAR), [at], inbounds=True)
    return b.ptrtoint(b.gep(pointer, [ir.Constant(at.type, offset)], inbounds=True), at.type)


# -------------------------------------------------------------------------------------------------------- codes


def make_bit_plane_code_loader(
    plane_widths: tuple[int, ...], table: Intrinsic | None = None, to_bit: int = 0
) -> Intrinsic:
    """Make an intrinsic ``(p, h) -> codes`` that loads weight codes from bit planes.

    The codes belong to 32 columns of 16 rows.

    Args:
        plane_widths: Bits of each code in the plane at `p`, and optionally the higher bits in the plane at `h`.
        table: Lookup table that maps each code to a byte.
        to_bit: The lowest bit of the codes in each byte of the result.
    """

    @intrinsic(CODES_TYPE, ADDRESS, ADDRESS)
    def load_codes_of_planes(b, p, h):
        vectors = _unpack_plane_fields_to_bytes(b, p, plane_widths[0], to_bit)
        for high in plane_widths[1:]:
            vectors = [
                b.or_(x, y)
                for x, y in zip(
                    vectors, _unpack_plane_fields_to_bytes(b, h, high, plane_widths[0] + to_bit), strict=True
                )
            ]
        if table is not None:
            vectors = [look_up_in_16_byte_table.body(b, table.body(b), x) for x in vectors]
        return pack_vectors_into_array(b, vectors)

    return load_codes_of_planes


def _unpack_plane_fields_to_bytes(b: Any, plane: Any, width: int, to_bit: int = 0) -> list[Any]:
    """Unpack a plane of `width`-bit fields to eight vectors with one field in each byte, at bit `to_bit`.

    A byte of the plane has ``fields = 8 // width`` fields. Vector j has field ``j % fields`` of each byte of plane
    vector ``j // fields``.
    """
    fields = 8 // width
    vectors = [simd.load_bytes.body(b, _offset_address_as_pointer(b, plane, 64 * i)) for i in range(width)]
    return [move_bit_field(b, vectors[j // fields], j % fields * width, width, to_bit) for j in range(CODE_VECTORS)]


@intrinsic(NOTHING, ADDRESS, CODES_TYPE)
def store_codes(b, to, codes):
    for i, vector in enumerate(unpack_vectors_from_array(b, codes)):
        simd.store_bytes.body(b, _offset_address_as_pointer(b, to, 64 * i), vector)


@intrinsic(CODES_TYPE, ADDRESS)
def load_codes(b, p):
    return pack_vectors_into_array(
        b, [simd.load_bytes.body(b, _offset_address_as_pointer(b, p, 64 * i)) for i in range(CODE_VECTORS)]
    )


first_codes, second_codes = (
    intrinsic(CODES_TYPE, TWO_CODES_TYPE)(
        lambda b, two, start=start: pack_vectors_into_array(
            b, unpack_vectors_from_array(b, two)[start : start + CODE_VECTORS]
        )
    )
    for start in (0, CODE_VECTORS)
)
"""Intrinsics that return the codes of the first block and of the second block of two packed blocks."""


# ------------------------------------------------------------------------------------------------ rows at a time


UNKNOWN_CODES = WeightCodeProperties()


@dataclass(frozen=True, slots=True)
class DotTileIntrinsics:
    """Intrinsics for a register tile: sums of several rows of activations by one or two groups of 16 weight rows.

    The addresses of the activation rows are one value. The codes, scales and biases of each group are separate
    arguments.

    - ``row_addresses(p, step, n)``: rows every `step` bytes from `p`; the last of `n` rows replaces missing rows.
    - ``row_addresses_by_slot(slots, n, used, shared, p, step)``: rows that the slots of a mixture of experts read.
    - ``add_dot_products(acc, codes..., first..., second..., rows, at)``: add products with the records at `at`, times
      the scales of both halves of the columns. ``add_centred_dot_products`` subtracts the zero point from the codes.
    - ``add_biases(acc, biases..., rows, at)``: add the biases times the float32 at `at`.
    - ``add_outer_product(acc, weights..., rows, at)``: add one column of float32 weights times the float32 at `at`.
    - ``add_inner_product(acc, weights, rows, at)``: add products of lanes with 16 float32 at `at`, for one group.
    - ``fold_four_tiles(acc, acc, acc, acc)``: reduce the lanes of four tiles to four lanes each.
    - ``store_lane_sums(rows, at, acc, left)``: store the sums of all lanes, of the first `left` groups.
    - ``store_rows(rows, acc, left)``: store the first `left` lanes. ``load_rows(rows)`` loads all lanes.
    - ``spill(p, acc)`` and ``reload(p)``: store and load a whole tile at `p`.
    """

    row_addresses: Intrinsic
    row_addresses_by_slot: Intrinsic
    zero_sums: Intrinsic
    add_dot_products: Intrinsic
    add_centred_dot_products: Intrinsic
    add_biases: Intrinsic
    add_outer_product: Intrinsic
    add_inner_product: Intrinsic
    store_lane_sums: Intrinsic
    fold_four_tiles: Intrinsic
    store_rows: Intrinsic
    load_rows: Intrinsic
    spill: Intrinsic
    reload: Intrinsic


@cache
def make_dot_tile_intrinsics(
    row_count: int, group_count: int, codes: WeightCodeProperties = UNKNOWN_CODES
) -> DotTileIntrinsics:
    """Make the intrinsics of a register tile of activation rows by groups of 16 weight rows.

    The tile has one vector of float32 sums for each row and group, ordered by row.

    Args:
        row_count: Number of activation rows.
        group_count: Number of groups of 16 weight rows.
        codes: Properties of the weight codes.
    """
    known = codes
    rows_of = format_tuple_type(ADDRESS, row_count)
    sums_of = format_tuple_type(FLOATS, row_count * group_count)
    places = [(i, g) for i in range(row_count) for g in range(group_count)]
    # If the registers do not hold the integers of both halves, the first half is added before the second is computed.
    has_many_registers = simd.count_vector_registers() == simd.MANY_REGISTERS
    together = [(0, 1)] if has_many_registers or len(places) == 1 else [(0,), (1,)]
    adds_halves_first = has_many_registers and not known.has_half_scales  # for any number of rows: their bits are equal

    def clamp_row_number(b: Any, i: int, n: Any) -> Any:
        last, number = b.sub(n, ir.Constant(n.type, 1)), ir.Constant(n.type, i)
        return b.select(b.icmp_signed("<", number, last), number, last)

    @intrinsic(rows_of, ADDRESS, ADDRESS, ADDRESS)
    def row_addresses(b, p, step, n):
        return pack_vectors_into_array(b, [b.add(p, b.mul(step, clamp_row_number(b, i, n))) for i in range(row_count)])

    @intrinsic(rows_of, *[ADDRESS] * 6)
    def row_addresses_by_slot(b, slots, n, used, shared, p, step):
        own = [
            simd.load_int.body(b, b.add(slots, b.mul(clamp_row_number(b, i, n), ir.Constant(n.type, 4))))
            for i in range(row_count)
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
        return pack_vectors_into_array(b, [b.add(p, b.mul(step, row)) for row in addresses])

    @intrinsic(sums_of)
    def zero_sums(b):
        return pack_vectors_into_array(b, [simd.zeros.body(b)] * len(places))

    def splat_rows(b: Any, rows: Any, at: Any, offset: int = 0) -> list[Any]:
        return [
            simd.splat_from.body(b, _compute_record_address(b, row, at, offset))
            for row in unpack_vectors_from_array(b, rows)
        ]

    def dot_products(
        b: Any, vectors: Sequence[Any], records: Sequence[Any], halves: Sequence[int], loads_initial_sums: bool
    ) -> Any:
        """Return the int32 dot products of the given column halves, by half, row and group."""
        first = {
            half: [
                _emit_repeated_initial_dot_sum(b, record, SUMS_OFFSET + 4 * half if loads_initial_sums else None)
                for record in records
            ]
            for half in halves
        }
        products = Int8DotProductEmitter(b, known, {(half, i, g): first[half][i] for half in halves for i, g in places})
        for j in range(CODE_VECTORS // COLUMN_HALVES):
            for half in halves:
                column = half * CODE_VECTORS // COLUMN_HALVES + j
                weights = [products.prepare_weight_codes(vector[column]) for vector in vectors]
                for i, record in enumerate(records):
                    four = splat_4_bytes.body(b, _offset_address_as_pointer(b, record, 4 * column))
                    for g in range(group_count):
                        products.emit_dot4((half, i, g), weights[g], four)
        return products.flush_pending_sums()

    def make_add_products(loads_initial_sums: bool) -> Intrinsic:
        @intrinsic(
            sums_of, sums_of, *[CODES_TYPE] * group_count, *[FLOATS] * (COLUMN_HALVES * group_count), rows_of, ADDRESS
        )
        def add_products(b, acc, *operands):
            codes, scales, (rows, at) = operands[:group_count], operands[group_count:-2], operands[-2:]
            vectors, records = (
                [unpack_vectors_from_array(b, c) for c in codes],
                [_compute_record_address(b, row, at) for row in unpack_vectors_from_array(b, rows)],
            )
            sums = unpack_vectors_from_array(b, acc)
            for halves in together:
                ints, products = dot_products(b, vectors, records, halves, loads_initial_sums), list[list[Any]]()
                for half in halves:
                    factors, starts = (
                        splat_rows(b, rows, at, SCALES_OFFSET + 4 * half),
                        splat_rows(b, rows, at, STARTS_OFFSET + 4 * half),
                    )
                    floats = [(i, simd.bits_to_float.body(b, ints[half, i, g])) for i, g in places]
                    # The values at `STARTS_OFFSET` are exact, so this is up to one rounding.
                    products.append([simd.fma.body(b, x, factors[i], starts[i]) for i, x in floats])
                if adds_halves_first:  # some processors have units that only add
                    products = [[b.fadd(*pair) for pair in zip(*products, strict=True)]]
                for half, terms in zip(halves, products, strict=False):
                    own = scales[half * group_count :]
                    sums = [simd.fma.body(b, own[g], *pair) for (_, g), *pair in zip(places, terms, sums, strict=True)]
            return pack_vectors_into_array(b, sums)

        return add_products

    @intrinsic(sums_of, sums_of, *[FLOATS] * group_count, rows_of, ADDRESS)
    def add_biases(b, acc, *operands):
        *biases, rows, at = operands
        sums = splat_rows(b, rows, at)
        pairs = zip(places, unpack_vectors_from_array(b, acc), strict=True)
        return pack_vectors_into_array(b, [simd.fma.body(b, biases[g], sums[i], total) for (i, g), total in pairs])

    @intrinsic(sums_of, sums_of, *[FLOATS] * group_count, rows_of, ADDRESS)
    def add_outer_product(b, acc, *operands):
        *weights, rows, at = operands
        values = splat_rows(b, rows, at)
        pairs = zip(places, unpack_vectors_from_array(b, acc), strict=True)
        return pack_vectors_into_array(b, [simd.fma.body(b, weights[g], values[i], total) for (i, g), total in pairs])

    @intrinsic(sums_of, sums_of, FLOATS, rows_of, ADDRESS)
    def add_inner_product(b, acc, weights, rows, at):
        values = [simd.load.body(b, _compute_record_address(b, row, at)) for row in unpack_vectors_from_array(b, rows)]
        return pack_vectors_into_array(
            b,
            [simd.fma.body(b, weights, *pair) for pair in zip(values, unpack_vectors_from_array(b, acc), strict=True)],
        )

    @intrinsic(NOTHING, rows_of, ADDRESS, sums_of, ADDRESS)
    def store_lane_sums(b, rows, at, acc, left):
        vectors, starts = unpack_vectors_from_array(b, acc), unpack_vectors_from_array(b, rows)
        whole, per_vector = b.icmp_signed(">=", left, ir.Constant(left.type, group_count)), LANES // group_count
        for first in range(0, row_count, per_vector):
            folded = emit_lane_sums_of_vectors(b, vectors[first * group_count : (first + per_vector) * group_count])
            for i, row in enumerate(starts[first : first + per_vector]):
                to, lanes = _compute_record_address(b, row, at), range(i * group_count, (i + 1) * group_count)
                with b.if_else(whole) as (then, otherwise):
                    with then:
                        some = b.shuffle_vector(folded, folded, ir.Constant(ir.VectorType(_INT, group_count), [*lanes]))
                        b.store(some, b.inttoptr(to, some.type.as_pointer()), align=4)
                    with otherwise:
                        order = [min(lanes.start + j, LANES - 1) for j in range(LANES)]
                        own = b.shuffle_vector(folded, folded, ir.Constant(ir.VectorType(_INT, LANES), order))
                        simd.store_first_lanes.body(b, to, own, left)

    @intrinsic(sums_of, *[sums_of] * 4)
    def fold_four_tiles(b, *four):
        lanes = zip(*(unpack_vectors_from_array(b, acc) for acc in four), strict=True)
        return pack_vectors_into_array(
            b, [fold_4.body(b, fold_8.body(b, w, x), fold_8.body(b, y, z)) for w, x, y, z in lanes]
        )

    def store_vectors(b: Any, rows: Any, acc: Any, store: Callable[[Any, int, Any], None]) -> None:
        starts = unpack_vectors_from_array(b, rows)
        for (i, g), total in zip(places, unpack_vectors_from_array(b, acc), strict=True):
            store(_offset_address_as_pointer(b, starts[i], 4 * LANES * g), g, total)

    @intrinsic(NOTHING, rows_of, sums_of, ADDRESS)
    def store_rows(b, rows, acc, left):
        whole = b.icmp_signed(">=", left, ir.Constant(left.type, LANES * group_count))
        with b.if_else(whole) as (then, otherwise):
            with then:
                store_vectors(b, rows, acc, lambda to, _, total: simd.store.body(b, to, total))
            with otherwise:
                lefts = [b.sub(left, ir.Constant(left.type, LANES * g)) for g in range(group_count)]
                store_vectors(b, rows, acc, lambda to, g, total: simd.store_first_lanes.body(b, to, total, lefts[g]))

    @intrinsic(sums_of, rows_of)
    def load_rows(b, rows):
        starts = unpack_vectors_from_array(b, rows)
        return pack_vectors_into_array(
            b, [simd.load.body(b, _offset_address_as_pointer(b, starts[i], 4 * LANES * g)) for i, g in places]
        )

    @intrinsic(NOTHING, ADDRESS, sums_of)
    def spill(b, p, acc):
        for i, total in enumerate(unpack_vectors_from_array(b, acc)):
            simd.store.body(b, _offset_address_as_pointer(b, p, 4 * LANES * i), total)

    @intrinsic(sums_of, ADDRESS)
    def reload(b, p):
        return pack_vectors_into_array(
            b, [simd.load.body(b, _offset_address_as_pointer(b, p, 4 * LANES * i)) for i in range(len(places))]
        )

    return DotTileIntrinsics(
        row_addresses=row_addresses,
        row_addresses_by_slot=row_addresses_by_slot,
        zero_sums=zero_sums,
        add_dot_products=make_add_products(loads_initial_sums=False),
        add_centred_dot_products=make_add_products(loads_initial_sums=not codes.uses_centred_codes),
        add_biases=add_biases,
        add_outer_product=add_outer_product,
        add_inner_product=add_inner_product,
        store_lane_sums=store_lane_sums,
        fold_four_tiles=fold_four_tiles,
        store_rows=store_rows,
        load_rows=load_rows,
        spill=spill,
        reload=reload,
    )


def make_add_row_products(row_count: int, weight_rows: int, load_weights: Intrinsic, *left: Any) -> Intrinsic:
    """Make an intrinsic that adds the products of some activation rows with some weight rows, for 16 columns.

    It is ``(acc, rows, at, p, stride) -> acc``. The tile has a vector of sums for each activation row and weight row.
    Weight rows are `stride` bytes apart from `p` on.

    Args:
        row_count: Number of activation rows.
        weight_rows: Number of weight rows.
        load_weights: Loads 16 columns of a weight row at an address, as float32.
        left: Nothing for 16 columns. For fewer columns it is the type of one more argument, their number. Then
            `load_weights` loads only these lanes.
    """
    sums_of, load_row = format_tuple_type(FLOATS, row_count * weight_rows), load_weights if left else simd.load

    @intrinsic(sums_of, sums_of, format_tuple_type(ADDRESS, row_count), *[ADDRESS] * 3, *left)
    def add_row_products(b, acc, rows, at, p, stride, *count):
        places = [b.add(p, b.mul(stride, ir.Constant(stride.type, i))) for i in range(weight_rows)]
        weights = [load_weights.body(b, place, *count) for place in places]
        values = [
            load_row.body(b, _compute_record_address(b, row, at), *count) for row in unpack_vectors_from_array(b, rows)
        ]
        pairs = zip(((x, w) for x in values for w in weights), unpack_vectors_from_array(b, acc), strict=True)
        return pack_vectors_into_array(b, [simd.fma.body(b, w, x, total) for (x, w), total in pairs])

    return add_row_products


def emit_lane_sums_of_vectors(b: Any, vectors: Sequence[Any]) -> Any:
    """Add the lanes of each of up to 16 vectors, and return the sums in the lanes of one vector, in order."""
    missing = ir.Constant(vectors[0].type, ir.Undefined)
    sums = [*vectors, *[missing] * (LANES - len(vectors))]
    folds: tuple[Intrinsic, ...] = (fold_8, fold_4, fold_2, fold_1)
    for fold in folds:
        sums = [fold.body(b, x, y) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _emit_repeated_initial_dot_sum(b: Any, record: Any, offset: int | None) -> Any:
    """Emit the initial int32 lanes of a dot product: the int32 at byte `offset` of `record`, repeated in all lanes.

    Without an offset it is `ONE_AND_A_HALF_BITS`, so that the bits of the final sum are a valid float32.
    """
    if offset is None:
        return simd.ints_of(ONE_AND_A_HALF_BITS)
    return simd.splat_int.body(b, simd.load_int.body(b, _offset_address_as_pointer(b, record, offset)))
