"""Fusion of matmuls that read the same few rows into one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....base import contiguous_strides
from ....fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ....fusion.operands import NoKernelError, Operand, require_supported
from ....fusion.patterns import match_gated_unit
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder, LaunchWord
from ...generated.row_prologue import RowPrologue, find_row_prologue
from ..routing import GATING_CODES, match_expert_routing_launch
from .epilogues import RoutingEpilogue, make_routing_epilogue
from .matmul import MAX_GEMV_ROWS, is_gemv_readable, launch_gemv_of_any_weights
from .routes import GATED_UNIT_CODES, MAX_PRODUCTS, NO_UNIT


def _launch_matmuls_of_same_rows_as_gemv(
    launches: LaunchBuilder,
    flow: Dataflow,
    numbers: Sequence[int],
    outs: Sequence[Operand],
    unit: int,
    prologue: RowPrologue | None = None,
    epilogue: RoutingEpilogue | None = None,
) -> None:
    """Launch several matmuls of the same few rows as one GEMV.

    Args:
        launches: Receives the launch.
        flow: The dataflow of the program.
        numbers: The indices of the matmuls.
        outs: The results that are written.
        unit: Code of the gated unit that joins two matmuls, or `NO_UNIT`.
        prologue: The computation of their rows.
        epilogue: The expert routing by one of the results.
    """
    calls = [flow.bound_instruction(n) for n in numbers]
    require_supported(all(call.op == "mul_mat" for call in calls), "something else makes a result")
    w, x = calls[0].operand(0), calls[0].operand(1)
    tokens = math.prod(x.shape[:-1])
    require_supported(
        x.is_float and x.has_uniform_row_stride and 0 < tokens <= MAX_GEMV_ROWS,
        "rows of x are many, or do not lie evenly",
    )
    for call in calls:
        matrix = call.operand(0)
        require_supported(has_same_elements(call.operand(1), x), "other rows are multiplied")
        require_supported(
            matrix.dtype is w.dtype and matrix.shape[-1] == w.shape[-1] and len(matrix.shape) == 2, "weights differ"
        )
        require_supported(is_gemv_readable(matrix), "weights are not read so")
    for out in outs:
        require_supported(out.is_dense, "results are not dense")
        require_no_alias(out, [x] if prologue is None else [*prologue.operands, *prologue.tees])
    route: list[LaunchWord] = [1, 1, 0, 0, 1, 1, 0, 0]
    # The kernel does not write the second result of a unit.
    results = [*outs, *[call.out for call in calls[len(outs) :]]]
    products = [(call.operand(0), as_matrix(out)) for call, out in zip(calls, results, strict=True)]
    launch_gemv_of_any_weights(launches, products, x, 1, tokens, route, unit, prologue=prologue, epilogue=epilogue)


def as_matrix(out: Operand) -> Operand:
    """Return a contiguous operand as a matrix: all axes except the last are merged into one."""
    shape = math.prod(out.shape[:-1]), out.shape[-1]
    return replace(out, tensor=replace(out.tensor, shape=shape, strides=contiguous_strides(shape)))


def find_gated_unit_as_only_reader(flow: Dataflow, number: int) -> int | None:
    """Return the index of the gated unit that reads a matmul, if nothing else reads the matmul; else `None`."""
    readers = flow.find_readers(number)
    return (
        readers[0]
        if readers and len(readers) == 1 and flow.bound_instruction(readers[0]).op in GATED_UNIT_CODES
        else None
    )


def match_gated_products(flow: Dataflow, number: int) -> tuple[tuple[int, ...], int]:
    """Match two matmuls and the gated unit that joins them.

    Raises `NoKernelError` if the pattern differs.

    Returns:
        The indices of the matmuls, and the index of the gated unit.
    """
    products, unit = match_gated_unit(flow, number, GATED_UNIT_CODES)
    require_supported(
        len(products) == 2 and all(flow.is_whole_result_operand_of(p, unit, k) for k, p in enumerate(products)),
        "a part is read",
    )
    require_supported(
        all(flow.bound_instruction(p).out.shape == flow.bound_instruction(unit).out.shape for p in products),
        "shapes differ",
    )
    return products, unit


@dataclass(frozen=True, slots=True)
class MatmulsOfSameRows:
    """Matmuls that multiply the same activation rows in one launch, and the gated unit (SwiGLU) of two of them."""

    products: tuple[int, ...]
    results: tuple[Operand, ...]
    gated_unit: int | None = None
    unit_code: int = NO_UNIT

    @property
    def instruction_numbers(self) -> tuple[int, ...]:
        return self.products if self.gated_unit is None else (*self.products, self.gated_unit)


def _find_gated_unit(flow: Dataflow, number: int) -> MatmulsOfSameRows:
    """Find two matmuls of the same rows and their gated unit."""
    products, unit = match_gated_products(flow, number)
    call = flow.bound_instruction(unit)
    return MatmulsOfSameRows(products, (call.out,), unit, GATED_UNIT_CODES[call.op])


def _find_matmuls_of_same_rows(flow: Dataflow, number: int) -> MatmulsOfSameRows:
    """Find the matmuls that multiply the same activation rows as matmul `number`, except matmuls of gated units."""
    own = flow.bound_instruction(number)
    require_supported(find_gated_unit_as_only_reader(flow, number) is None, "it belongs to a gated unit")
    chosen = [number]
    for other in flow.require_readers(flow.require_producer(number, 1)):
        call = flow.bound_instruction(other)
        reads_same_rows = other > number and call.op == "mul_mat" and has_same_elements(call.operand(1), own.operand(1))
        if (
            not reads_same_rows
            or len(chosen) == MAX_PRODUCTS
            or find_gated_unit_as_only_reader(flow, other) is not None
        ):
            continue
        same = call.operand(0).dtype is own.operand(0).dtype and len(call.operand(0).shape) == 2
        if same and flow.can_group([*chosen, other]):
            chosen.append(other)
    return MatmulsOfSameRows(tuple(chosen), tuple(flow.bound_instruction(n).out for n in chosen))


def _fuse_gated_unit_and_its_rows(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute a gated unit, its two matmuls, and the ops that compute their rows (such as a norm) in one launch."""
    return _launch_with_prologue(launches, flow, _find_gated_unit(flow, number))


