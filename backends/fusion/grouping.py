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
    """The functions through which the search for groups asks a backend about its generated kernels.

    Attributes:
        trace: returns the traced instruction of a number; None for one that must stay alone.
        has_kernel: returns whether a kernel can loop over the operands and results of a group.
        price_expression: returns the price of an expression per element, in bytes of memory traffic.
    """

    trace: Callable[[int], TracedInstruction | None]
    has_kernel: Callable[[ExpressionGroup], bool]
    price_expression: Callable[[Expression], float]


def find_expression_groups(flow: Dataflow, rules: GroupingRules) -> list[ExpressionGroup]:
    """Find the groups of declared ops that one generated kernel should compute, and make each a group of `flow`.

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
    """Rank each instruction by the length of its longest producer chain, its op, and the place of its result."""
    instructions = flow.reader_table.program.instructions
    depths = [0] * len(instructions)
    for number in range(len(instructions)):
        for reader in flow.reader_table.find_known_readers_of_first_result(number):
            depths[reader] = max(depths[reader], depths[number] + 1)
    places = [[(t.buffer, t.offset) for t in i.dst] for i in instructions]
    return {n: (depths[n], i.op, places[n], n) for n, i in enumerate(instructions)}


@dataclass
class _GroupSearch:
    """The search for expression groups in a program. Each instruction is traced once."""

    flow: Dataflow
    rules: GroupingRules
    ranks: Mapping[int, Rank]
    traced: dict[int, TracedInstruction | None] = field(default_factory=dict)

    def trace(self, number: int) -> TracedInstruction | None:
        """Trace an instruction to its expression; return None if it cannot join a group or is in one already."""
        if not self.flow.can_join_fusion(number):
            return None
        if number not in self.traced:
            call = self.rules.trace(number)
            self.traced[number] = None if call is None or call.why_it_must_stay_alone else call
        return self.traced[number]

    def grow_group(self, first: int) -> ExpressionGroup | None:
        """Grow a group from one instruction while joins save memory traffic; return None if it stays alone."""
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
                joined = self._join_if_cheaper(members, number, neighbours[number])
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
        """Find the producers and readers of an instruction that may join its group."""
        adjacent = {*self.flow.reader_table.find_known_readers_of_first_result(number), *call.producers}
        return {n: traced for n in adjacent if n is not None and (traced := self.trace(n)) is not None}

    def _join_if_cheaper(
        self, members: GroupComposition, number: int, call: TracedInstruction
    ) -> tuple[GroupComposition, int] | None:
        """Join an instruction to a group; return the larger group, and the memory traffic in bytes that the join saves.

        The result is None if the join is impossible, or costs more than it saves.
        """
        try:
            joined = members.join(number, call)
            alone = self._estimate_cost_in_traffic_bytes(call.moved_bytes, call.size, call.expression)
        except NoKernelError:
            return None
        group, larger = members.group, joined.group
        saved = STEP_COST_BYTES + self._price_group(group) + alone - self._price_group(larger)
        if saved <= 0 or not self.rules.has_kernel(larger) or not self.flow.can_group(larger.instruction_numbers):
            return None
        return joined, group.moved_bytes + call.moved_bytes - larger.moved_bytes

    def _price_group(self, group: ExpressionGroup) -> float:
        return self._estimate_cost_in_traffic_bytes(group.moved_bytes, group.size, group.expression)

    def _estimate_cost_in_traffic_bytes(self, moved_bytes: int, size: int, expression: Expression) -> float:
        """Estimate the cost of a kernel: its memory traffic in bytes, plus its arithmetic as bytes."""
        return moved_bytes + size * self.rules.price_expression(expression)
