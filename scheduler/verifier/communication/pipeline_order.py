"""The verifier of pipeline orders: each run must find the same memory as a run alone.

A pipeline order lists for each device its actions: `put` writes the inputs of a run, `run` executes its program,
`keep` retains its results. The verifier simulates the actions of all devices. For each device it records:

- the run that has its inputs, results and saves in the arena;
- the run after which the states are;
- the next message or collective of the device's group.

No message is buffered in this model: the sender waits for the receiver. So the order is right for every number of
buffered messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....backends.base import Program
from ....graph.errors import format_count
from ....ops.collectives import POINT_TO_POINT_OPS, narrow_to_integer
from ...ir.pipeline_actions import PipelineAction, PipelineOrder
from .collective_order import CollectiveCall, list_collective_calls

NEXT_ACTION = {"put": "run", "run": "keep", "keep": "put"}
"""The action that must follow each action before the memory of a device is used again."""
CallsWithParticipants = Sequence[Sequence[tuple[CollectiveCall, tuple[int, ...]]]]
"""The collective calls of each device with their participants; for a message these are the sender and the receiver."""


class NextCollectiveOfDevice(NamedTuple):
    """The next collective that a device will call, in the simulation of a pipeline.

    - `run`: the number of the run.
    - `call`: the collective call of the device.
    - `participants`: the numbers of all devices that call it.
    """

    run: int
    call: CollectiveCall
    participants: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.call} in run {self.run}"


def find_pipeline_order_faults(programs_by_run: Sequence[Sequence[Program]], order: PipelineOrder) -> Iterator[str]:
    """Yield as text all faults of a pipeline order, which lists the actions of each device for several runs.

    Faults are actions in a wrong order, a collective that joins all devices, collectives that do not match, and devices
    that wait for each other.

    Args:
        programs_by_run: For each run the program of each device.
        order: For each device its actions in order: `put` (write inputs), `run` (execute), `keep` (retain results).
    """
    known = [tuple(map(id, run)) for run in programs_by_run]
    calls_by_programs = {
        key: _list_calls_with_participants(run) for key, run in dict(zip(known, programs_by_run, strict=True)).items()
    }
    complaints = [why for own in calls_by_programs.values() for why in _find_collective_that_joins_all_devices(own)]
    wrong = next((len(each) for each in programs_by_run if len(each) != len(order)), len(order))
    if wrong != len(order):
        complaints.append(f"the programs are for {wrong} devices, but the order is for {len(order)}")
    complaints += [
        why
        for device, actions in enumerate(order)
        for why in _find_action_order_faults(device, actions, len(programs_by_run))
    ]
    yield from complaints
    if not complaints:
        yield from _find_collective_order_faults(
            [
                [
                    NextCollectiveOfDevice(action.run, call, participants)
                    for action in actions
                    if action.action == "run"
                    for call, participants in calls_by_programs[known[action.run]][device]
                ]
                for device, actions in enumerate(order)
            ]
        )


def find_collective_that_forbids_pipelining(programs: Sequence[Program]) -> Iterator[str]:
    """Yield a fault if one collective joins all devices, because runs of such a plan cannot be pipelined.

    In a pipeline, devices must work on different runs at the same time. Only the first such collective is reported.
    """
    return _find_collective_that_joins_all_devices(_list_calls_with_participants(programs))


def _list_calls_with_participants(programs: Sequence[Program]) -> CallsWithParticipants:
    """List the collective calls of each device, in program order, each with the numbers of the participating devices.

    The participants of a message are its sender and its receiver. The participants of another collective are all
    devices that call a collective with the same sequence number.
    """
    calls_by_device = [list_collective_calls(device, program) for device, program in enumerate(programs)]
    members: dict[int, dict[int, None]] = {}
    for a in (a for calls in calls_by_device for a in calls if a.op not in POINT_TO_POINT_OPS):
        members.setdefault(a.sequence, {})[a.device] = None
    participants = {sequence: tuple(own) for sequence, own in members.items()}
    return [
        [(a, _list_sender_and_receiver(a) if a.op in POINT_TO_POINT_OPS else participants[a.sequence]) for a in calls]
        for calls in calls_by_device
    ]


def _list_sender_and_receiver(message: CollectiveCall) -> tuple[int, ...]:
    """List the device numbers of the sender and of the receiver of a message."""
    if message.op == "send":
        return message.device, narrow_to_integer(message.attributes["to"])
    return narrow_to_integer(message.attributes["source"]), message.device


def _find_collective_that_joins_all_devices(calls_by_device: CallsWithParticipants) -> Iterator[str]:
    """Yield a fault for the first collective in which all devices participate. Messages do not count."""
    every = (
        a
        for calls in calls_by_device
        for a, participants in calls
        if a.op not in POINT_TO_POINT_OPS and len(participants) == len(calls_by_device)
    )
    if a := next(every, None):
        yield (
            f"{a} joins all devices; pipelined runs need stages that exchange messages, or collective "
            "groups of some devices"
        )


def _find_action_order_faults(device: int, actions: Sequence[PipelineAction], run_count: int) -> Iterator[str]:
    """Yield faults of one device's actions: an action that would find another run's data in the arena or the states.

    - The actions of a run must be `put`, `run`, `keep`, without an action of another run between them. The arena has
      room for one run only.
    - Runs must be executed in order, because each run reads the states that the run before it left.

    Args:
        device: The number of the device, for messages.
        actions: Its actions, in order.
        run_count: The number of runs that must be executed.
    """
    current_run, follows, state = -1, "put", 0
    for what, run in actions:
        where = f"device {device}: {what} {run}"
        if what != follows:
            yield (
                f"{where}: "
                + {
                    "put": f"the arena has no inputs after those of run {current_run}",
                    "run": f"the arena has inputs of run {current_run}, which has not begun yet",
                    "keep": f"the arena has results of run {current_run}, which are not retained yet",
                }[follows]
            )
        elif what != "put" and run != current_run:
            yield f"{where}: the arena belongs to run {current_run}"
        if what == "run":
            if run != state:
                yield f"{where}: the states are from before run {state}"
            state = run + 1
        current_run, follows = run, NEXT_ACTION[what]
    if follows != "put":
        yield f"device {device}: run {current_run} begins, but its results are not retained"
    if state != run_count:
        yield f"device {device}: it executes {state} of {format_count(run_count, 'run')}"


def _find_collective_order_faults(calls_by_device: Sequence[Sequence[NextCollectiveOfDevice]]) -> Iterator[str]:
    """Simulate the collectives of all devices over all runs, and yield the first mismatch or a deadlock.

    A collective is executed when all participants have reached it. It is a mismatch if a participant has reached
    another collective instead, or the collective of another run. It is a deadlock if calls wait for each other.
    """
    at = [0] * len(calls_by_device)

    def next_of(device: int) -> NextCollectiveOfDevice | None:
        return calls_by_device[device][at[device]] if at[device] < len(calls_by_device[device]) else None

    moved = True
    while moved:
        moved = False
        for device in range(len(calls_by_device)):
            if (mine := next_of(device)) is None or mine.participants[0] != device:
                continue
            others = [
                other
                for d in mine.participants
                if (other := next_of(d)) is not None and other.participants == mine.participants
            ]
            if len(others) < len(mine.participants):
                continue
            if strange := [
                other
                for other in others
                if (other.run, _make_participant_agreement_key(other))
                != (mine.run, _make_participant_agreement_key(mine))
            ]:
                yield f"{strange[0]} does not match {mine}"
                return
            for d in mine.participants:
                at[d] += 1
            moved = True
    waiting = [str(coming) for device in range(len(calls_by_device)) if (coming := next_of(device)) is not None]
    if waiting:
        yield f"devices wait for each other: {'; '.join(waiting)}"


def _make_participant_agreement_key(pending: NextCollectiveOfDevice) -> tuple[object, int]:
    """Return the op and the sequence number of a pending collective, on which all participants must agree.

    `send` and `receive` count as the same op.
    """
    return pending.call.op in POINT_TO_POINT_OPS or pending.call.op, pending.call.sequence
