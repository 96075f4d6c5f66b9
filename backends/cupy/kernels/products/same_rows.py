"""Fuses matmuls of the same few rows into one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....base import contiguous_strides
from ....chains import gated_unit
from ....flow import Flow, apart, lies_as
from ....operands import Operand, need
from ...binding.chains import Fused
from ...binding.launches import Launches, Word
from .matmul import FEW, is_read, launch_few
from .routes import ALONE, MOST_PRODUCTS, UNITS


def _launch_together(
    launches: Launches, flow: Flow, numbers: Sequence[int], outs: Sequence[Operand], unit: int
) -> None:
    """Launch matmuls of the same few rows.

    Args:
        launches: Receives the launch.
        flow: The dataflow of the program.
        numbers: The matmuls.
        outs: The results that are written.
        unit: Code of the gated unit.
    """
    calls = [flow.call(n) for n in numbers]
    need(all(call.op == "mul_mat" for call in calls), "something else makes a result")
    w, x = calls[0].operand(0), calls[0].operand(1)
    tokens = math.prod(x.shape[:-1])
    need(x.is_float and x.has_rows and 0 < tokens <= FEW, "rows of x are many, or do not lie evenly")
    for call in calls:
        matrix = call.operand(0)
        need(lies_as(call.operand(1), x), "other rows are multiplied")
        need(matrix.dtype is w.dtype and matrix.shape[-1] == w.shape[-1] and len(matrix.shape) == 2, "weights differ")
        need(is_read(matrix), "weights are not read so")
    for out in outs:
        need(out.is_dense, "results are not dense")
        apart(out, [x])
    route: list[Word] = [1, 1, 0, 0, 1, 1, 0, 0]
    # The kernel does not write the second result of a unit.
    results = [*outs, *[call.out for call in calls[len(outs) :]]]
    products = [(call.operand(0), by_row(out)) for call, out in zip(calls, results, strict=True)]
    launch_few(launches, products, x, 1, tokens, route, unit)


def by_row(out: Operand) -> Operand:
    """Return a contiguous operand as a matrix."""
    shape = math.prod(out.shape[:-1]), out.shape[-1]
    return replace(out, tensor=replace(out.tensor, shape=shape, strides=contiguous_strides(shape)))


def unit_of(flow: Flow, number: int) -> int | None:
    """Find the gated unit that is the only reader of a product."""
    readers = flow.found(number)
    return readers[0] if readers and len(readers) == 1 and flow.call(readers[0]).op in UNITS else None


def gated(flow: Flow, number: int) -> tuple[tuple[int, ...], int]:
    """Match two products and the gated unit that joins them; raise `NoKernelError` otherwise."""
    products, unit = gated_unit(flow, number, UNITS)
    need(len(products) == 2 and all(flow.makes(p, unit, k) for k, p in enumerate(products)), "a part is read")
    need(all(flow.call(p).out.shape == flow.call(unit).out.shape for p in products), "shapes differ")
    return products, unit


def _gated_unit(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse two products and their gated unit."""
    products, unit = gated(flow, number)
    call = flow.call(unit)
    _launch_together(launches, flow, products, [call.out], UNITS[call.op])
    return *products, unit


def _of_the_same_rows(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse as many matmuls of the same rows as possible, except products of gated units."""
    own = flow.call(number)
    need(unit_of(flow, number) is None, "it belongs to a gated unit")
    chosen = [number]
    for other in flow.readers_of(flow.maker(number, 1)):
        call = flow.call(other)
        alike = other > number and call.op == "mul_mat" and lies_as(call.operand(1), own.operand(1))
        if not alike or len(chosen) == MOST_PRODUCTS or unit_of(flow, other) is not None:
            continue
        same = call.operand(0).dtype is own.operand(0).dtype and len(call.operand(0).shape) == 2
        if same and flow.can_meet([*chosen, other]):
            chosen.append(other)
    need(len(chosen) > 1, "no other product has these rows")
    _launch_together(launches, flow, chosen, [flow.call(n).out for n in chosen], ALONE)
    return chosen


FUSED: Mapping[str, Sequence[Fused]] = {"mul_mat": (_gated_unit, _of_the_same_rows)}
