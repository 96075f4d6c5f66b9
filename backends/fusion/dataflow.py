"""The dataflow of a program and the grouping of its instructions: the basis on which compiled backends fuse.

A fusion finds the producers and readers of values through a `Dataflow`, never by neighbouring instructions. So the
order of a program does not affect fusion. A query with an answer that no kernel supports raises `NoKernelError`; the
instructions are then bound one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from ...graph.old_names import make_module_getattr
from ...ops.collectives import COLLECTIVES
from ..base import Program, Tensor
from .liveness import AccessedRegions, ReaderTable
from .operands import BoundInstruction, MemoryRegion, NoKernelError, Operand, require_supported

GroupNeighbours = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]
"""The groups that run before a new group, and the groups that run after it."""


class Dataflow:
    """Which instructions of a program compute and read each value, and which of them run together in one kernel.

    A group is the set of instructions that one fused kernel computes. All other instructions run one by one. The
    class also has the order of the groups.
    """

    def __init__(self, program: Program, readers: ReaderTable) -> None:
        self.reader_table, self.save_positions = readers, program.save_positions
        self._scratch_regions = [_find_scratch_regions(i.scratch) for i in program.instructions]
        numbered = enumerate(program.instructions)
        self.fixed_instructions = frozenset(
            n for n, i in numbered if i.op in COLLECTIVES or not any(t.spec.size for t in i.dst)
        )
        """Instructions that no other may pass and no fusion contains: collectives, and instructions without results."""
        self._order: list[tuple[int, ...]] = [(number,) for number in range(len(program.instructions))]
        self._position_by_instruction = list(range(len(program.instructions)))
        self._accesses: dict[int, AccessedRegions] = {}
        self._neighbours_by_group: dict[frozenset[int], GroupNeighbours | None] = {}  # valid until the order changes
        self._own_accesses: dict[int, AccessedRegions] = {}

    def bound_instruction(self, number: int) -> BoundInstruction:
        return self.reader_table.bound_instruction(number)

    # -------------------------------------------------------------------------------------------- from value to value

    def require_readers(self, number: int) -> list[int]:
        """Return all instructions that read the result of instruction `number`, if these are known.

        Raises `NoKernelError` if the result is retained after the run or has no reader.
        """
        readers = self.find_readers(number)
        require_supported(readers, "a result is kept, or nobody reads it")
        return readers or []

    def find_readers(self, number: int) -> list[int] | None:
        """Return all instructions that read the result of instruction `number`; None if it is needed after the run."""
        return self.reader_table.find_readers(number)

    def require_sole_reader(self, number: int, op: str, index: int = 0, in_order: bool = True) -> int:
        """Return the only instruction that reads the result of instruction `number`; it must have the op `op`.

        Its operand `index` must be the whole result; without `in_order` it may be a permuted view. Raises
        `NoKernelError` otherwise.
        """
        readers = self.require_readers(number)
        require_supported(
            len(readers) == 1 and self.bound_instruction(readers[0]).op == op, f"it is not read by {op} alone"
        )
        is_whole = self.is_whole_result_operand_of(number, readers[0], index, in_order)
        require_supported(is_whole, "another operand is read")
        return readers[0]

    def require_first_reader_of_whole_result(self, number: int, op: str) -> int:
        """Return the first instruction that reads all of result `number` as its first operand and has the op `op`.

        Raises `NoKernelError` without such a reader, or if the bytes of the result are overwritten in between.
        """
        readers = self.require_readers(number)
        later = next(
            (
                n
                for n in readers
                if self.bound_instruction(n).op == op and self.is_whole_result_operand_of(number, n, 0)
            ),
            None,
        )
        if later is None:
            raise NoKernelError(f"no {op} reads it")
        region = self.bound_instruction(number).out.region
        writers = self.reader_table.list_writes(region.buffer)
        first, last = (bisect_left(writers, n, key=itemgetter(0)) for n in (number + 1, later))
        require_supported(
            not any(written.overlaps(region) for _, written in writers[first:last]),
            "something else lies there",
        )
        return later

    def is_whole_result_operand_of(self, number: int, later: int, index: int, in_order: bool = True) -> bool:
        """Return whether operand `index` of instruction `later` is the whole result of instruction `number`.

        The operand must have the elements in the order of the result, unless `in_order` is false.
        """
        source, out = self.bound_instruction(later).optional_operand(index), self.bound_instruction(number).out
        if source is None or source.region != out.region or source.size != out.size:
            return False
        return has_same_elements(source, out) or not in_order

    def require_producer(self, number: int, index: int) -> int:
        """Return the instruction that computes operand `index` of instruction `number`.

        The instruction may instead compute a value that contains the operand. It is the last instruction before
        `number` that writes into the memory of the operand.

        Raises `NoKernelError` if the operand is missing or no instruction computes it.
        """
        operand = self.bound_instruction(number).optional_operand(index)
        require_supported(operand, "there is no such operand")
        assert operand is not None
        writer = self.find_last_writer(operand.region, number)
        if writer is None:
            raise NoKernelError("an operand comes from outside")
        return writer

    def find_last_writer(self, region: MemoryRegion, before: int) -> int | None:
        """Return the last instruction before `before` that writes into a region, or None."""
        writers = self.reader_table.list_writes(region.buffer)
        for at in range(bisect_left(writers, before, key=itemgetter(0)) - 1, -1, -1):
            writer, written = writers[at]
            if written.overlaps(region):
                return writer
        return None

    def find_state_save(self, state: Operand, before: int) -> int | None:
        """Return the last instruction before `before` that saves the state or some of its rows, or None."""
        saves = self._saves_by_buffer.get(state.tensor.buffer, [])
        at = bisect_left(saves, before)
        return saves[at - 1] if at else None

    @cached_property
    def _saves_by_buffer(self) -> Mapping[int, list[int]]:
        """For each buffer, the instructions that save its state for a rollback, by number, ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        for number in sorted(self.save_positions):
            found[self.bound_instruction(number).operand(0).tensor.buffer].append(number)
        return found

    def list_state_writers(self, state: Operand, after: int) -> list[int]:
        """Return the instructions after `after` that write into the memory of a state."""
        writers = self.reader_table.list_writes(state.region.buffer)
        return list(dict.fromkeys(n for n, region in writers if n > after and region.overlaps(state.region)))

    # ---------------------------------------------------------------------------------------------------------- order

    def list_groups(self) -> Iterator[tuple[int, ...]]:
        """Yield the groups in the order of a run; a group is a tuple of instruction numbers in program order."""
        return (group for group in self._order if group)

    def groups_by_instruction(self) -> dict[int, tuple[int, ...]]:
        """The group of each grouped instruction, by instruction number."""
        return {number: group for group in self.list_groups() for number in group}

    def find_group(self, number: int) -> tuple[int, ...]:
        """Return the group of an instruction."""
        return self._order[self._position_by_instruction[number]]

    def can_join_fusion(self, number: int) -> bool:
        """Return whether an instruction may be fused with others: it is in no group, and its order may change."""
        return number not in self.fixed_instructions and len(self.find_group(number)) == 1

    def can_group(self, numbers: Sequence[int]) -> bool:
        """Return whether these instructions can run as one group, after all instructions between them are moved away.

        An instruction between them must be able to run before the group or after it without a change of results.
        """
        return all(map(self.can_join_fusion, numbers)) and self._find_neighbours_of_fusion(numbers) is not None

    def reads_inner_values_once(self, numbers: Sequence[int]) -> bool:
        """Return whether no instruction of a group reads a value that stays inside the group through two operands.

        A fused kernel does not write such a value. It computes the value for the operand that its pattern has matched,
        and would read the other operand from memory. Example: ``mul(s, s)`` with ``s = sigmoid(x)``.
        """
        for n in numbers:
            readers = self.find_readers(n) if len(self.bound_instruction(n).dst) == 1 else None
            if readers is None or not set(readers) <= {*numbers}:
                continue
            out = self.bound_instruction(n).out.region
            for reader in readers:
                if (
                    sum(
                        source is not None and source.region.overlaps(out)
                        for source in self.bound_instruction(reader).src
                    )
                    > 1
                ):
                    return False
        return True

    def group_instructions_unchecked(self, numbers: Sequence[int]) -> None:
        """Make one group of these instructions, without a test; the caller has tested `can_group`."""
        self._insert_group_into_order(numbers, self._find_neighbours_of_fusion(numbers))
        self._accesses |= self._find_external_accesses(numbers)

    def can_join_groups(self, numbers: Sequence[int]) -> bool:
        """Return whether several groups can run directly one after the other, for example as kernels of one launch.

        `numbers` are all instructions of the groups. The groups still write the values that they pass to each other.
        """
        return self.fixed_instructions.isdisjoint(numbers) and self._partition_around_group(numbers, {}) is not None

    def join_groups_unchecked(self, numbers: Sequence[int]) -> None:
        """Make one group of several groups, without a test; the caller has tested `can_join_groups`."""
        self._insert_group_into_order(numbers, self._partition_around_group(numbers, {}))

    def _insert_group_into_order(self, numbers: Sequence[int], parted: GroupNeighbours | None) -> None:
        """Insert a group into the execution order, between the groups that run before it and after it.

        Args:
            numbers: The instructions of the group.
            parted: The groups to run before it and after it.
        """
        assert parted is not None
        first, last = (extreme(self._position_by_instruction[n] for n in numbers) for extreme in (min, max))
        groups = [*parted[0], tuple(sorted(numbers)), *parted[1]]
        groups += [()] * (last + 1 - first - len(groups))
        self._order[first : last + 1] = groups
        for place, group in enumerate(groups, first):
            for number in group:
                self._position_by_instruction[number] = place
        self._neighbours_by_group.clear()

    def _find_neighbours_of_fusion(self, numbers: Sequence[int]) -> GroupNeighbours | None:
        """Return the partition of `_partition_around_group` for a group without the values that stay inside.

        Several fusions ask for the same group, so the partition is kept until the order changes.
        """
        key = frozenset(numbers)
        if key not in self._neighbours_by_group:
            self._neighbours_by_group[key] = self._partition_around_group(numbers, None)
        return self._neighbours_by_group[key]

    def _partition_around_group(
        self, numbers: Sequence[int], accesses: Mapping[int, AccessedRegions] | None
    ) -> GroupNeighbours | None:
        """Decide which groups run before a new group and which after it, of those between its instructions.

        A group runs after the new group if it must follow a member, or follow another group that runs after. The
        result is None if a group would have to run on both sides, or if a member cannot move.

        Args:
            numbers: The instructions of the new group.
            accesses: The memory that they access; None for all memory except the values that stay inside the group.
        """
        places = sorted(self._position_by_instruction[n] for n in numbers)
        if not any(self._order[place] for place in {*range(places[0], places[-1])}.difference(places)):
            return [], []
        touched = self._find_external_accesses(numbers) if accesses is None else accesses
        before, behind = list[tuple[int, ...]](), list[tuple[int, ...]]()
        accesses_of_members, accesses_behind = _AccessesOfGroups(), _AccessesOfGroups()
        for group in filter(None, self._order[places[0] : places[-1] + 1]):
            is_fixed = not self.fixed_instructions.isdisjoint(group)
            regions = [touched.get(n) or self._accesses.get(n) or self._find_own_accesses(n) for n in group]
            must_follow = accesses_behind.must_precede(regions, is_fixed)
            if group[0] in numbers:
                if must_follow:
                    return None
                accesses_of_members.add_group(regions, is_fixed)
            elif must_follow or accesses_of_members.must_precede(regions, is_fixed):
                behind.append(group)
                accesses_behind.add_group(regions, is_fixed)
            else:
                before.append(group)
        return before, behind

    def _find_external_accesses(self, numbers: Sequence[int]) -> dict[int, AccessedRegions]:
        """Return the memory that each instruction of a group accesses, without values that stay inside the group.

        Such a value is the result of one of the instructions, and no instruction outside of the group reads it.
        """
        touched = {n: self._find_own_accesses(n) for n in numbers}
        for n in numbers:
            readers = self.find_readers(n) if len(self.bound_instruction(n).dst) == 1 else None
            if readers is None or not set(readers) <= {*numbers}:
                continue
            out = self.bound_instruction(n).out.region
            touched[n] = touched[n][0], []
            for reader in readers:
                read, written = touched[reader]
                touched[reader] = [region for region in read if not region.overlaps(out)], written
        return touched

    def _find_own_accesses(self, number: int) -> AccessedRegions:
        if number not in self._own_accesses:
            read, written = self.reader_table.accessed_regions(number)
            self._own_accesses[number] = read, [*written, *self._scratch_regions[number]]
        return self._own_accesses[number]

    def find_instructions_finished_before(self, number: int) -> int | frozenset[int]:
        """Return which instructions have finished if a run fails at instruction `number`, so that they can be undone.

        Groups do not run in program order. The result is a count if the finished instructions are the first ones of
        the program, else the set of their numbers. `StepError.finished_instructions` has this form.
        """
        done = frozenset(n for group in self._order[: self._position_by_instruction[number]] for n in group)
        return number if done == {*range(number)} else done


