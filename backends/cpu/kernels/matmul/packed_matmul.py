"""Matrix products with packed weights: activations quantised to 8 bits, integer dot products, float32 sums.

Each weight code is unpacked once for a chunk of activation rows. This module also chooses and binds the kernel of
every `mul_mat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...simd.dot_tiles import (
    CODE_VECTORS,
    RECORD_BYTES,
    SUMS_OFFSET,
    DotTileIntrinsics,
    first_codes,
    load_codes,
    make_dot_tile_intrinsics,
    second_codes,
    store_codes,
)
from ...simd.vectors import MANY_REGISTERS, count_vector_registers, load, store, sub
from ...steps.step_table import StepTableBuilder, view_with_layout_of
from ..packed.activation_quantisation import (
    TERMS_BY_KIND,
    ResultReadForms,
    compute_quantised_activation_bytes,
    find_or_add_quantised_activations,
)
from ..packed.format_table import BLOCK_COLUMNS, FORMATS, GROUP_ROWS, UNIT_BLOCKS, PackedFormat
from . import amx_matmul, batched_matmul, float_matmul
from .block_tiling import BlockTiling, make_expand_and_multiply
from .tile_loops import (
    ExpertSlots,
    WeightTiling,
    add_grouped_expert_matmul_step,
    is_matmul_shared_by_threads,
    make_grouped_expert_matmul_kernel,
    make_single_expert_slots,
    prefetch_cache_lines_to_l1_and_l2,
)

SCALES_OFFSET, BIASES_OFFSET, EXPANDED_BLOCK_BYTES = 64 * CODE_VECTORS, 64 * CODE_VECTORS + 128, 64 * CODE_VECTORS + 256
"""Offsets into an expanded block, and its bytes: codes as bytes, then scales and biases of both halves as float32."""
BLOCKS_PER_PASS, ROWS_PER_CHUNK = 3 * UNIT_BLOCKS, 256
EXPANDED_GROUP_BYTES = BLOCKS_PER_PASS * EXPANDED_BLOCK_BYTES


def make_load_code_pair_of_blocks(form: PackedFormat) -> Subroutine:
    """Make the subroutine ``(p, h, q, k) -> (codes, codes)`` that loads the weight codes of two packed blocks.

    `p` and `h` are the addresses of the first block in the two planes of codes, `q` and `k` of the second block.
    """
    codes, two = form.load_codes, form.load_two_codes
    if two is None:

        def load_two(p, h, q, k):
            return codes(p, h), codes(q, k)
    else:

        def load_two(p, h, q, k):
            both = two(p, q)
            return first_codes(both), second_codes(both)

    return subroutine(load_two)


def make_expand_packed_to_codes_and_scales(form: PackedFormat) -> Subroutine:
    """Make the subroutine that expands packed weight blocks to byte codes, float32 scales and float32 biases.

    Its arguments are as in `BlockTiling.expand_blocks`. One expanded block serves many activation rows.
    """
    scales, biases, nbytes = form.load_scales, form.load_biases, form.packed_block_bytes
    of_first, of_second = form.plane_bytes
    biased, step, codes, load_two = (
        form.zero_point == 0,
        form.blocks_per_load,
        form.load_codes,
        make_load_code_pair_of_blocks(form),
    )

    @subroutine
    def store_block(to, u, last, b):
        store_codes(to, u)
        d, e = scales(last, b)
        store(to + SCALES_OFFSET, d)
        store(to + SCALES_OFFSET + 64, e)
        if biased:
            m, o = biases(last, b)
            store(to + BIASES_OFFSET, m)
            store(to + BIASES_OFFSET + 64, o)

    def expand_group(to, group, stride, left, columns, first, count):
        for start in range(first, first + count, UNIT_BLOCKS):
            blocks, planes = min(UNIT_BLOCKS, first + count - start), group + start * nbytes
            second = planes + blocks * of_first
            last = second + blocks * of_second
            for b in range(0, blocks, step):
                p, h = planes + b * of_first, second + b * of_second
                if step == 2:
                    u, v = load_two(p, h, p + of_first, h + of_second)
                    store_block(to, u, last, b)
                    store_block(to + EXPANDED_BLOCK_BYTES, v, last, b + 1)
                else:
                    store_block(to, codes(p, h), last, b)
                to += step * EXPANDED_BLOCK_BYTES

    return subroutine(expand_group)


def make_add_block_products(form: PackedFormat, rows: DotTileIntrinsics) -> Subroutine:
    """Make the subroutine that adds the products of activation rows with one block of a weight group.

    The subroutine is ``(acc, codes, scales, biases, r, at) -> acc``. `acc` are the sums, and `r` the activation rows.
    The quantised activations for the columns of the block begin at byte `at` of a row.
    """
    add_biases, centred, halves = rows.add_biases, form.zero_point != 0, form.has_half_block_scales
    add_products = rows.add_centred_dot_products if centred else rows.add_dot_products

    def add_block(acc, codes, scales, biases, r, at):
        # acc[i, row] += w_scale[row] * x_scale[i] * (codes[row] . x_codes[i]), for both halves of the block
        acc = add_products(acc, codes, scales[0], scales[1], r, at)
        if not centred:
            acc = add_biases(acc, biases[0], r, at + SUMS_OFFSET)  # acc[i, row] += bias[row] * sum(x[i])
            if halves:
                acc = add_biases(acc, sub(biases[1], biases[0]), r, at + SUMS_OFFSET + 4)
        return acc

    return subroutine(add_block)


def make_add_expanded_block_products(form: PackedFormat, rows: DotTileIntrinsics) -> Subroutine:
    """Make the subroutine that adds the products of activation rows with an expanded block of one weight group.

    It is ``(acc, p, r, at) -> acc``: `acc` are the sums, `p` the block, and byte `at` of rows `r` the activations.
    """
    add_block = make_add_block_products(form, rows)

    def add_expanded_block(acc, p, r, at):
        scales = (load(p + SCALES_OFFSET), load(p + SCALES_OFFSET + 64))
        biases = (load(p + BIASES_OFFSET), load(p + BIASES_OFFSET + 64))
        return add_block(acc, load_codes(p), scales, biases, r, at)

    return subroutine(add_expanded_block)


def make_add_block_products_of_two_groups(form: PackedFormat, rows: DotTileIntrinsics) -> Subroutine:
    """Make the subroutine that adds the products of activation rows with one block of each of two weight groups.

    The subroutine is ``(acc, u, v, s, f, m, o, r, at) -> acc``. `u` and `v` are the codes of both groups for equal
    columns, `s` and `f` their scales, `m` and `o` their biases. Rows `r` and byte `at` are as in
    `make_add_block_products`.
    """
    add_biases, centred, halves = rows.add_biases, form.zero_point != 0, form.has_half_block_scales
    add_products = rows.add_centred_dot_products if centred else rows.add_dot_products

    def add_two_blocks(acc, u, v, s, f, m, o, r, at):
        acc = add_products(acc, u, v, s[0], f[0], s[1], f[1], r, at)
        if not centred:
            acc = add_biases(acc, m[0], o[0], r, at + SUMS_OFFSET)
            if halves:
                acc = add_biases(acc, sub(m[1], m[0]), sub(o[1], o[0]), r, at + SUMS_OFFSET + 4)
        return acc

    return subroutine(add_two_blocks)


@subroutine
def load_two_adjacent_vectors(p):
    """Load the two adjacent vectors at `p` and ``p + 64``."""
    return load(p), load(p + 64)


def make_add_expanded_block_products_of_two_groups(form: PackedFormat, rows: DotTileIntrinsics) -> Subroutine:
    """Make the subroutine that adds the products of activation rows with an expanded block of each of two groups.

    It is ``(acc, p, r, at) -> acc``, as in `make_add_expanded_block_products`.
    """
    add_two_blocks = make_add_block_products_of_two_groups(form, rows)

    def add_expanded_pair(acc, p, r, at):
        q = p + EXPANDED_GROUP_BYTES
        scales, biases = load_two_adjacent_vectors(p + SCALES_OFFSET), load_two_adjacent_vectors(p + BIASES_OFFSET)
        return add_two_blocks(
            acc,
            load_codes(p),
            load_codes(q),
            scales,
            load_two_adjacent_vectors(q + SCALES_OFFSET),
            biases,
            load_two_adjacent_vectors(q + BIASES_OFFSET),
            r,
            at,
        )

    return subroutine(add_expanded_pair)


def make_add_packed_block_products(form: PackedFormat, groups: int, rows: DotTileIntrinsics) -> Subroutine:
    """Make the subroutine that adds the products of activation rows with one block of 1 or 2 packed weight groups.

    The subroutine is ``(acc, p, h, last, b, apart, x, at) -> acc``:

    - `acc` are the sums, and `b` is the number of the block.
    - `p` and `h` are the addresses of the codes of the first group in both planes, and `last` of its scales.
    - `apart` is the number of bytes from group to group.
    - `x` are the activation rows; their quantised columns of the block begin at byte `at`.

    With one group and `form.blocks_per_load` 2, it adds the products of the next block as well.
    """
    codes, scales, biases, load_two = (
        form.load_codes,
        form.load_scales,
        form.load_biases,
        make_load_code_pair_of_blocks(form),
    )
    of_first, of_second = form.plane_bytes
    if groups == 1 and form.blocks_per_load == 2:
        add_block = make_add_block_products(form, rows)

        def multiply_block(acc, p, h, last, b, apart, x, at):
            u, v = load_two(p, h, p + of_first, h + of_second)
            acc = add_block(acc, u, scales(last, b), biases(last, b), x, at)
            return add_block(acc, v, scales(last, b + 1), biases(last, b + 1), x, at + RECORD_BYTES)
    elif groups == 1:
        add_block = make_add_block_products(form, rows)

        def multiply_block(acc, p, h, last, b, apart, x, at):
            return add_block(acc, codes(p, h), scales(last, b), biases(last, b), x, at)
    else:
        add_block = make_add_block_products_of_two_groups(form, rows)

        def multiply_block(acc, p, h, last, b, apart, x, at):
            u, v = load_two(p, h, p + apart, h + apart)
            s, f, m, o = scales(last, b), scales(last + apart, b), biases(last, b), biases(last + apart, b)
            return add_block(acc, u, v, s, f, m, o, x, at)

    return subroutine(multiply_block)


def make_multiply_few_activation_rows(form: PackedFormat, group_count: int, row_count: int) -> Subroutine:
    """Make the subroutine that multiplies `row_count` activation rows with 1 or 2 groups of packed weights.

    Arguments are as in `WeightTiling.make_few_rows`. The weights are not expanded: codes are unpacked once for all rows
    and stay in registers. Each activation load serves all groups, because loads take longer than products here.
    """
    rows = make_dot_tile_intrinsics(row_count, group_count, form.dot_product_code_properties)
    nbytes, (of_first, of_second) = form.packed_block_bytes, form.plane_bytes
    step = form.blocks_per_load if group_count == 1 else 1
    zeros, store_rows, multiply_block = (
        rows.zero_sums,
        rows.store_rows,
        make_add_packed_block_products(form, group_count, rows),
    )
    lines = group_count * (nbytes // 64)
    more = group_count * (nbytes % 64 * UNIT_BLOCKS // 64)

    def multiply_few(to, group, stride, left, columns, x, l1_ahead, l2_ahead):
        n, acc, apart = columns // BLOCK_COLUMNS, zeros(), GROUP_ROWS * stride if left > GROUP_ROWS else 0
        for first in range(0, n, UNIT_BLOCKS):
            block_count, passed = min(UNIT_BLOCKS, n - first), first * nbytes
            planes = group + passed
            ahead = planes + (group_count - 1) * passed  # prefetches start behind both groups
            second = planes + block_count * of_first
            last = second + block_count * of_second
            prefetch_cache_lines_to_l1_and_l2(ahead, more, l1_ahead, l2_ahead)
            for b in range(0, block_count, step):
                prefetch_cache_lines_to_l1_and_l2(ahead + 64 * (more + b * lines), step * lines, l1_ahead, l2_ahead)
                p, h = planes + b * of_first, second + b * of_second
                acc = multiply_block(acc, p, h, last, b, apart, x, (first + b) * RECORD_BYTES)
        store_rows(to, acc, left)

    return subroutine(multiply_few)


@cache
def make_packed_block_tiling(form: PackedFormat) -> BlockTiling:
    """Make the subroutines and tile sizes with which matmuls multiply expanded weights of a packed type.

    A tile has as many rows and groups as registers can hold. Each load is used at least twice, because processors
    broadcast from memory more slowly than they multiply.
    """
    rows, groups = (4, 2) if count_vector_registers() == MANY_REGISTERS else (2, 1)
    some = make_dot_tile_intrinsics(rows, groups, form.dot_product_code_properties)
    add = (make_add_expanded_block_products_of_two_groups if groups == 2 else make_add_expanded_block_products)(
        form, some
    )
    return BlockTiling(
        BLOCK_COLUMNS,
        RECORD_BYTES,
        EXPANDED_BLOCK_BYTES,
        BLOCKS_PER_PASS,
        ROWS_PER_CHUNK,
        rows,
        groups,
        make_expand_packed_to_codes_and_scales(form),
        add,
    )


@cache
def make_packed_matmul_subroutines_and_tiling(form: PackedFormat) -> WeightTiling:
    """Make the subroutines and tile sizes of matmuls with a packed weight type."""
    blocks = make_packed_block_tiling(form)
    return WeightTiling(
        tile_rows=blocks.tile_rows,
        tile_groups=blocks.tile_groups,
        rows_per_chunk=blocks.rows_per_chunk,
        max_leftover_rows=2,
        max_unexpanded_rows=form.max_unexpanded_rows,
        scratch_bytes=blocks.scratch_bytes_per_thread,
        multiply_expanded=make_expand_and_multiply(blocks),
        make_few_rows=partial(make_multiply_few_activation_rows, form, 1),
        make_few_rows_of_two=partial(make_multiply_few_activation_rows, form, 2) if blocks.tile_groups == 2 else None,
    )


@cache
def make_packed_matmul_kernel(form: PackedFormat) -> Kernel:
    """Make the matmul kernel of a packed weight type."""
    return make_grouped_expert_matmul_kernel(
        f"packed_matmul.multiply.{form.dtype}", make_packed_matmul_subroutines_and_tiling(form)
    )


# ----------------------------------------------------------------------------------------------------- binding


def make_memory_for_redundant_results(steps: StepTableBuilder, call: BoundInstruction) -> Sequence[Operand] | None:
    """Return memory for a copy of a result for each thread, so that every thread computes the whole result.

    Then no barrier is needed before the matmuls that read it. The result is None if an op other than a matmul reads it,
    or if it is too large to be computed by every thread.
    """
    y = call.out
    if steps.threads == 1 or not steps.is_cheap_to_repeat_per_thread([y]) or not y.is_dense:
        return None
    readers = call.find_readers()
    if not readers or not all(_can_read_thread_copies(r, y) for r in readers):
        return None
    if not any(is_matmul_shared_by_threads(steps, r) for r in readers):
        return None
    return [view_with_layout_of(o, y) for o in steps.take_private_memory("own", y.tensor.spec.nbytes)]


def find_result_read_forms(steps: StepTableBuilder, call: BoundInstruction) -> ResultReadForms:
    """Find the forms in which later ops read a result: as float32, or quantised by matmuls."""
    y, readers = call.out, call.find_readers()
    if readers is None or not y.is_dense:
        return ResultReadForms(y, (), True, False)
    products = [r for r in readers if _can_read_thread_copies(r, y) and r.operand(1).shape[-1] == y.shape[-1]]
    kinds = [(r, kind) for r in products if (kind := amx_matmul.choose_activation_rounding_kind(r)) is not None]
    rounded = tuple((r.operand(1).tensor, kind) for r, kind in kinds)
    return ResultReadForms(
        y, rounded, len(kinds) < len(readers), any(is_matmul_shared_by_threads(steps, r) for r, _ in kinds)
    )


def _can_read_thread_copies(call: BoundInstruction, y: Operand) -> bool:
    """Return whether `call` is a matmul with `y` as activations, for which each thread can read its own copy of `y`."""
    x = call.optional_operand(1)
    if x is None or x.region != y.region or not x.is_dense or not has_matmul_kernel(call):
        return False
    return not any(o is not None and o is not x and o.region.overlaps(y.region) for o in call.src)


def has_matmul_kernel(call: BoundInstruction) -> bool:
    """Return whether a kernel for packed or float weights can compute this `mul_mat` or `mul_mat_id`."""
    if call.op not in ("mul_mat", "mul_mat_id"):
        return False
    w, x = call.operand(0), call.operand(1)
    experts = call.op == "mul_mat_id"
    if len(w.shape) != 2 + experts or not (x.is_float and x.has_uniform_row_stride and call.out.has_uniform_row_stride):
        return False
    if experts and not has_readable_expert_ids(call):
        return False
    if w.dtype in FORMATS:
        return w.has_packed_layout and w.is_whole_or_row_aligned(GROUP_ROWS, w.dtype.count_bytes(w.shape[-1]))
    return float_matmul.is_readable_float_weight(w)


def has_readable_expert_ids(call: BoundInstruction) -> bool:
    """Return whether kernels can read the expert ids of a `mul_mat_id`: dense int32."""
    x, ids = call.operand(1), call.operand(2)
    return ids.is_dense and ids.dtype is DType.I32 and bool(x.shape[-1])


def bind_matmul_of_any_weight_type(steps: StepTableBuilder, call: BoundInstruction, slots: ExpertSlots) -> None:
    """Add the steps of a matmul with a weight of any type. The steps include the quantisation of the activations."""
    w, x = call.operand(0), call.operand(1)
    kind = amx_matmul.choose_activation_rounding_kind(call)
    if kind is None:
        own = steps.find_per_thread_values(x) or [x] * steps.threads
        add_grouped_expert_matmul_step(
            steps,
            call,
            float_matmul.make_float_matmul_kernel(w.dtype),
            float_matmul.make_float_weight_tiling(w.dtype),
            *compute_weight_strides(w),
            own,
            own[0].row_stride_bytes,
            slots,
        )
    elif kind in TERMS_BY_KIND:
        amx_matmul.bind_amx_matmul(steps, call, compute_weight_strides(w)[0])
    else:
        form, q = (
            FORMATS[w.dtype],
            find_or_add_quantised_activations(steps, x, kind, for_all=is_matmul_shared_by_threads(steps, call)),
        )
        pitch = compute_quantised_activation_bytes(1, w.shape[-1], kind)
        add_grouped_expert_matmul_step(
            steps,
            call,
            make_packed_matmul_kernel(form),
            make_packed_matmul_subroutines_and_tiling(form),
            *compute_weight_strides(w),
            q,
            pitch,
            slots,
        )


def compute_weight_strides(w: Operand) -> tuple[int, int]:
    """Return two strides of a weight in bytes: from row to row, and from matrix to matrix.

    A packed matrix has whole groups of rows.
    """
    if w.dtype not in FORMATS:
        *between, stride, _ = (w.dtype.storage.itemsize * s for s in w.strides)
        return stride, sum(between)
    assert w.stored_spec is not None
    stride = w.shape[-1] // w.dtype.block * w.dtype.block_bytes
    return stride, w.stored_spec.shape[-2] * stride


def _bind_mul_mat(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    if has_matmul_kernel(call):
        bind_matmul_of_any_weight_type(steps, call, make_single_expert_slots(steps, call.operand(1)))
        return True
    return float_matmul.bind_batched_column_major_matmul(steps, call) or batched_matmul.bind_batched_matmul(steps, call)


BINDINGS = {"mul_mat": _bind_mul_mat}
