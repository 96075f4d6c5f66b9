"""The grouping of neighbouring instructions with ops that are declared in the scalar language.

A group begins with one instruction. Readers of its results and producers of its operands join while that saves more
than it costs. Prices are in bytes of memory traffic. A join saves reads and writes of values; its cost is the repeated
work of the composed kernel, which passes over a row several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ops.declaration.expression import Expression
from .dataflow import Dataflow
from .expression_groups import ExpressionGroup, GroupComposition, compose_instructions
from .operands import NoKernelError
from .traced_instruction import TracedInstruction

STEP_COST_BYTES = 1024
"""The bytes that a core moves while it calls a kernel: about 50 ns."""
MAX_GROUP_INSTRUCTIONS = 24
MAX_READERS_OF_REPEATED_RESULTS = 4
"""The most readers that join a group together with another one, because a result that they repeat is not written."""
Rank = tuple[int, str, Sequence[tuple[int, int]], int]
"""The key of an instruction in the order of the search."""


@dataclass(frozen=True)
class FusionGroupingCallbacks:
    """The functions with which a backend answers the search for fusible groups.

    Attributes:
        trace: returns the traced instruction of a number; None for one that must stay alone.
        has_kernel: returns whether a kernel can loop over the operands and results of a group.
        price_expression: returns the prices of an expression per element and per row, in bytes of memory traffic; it
            takes the operands with one number per row.
    """

    trace: Callable[[int], TracedInstruction | None]
    has_kernel: Callable[[ExpressionGroup], bool]
    price_expression: Callable[[Expression, frozenset[int]], tuple[float, float]]


def find_expression_groups(flow: Dataflow, rules: FusionGroupingCallbacks) -> list[ExpressionGroup]:
    """Find neighbouring instructions that one generated kernel should compute, and make them groups of `flow`.

    Their ops must be declared in the scalar language. Instructions that are in a group already stay there. Each valid
    order of a program gives the same groups.
    """
    search = _GroupSearch(flow, rules, _rank_by_chain_op_and_place(flow))
    groups: list[ExpressionGroup] = []
    for number in sorted(search.ranks, key=search.ranks.__getitem__):
        if (group := search.grow_group(number)) is not None:
            flow.group_instructions_unchecked(group.instruction_numbers)
            groups.append(group)
    return groups


def _rank_by_chain_op_and_place(flow: Dataflow) -> Mapping[int, Rank]:
    """Return for each instruction a rank, which is the order in which the search visits the instructions.

    The rank has the length of the longest chain of producers, the op, the memory of the results and the position.
    """
    instructions = flow.reader_table.program.instructions
    depths = [0] * len(instructions)
    for number in range(len(instructions)):
        for reader in flow.reader_table.find_known_readers_of_first_result(number):
            depths[reader] = max(depths[reader], depths[number] + 1)
    places = [[(t.buffer, t.offset) for t in i.dst] for i in instructions]
    return {n: (depths[n], i.op, places[n], n) for n, i in enumerate(instructions)}


@dataclass
class _GroupSearch:
    """The search for groups of instructions to fuse in a program. Each instruction is traced to its expression once."""

    flow: Dataflow
    rules: FusionGroupingCallbacks
    ranks: Mapping[int, Rank]
    traced: dict[int, TracedInstruction | None] = field(default_factory=dict)

    def trace(self, number: int) -> TracedInstruction | None:
        """Return an instruction with its expression; None if it cannot be fused or is in a group already."""
        if not self.flow.can_join_fusion(number):
            return None
        if number not in self.traced:
            call = self.rules.trace(number)
            self.traced[number] = None if call is None or call.reason_against_fusion else call
        return self.traced[number]

    def grow_group(self, first: int) -> ExpressionGroup | None:
        """Grow a group from one instruction while joins save memory traffic; return None if it stays alone."""
        call = self.trace(first)
        neighbours = {} if call is None else self._find_neighbours(first, call)
        if call is None or not neighbours:
            return None
        try:
            members = compose_instructions({first: call}, can_repeat=True)
        except NoKernelError:
            return None
        saved_bytes = 0
        while len(members.calls) < MAX_GROUP_INSTRUCTIONS:
            candidates = [{n: neighbours[n]} for n in sorted(neighbours, key=self.ranks.__getitem__)]
            joins = (
                self._join_if_cheaper(members, calls) for calls in self._add_joins_with_readers(members, candidates)
            )
            joined = next(filter(None, joins), None)
            if joined is None:
                break
            larger, saved = joined
            saved_bytes += saved
            for number in larger.calls.keys() - members.calls:
                neighbours |= self._find_neighbours(number, larger.calls[number])
            members = larger
            neighbours = {n: neighbours[n] for n in neighbours.keys() - members.calls}
        if len(members.calls) == 1:
            return None
        return replace(members.build_group_for_any_order(), saved_bytes=saved_bytes)

    def _find_neighbours(self, number: int, call: TracedInstruction) -> dict[int, TracedInstruction]:
        """Find the producers and readers of an instruction that may join its group."""
        adjacent = {*self.flow.reader_table.find_known_readers_of_first_result(number), *call.producers}
        return {n: traced for n in adjacent if n is not None and (traced := self.trace(n)) is not None}

    def _add_joins_with_readers(
        self, members: GroupComposition, candidates: Sequence[Mapping[int, TracedInstruction]]
    ) -> Iterator[Mapping[int, TracedInstruction]]:
        """Yield the candidates for a join, and larger candidates with further readers of the group's results.

        A result that a larger value repeats is not written, so all of its readers must join.

        Args:
            members: The group.
            candidates: The instructions that may join, by number, one mapping for each candidate.
        """
        yield from candidates
        for candidate in candidates:
            joining = dict(candidate)
            size = max(call.size for call in joining.values())
            for _ in range(MAX_READERS_OF_REPEATED_RESULTS):
                calls = {**members.calls, **joining}
                repeated = [call for call in calls.values() if call.size < size and call.readers is not None]
                missing = {n for call in repeated for n in call.readers or ()} - calls.keys()
                if not missing:
                    break
                first = min(missing, key=self.ranks.__getitem__)
                if (call := self.trace(first)) is None:
                    break
                joining[first] = call
            if len(joining) > len(candidate) and len(members.calls) + len(joining) <= MAX_GROUP_INSTRUCTIONS:
                yield joining

    def _join_if_cheaper(
        self, members: GroupComposition, calls: Mapping[int, TracedInstruction]
    ) -> tuple[GroupComposition, int] | None:
        """Join instructions to a group; return the larger group, and the memory traffic in bytes that the join saves.

        The result is None if the join is impossible, or costs more than it saves.
        """
        try:
            joined = members.join(calls)
            alone = sum(
                call.moved_bytes + call.size * self.rules.price_expression(call.expression, frozenset())[0]
                for call in calls.values()
            )
        except NoKernelError:
            return None
        group, larger = members.group, joined.group
        saved = STEP_COST_BYTES * len(calls) + self._price_group(group) + alone - self._price_group(larger)
        if saved <= 0 or not self.rules.has_kernel(larger) or not self.flow.can_group(larger.instruction_numbers):
            return None
        return joined, group.moved_bytes + sum(call.moved_bytes for call in calls.values()) - larger.moved_bytes

    def _price_group(self, group: ExpressionGroup) -> float:
        """Estimate the cost of a kernel: its memory traffic in bytes, plus its arithmetic as bytes."""
        per_element, per_row = self.rules.price_expression(group.expression, group.operands_with_one_number_per_row)
        return group.moved_bytes + group.size * per_element + group.row_count * per_row