class _AccessesOfGroups:
    """The memory that several groups access, by buffer, to decide which later groups must stay behind them."""

    def __init__(self) -> None:
        self._read: dict[int, list[MemoryRegion]] = {}
        self._written: dict[int, list[MemoryRegion]] = {}
        self._has_groups, self._has_fixed_group = False, False

    def add_group(self, accesses: Sequence[AccessedRegions], is_fixed: bool) -> None:
        """Add a group: the accesses of its instructions, and whether one of them is in `fixed_instructions`."""
        self._has_groups, self._has_fixed_group = True, self._has_fixed_group or is_fixed
        for own in accesses:
            for known, regions in zip((self._read, self._written), own, strict=True):
                for region in regions:
                    known.setdefault(region.buffer, []).append(region)

    def must_precede(self, accesses: Sequence[AccessedRegions], is_fixed: bool) -> bool:
        """Return whether a later group must stay behind one of these groups, because they access common memory.

        It must if one of them writes bytes that the other accesses. It also must if one of them is fixed.
        """
        if not self._has_groups or self._has_fixed_group or is_fixed:
            return self._has_groups
        return any(
            _overlaps_any(self._written, region) for read, written in accesses for region in (*read, *written)
        ) or any(_overlaps_any(self._read, region) for _, written in accesses for region in written)


