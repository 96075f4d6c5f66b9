"""The collective calls of all devices, and the check that they match and do not deadlock.

All participants must call each collective. A device has the same participants in all collectives, which are its
collective group. Messages (`send` and `receive`) go from any device to any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....backends.base import Instruction, Program
from ....graph.attrs import Attr, quote_node_name
from ....graph.spec import Spec
from ....ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective, such as an all-reduce or a send, in the program of one device.

    - `device`: the number of the device.
    - `op`, `attributes`: the op and its attributes.
    - `sequence`: the sequence number; calls with the same number belong together.
    - `specs`: the specs of the operands, followed by the specs of the results.
    - `node`: the name of the node.
    """

    device: int
    op: str
    sequence: int
    attributes: Mapping[str, Attr]
    specs: tuple[Spec | None, ...]
    node: str

    @property
    def participant_agreement_key(self) -> tuple[object, ...]:
        """The properties that must be equal in the calls of all participants.

        These are the op and all attributes except the rank. For an all-reduce they include shapes and dtypes. Other
        collectives may have shards of different sizes.
        """
        terms = tuple((k, v) for k, v in sorted(self.attributes.items()) if k != "rank")
        return self.op, terms, make_shape_and_dtype_key(self.specs) if self.op == "all_reduce" else ()

    def __str__(self) -> str:
        return f"{self.op} {self.sequence} (%{quote_node_name(self.node)}) of device {self.device}"


def make_shape_and_dtype_key(specs: Sequence[Spec | None]) -> tuple[object, ...]:
    """Return a key of the shapes and dtypes of a transfer that must be equal on all participants.

    All float dtypes count as one dtype, because devices may store a value in different precisions.
    """
    return tuple(None if s is None else (s.shape, "float" if s.dtype.is_float else s.dtype) for s in specs)


def list_collective_calls(device: int, program: Program) -> list[CollectiveCall]:
    """List the collective calls of one device, in program order."""
    return [_make_collective_call(device, i) for i in program.instructions if i.op in COLLECTIVES]


def _make_collective_call(device: int, instruction: Instruction) -> CollectiveCall:
    """Return the data of a collective instruction that the checks compare between devices."""
    number = instruction.attrs["sequence"]
    assert isinstance(number, int)
    shapes = (*(None if t is None else t.spec for t in instruction.src), *(t.spec for t in instruction.dst))
    return CollectiveCall(device, instruction.op, number, instruction.attrs, shapes, instruction.node)


def find_collective_faults(programs: Sequence[Program]) -> Iterator[str]:
    """Yield as text the faults of the collective calls of all devices.

    Faults are missing participants, different calls, calls in a wrong order, and deadlocks.
    """
    calls_by_device = [list_collective_calls(d, p) for d, p in enumerate(programs)]
    complaints = [*_find_group_faults(calls_by_device), *_find_send_receive_mismatches(calls_by_device)]
    for calls in calls_by_device:
        times = Counter((a.sequence, a.op) for a in calls)
        complaints += [f"{a} is called twice" for a in calls if times[a.sequence, a.op] > 1]
        complaints += [f"{b} runs after {a}" for a, b in pairwise(calls) if b.sequence < a.sequence]
    yield from complaints
    if not complaints:
        yield from find_deadlocks(calls_by_device)


def _find_group_faults(calls_by_device: Sequence[Sequence[CollectiveCall]]) -> Iterator[str]:
    """Yield faults of collectives in a device group: a missing participant, unequal calls, or a wrong rank.

    The group of a device has all devices with which it shares a collective. All of them must call all its collectives.
    """
    groups: dict[int, dict[int, CollectiveCall]] = {}
    for call in (a for calls in calls_by_device for a in calls if a.op not in POINT_TO_POINT_OPS):
        groups.setdefault(call.sequence, {})[call.device] = call
    participants: dict[int, set[int]] = {}  # all participants of a device
    for members in groups.values():
        for device in members:
            participants.setdefault(device, set()).update(members)
    for members in groups.values():
        first = next(iter(members.values()))
        missing = sorted(set().union(*(participants[d] for d in members)) - members.keys())
        if missing:
            yield f"{first}: device {missing[0]} does not call it"
        for place, other in enumerate(members.values()):
            if other.participant_agreement_key != first.participant_agreement_key:
                yield f"{first} does not match {other}"
            if "rank" in other.attributes and other.attributes["rank"] != place:
                yield f"{other}: its rank is {other.attributes['rank']!r}, need {place}"


def _find_send_receive_mismatches(calls_by_device: Sequence[Sequence[CollectiveCall]]) -> Iterator[str]:
    """Yield faults of messages: a send without a receive, a receive without a send, or different specs of the two."""
    sent = {(a.device, a.attributes["to"], a.sequence): a for calls in calls_by_device for a in calls if a.op == "send"}
    received = {
        (a.attributes["source"], a.device, a.sequence): a
        for calls in calls_by_device
        for a in calls
        if a.op == "receive"
    }
    for key, a in sent.items():
        if key not in received:
            yield f"{a}: device {key[1]!r} does not receive it"
        elif make_shape_and_dtype_key(received[key].specs) != make_shape_and_dtype_key(a.specs[-1:]):
            yield f"{a} sends {a.specs[-1]}, but {received[key]} receives {received[key].specs[-1]}"
    for message_key, a in received.items():
        if message_key not in sent:
            yield f"{a}: device {message_key[0]!r} does not send it"


def find_deadlocks(calls_by_device: Sequence[Sequence[CollectiveCall]]) -> Iterator[str]:
    """Simulate the collective calls of all devices in program order, and yield the calls that wait for each other.

    A send ends at once. A receive waits for its send. All other collectives wait for all participants.
    """
    at = [0] * len(calls_by_device)
    sizes = Counter(a.sequence for calls in calls_by_device for a in calls if a.op not in POINT_TO_POINT_OPS)
    sent: set[tuple[object, ...]] = set()
    while True:
        before = list(at)
        for device, calls in enumerate(calls_by_device):
            while at[device] < len(calls) and calls[at[device]].op in POINT_TO_POINT_OPS:
                a = calls[at[device]]
                if a.op == "send":
                    sent.add((a.device, a.attributes["to"], a.sequence))
                elif (a.attributes["source"], a.device, a.sequence) not in sent:
                    break
                at[device] += 1
        here = [calls[i] if i < len(calls) else None for calls, i in zip(calls_by_device, at, strict=True)]
        there = Counter(a.sequence for a in here if a is not None and a.op not in POINT_TO_POINT_OPS)
        for device, call in enumerate(here):
            if call is not None and call.op not in POINT_TO_POINT_OPS:
                at[device] += there[call.sequence] == sizes[call.sequence]
        if at == before:
            break
    waiting = [str(calls[i]) for calls, i in zip(calls_by_device, at, strict=True) if i < len(calls)]
    if waiting:
        yield f"devices wait for each other: {'; '.join(waiting)}"
