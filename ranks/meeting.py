"""How devices of several ranks meet: the communicators of a plan whose lanes run in different processes.

All devices send what they have as packets, those of one rank, too, so that there is one way.  Where all ranks are on
one machine, compiled code sums through memory that they share (`Slabs`) and needs no packets for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Array, Device, Slabs
from ..backends.board import BOARD_FAILED, end_run, new_board
from ..graph.dtypes import DType
from .arrays import packed, unpacked
from .world import DATA, World

BLOCKS = 64 * 1024
"""Bytes of a value from which on each device sums a part of it for all, instead of all of it for itself."""
SLAB = 64 * 1024
"""Float32 of each device that are summed at once through shared memory."""


class Between:
    """Devices by number, each on a rank; `own` are those of this one."""

    world: World
    ranks: tuple[int, ...]
    own: tuple[int, ...]

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.own = tuple(d for d, rank in enumerate(ranks) if rank == world.rank)
        self._slabs: Slabs | None = None

    @property
    def is_wide(self) -> bool:
        return self.world.size > 1

    def everywhere(self, parts: Mapping[int, Any], needed: Sequence[int]) -> dict[int, Any]:
        """What each `needed` device has: `parts` of devices of this rank, and what the others send; all ranks ask."""
        own = {device: parts[device] for device in needed if device in self.own}
        posted = [p for device, part in own.items() for p in self._post(part, device, range(self.world.size))]
        everybody = {d: own[d] if d in own else self._take(d) for d in needed}
        self.world.settle(posted)
        return everybody

    def one(self, parts: Mapping[int, Any], holders: Sequence[int]) -> Any:
        """What any of `holders`, which have the same, has: one of this rank, else the first, whose rank sends it to the
        ranks that have none."""
        if not self.is_wide:  # the way of every token on one machine
            return parts[holders[0]]
        first, lacking = holders[0], set(range(self.world.size)) - {self.ranks[d] for d in holders}
        posted = self._post(parts[first], first, sorted(lacking)) if first in self.own else []
        here = next((parts[d] for d in holders if d in self.own), None)
        part = self._take(first) if here is None else here
        self.world.settle(posted)
        return part

    def _post(self, part: Any, device: int, to: Sequence[int]) -> list[object]:
        others = [rank for rank in to if rank != self.world.rank]
        packet = packed(np.asarray(part), device) if others else None
        return [self.world.post(rank, self._channel(device), packet) for rank in others if packet is not None]

    def _take(self, device: int) -> Array:
        rank = self.ranks[device]
        packet = self.world.take(rank, self._channel(device))
        assert packet is not None  # it is waited for until it comes
        return unpacked(packet, self.world.name(rank), device)

    def slabs(self) -> Slabs | None:
        """Memory in which compiled code of several processes of one machine sums; None on several machines.  All ranks
        ask for it."""
        if self._slabs is None:
            head, devices = 16 + 8 * len(self.ranks), len(self.ranks)
            words = self.world.shared(head + devices * SLAB)
            if words is None:
                return None
            self._slabs = Slabs(words[:head], words[head:].view(np.float32).reshape(2, devices, SLAB))
            self.world.wakes(self._wake)
        return self._slabs

    def _wake(self, why: str) -> None:
        assert self._slabs is not None
        self._slabs.board[BOARD_FAILED] = 1

    def _channel(self, device: int) -> int:
        """On which a device's rank sends to all."""
        return DATA + len(self.ranks) ** 2 + device

    def channel(self, source: int, to: int) -> int:
        """On which a device sends to another."""
        return DATA + source * len(self.ranks) + to