def _overlaps_any(regions_by_buffer: Mapping[int, Sequence[MemoryRegion]], region: MemoryRegion) -> bool:
    return any(map(region.overlaps, regions_by_buffer.get(region.buffer, ())))


def _find_scratch_regions(scratch: Tensor | None) -> list[MemoryRegion]:
    if scratch is None:
        return []
    return [MemoryRegion(scratch.buffer, scratch.offset, scratch.offset + scratch.spec.nbytes)]


def require_no_alias(out: Operand, sources: Iterable[Operand | None], same: Iterable[Operand | None] = ()) -> None:
    """Require that a kernel may write `out` while it still reads its operands; raise `NoKernelError` otherwise.

    Args:
        out: The result.
        sources: Operands that must not overlap the result.
        same: Operands that may be in place: they must not overlap the result, or must have exactly its elements in
            the same order. Each thread reads such an element before it writes the element of `out`.
    """
    for source in sources:
        require_supported(
            source is None or not source.region.overlaps(out.region),
            "a result lies where something is still read",
        )
    for source in same:
        free = source is None or has_same_elements(source, out) or not source.region.overlaps(out.region)
        require_supported(free, "a result lies across what is still read")


def has_same_elements(one: Operand, other: Operand) -> bool:
    """Return whether two operands read the same memory elements in the same order; their shapes may differ."""
    if one.address != other.address:
        return False
    has_equal_strides = (one.shape, one.strides) == (other.shape, other.strides)
    return has_equal_strides or (one.is_dense and other.is_dense and one.size == other.size)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Flow="Dataflow", apart="require_no_alias")
