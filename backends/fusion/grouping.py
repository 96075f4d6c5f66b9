"""The grouping of neighbouring instructions with ops that are declared in the scalar language.

A group begins with one instruction. Readers of its results and producers of its operands join while that saves more
than it costs. Prices are in bytes of memory traffic. A join saves reads and writes of values; its cost is the repeated
work of the composed kernel, which passes over a row several times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ops.declaration.expression import Expression
from .dataflow import Dataflow
from .expression_groups import ExpressionGroup, GroupComposition, TracedInstruction, compose_instructions
from .operands import NoKernelError

STEP_COST_BYTES = 1024
"""The bytes that a core moves while it calls a kernel: about 50 ns."""
MAX_GROUP_INSTRUCTIONS = 24
Rank = tuple[int, str, Sequence[tuple[int, int]], int]
"""The key of an instruction in the order of the search."""


@dataclass(frozen=True)
class GroupingRules:
    """The properties of the generated kernels of a backend.

    Attributes:
        trace: returns the traced instruction of a number; None for one that must stay alone.
        has_kernel: returns whether a kernel can loop over the operands and results of a group.
        price_expression: returns the price of an expression per element, in bytes of memory traffic.
    """

    trace: Callable[[int], TracedInstruction | None]
    has_kernel: Callable[[ExpressionGroup], bool]
    price_expression: Callable[[Expression], float]


def find_expression_groups(flow: Dataflow, rules: GroupingRules) -> list[ExpressionGroup]:
    """Find the groups of a program, and make each a group of `flow`.

    Instructions in a group of `flow` stay there, and fixed instructions stay alone. Each valid order of a program has
    the same groups.
    """
    search = _GroupSearch(flow, rules, _rank_by_chain_op_and_place(flow))
    groups: list[ExpressionGroup] = []
    for number in sorted(search.ranks, key=search.ranks.__getitem__):
        if (group := search.grow_group(number)) is not None:
            flow.group_instructions_unchecked(group.instruction_numbers)
            groups.append(group)
    return groups


def _rank_by_chain_op_and_place(flow: Dataflow) -> Mapping[int, Rank]:
    """Return for each instruction the length of the longest chain of producers, its op, and the place of its result."""
    instructions = flow.reader_table.program.instructions
    depths = [0] * len(instructions)
    for number in range(len(instructions)):
        for reader in flow.reader_table.find_known_readers_of_first_result(number):
            depths[reader] = max(depths[reader], depths[number] + 1)
    places = [[(t.buffer, t.offset) for t in i.dst] for i in instructions]
    return {n: (depths[n], i.op, places[n], n) for n, i in enumerate(instructions)}


@dataclass
class _GroupSearch:
    """The search for groups in a program. It traces each instruction once."""

    flow: Dataflow
    rules: GroupingRules
    ranks: Mapping[int, Rank]
    traced: dict[int, TracedInstruction | None] = field(default_factory=dict)

    def trace(self, number: int) -> TracedInstruction | None:
        """Trace an instruction; return None if it must stay alone, or is in a group."""
        if not self.flow.can_join_fusion(number):
            return None
        if number not in self.traced:
            call = self.rules.trace(number)
            self.traced[number] = None if call is None or call.why_it_cannot_join else call
        return self.traced[number]

    def grow_group(self, first: int) -> ExpressionGroup | None:
        """Join neighbours to an instruction as long as a join saves more than it costs; return None without a join."""
        call = self.trace(first)
        neighbours = {} if call is None else self._find_neighbours(first, call)
        if call is None or not neighbours:
            return None
        try:
            members = compose_instructions({first: call})
        except NoKernelError:
            return None
        saved_bytes = 0
        while len(members.calls) < MAX_GROUP_INSTRUCTIONS:
            for number in sorted(neighbours, key=self.ranks.__getitem__):
                joined = self._join(members, number, neighbours[number])
                if joined is not None:
                    break
            else:
                break
            members, saved = joined
            saved_bytes += saved
            neighbours |= self._find_neighbours(number, neighbours[number])
            neighbours = {n: neighbours[n] for n in neighbours.keys() - members.calls}
        if len(members.calls) == 1:
            return None
        return replace(members.build_group_for_any_order(), saved_bytes=saved_bytes)

    def _find_neighbours(self, number: int, call: TracedInstruction) -> dict[int, TracedInstruction]:
        """Return the instructions that read the result of an instruction or produce its operands, and that may join."""
        adjacent = {*self.flow.reader_table.find_known_readers_of_first_result(number), *call.producers}
        return {n: traced for n in adjacent if n is not None and (traced := self.trace(n)) is not None}

    def _join(
        self, members: GroupComposition, number: int, call: TracedInstruction
    ) -> tuple[GroupComposition, int] | None:
        """Return the group with one more instruction, and the bytes that it no longer moves.

        The result is None if the join is impossible, or costs more than it saves.
        """
        try:
            joined = members.join(number, call)
            alone = self._price(call.moved_bytes, call.size, call.expression)
        except NoKernelError:
            return None
        group, larger = members.group, joined.group
        saved = STEP_COST_BYTES + self._price_group(group) + alone - self._price_group(larger)
        if saved <= 0 or not self.rules.has_kernel(larger) or not self.flow.can_group(larger.instruction_numbers):
            return None
        return joined, group.moved_bytes + call.moved_bytes - larger.moved_bytes

    def _price_group(self, group: ExpressionGroup) -> float:
        return self._price(group.moved_bytes, group.size, group.expression)

    def _price(self, moved_bytes: int, size: int, expression: Expression) -> float:
        """Return a price in bytes of memory traffic."""
        return moved_bytes + size * self.rules.price_expression(expression)
