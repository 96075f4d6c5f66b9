"""Fuses the MoE feed-forward network of a few tokens into two launches: gated units, and the weighted sum.

A shared expert that every token uses is part of the same launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....chains import summed_experts, with_other
from ....flow import Flow, apart, lies_as
from ....operands import Bound, Operand, need
from ...binding.chains import Fused
from ...binding.launches import Launches
from . import dense, packed
from .matmul import MOST, are_few_of_each, is_packed, is_read, launch_few, routed
from .routes import UNITS, Products, Summed
from .same_rows import by_row, gated, unit_of


@dataclass(frozen=True, slots=True)
class _Unit:
    """Two products of the same rows and their gated unit."""

    products: tuple[int, ...]
    unit: int
    gate: Bound
    up: Bound
    out: Operand

    @classmethod
    def of(cls, flow: Flow, product: int) -> _Unit:
        """Match two products and their gated unit, with equal operands; raise `NoKernelError` otherwise."""
        products, unit = gated(flow, product)
        gate, up = map(flow.call, products)
        made = cls(products, unit, gate, up, flow.call(unit).out)
        need(all(lies_as(up.operand(k), gate.operand(k)) for k in range(1, len(gate.src))), "rows or experts differ")
        need(dict(gate.attrs) == dict(up.attrs), "experts differ")
        w, other = gate.operand(0), up.operand(0)
        need(is_read(w) and is_read(other) and (other.shape, other.dtype) == (w.shape, w.dtype), "weights differ")
        need(made.out.is_dense, "a result is not dense")
        return made

    @property
    def numbers(self) -> list[int]:
        """The two products and the unit."""
        return [*self.products, self.unit]

    @property
    def made(self) -> Products:
        """The weights with the results; the kernel writes the first result only."""
        return [(self.gate.operand(0), by_row(self.out)), (self.up.operand(0), by_row(self.up.out))]


def _launch_units(launches: Launches, flow: Flow, chosen: _Unit, other: _Unit | None = None) -> None:
    x, ids, w = chosen.gate.operand(1), chosen.gate.operand(2), chosen.gate.operand(0)
    slots, tokens = math.prod(ids.shape), 0
    need(are_few_of_each(chosen.gate) and slots <= MOST // 2 and x.is_float, "slots are many")
    apart(chosen.out, [x, ids])
    if other is not None:
        tokens, matrix = math.prod(x.shape[:-1]), other.gate.operand(0)
        need((matrix.shape, matrix.dtype) == (w.shape[1:], w.dtype), "the other expert is of another kind")
        need(x.is_dense and lies_as(other.gate.operand(1), x) and x.shape[-2] == 1, "rows differ")
        need(flow.call(other.unit).op == flow.call(chosen.unit).op, "units differ")
        apart(other.out, [x, ids, chosen.out])
    before, launches.number = launches.number, chosen.products[0]
    spread, choice = routed(launches, chosen.gate)
    launches.number = before
    unit, others = UNITS[flow.call(chosen.unit).op], () if other is None else other.made
    launch_few(launches, chosen.made, x, slots, 1, [*spread, *choice], unit, others, tokens)


def _unit_of_experts(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse two products with weights of chosen experts and their gated unit."""
    chosen = _Unit.of(flow, number)
    _launch_units(launches, flow, chosen)
    return chosen.numbers


def _unit_of_all_experts(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse the gated units of the chosen experts and of the shared expert."""
    readers = [n for n in flow.readers_of(flow.maker(number, 1)) if unit_of(flow, n) is not None]
    of_op = {flow.call(n).op: n for n in reversed(readers)}
    need(of_op.keys() == {"mul_mat_id", "mul_mat"}, "there are no experts of both kinds")
    chosen, other = (_Unit.of(flow, of_op[op]) for op in ("mul_mat_id", "mul_mat"))
    numbers = [*chosen.numbers, *other.numbers]
    need(number in numbers, "it is none of their products")
    _launch_units(launches, flow, chosen, other)
    return numbers


def _launch_sum(
    launches: Launches, down: Bound, total: Bound, out: Operand, other: Bound | None = None, gate: Operand | None = None
) -> None:
    """Launch the sum of the products of chosen experts, times their shares, plus the product of the shared expert.

    Args:
        launches: Receives the launch.
        down: The products of the chosen experts.
        total: The weighted sum of these products.
        out: The result.
        other: The product of the shared expert.
        gate: The logit of its share; without it the share is 1.
    """
    w, x, ids, shares = down.operand(0), down.operand(1), down.operand(2), total.operand(1)
    used, width, answers = ids.shape[-1], w.shape[-2], total.operand(0)
    tokens = math.prod(ids.shape) // used if used else 0
    need(w.tensor.spec.size > 0, "a device may have nothing of the experts")
    need(answers.shape[-2:] == (width, used) and answers.strides[-2] == 1, "answers are not added up")
    need(
        x.is_float and x.is_dense and x.shape[-2] == used and shares.is_float and shares.is_dense,
        "rows of x are shared",
    )
    need(shares.shape[-2:] == (1, used) and shares.tensor.spec.size == tokens * used, "shares are of others")
    need(is_read(w) and len(w.shape) == 3 and tokens and are_few_of_each(down), "slots are many")
    need(out.is_dense and out.tensor.spec.size == tokens * width and tokens <= MOST, "results are not dense")
    matrix = other_x = None
    if other is not None:
        matrix, other_x = other.operand(0), other.operand(1)
        need(is_read(matrix) and len(matrix.shape) == 2, "weights are not read so")
        need(matrix.shape == w.shape[1:] and matrix.dtype is w.dtype, "the other expert is of another kind")
        need(other_x.is_float and other_x.has_rows and math.prod(other_x.shape[:-1]) == tokens, "its rows are others")
        need(gate is None or (gate.is_float and gate.has_rows and gate.tensor.spec.size == tokens), "shares differ")
    apart(out, [x, ids, shares, other_x, gate])
    by_token = replace(shares, tensor=replace(shares.tensor, shape=(tokens, used), strides=(used, 1)))
    summed = Summed(by_token, routed(launches, down)[1], matrix, other_x, gate)
    (packed if is_packed(w) else dense).summed(launches, w, x, by_row(out), summed)


def _sum_of_experts(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse the products of chosen experts and their weighted sum."""
    chain = summed_experts(flow, number)
    down, total = map(flow.call, chain)
    _launch_sum(launches, down, total, total.out)
    return chain


def _sum_with_other(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse the products of chosen experts and of the shared expert, and their sum."""
    chain = with_other(flow, number)
    down, total, both, other = (flow.call(n) for n in chain[:4] if n is not None)
    gate = None if chain.logistic is None else flow.call(chain.logistic).operand(0)
    _launch_sum(launches, down, total, both.out, other, gate)
    return chain.numbers


FUSED: Mapping[str, Sequence[Fused]] = {
    "mul_mat": (_unit_of_all_experts,),
    "mul_mat_id": (_unit_of_experts, _unit_of_all_experts, _sum_of_experts, _sum_with_other),
}