class WideMeeting:
    """The place where devices of several ranks meet; `member(number)` is one end, of a device of this rank."""

    def __init__(
        self,
        between: Between,
        devices: Sequence[Device],
        timeout: float,
        wire: DType,
        teams: Sequence[Sequence[int]] = (),
        *,
        shares: bool = True,
    ) -> None:
        """`teams` says for each device whom it meets, itself among them; without it all meet each other.  `is_apart`
        will say whether some team has devices of several ranks.  Unless it `shares` a board with devices, they meet
        through memory of the host."""
        self.between, self.devices, self.timeout, self.wire = between, devices, timeout, wire
        everybody = tuple(range(len(devices)))
        self.teams = [tuple(team) for team in teams] or [everybody] * len(devices)
        is_one = all(team == everybody for team in self.teams)
        self.slabs = between.slabs() if is_one and len({d.kind for d in devices}) == 1 else None
        apart = {team for team in self.teams if len({between.ranks[d] for d in team}) > 1}
        self.is_apart = bool(apart)
        self.boards = {
            team: new_board(len(team)) for team in apart if shares and len({devices[d].kind for d in team}) == 1
        }
        between.world.wakes(self._wake)

    def member(self, number: int) -> WideMember:
        return WideMember(self, number)

    def abort(self, why: str) -> None:
        """A device of this rank failed: all ranks end."""
        self.between.world.fail(why)

    def _wake(self, why: str) -> None:
        for board in self.boards.values():
            board[BOARD_FAILED] = 1

    def clear(self) -> None:
        """Nothing stays of a run but its number, and that a rank has failed: it may have while the run ended."""
        for board in self.boards.values():
            end_run(board)
        self.between.world.remind()


class WideMember:
    """`Comm` of device `number`, whose thread calls it; `rank` is its place in its team."""

    is_apart: bool = True

    def __init__(self, meeting: WideMeeting, number: int) -> None:
        self.meeting, self.number, self.team = meeting, number, meeting.teams[number]
        self.rank, self.size, self.everybody = self.team.index(number), len(self.team), len(meeting.devices)
        self.timeout, self.wire, self.slabs = meeting.timeout, meeting.wire, meeting.slabs
        self.board: npt.NDArray[np.int64] | None = meeting.boards.get(self.team)
        self.devices: Sequence[Device] = [meeting.devices[d] for d in self.team]
        self._between, self._world = meeting.between, meeting.between.world

    def _post(self, array: Array, to: int, sequence: int) -> object:
        channel = self._between.channel(self.number, to)
        return self._world.post(self._between.ranks[to], channel, packed(array, sequence))

    def _take(self, source: int, sequence: int) -> Array:
        rank = self._between.ranks[source]
        packet = self._world.take(rank, self._between.channel(source, self.number), self.timeout)
        if packet is None:
            raise self._world.late(rank, self.timeout)
        return unpacked(packet, self._world.name(rank), sequence)

    def _exchange(self, own: Callable[[int], Array], sequence: int) -> list[Array]:
        """What each device of the team has for this one, in their order; ``own(to)`` is what this one has for that at
        place `to`."""
        others = [(place, d) for place, d in enumerate(self.team) if d != self.number]
        posted = [self._post(own(place), to, sequence) for place, to in others]
        arrays = [own(p) if d == self.number else self._take(d, sequence) for p, d in enumerate(self.team)]
        self._world.settle(posted, self.timeout)
        return arrays

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        if source.nbytes < BLOCKS or self.size < 3:
            np.copyto(into, _sum(self._exchange(lambda to: source, sequence)))
            return
        flat = np.ascontiguousarray(source).reshape(-1)
        bounds = [len(flat) * d // self.size for d in range(self.size + 1)]
        mine = _sum(self._exchange(lambda to: flat[bounds[to] : bounds[to + 1]], sequence))
        np.copyto(into, np.concatenate(self._exchange(lambda to: mine, sequence)).reshape(into.shape))

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        for array, pairs in zip(self._exchange(lambda to: source, sequence), parts, strict=True):
            for target, origin in pairs:
                np.copyto(into[target], array[origin])

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        total = _sum(self._exchange(lambda to: source, sequence))
        for target, origin in parts:
            np.copyto(into[target], total[origin])

    def send(self, source: Array, to: int, sequence: int) -> None:
        self._world.settle([self._post(source, to, sequence)], self.timeout)

    def receive(self, into: Array, source: int, sequence: int) -> None:
        np.copyto(into, self._take(source, sequence))


def _sum(arrays: Sequence[Array]) -> Array:
    """The sum in their order and in the narrowest dtype that anybody brings, so that it is the same everywhere."""
    wire = min((a.dtype for a in arrays), key=lambda d: (d.itemsize, d.str))
    total = arrays[0].astype(wire)
    for other in arrays[1:]:
        np.add(total, other.astype(wire, copy=False), out=total)
    return total
