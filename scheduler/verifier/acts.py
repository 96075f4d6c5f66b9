"""The verifier of orders in which devices make runs that follow each other: does each find what it would find alone?

It walks through what all devices do.  Of each device it knows the run whose inputs, results and saves lie in the arena,
and the run whose states lie in the others; of two devices, which letter the one is about to send, and the other about
to take.  Nobody is assumed to hold letters: who sends waits for who takes, so that the order is right however many are
held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...backends.base import Program
from ...ops.collective import LETTERS
from ..acts import Act, Order
from .meetings import Appointment, appointments

NEXT = {"put": "run", "run": "keep", "keep": "put"}
"""What has to be done with the memory of a device before it may be used again."""


class Letter(NamedTuple):
    """A letter at one of its ends: in which run, and what the program says of it."""

    run: int
    said: Appointment

    def __str__(self) -> str:
        return f"{self.said} in run {self.run}"


def order_faults(programs: Sequence[Sequence[Program]], order: Order) -> Iterator[str]:
    """Everything wrong with `order` as a way to make runs: for each run its programs, one a device."""
    complaints = [
        why for each in {tuple(map(id, run)): run for run in programs}.values() for why in meets_otherwise(each)
    ]
    wrong = next((len(each) for each in programs if len(each) != len(order)), len(order))
    if wrong != len(order):
        complaints.append(f"there are {wrong} devices, and {len(order)} are told what to do")
    complaints += [why for device, acts in enumerate(order) for why in _memory_faults(device, acts, len(programs))]
    yield from complaints
    if not complaints:
        known: dict[tuple[int, int], list[Appointment]] = {}
        for each in programs:
            for device, program in enumerate(each):
                if (device, id(program)) not in known:
                    known[device, id(program)] = appointments(device, program)
        yield from _letter_faults(
            [
                [Letter(a.run, m) for a in acts if a.what == "run" for m in known[device, id(programs[a.run][device])]]
                for device, acts in enumerate(order)
            ]
        )


def meets_otherwise(programs: Sequence[Program]) -> Iterator[str]:
    """A meeting that is no letter, if the devices that run these have one."""
    met = (a for device, program in enumerate(programs) for a in appointments(device, program))
    if other := next((a for a in met if a.op not in LETTERS), None):
        yield f"{other}: runs follow each other only where devices meet by letters"


def _memory_faults(device: int, acts: Sequence[Act], runs: int) -> Iterator[str]:
    """The arena has room for one run, and states are those that the run before has left."""
    held, follows, state = -1, "put", 0
    for what, run in acts:
        where = f"device {device}: {what} {run}"
        if what != follows:
            yield (
                f"{where}: "
                + {
                    "put": f"no inputs lie there since those of run {held}",
                    "run": f"inputs of run {held} lie there, which it has not read yet",
                    "keep": f"results of run {held} lie there, which nobody has kept",
                }[follows]
            )
        elif what != "put" and run != held:
            yield f"{where}: what lies there is of run {held}"
        if what == "run":
            if run != state:
                yield f"{where}: its states are those before run {state}"
            state = run + 1
        held, follows = run, NEXT[what]
    if follows != "put":
        yield f"device {device}: run {held} is begun, and not kept"
    if state != runs:
        yield f"device {device}: it makes {state} of {runs} runs"


def _letter_faults(lanes: Sequence[Sequence[Letter]]) -> Iterator[str]:
    """Walk all devices through their letters, each of which is sent when it is taken."""
    at = [0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for device, lane in enumerate(lanes):
            if at[device] == len(lane) or lane[at[device]].said.op != "send":
                continue
            sent = lane[at[device]]
            to = sent.said.terms["to"]
            assert isinstance(to, int)
            taken = lanes[to][at[to]] if at[to] < len(lanes[to]) else None
            if taken is None or taken.said.op != "receive" or taken.said.terms["source"] != device:
                continue
            if (taken.run, taken.said.sequence) != (sent.run, sent.said.sequence):
                yield f"{taken}: {sent} comes in its place"
                return
            at[device], at[to], moved = at[device] + 1, at[to] + 1, True
    waiting = [str(lane[i]) for lane, i in zip(lanes, at, strict=True) if i < len(lane)]
    if waiting:
        yield f"devices wait for each other: {'; '.join(waiting)}"
