"""How devices of several ranks meet: the communicators of a plan whose lanes run in different processes.

Devices of one rank meet in its memory.  A sum over ranks is a sum within each of them, of which each device has a
piece; the sums of the pieces across ranks, which all devices of a rank send at once; and the pieces put together again
within each.  So no byte goes to another rank twice.  Where all ranks are on one machine, compiled code sums through
memory that they share (`Slabs`) and needs no packets for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Array, Device, Slabs
from ..backends.board import BOARD_FAILED, end_runs, new_board
from ..graph.dtypes import DType
from .arrays import packed, unpacked
from .near import Meeting
from .world import DATA, World

BLOCKS = 16 * 1024
"""Numbers from which on each rank sums a part of them for all, instead of all of them for itself."""
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
        own = {team: [d for d in team if d in between.own] for team in self.teams}
        self.near = {team: Meeting(len(mine), timeout) for team, mine in own.items() if mine}
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
        for meeting in self.near.values():
            meeting.abort(why)

    def clear(self) -> None:
        """Nothing stays of a run but its number, and that a rank has failed: it may have while the run ended."""
        for board in self.boards.values():
            end_runs(board)
        for meeting in self.near.values():
            meeting.clear()
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
        by_rank: dict[int, list[int]] = {}
        for device in self.team:
            by_rank.setdefault(self._between.ranks[device], []).append(device)
        self._mates = by_rank[self._world.rank]
        self._place = self._mates.index(number)
        self._near = meeting.near[self.team].member(self._place)
        self._groups = list(by_rank.values())
        self._pieces = min(map(len, self._groups))

    def _post(self, array: Array, to: int, sequence: int) -> object:
        channel = self._between.channel(self.number, to)
        return self._world.post(self._between.ranks[to], channel, packed(array, sequence))

    def _take(self, source: int, sequence: int) -> Array:
        rank = self._between.ranks[source]
        packet = self._world.take(rank, self._between.channel(source, self.number), self.timeout)
        if packet is None:
            raise self._world.late(rank, self.timeout)
        return unpacked(packet, self._world.name(rank), sequence)

    def _exchange(self, peers: Sequence[int], own: Callable[[int], Array], sequence: int) -> list[Array]:
        """What each of these devices, of which this is one, has for this one; ``own(to)`` is what this one has for that
        at place `to`."""
        others = [(place, d) for place, d in enumerate(peers) if d != self.number]
        posted = [self._post(own(place), to, sequence) for place, to in others]
        arrays = [own(p) if d == self.number else self._take(d, sequence) for p, d in enumerate(peers)]
        self._world.settle(posted, self.timeout)
        return arrays

    def _across(self, piece: Array, sequence: int) -> Array:
        """The sum over ranks of a piece, which the devices at this place of each of them have."""
        peers = [mates[self._place] for mates in self._groups]
        if len(piece) < BLOCKS or len(peers) < 3:
            return _sum(self._exchange(peers, lambda to: piece, sequence))
        blocks = _cut(len(piece), len(peers))
        mine = _sum(self._exchange(peers, lambda to: piece[blocks[to]], sequence))
        return np.concatenate(self._exchange(peers, lambda to: mine, sequence))

    def _total(self, source: Array, sequence: int) -> Array:
        """The sum over the team: of the devices of each rank in their order, then of the ranks in theirs."""
        flat, total = np.ascontiguousarray(source).reshape(-1), np.empty(source.size, source.dtype)
        pieces = [*_cut(flat.size, self._pieces), *[slice(0, 0)] * (len(self._mates) - self._pieces)]
        mine = pieces[self._place]
        whole = slice(0, mine.stop - mine.start)
        piece = np.empty(whole.stop, source.dtype)
        self._near.reduce_scatter(flat, piece, [(whole, mine)], sequence)
        if self._place < self._pieces:
            piece = self._across(piece, sequence)
        self._near.all_gather(piece, total, [[(at, slice(0, at.stop - at.start))] for at in pieces], sequence)
        return total.reshape(source.shape)

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        np.copyto(into, self._total(source, sequence))

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        total = self._total(source, sequence)
        for target, origin in parts:
            np.copyto(into[target], total[origin])

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """What a device has goes to one device of each other rank, which shows it to those beside it."""
        others = [mates for mates in self._groups if mates is not self._mates]
        posted = [self._post(source, mates[self._place % len(mates)], sequence) for mates in others]
        own = len(self._mates)
        brought = {d: self._take(d, sequence) for mates in others for d in mates[self._place :: own]}
        self._world.settle(posted, self.timeout)
        known: dict[int, Array] = {}
        for theirs in self._near.exchanged({self.number: source, **brought}, sequence):
            known |= theirs
        for device, pairs in zip(self.team, parts, strict=True):
            for target, origin in pairs:
                np.copyto(into[target], known[device][origin])
        self._near.meeting.wait(self._place, sequence)  # nobody overwrites a source that another still reads

    def send(self, source: Array, to: int, sequence: int) -> None:
        self._world.settle([self._post(source, to, sequence)], self.timeout)

    def receive(self, into: Array, source: int, sequence: int) -> None:
        np.copyto(into, self._take(source, sequence))


def _cut(size: int, count: int) -> list[slice]:
    """So many parts of about the same size."""
    bounds = [size * part // count for part in range(count + 1)]
    return [slice(*ends) for ends in pairwise(bounds)]


def _sum(arrays: Sequence[Array]) -> Array:
    """The sum in their order and in the narrowest dtype that anybody brings, so that it is the same everywhere."""
    wire = min((a.dtype for a in arrays), key=lambda d: (d.itemsize, d.str))
    total = arrays[0].astype(wire)
    for other in arrays[1:]:
        np.add(total, other.astype(wire, copy=False), out=total)
    return total
