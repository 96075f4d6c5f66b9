"""Communicators of devices of one process, which exchange data through its memory.

They implement `Comm` of ``backends.base``.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.base import Array, Device, SharedCollectiveBuffers
from ..backends.host.progress_board import FAILURE_WORD, make_signal_pad, set_run_numbers_to_highest_and_clear_failure
from ..graph.dtypes import DType
from ..graph.errors import BackendError

MAX_PENDING_MESSAGES = 8
"""Maximum messages from one device to another that are not received yet: messages of two or three runs.

Pipeline stages differ in time. With two messages, fewer than one run has, each stage waited for the slowest stage.
"""


class ThreadGroup:
    """The state that the communicators of several threads of this process share; each thread runs one device.

    `member(rank)` is the communicator of one device. Sums are computed in rank order and in the narrowest dtype of the
    operands, so all devices get the same numbers.

    Args:
        size: Number of threads.
        timeout: Maximum seconds of a wait.
        devices: The devices, if all belong to one backend; else empty.
        wire: The dtype of a transfer.
    """

    def __init__(
        self, size: int, timeout: float = 60.0, *, devices: Sequence[Device] = (), wire: DType = DType.F32
    ) -> None:
        self.size, self.timeout, self.wire = size, timeout, wire
        self.devices: Sequence[Device] = tuple(devices)
        self.board = make_signal_pad(size) if devices else None
        self.barrier = threading.Barrier(size)
        self.messages: defaultdict[tuple[int, int], deque[tuple[int, Array]]] = defaultdict(deque)
        self.post = threading.Condition()
        self.posted: list[tuple[int, Any] | None] = [None] * size
        self.failure = ""

    def member(self, rank: int) -> ThreadGroupMember:
        return ThreadGroupMember(self, rank)

    def abort(self, why: str) -> None:
        """Wake all waiting threads after a failure of a member; they raise an error with the reason `why`."""
        self.failure = self.failure or why
        if self.board is not None:
            self.board[FAILURE_WORD] = 1
        self.barrier.abort()
        with self.post:
            self.post.notify_all()

    def clear_messages_and_failures(self) -> None:
        """Clear messages and failures after a run, when no thread waits."""
        self.messages.clear()
        self.posted[:] = [None] * self.size
        if self.failure or self.barrier.broken:
            self.failure = ""
            self.barrier.reset()
        if self.board is not None:
            set_run_numbers_to_highest_and_clear_failure(self.board)

    def wait_on_message_queues(self, condition: Callable[[], object], subject: str, reason: str) -> None:
        """Wait on the message queues until `condition` returns true; the caller holds the lock `post`.

        Raises:
            BackendError: `condition` stays false for `timeout` seconds. The message has `subject` and `reason`.
        """
        came = self.post.wait_for(lambda: condition() or bool(self.failure), self.timeout)
        if not came or not condition():
            raise BackendError(f"{subject}: {self.failure or f'{reason} within {self.timeout:g} s'}")

    def wait(self, rank: int, sequence: int) -> None:
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            why = self.failure or f"{self._describe_missing(sequence)} did not arrive within {self.timeout:g} s"
            raise BackendError(f"collective {sequence} on device {rank} of {self.size}: {why}") from None

    def _describe_missing(self, sequence: int) -> str:
        late = [str(d) for d, posted in enumerate(self.posted) if posted is None or posted[0] != sequence]
        return f"device {', '.join(late)}" if late else "a device"


class ThreadGroupMember:
    """The communicator (`Comm`) of one thread of a `ThreadGroup`."""

    spans_processes: bool = False

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.plan_device_count = group.size
        self.timeout, self.signal_pad, self.devices = group.timeout, group.board, group.devices
        self.shared_buffers: SharedCollectiveBuffers | None = None
        self.transfer_dtype = group.wire

    def exchange_values(self, own: Any, sequence: int) -> list[Any]:
        """Give a value to all members of the group, and return the values of all members in rank order.

        Values are not copied. The caller calls `wait` before it changes a value that others may still read.
        """
        self.group.posted[self.rank] = (sequence, own)
        self.group.wait(self.rank, sequence)
        values = []
        for rank, posted in enumerate(self.group.posted):
            assert posted is not None
            if posted[0] != sequence:
                raise BackendError(
                    f"device {rank} is at collective {posted[0]}, device {self.rank} at {sequence}: "
                    "the plans of the devices do not match"
                )
            values.append(posted[1])
        return values

    def _exchange_arrays_in_narrowest_dtype(self, source: Array, sequence: int) -> list[Array]:
        """Give `source` to all members; return the sources of all members in rank order, in their narrowest dtype."""
        return _cast_to_narrowest_dtype(self.exchange_values(source, sequence))

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        first, *others = self._exchange_arrays_in_narrowest_dtype(source, sequence)
        total = _reuse_or_allocate_accumulator(scratch, first)
        np.copyto(total, first)
        for other in others:
            np.add(total, other, out=total)
        self.group.wait(self.rank, sequence)  # no device overwrites a source that another still reads
        np.copyto(into, total)

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        arrays = self._exchange_arrays_in_narrowest_dtype(source, sequence)
        for array, pairs in zip(arrays, parts, strict=True):
            for target, origin in pairs:
                np.copyto(into[target], array[origin])
        self.group.wait(self.rank, sequence)

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        first, *others = self._exchange_arrays_in_narrowest_dtype(source, sequence)
        total = _reuse_or_allocate_accumulator(into, first)
        for target, origin in parts:
            np.copyto(total[target], first[origin])
            for other in others:
                np.add(total[target], other[origin], out=total[target])
        if total is not into:
            np.copyto(into, total)
        self.group.wait(self.rank, sequence)

    def send(self, source: Array, to: int, sequence: int) -> None:
        group, message = self.group, source.copy()
        with group.post:
            box = group.messages[self.rank, to]
            what = f"copy {sequence} from device {self.rank} of {self.size}"
            group.wait_on_message_queues(lambda: len(box) < MAX_PENDING_MESSAGES, what, f"device {to} took none")
            box.append((sequence, message))
            group.post.notify_all()

    def receive(self, into: Array, source: int, sequence: int) -> None:
        group, what = self.group, f"copy {sequence} to device {self.rank} of {self.size}"
        with group.post:
            box = group.messages[source, self.rank]
            group.wait_on_message_queues(lambda: box, what, f"device {source} sent nothing")
            number, message = box.popleft()
            group.post.notify_all()
        if number != sequence:
            raise BackendError(f"{what}: device {source} sent copy {number}; the plans of the devices do not match")
        np.copyto(into, message)


def _cast_to_narrowest_dtype(arrays: list[Array]) -> list[Array]:
    """Cast all arrays to the narrowest of their dtypes, so that all devices compute equal sums."""
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) == 1:
        return arrays
    wire = min(dtypes, key=lambda d: (d.itemsize, d.str))
    return [a.astype(wire) for a in arrays]


def _reuse_or_allocate_accumulator(candidate: Array, operand: Array) -> Array:
    """Return an array in which a sum can be accumulated: `candidate` if it has the dtype of `operand`.

    Otherwise it is a new array with the shape of `candidate` and the dtype of `operand`.
    """
    return candidate if candidate.dtype == operand.dtype else np.empty(candidate.shape, operand.dtype)