def _fuse_gated_unit(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute a gated unit such as SwiGLU and its two matmuls in one launch."""
    return _launch_several_products(launches, flow, _find_gated_unit(flow, number))


def _fuse_matmuls_and_their_rows(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute matmuls of the same rows, and the ops that compute these rows (such as a norm), in one launch."""
    return _launch_with_prologue(launches, flow, _find_matmuls_of_same_rows(flow, number))


def _fuse_matmuls_of_same_rows(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute several matmuls of the same activation rows in one launch."""
    return _launch_several_products(launches, flow, _find_matmuls_of_same_rows(flow, number))


def _fuse_matmuls_their_rows_and_routing(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Fuse matmuls of the same rows, the declared ops that compute these rows, and the routing by a result."""
    found = _find_matmuls_of_same_rows(flow, number)
    return _launch_with_routing(launches, flow, found, _find_prologue(launches, flow, found))


def _fuse_matmuls_and_routing(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Fuse matmuls of the same rows and the expert routing by the result of one of them."""
    return _launch_with_routing(launches, flow, _find_matmuls_of_same_rows(flow, number), None)


def _launch_with_routing(
    launches: LaunchBuilder, flow: Dataflow, found: MatmulsOfSameRows, prologue: RowPrologue | None
) -> Sequence[int]:
    """Launch matmuls of the same rows and the expert routing by one result, which lies in the scratch of the choice."""
    require_supported(launches.limits.computes_operands, "products choose no experts")
    read_alone = {n: those[0] for n in found.products if len(those := flow.find_readers(n) or []) == 1}
    router, gate = next(((n, gate) for n, gate in read_alone.items() if _may_start_routing(flow, gate)), (None, 0))
    if router is None:
        raise NoKernelError("no result chooses experts")
    routing, result = match_expert_routing_launch(flow, gate), flow.bound_instruction(router).out
    require_supported(
        has_same_elements(routing.scores, result) and routing.scores.shape[-1] == result.shape[-1],
        "a part of the scores is read",
    )
    call = flow.bound_instruction(found.products[0])
    reads = [call.operand(1)] if prologue is None else [*prologue.operands, *prologue.tees]
    for out in (routing.ids, routing.shares):
        require_no_alias(out, [*reads, routing.bias])
    launches.use_scratch_of_fused_instruction(flow.bound_instruction(routing.top_k).scratch)
    scores = launches.allocate_scratch((routing.tokens, routing.scores.shape[-1]))
    outs = [scores if number == router else out for number, out in zip(found.products, found.results, strict=True)]
    epilogue = make_routing_epilogue(launches, routing, scores)
    _launch_matmuls_of_same_rows_as_gemv(launches, flow, found.products, outs, NO_UNIT, prologue, epilogue)
    rows: tuple[int, ...] = () if prologue is None else prologue.instruction_numbers
    return *rows, *found.products, *routing.instruction_numbers


def _may_start_routing(flow: Dataflow, number: int) -> bool:
    """Return whether an instruction computes probabilities, and another one takes some of them."""
    readers = flow.find_readers(number) or ()
    return flow.bound_instruction(number).op in GATING_CODES and any(
        flow.bound_instruction(n).op == "get_rows" for n in readers
    )


def _find_prologue(launches: LaunchBuilder, flow: Dataflow, found: MatmulsOfSameRows) -> RowPrologue:
    require_supported(launches.limits.computes_operands, "products compute no rows")
    x = flow.bound_instruction(found.products[0]).operand(1)
    return find_row_prologue(flow, found.products, math.prod(x.shape[:-1]), x.shape[-1])


def _launch_with_prologue(launches: LaunchBuilder, flow: Dataflow, found: MatmulsOfSameRows) -> Sequence[int]:
    prologue = _find_prologue(launches, flow, found)
    _launch_matmuls_of_same_rows_as_gemv(launches, flow, found.products, found.results, found.unit_code, prologue)
    return *prologue.instruction_numbers, *found.instruction_numbers


def _launch_several_products(launches: LaunchBuilder, flow: Dataflow, found: MatmulsOfSameRows) -> Sequence[int]:
    require_supported(len(found.instruction_numbers) > 1, "no other product has these rows")
    _launch_matmuls_of_same_rows_as_gemv(launches, flow, found.products, found.results, found.unit_code, None)
    return found.instruction_numbers


FUSED: Mapping[str, Sequence[FusionBinder]] = {
    "mul_mat": (
        _fuse_gated_unit_and_its_rows,
        _fuse_gated_unit,
        _fuse_matmuls_and_their_rows,
        _fuse_matmuls_of_same_rows,
        _fuse_matmuls_their_rows_and_routing,
        _fuse_matmuls_and_routing,
    )
}
