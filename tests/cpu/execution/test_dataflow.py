"""The instructions of a program that may run together, and the resulting order."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.backends.base import BufferSpec, Instruction, Program, Tensor
from hocket.backends.fusion.dataflow import Dataflow
from hocket.backends.fusion.liveness import build_reader_table
from hocket.backends.fusion.operands import Operand
from hocket.graph import DType


def flow_of(*instructions: tuple[str, str], collective_index: int = -1) -> Dataflow:
    """Instructions that read some of sixteen places of memory, and write one: ``("ab", "c")``; one may meet others."""

    def tensor(name: str) -> Tensor:
        return Tensor(0, 64 * (ord(name) - ord("a")), (16,), (1,), DType.F32)

    ops = ["all_reduce" if number == collective_index else "neg" for number in range(len(instructions))]
    program = Program(
        (BufferSpec("arena", "arena", 1024),),
        tuple(
            Instruction(op, tuple(map(tensor, src)), (tensor(dst),), {}, None, dst)
            for op, (src, dst) in zip(ops, instructions, strict=True)
        ),
        {},
        {"y": tensor(instructions[-1][1])},
    )
    return Dataflow(program, build_reader_table(program, lambda t: Operand(t.offset, t)))


def order(flow: Dataflow, *chains: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The order in which all run once these run together; None if they cannot."""
    for numbers in chains:
        if not flow.can_group(numbers):
            return None
        flow.group_instructions_unchecked(numbers)
    return [*flow.list_groups()]


def test_instructions_are_joined_in_the_place_of_the_last_of_them():
    assert order(flow_of(("a", "b"), ("c", "d"), ("bd", "e")), [0, 2]) == [(1,), (0, 2)]


def test_what_writes_over_an_operand_moves_behind_a_chain():
    assert order(flow_of(("a", "b"), ("b", "d"), ("a", "e"), ("de", "f")), [0, 2]) == [(0, 2), (1,), (3,)]


def test_instructions_between_parts_are_split_into_producers_and_overwriters_of_operands():
    flow = flow_of(("a", "b"), ("c", "a"), ("a", "d"), ("f", "e"), ("be", "g"), ("dg", "h"))
    assert order(flow, [0, 4]) == [(3,), (0, 4), (1,), (2,), (5,)]


def test_what_has_to_run_between_keeps_instructions_apart():
    assert order(flow_of(("a", "b"), ("b", "c"), ("ac", "e"), ("be", "f")), [0, 2]) is None


def test_a_value_that_is_written_over_in_between_is_not_read_later():
    assert order(flow_of(("a", "b"), ("c", "a"), ("ab", "d"), ("ad", "e")), [0, 2]) is None


def test_memory_that_only_a_chain_would_have_written_may_hold_something_else():
    """The second instruction takes the place of the first one's result only after that was read."""
    flow = flow_of(("a", "b"), ("b", "c"), ("d", "b"), ("c", "e"), ("be", "f"))
    assert order(flow, [0, 1, 3]) == [(2,), (0, 1, 3), (4,)]


def test_nothing_moves_past_a_collective():
    assert order(flow_of(("a", "b"), ("c", "d"), ("bd", "e"), collective_index=1), [0, 2]) is None


def test_what_belongs_to_a_chain_belongs_to_no_other():
    assert order(flow_of(("a", "b"), ("b", "c"), ("c", "d")), [0, 1], [1, 2]) is None


def test_one_chain_moves_past_another():
    flow = flow_of(("a", "b"), ("c", "d"), ("b", "e"), ("d", "f"), ("ef", "g"))
    assert order(flow, [0, 2], [1, 3]) == [(0, 2), (1, 3), (4,)]


def test_a_group_that_was_possible_is_asked_again_after_the_order_has_changed():
    flow = flow_of(("a", "b"), ("c", "d"), ("d", "e"), ("b", "f"), ("ef", "g"))
    assert flow.can_group([0, 2])
    assert flow.can_group([1, 3])
    flow.group_instructions_unchecked([0, 2])
    assert not flow.can_group([1, 3])
