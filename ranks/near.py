"""How devices of one process meet, which share its memory (the protocol is `Comm` in ``backends.base``)."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.base import Array, Device, Slabs
from ..backends.board import BOARD_FAILED, end_runs, new_board
from ..graph.dtypes import DType
from ..graph.errors import BackendError

DEPTH = 8
"""Letters that one device may have sent to another which that has not taken yet: those of two or three runs.  Stages of
a pipeline never take equally long; with two letters, less than those of a run, each of them waited for the slowest
(prompts of 2,048 tokens took 7 % longer, on two devices of one thread)."""


class Meeting:
    """The place where the threads of a group meet; `member(rank)` is one end.  `devices` are those of one backend that
    all of them belong to, none if there are several.

    Sums are taken in rank order and in the narrowest dtype anybody brings, so every device gets the same numbers.
    """

    def __init__(
        self, size: int, timeout: float = 60.0, *, devices: Sequence[Device] = (), wire: DType = DType.F32
    ) -> None:
        self.size, self.timeout, self.wire = size, timeout, wire
        self.devices: Sequence[Device] = tuple(devices)
        self.board = new_board(size) if devices else None
        self.barrier = threading.Barrier(size)
        self.mail: defaultdict[tuple[int, int], deque[tuple[int, Array]]] = defaultdict(deque)
        self.post = threading.Condition()
        self.posted: list[tuple[int, Any] | None] = [None] * size
        self.failure = ""

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def abort(self, why: str) -> None:
        """Wake everybody who waits: a member failed."""
        self.failure = self.failure or why
        if self.board is not None:
            self.board[BOARD_FAILED] = 1
        self.barrier.abort()
        with self.post:
            self.post.notify_all()

    def clear(self) -> None:
        """Forget what was sent, and that somebody failed: a run is over, and nobody waits."""
        self.mail.clear()
        self.posted[:] = [None] * self.size
        if self.failure or self.barrier.broken:
            self.failure = ""
            self.barrier.reset()
        if self.board is not None:
            end_runs(self.board)

    def wait_for_post(self, holds: Callable[[], object], what: str, why: str) -> None:
        """Wait, with `post` held, until that holds of the letters; `why` is what nobody did if it never does."""
        came = self.post.wait_for(lambda: holds() or bool(self.failure), self.timeout)
        if not came or not holds():
            raise BackendError(f"{what}: {self.failure or f'{why} within {self.timeout:g} s'}")

    def wait(self, rank: int, sequence: int) -> None:
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            why = self.failure or f"{self._missing(sequence)} did not arrive within {self.timeout:g} s"
            raise BackendError(f"collective {sequence} on device {rank} of {self.size}: {why}") from None

    def _missing(self, sequence: int) -> str:
        late = [str(d) for d, posted in enumerate(self.posted) if posted is None or posted[0] != sequence]
        return f"device {', '.join(late)}" if late else "a device"


class Member:
    """`Comm` of one thread."""

    is_apart: bool = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.everybody = meeting.size
        self.timeout, self.board, self.devices = meeting.timeout, meeting.board, meeting.devices
        self.slabs: Slabs | None = None
        self.wire = meeting.wire

    def exchanged(self, own: Any, sequence: int) -> list[Any]:
        """What everybody brings, in rank order, once all are there; who is done with it waits for the others."""
        self.meeting.posted[self.rank] = (sequence, own)
        self.meeting.wait(self.rank, sequence)
        brought = []
        for rank, posted in enumerate(self.meeting.posted):
            assert posted is not None
            if posted[0] != sequence:
                raise BackendError(
                    f"device {rank} is at collective {posted[0]}, device {self.rank} at {sequence}: "
                    "the plans of the devices do not match"
                )
            brought.append(posted[1])
        return brought

    def _exchange(self, source: Array, sequence: int) -> list[Array]:
        """Everybody's source, as it goes over the wire."""
        return _alike(self.exchanged(source, sequence))

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        first, *others = self._exchange(source, sequence)
        total = _as_wide(scratch, first)
        np.copyto(total, first)
        for other in others:
            np.add(total, other, out=total)
        self.meeting.wait(self.rank, sequence)  # nobody overwrites a source that another still reads
        np.copyto(into, total)

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        arrays = self._exchange(source, sequence)
        for array, pairs in zip(arrays, parts, strict=True):
            for target, origin in pairs:
                np.copyto(into[target], array[origin])
        self.meeting.wait(self.rank, sequence)

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        first, *others = self._exchange(source, sequence)
        total = _as_wide(into, first)
        for target, origin in parts:
            np.copyto(total[target], first[origin])
            for other in others:
                np.add(total[target], other[origin], out=total[target])
        if total is not into:
            np.copyto(into, total)
        self.meeting.wait(self.rank, sequence)

    def send(self, source: Array, to: int, sequence: int) -> None:
        meeting, letter = self.meeting, source.copy()
        with meeting.post:
            box = meeting.mail[self.rank, to]
            what = f"copy {sequence} from device {self.rank} of {self.size}"
            meeting.wait_for_post(lambda: len(box) < DEPTH, what, f"device {to} took none")
            box.append((sequence, letter))
            meeting.post.notify_all()

    def receive(self, into: Array, source: int, sequence: int) -> None:
        meeting, what = self.meeting, f"copy {sequence} to device {self.rank} of {self.size}"
        with meeting.post:
            box = meeting.mail[source, self.rank]
            meeting.wait_for_post(lambda: box, what, f"device {source} sent nothing")
            number, letter = box.popleft()
            meeting.post.notify_all()
        if number != sequence:
            raise BackendError(f"{what}: device {source} sent copy {number}; the plans of the devices do not match")
        np.copyto(into, letter)


def _alike(arrays: list[Array]) -> list[Array]:
    """Arrays as they go over the wire: where backends keep a value in several dtypes, in the narrowest of them, so
    that everybody ends with the same numbers."""
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) == 1:
        return arrays
    wire = min(dtypes, key=lambda d: (d.itemsize, d.str))
    return [a.astype(wire) for a in arrays]


def _as_wide(own: Array, wire: Array) -> Array:
    """`own` to sum in, or an array like it if the others sum in a narrower dtype."""
    return own if own.dtype == wire.dtype else np.empty(own.shape, wire.dtype)
