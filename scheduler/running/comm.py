"""Communicators of one process: in teams, with letters between all; of one device (the protocol is `Comm` in
``backends.base``).  How devices of one team meet is in `distributed.thread_group`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...backends.base import Array, Comm, Device, Slabs
from ...distributed.thread_group import ThreadGroup, ThreadGroupMember
from ...graph.dtypes import DType


class Letters(Protocol):
    """Where letters go between all devices: those of a process, or of several."""

    def member(self, number: int, /) -> Comm: ...
    def abort(self, why: str) -> None: ...
    def clear(self) -> None: ...


class Teams:
    """The place where the threads of several teams meet, each team by itself, and where letters go between all."""

    def __init__(
        self,
        teams: Sequence[Sequence[int]],
        timeout: float = 60.0,
        *,
        devices: Sequence[Device] = (),
        wire: DType = DType.F32,
        letters: Letters | None = None,
    ) -> None:
        """`teams` says for each device of which it is; `devices` as for `Meeting`; `letters` go within the process
        unless given."""
        self.teams = [tuple(team) for team in teams]
        self.letters = letters or ThreadGroup(len(teams), timeout, wire=wire)
        self.meetings = {
            team: ThreadGroup(len(team), timeout, devices=[devices[d] for d in team] if devices else (), wire=wire)
            for team in self.teams
        }

    def member(self, number: int) -> TeamMember:
        team = self.teams[number]
        return TeamMember(self.meetings[team], team.index(number), self.letters.member(number))

    def abort(self, why: str) -> None:
        """Wake everybody who waits: a member failed."""
        for meeting in (self.letters, *self.meetings.values()):
            meeting.abort(why)

    def clear(self) -> None:
        """Forget what was sent, and that somebody failed: a run is over, and nobody waits.  Letters come last: those
        between ranks do not forget that a rank failed, and wake the teams again."""
        for meeting in (*self.meetings.values(), self.letters):
            meeting.clear()


class TeamMember(ThreadGroupMember):
    """`Comm` of one thread of a team; its letters go by the numbers of all devices."""

    def __init__(self, meeting: ThreadGroup, rank: int, letters: Comm) -> None:
        super().__init__(meeting, rank)
        self.everybody, self._letters = letters.everybody, letters

    def send(self, source: Array, to: int, sequence: int) -> None:
        self._letters.send(source, to, sequence)

    def receive(self, into: Array, source: int, sequence: int) -> None:
        self._letters.receive(into, source, sequence)


def meeting_of(
    teams: Sequence[Sequence[int]], timeout: float = 60.0, *, devices: Sequence[Device] = (), wire: DType = DType.F32
) -> ThreadGroup | Teams:
    """Where the devices of one process meet: all of them, or in teams."""
    if len(set(map(tuple, teams))) == 1:
        return ThreadGroup(len(teams), timeout, devices=devices, wire=wire)
    return Teams(teams, timeout, devices=devices, wire=wire)


class Alone:
    """`Comm` of a group of one: every collective is a copy."""

    rank: int = 0
    size: int = 1
    everybody: int = 1
    is_apart: bool = False
    timeout: float = 0.0
    board: npt.NDArray[np.int64] | None = None
    slabs: Slabs | None = None
    devices: Sequence[Device] = ()
    wire: DType = DType.F32

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        np.copyto(into, source)

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        for target, origin in parts[0]:
            np.copyto(into[target], source[origin])

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        for target, origin in parts:
            np.copyto(into[target], source[origin])

    def send(self, source: Array, to: int, sequence: int) -> None:
        """Nobody is there to receive."""

    def receive(self, into: Array, source: int, sequence: int) -> None:
        into[...] = 0
