"""The verifier of orders in which devices make runs that follow each other: does each find what it would find alone?

It walks through what all devices do.  Of each device it knows the run whose inputs, results and saves lie in the arena,
and the run whose states lie in the others; and the meeting that each is about to come to: a letter, or a collective of
its team.  Nobody is assumed to hold letters: who sends waits for who takes, so that the order is right however many are
held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...backends.base import Program
from ...ops.collectives import POINT_TO_POINT_OPS, as_integer
from ..acts import Act, Order
from .meetings import Appointment, appointments

NEXT = {"put": "run", "run": "keep", "keep": "put"}
"""What has to be done with the memory of a device before it may be used again."""
Met = Sequence[Sequence[tuple[Appointment, tuple[int, ...]]]]
"""The meetings of each device, and whom each of them joins: of a letter sender and receiver."""


class Coming(NamedTuple):
    """A meeting that a device comes to: in which run, what its program says of it, and with whom."""

    run: int
    said: Appointment
    team: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.said} in run {self.run}"


def order_faults(programs: Sequence[Sequence[Program]], order: Order) -> Iterator[str]:
    """Everything wrong with `order` as a way to make runs: for each run its programs, one a device."""
    known = [tuple(map(id, run)) for run in programs]
    met = {key: _met(run) for key, run in dict(zip(known, programs, strict=True)).items()}
    complaints = [why for own in met.values() for why in _meets_all(own)]
    wrong = next((len(each) for each in programs if len(each) != len(order)), len(order))
    if wrong != len(order):
        complaints.append(f"there are {wrong} devices, and {len(order)} are told what to do")
    complaints += [why for device, acts in enumerate(order) for why in _memory_faults(device, acts, len(programs))]
    yield from complaints
    if not complaints:
        yield from _meeting_faults(
            [
                [
                    Coming(act.run, said, team)
                    for act in acts
                    if act.what == "run"
                    for said, team in met[known[act.run]][device]
                ]
                for device, acts in enumerate(order)
            ]
        )


def meets_all(programs: Sequence[Program]) -> Iterator[str]:
    """A meeting that joins all of the devices that run these, if they have one."""
    return _meets_all(_met(programs))


def _met(programs: Sequence[Program]) -> Met:
    lanes = [appointments(device, program) for device, program in enumerate(programs)]
    members: dict[int, dict[int, None]] = {}
    for a in (a for lane in lanes for a in lane if a.op not in POINT_TO_POINT_OPS):
        members.setdefault(a.sequence, {})[a.device] = None
    teams = {sequence: tuple(own) for sequence, own in members.items()}
    return [[(a, _pair(a) if a.op in POINT_TO_POINT_OPS else teams[a.sequence]) for a in lane] for lane in lanes]


def _pair(letter: Appointment) -> tuple[int, ...]:
    if letter.op == "send":
        return letter.device, as_integer(letter.terms["to"])
    return as_integer(letter.terms["source"]), letter.device


def _meets_all(met: Met) -> Iterator[str]:
    every = (a for lane in met for a, team in lane if a.op not in POINT_TO_POINT_OPS and len(team) == len(met))
    if a := next(every, None):
        yield f"{a} joins all devices: runs follow each other only where devices meet by letters, or in teams"


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


def _meeting_faults(lanes: Sequence[Sequence[Coming]]) -> Iterator[str]:
    """Walk all devices through their meetings, to each of which they come together."""
    at = [0] * len(lanes)

    def next_of(device: int) -> Coming | None:
        return lanes[device][at[device]] if at[device] < len(lanes[device]) else None

    moved = True
    while moved:
        moved = False
        for device in range(len(lanes)):
            if (mine := next_of(device)) is None or mine.team[0] != device:
                continue
            others = [other for d in mine.team if (other := next_of(d)) is not None and other.team == mine.team]
            if len(others) < len(mine.team):
                continue
            if strange := [other for other in others if (other.run, _what(other)) != (mine.run, _what(mine))]:
                yield f"{strange[0]}: {mine} comes in its place"
                return
            for d in mine.team:
                at[d] += 1
            moved = True
    waiting = [str(coming) for device in range(len(lanes)) if (coming := next_of(device)) is not None]
    if waiting:
        yield f"devices wait for each other: {'; '.join(waiting)}"


def _what(coming: Coming) -> tuple[object, int]:
    """What those who come to a meeting say alike."""
    return coming.said.op in POINT_TO_POINT_OPS or coming.said.op, coming.said.sequence
