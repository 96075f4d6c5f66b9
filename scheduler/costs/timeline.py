"""The timeline of a plan: compute spans between collectives, and the collectives, with predicted times.

A program of a model with a hundred layers has about a thousand instructions for each device. Its timeline has a few
hundred entries, which people can read.

1. Predict the cost of each instruction (`compute_instruction_costs`).
2. Split each program at its collectives (`_ProgramSplitAtCollectives`), and merge equal spans of several devices
   (`build_timeline`).
3. Advance a clock for each device through the entries (`compute_device_end_seconds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ...backends.base import Instruction
from ...backends.capabilities import OTHER_OPS, can_group_overlap
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node
from ...ops.collectives import POINT_TO_POINT_OPS, find_collective_sequence_number, narrow_to_integer
from ...ops.registry import find_view_base
from ..lowering.device_plan import (
    DevicePlan,
    KernelLaunchesAndFallbacks,
    find_collective_group_of_each_device,
    find_first_devices_with_same_program,
)
from ..lowering.structural_equality import make_program_key_without_names
from .hardware import Estimate, Hardware, WorkCounter, WorkEstimate
from .stand_ins import NUMPY_SLOWDOWNS

COMPUTE = "work"
"""The `op` of a compute span."""
MAX_CONCURRENT_SHARE = 0.05
"""The share of the time in which other devices may compute small things, such as masks, in a sequential timeline."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One step in the predicted course of a run: a span of compute on one or more devices, or one collective.

    - `op`: ``work`` for a compute span, or the op of the collective.
    - `devices`: the numbers of the devices that execute the entry.
    - `first_instruction`, `instruction_count`: the instructions of the entry, equal on each of `devices`.
    - `bytes_read`: the bytes that the busiest device moves through memory.
    - `bytes_sent`: the bytes that it sends to other devices.
    - `seconds`: the predicted seconds.
    - `unsharded_seconds`: the predicted seconds if each device read every weight and state whole; None if all of
      these are whole anyway.
    - `sending_device`: the sender of a message.
    - `is_overlapped`: whether a compute span runs during the collective before it, without a wait.
    """

    op: str
    devices: tuple[int, ...]
    first_instruction: int
    instruction_count: int
    bytes_read: float
    bytes_sent: float
    seconds: float
    unsharded_seconds: float | None = None
    sending_device: int = 0
    is_overlapped: bool = False


@dataclass(frozen=True, slots=True)
class InstructionCost:
    """The predicted cost of one instruction in one run.

    - `flops`: floating-point operations.
    - `nbytes`: bytes read and written.
    - `bytes_sent`: bytes sent to other devices.
    - `seconds`: the predicted seconds.
    - `unsharded_seconds`: the seconds if all weights and states were whole; None if all of them are.
    """

    flops: float
    nbytes: float
    bytes_sent: float
    seconds: float
    unsharded_seconds: float | None = None


class InstructionCosts:
    """The predicted cost of every instruction of a program; it is computed at the first use."""

    def __init__(
        self,
        device_plan: DevicePlan,
        hardware: Hardware,
        whole: Mapping[str, int],
        counts: WorkCounter,
        number: int = 0,
        collective_group: Sequence[int] = (0,),
        kernel_use: KernelLaunchesAndFallbacks | None = None,
    ) -> None:
        """Store the inputs of the prediction; costs are computed at first use.

        Args:
            device_plan: The device plan.
            hardware: The speeds of the device and its links.
            whole: Bytes of each weight and state before sharding, by name.
            counts: The work estimates of nodes, shared by several device plans.
            number: The number of the device.
            collective_group: The devices that call the same collectives, this device included.
            kernel_use: The use of kernels; by default the device plan is asked.
        """
        self.graph_nodes, self.program = device_plan.graph.nodes, device_plan.program
        self.launch_counts, self.stand_ins, self.overlapped_instructions = (
            kernel_use or device_plan.find_kernel_launches_and_fallbacks()
        )
        self.hardware, self.unsharded_bytes, self.work_estimates, self.device_number, self.collective_group = (
            hardware,
            whole,
            counts,
            number,
            collective_group,
        )

    def get_cost(self, at: int) -> InstructionCost:
        """Return the predicted FLOPs, bytes and seconds of the instruction at position `at`."""
        return self._all_costs[at]

    @cached_property
    def _all_costs(self) -> list[InstructionCost]:
        return [self._compute_cost(at, i) for at, i in enumerate(self.program.instructions)]

    def _compute_cost(self, at: int, i: Instruction) -> InstructionCost:
        if find_collective_sequence_number(i.op, i.attrs) is not None:
            collective_cost = self.hardware.estimate_fastest_collective_cost(
                i.op, count_bytes_of_exchanged_value(i), self._list_participating_devices(i)
            )
            return InstructionCost(0.0, 0.0, collective_cost.bytes_sent, collective_cost.seconds)
        if i.index < 0:  # a copy of a state, for its update or for a rollback
            copied = WorkEstimate(
                0.0, _count_copy_read_and_write_bytes(i), _count_copy_read_and_write_bytes(i), (OTHER_OPS,)
            )
            return InstructionCost(
                0.0, copied.nbytes, 0.0, self.hardware.compute_seconds(*copied, launches=self.launch_counts[at])
            )
        node = self.graph_nodes[i.index]
        own = self.work_estimates.count_work(node)
        times, more = self._estimate_extra_work_without_sharding(node)
        more = min(own.nbytes * (times - 1), more)
        whole = own._replace(flops=own.flops * times, nbytes=own.nbytes + more, stored_bytes=own.stored_bytes + more)
        slowdown = NUMPY_SLOWDOWNS.get(i.op, 1.0) if at in self.stand_ins else 1.0

        def seconds(work: WorkEstimate) -> float:
            return slowdown * self.hardware.compute_seconds(*work, launches=self.launch_counts[at])

        return InstructionCost(own.flops, own.nbytes, 0.0, seconds(own), seconds(whole) if more else None)

    def _list_participating_devices(self, i: Instruction) -> Sequence[int]:
        """List the devices that take part in a collective instruction; for a message, the sender and the receiver."""
        if i.op not in POINT_TO_POINT_OPS:
            return self.collective_group
        return self.device_number, narrow_to_integer(i.attrs["to" if i.op == "send" else "source"])

    def _estimate_extra_work_without_sharding(self, node: Node) -> tuple[float, float]:
        """Estimate how much more work a node would have on this device if its weights and states were not sharded.

        Reports use it to show the gain of sharding. A weight or state counts only if this device has a part of it.

        Returns:
            The growth factor of the FLOPs, and the extra bytes to read.
        """
        times, missing = 1.0, 0.0
        for source in node.inputs:
            leaf = find_view_base(source).node
            if leaf.name in self.unsharded_bytes and leaf.op in ("weight", "state"):
                whole, own = self.unsharded_bytes[leaf.name], leaf.specs[0].nbytes
                if 0 < own < whole:
                    times = max(times, whole / own)
                    missing += source.spec.nbytes * (whole / own - 1)
        return times, missing


def compute_instruction_costs(
    device_plans: Sequence[DevicePlan], speeds: Sequence[Hardware], unsharded_bytes: Mapping[str, int]
) -> list[InstructionCosts]:
    """Predict the cost of each instruction on each device.

    Devices with equal programs share one result.

    Args:
        device_plans: The device plans.
        speeds: The speeds of each device.
        unsharded_bytes: Bytes of each weight and state before sharding, by name.
    """
    prices: list[InstructionCosts] = []
    counts, groups = (
        WorkCounter(),
        find_collective_group_of_each_device([device_plan.program for device_plan in device_plans]),
    )
    uses: dict[
        Hashable, KernelLaunchesAndFallbacks
    ] = {}  # by structure: structurally equal programs call the same kernels
    for number, first in enumerate(find_first_devices_with_same_program(device_plans)):
        if first < number:
            prices.append(prices[first])
            continue
        device_plan = device_plans[number]
        key = (type(device_plan.backend), device_plan.device.kind, make_program_key_without_names(device_plan.program))
        if key not in uses:
            uses[key] = device_plan.find_kernel_launches_and_fallbacks()
        prices.append(
            InstructionCosts(device_plan, speeds[number], unsharded_bytes, counts, number, groups[number], uses[key])
        )
    return prices


def build_timeline(device_plans: Sequence[DevicePlan], prices: Sequence[InstructionCosts]) -> list[TimelineEntry]:
    """Build the timeline of a plan: compute spans and collectives with predicted seconds, in the order of collectives.

    Args:
        device_plans: The device plans.
        prices: The instruction costs of each device.
    """
    goes_on = can_group_overlap([(device_plan.backend, device_plan.device) for device_plan in device_plans])
    own: list[_ProgramSplitAtCollectives] = []
    for number, first in enumerate(find_first_devices_with_same_program(device_plans)):
        own.append(
            _ProgramSplitAtCollectives(device_plans[number], prices[number], goes_on) if first == number else own[first]
        )
    timeline: list[TimelineEntry] = []
    for number in sorted({n for p in own for n in p.collective_entries}):
        there = [d for d, p in enumerate(own) if number in p.collective_entries]
        timeline += _merge_equal_entries_at_longest_time({d: own[d].entries_before_collective[number] for d in there})
        timeline.append(_build_collective_entry(there, own, number))
        timeline += _merge_equal_entries_at_longest_time({d: own[d].overlapped_entries[number] for d in there})
    return timeline + _merge_equal_entries_at_longest_time({d: p.final_entry for d, p in enumerate(own)})


def compute_last_end_seconds(timeline: Sequence[TimelineEntry], devices: int) -> float:
    """Return the seconds from the common start of all devices until the last device ends the timeline."""
    return max(compute_device_end_seconds(timeline, [0.0] * devices), default=0.0)


def compute_device_end_seconds(timeline: Sequence[TimelineEntry], start_seconds: Sequence[float]) -> list[float]:
    """Return the time at which each device ends a timeline, given the time at which each device begins.

    - A device starts a compute span when it has ended the previous entry.
    - A collective starts when all its devices have arrived, and a message when its sender has.
    - An overlapped span starts when the device has arrived at the collective before it.

    Args:
        timeline: The timeline.
        start_seconds: Seconds at which each device begins.
    """
    worked, collective_ends = [*start_seconds], [*start_seconds]
    for stage in timeline:
        if stage.op == COMPUTE:
            for d in stage.devices:
                worked[d] = (worked[d] if stage.is_overlapped else max(worked[d], collective_ends[d])) + stage.seconds
        else:
            there = {d: max(worked[d], collective_ends[d]) for d in stage.devices}
            ready = there[stage.sending_device] if stage.op == "send" else max(there.values())
            for d in stage.devices:
                worked[d] = there[d]
                if stage.op != "send" or d != stage.sending_device:
                    collective_ends[d] = max(there[d], ready + stage.seconds)
    return [*map(max, worked, collective_ends)]


def is_timeline_sequential(timeline: Sequence[TimelineEntry], devices: int) -> bool:
    """Return whether the devices of a timeline compute one after another, and not at the same time.

    Concurrent compute is tolerated up to the share `MAX_CONCURRENT_SHARE` of the time.
    """
    took = compute_last_end_seconds(timeline, devices)
    busy = sum(s.seconds * (len(s.devices) if s.op == COMPUTE else 1) for s in timeline)
    return busy <= (1 + MAX_CONCURRENT_SHARE) * took


def estimate_run_time(timeline: Sequence[TimelineEntry], devices: int) -> Estimate:
    """Estimate the seconds of one run from its timeline, split into compute, collectives and their overlap."""
    collectives = [s for s in timeline if s.op != COMPUTE]
    sent, took = sum(s.seconds for s in collectives), compute_last_end_seconds(timeline, devices)
    one_by_one = took
    if any(s.is_overlapped for s in timeline):
        one_by_one = compute_last_end_seconds([replace(s, is_overlapped=False) for s in timeline], devices)
    compute = max(0.0, one_by_one - sent)  # the sum over messages may exceed the time of the run
    return Estimate(compute, sent, len(collectives), one_by_one - took + max(0.0, sent - one_by_one))


def count_bytes_of_exchanged_value(i: Instruction) -> int:
    """Return the bytes of the whole value that a collective transfers, which is its largest operand or result."""
    return max(t.spec.nbytes for t in (*i.src, *i.dst) if t is not None)


def _count_copy_read_and_write_bytes(i: Instruction) -> float:
    """Return the bytes that a copy instruction reads and writes, which are twice the bytes of its results."""
    return 2.0 * sum(t.spec.nbytes for t in i.dst)


def _merge_equal_entries_at_longest_time(
    entry_by_device: Mapping[int, tuple[str, TimelineEntry]],
) -> list[TimelineEntry]:
    """Merge the compute entries of devices with equal ops into one entry, which has the longest of their times.

    All entries are between the same two collectives.

    Args:
        entry_by_device: For each device, its ops as text and its compute entry.
    """
    groups: dict[str, list[tuple[int, TimelineEntry]]] = defaultdict(list)
    for device, (ops_text, stage) in entry_by_device.items():
        if stage.instruction_count:
            groups[ops_text].append((device, stage))
    merged = []
    for members in groups.values():
        longest = max((s for _, s in members), key=lambda s: s.seconds)
        first = members[0][1].first_instruction
        merged.append(
            replace(
                longest, devices=tuple(d for d, _ in members), first_instruction=first, sending_device=members[0][0]
            )
        )
    return merged


def _build_collective_entry(
    devices: Sequence[int], spans_by_device: Sequence[_ProgramSplitAtCollectives], number: int
) -> TimelineEntry:
    """Build the timeline entry of one collective.

    A send and its receive become one entry.

    Args:
        devices: The devices that take part.
        spans_by_device: The split program of each device.
        number: The sequence number of the collective.
    """
    sender = next((d for d in devices if spans_by_device[d].collective_entries[number].op == "send"), devices[0])
    return replace(spans_by_device[sender].collective_entries[number], devices=tuple(devices), sending_device=sender)


class _ProgramSplitAtCollectives:
    """One program, cut at its collectives into spans of compute instructions, from which the timeline is built.

    All fields are by the sequence number of the collective:

    - `collective_entries`: the timeline entry of the collective.
    - `entries_before_collective`: the compute span before it.
    - `overlapped_entries`: the compute span that runs during it; empty unless the backend can overlap.

    Each span comes with its ops as text, because spans of equal text on several devices are merged.
    """

    def __init__(self, device_plan: DevicePlan, prices: InstructionCosts, goes_on: bool) -> None:
        self.program, self.instruction_costs = device_plan.program, prices
        overlapped_instructions = prices.overlapped_instructions if goes_on else {}
        self.collective_entries: dict[int, TimelineEntry] = {}
        self.entries_before_collective: dict[int, tuple[str, TimelineEntry]] = {}
        self.overlapped_entries: dict[int, tuple[str, TimelineEntry]] = {}
        start = 0
        for at, i in enumerate(self.program.instructions):
            if (number := find_collective_sequence_number(i.op, i.attrs)) is not None:
                self.entries_before_collective[number] = self._build_compute_entry(start, at)
                cost = prices.get_cost(at)
                self.collective_entries[number] = TimelineEntry(i.op, (), at, 1, 0.0, cost.bytes_sent, cost.seconds)
                start = at + 1 + len(overlapped_instructions.get(at, ()))
                self.overlapped_entries[number] = self._build_compute_entry(at + 1, start, is_overlapped=True)
        self.final_entry = self._build_compute_entry(start, len(self.program.instructions))

    def _build_compute_entry(self, start: int, stop: int, is_overlapped: bool = False) -> tuple[str, TimelineEntry]:
        """Build the timeline entry of the compute instructions from `start` up to `stop`.

        Returns:
            The ops of the instructions as text, and the entry.
        """
        costs = [self.instruction_costs.get_cost(at) for at in range(start, stop)]
        reads, seconds = sum(c.nbytes for c in costs), sum(c.seconds for c in costs)
        is_sharded = any(c.unsharded_seconds is not None for c in costs)
        unsharded_seconds = (
            sum(c.seconds if c.unsharded_seconds is None else c.unsharded_seconds for c in costs)
            if is_sharded
            else None
        )
        stage = TimelineEntry(
            COMPUTE,
            (),
            start,
            stop - start,
            float(reads),
            0.0,
            float(seconds),
            unsharded_seconds,
            is_overlapped=is_overlapped,
        )
        return " ".join(i.op for i in self.program.instructions[start:stop]), stage
