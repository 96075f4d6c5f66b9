"""Batched matmuls with a result that is copied with permuted axes: the matmul writes the copy itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ....base import contiguous_strides
from ....fusion.dataflow import Dataflow, require_no_alias
from ....fusion.operand_views import (
    find_strides_of_reshape,
    is_permutation_of_dense,
    sort_axes_by_stride,
    with_shape_and_strides,
)
from ....fusion.operands import BoundInstruction, NoKernelError, Operand, require_supported
from ...steps.step_table import FusedBinding, FusionMatcher, StepTableBuilder
from .batched_matmul import bind_batched_matmul, has_batched_matmul_kernel
from .float_matmul import bind_batched_column_major_matmul, has_batched_column_major_matmul_kernel
from .packed_matmul import has_matmul_kernel


def _fuse_batched_matmul_and_copy(flow: Dataflow, number: int) -> FusedBinding:
    """Fuse a batched matmul with a copy of its whole result, which nothing else reads, with permuted axes."""
    reader = flow.require_sole_reader(number, "cont", in_order=False)
    product, copy = flow.bound_instruction(number), flow.bound_instruction(reader)
    permuted = replace(product, dst=(_view_copy_as_result(copy, product.out),))
    require_no_alias(permuted.out, product.src)
    require_supported(
        not has_matmul_kernel(product)
        and (has_batched_column_major_matmul_kernel(permuted) or has_batched_matmul_kernel(permuted)),
        "no batched kernel writes the copy",
    )
    return FusedBinding((number, reader), partial(_add_batched_matmul_step, call=permuted))


def _view_copy_as_result(copy: BoundInstruction, result: Operand) -> Operand:
    """Return the memory of a copy as a view with the shape of the copied result; raise `NoKernelError` without one."""
    read, out = copy.operand(0), copy.out
    is_plain = all(o.is_float and o.size and o.declared_spec is None for o in (read, out, result))
    require_supported(is_plain and out.is_dense and result.is_dense, "a copy is not dense float32 in the arena")
    is_whole = read.address == result.address and read.size == result.size and is_permutation_of_dense(read)
    require_supported(is_whole, "a part is copied")
    order, dense = sort_axes_by_stride(read.shape, read.strides), contiguous_strides(read.shape)
    sizes = tuple(read.shape[axis] for axis in order)
    strides = find_strides_of_reshape(sizes, [dense[axis] for axis in order], result.shape)
    if strides is None:
        raise NoKernelError("the copy divides an axis of the result")
    return with_shape_and_strides(out, result.shape, strides)


def _add_batched_matmul_step(steps: StepTableBuilder, call: BoundInstruction) -> None:
    is_bound = bind_batched_column_major_matmul(steps, call) or bind_batched_matmul(steps, call)
    assert is_bound, "the fused pattern has checked the operands"


FUSED: Mapping[str, tuple[FusionMatcher, ...]] = {"mul_mat": (_fuse_batched_matmul_and_copy,)}
