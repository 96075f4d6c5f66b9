"""The grouping of neighbouring instructions with ops that are declared in the scalar language.

A group begins with one instruction. Readers of its results and producers of its operands join while that saves more
than it costs. Prices are in bytes of memory traffic. A join saves reads and writes of values; its cost is the repeated
work of the composed kernel, which passes over a row several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ops.declaration.expression import Expression
from .dataflow import Dataflow
from .expression_groups import ExpressionGroup, TraceInstruction, compose_group
from .operands import NoKernelError

STEP_COST_BYTES = 1024
"""The bytes that a core moves while it calls a kernel: about 50 ns."""
MAX_GROUP_INSTRUCTIONS = 24
Ranks = Mapping[int, tuple[int, str, Sequence[tuple[int, int]], int]]
"""The key of each instruction in the order of the search."""


@dataclass(frozen=True)
class GroupingRules:
    """The properties of the generated kernels of a backend.

    Attributes:
        trace: returns the traced instruction of a number; None for one that must stay alone.
        compose_alone: returns the group of one instruction; raises `NoKernelError`.
        has_kernel: returns whether a kernel can loop over the operands and results of a group.
        price_expression: returns the price of an expression per element, in bytes of memory traffic.
    """

    trace: TraceInstruction
    compose_alone: Callable[[int], ExpressionGroup]
    has_kernel: Callable[[ExpressionGroup], bool]
    price_expression: Callable[[Expression], float]


def find_expression_groups(flow: Dataflow, rules: GroupingRules) -> list[ExpressionGroup]:
    """Find the groups of a program, and make each a group of `flow`.

    Instructions in a group of `flow` stay there, and fixed instructions stay alone. Each valid order of a program has
    the same groups.
    """
    groups: list[ExpressionGroup] = []
    ranks = _rank_instructions(flow)
    for number in sorted(ranks, key=ranks.__getitem__):
        if flow.can_join_fusion(number) and rules.trace(number) is not None:
            group = _grow_group(flow, rules, ranks, number)
            if group is not None:
                flow.group_instructions(group.instruction_numbers)
                groups.append(group)
    return groups


def _rank_instructions(flow: Dataflow) -> Ranks:
    """Return for each instruction the length of the longest chain of producers, its op, and the place of its result."""
    instructions = flow.reader_table.program.instructions
    depths = [0] * len(instructions)
    for number in range(len(instructions)):
        for reader in flow.reader_table.find_readers_in_program(number):
            depths[reader] = max(depths[reader], depths[number] + 1)
    places = [[(t.buffer, t.offset) for t in i.dst] for i in instructions]
    return {n: (depths[n], i.op, places[n], n) for n, i in enumerate(instructions)}


def _grow_group(flow: Dataflow, rules: GroupingRules, ranks: Ranks, first: int) -> ExpressionGroup | None:
    """Join neighbours to an instruction as long as a join saves more than it costs; return None without a join."""
    try:
        group = rules.compose_alone(first)
    except NoKernelError:
        return None
    while len(group.instruction_numbers) < MAX_GROUP_INSTRUCTIONS:
        neighbours = _list_neighbours(flow, rules, ranks, group)
        joined = next((g for n in neighbours if (g := _join(flow, rules, group, n)) is not None), None)
        if joined is None:
            break
        group = joined
    return group if len(group.instruction_numbers) > 1 else None


def _list_neighbours(flow: Dataflow, rules: GroupingRules, ranks: Ranks, group: ExpressionGroup) -> Sequence[int]:
    """Return the instructions that read results of a group or produce its operands, and that may join it."""

    def neighbours() -> Iterator[int]:
        for number in group.instruction_numbers:
            yield from flow.reader_table.find_readers_in_program(number)
            call = rules.trace(number)
            assert call is not None
            for operand in filter(None, call.operands):
                maker = flow.find_last_writer(operand.region, number)
                if maker is not None:
                    yield maker

    return [
        n
        for n in sorted({*neighbours()} - {*group.instruction_numbers}, key=ranks.__getitem__)
        if flow.can_join_fusion(n) and rules.trace(n) is not None
    ]


def _join(flow: Dataflow, rules: GroupingRules, group: ExpressionGroup, number: int) -> ExpressionGroup | None:
    """Return the group with one more instruction; None if that is impossible or costs more than it saves."""
    try:
        alone = rules.compose_alone(number)
        joined = compose_group(flow, [*group.instruction_numbers, number], rules.trace)
    except NoKernelError:
        return None
    saved = STEP_COST_BYTES + _price(rules, group) + _price(rules, alone) - _price(rules, joined)
    if saved <= 0 or not rules.has_kernel(joined) or not flow.can_group(joined.instruction_numbers):
        return None
    traffic = group.saved_bytes + group.moved_bytes + alone.moved_bytes - joined.moved_bytes
    return replace(joined, saved_bytes=traffic)


def _price(rules: GroupingRules, group: ExpressionGroup) -> float:
    """Return the price of a group in bytes of memory traffic."""
    return group.moved_bytes + math.prod(group.shape) * rules.price_expression(group.expression)
