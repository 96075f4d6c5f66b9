"""Communicators of one process: of several collective groups with messages between all devices, and of one device.

The protocol is `Comm` in ``backends.base``. `distributed.thread_group` has the communicators of a single group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...backends.base import Array, Comm, Device, SharedCollectiveBuffers
from ...distributed import World
from ...distributed.thread_group import ThreadGroup, ThreadGroupMember
from ...graph.dtypes import DType
from ...graph.errors import PlanError


class PointToPointGroup(Protocol):
    """The communicators for messages between any two devices, in one process or in several."""

    def member(self, number: int, /) -> Comm: ...
    def abort(self, why: str) -> None: ...
    def clear_messages_and_failures(self) -> None: ...


class CollectiveGroups:
    """The communicators of a plan in which collectives join only some devices, and messages join any two.

    An example is a pipeline of groups with tensor parallelism in each.
    """

    def __init__(
        self,
        groups_of_devices: Sequence[Sequence[int]],
        timeout: float = 60.0,
        *,
        devices: Sequence[Device] = (),
        wire: DType = DType.F32,
        message_group: PointToPointGroup | None = None,
    ) -> None:
        """Make a thread group for each collective group.

        Args:
            groups_of_devices: For each device the numbers of the devices of its group.
            timeout: Maximum seconds of a wait.
            devices: The devices, if all belong to one backend; else empty.
            wire: The dtype of transferred numbers.
            message_group: The communicator group for messages; by default a thread group of this process.
        """
        self.groups_of_devices = [tuple(group) for group in groups_of_devices]
        self.message_group = message_group or ThreadGroup(len(groups_of_devices), timeout, wire=wire)
        self.thread_groups = {
            group: ThreadGroup(len(group), timeout, devices=[devices[d] for d in group] if devices else (), wire=wire)
            for group in self.groups_of_devices
        }

    def member(self, number: int) -> CollectiveGroupMember:
        """Return the communicator of device `number`, a member of its collective group."""
        group = self.groups_of_devices[number]
        return CollectiveGroupMember(self.thread_groups[group], group.index(number), self.message_group.member(number))

    def abort(self, why: str) -> None:
        """Wake all waiting threads of all groups with an error, because a device failed."""
        for group in (self.message_group, *self.thread_groups.values()):
            group.abort(why)

    def clear_messages_and_failures(self) -> None:
        """Forget the pending messages and failures of all groups, after a run and when no thread waits.

        Messages are cleared last: messages between ranks keep the failure of a rank, and abort the groups again.
        """
        for group in (*self.thread_groups.values(), self.message_group):
            group.clear_messages_and_failures()


class CollectiveGroupMember(ThreadGroupMember):
    """The communicator of one device within its collective group.

    Its collectives stay within the group, but its messages go to any device of the plan.
    """

    def __init__(self, group: ThreadGroup, rank: int, message_comm: Comm) -> None:
        super().__init__(group, rank)
        self.plan_device_count, self._message_comm = message_comm.plan_device_count, message_comm

    def send(self, source: Array, to: int, sequence: int) -> None:
        self._message_comm.send(source, to, sequence)

    def receive(self, into: Array, source: int, sequence: int) -> None:
        self._message_comm.receive(into, source, sequence)


def make_local_communicator_group(
    groups_of_devices: Sequence[Sequence[int]],
    timeout: float = 60.0,
    *,
    devices: Sequence[Device] = (),
    wire: DType = DType.F32,
) -> ThreadGroup | CollectiveGroups:
    """Make the communicators of all devices within one process.

    If all devices are in one collective group, the result is one thread group. Otherwise it has a thread group for each
    collective group, and messages between all devices.

    Args:
        groups_of_devices: For each device the numbers of the devices of its collective group.
        timeout: Maximum seconds of a wait.
        devices: The devices, if all belong to one backend; else empty.
        wire: The dtype of transferred numbers.
    """
    if len(set(map(tuple, groups_of_devices))) == 1:
        return ThreadGroup(len(groups_of_devices), timeout, devices=devices, wire=wire)
    return CollectiveGroups(groups_of_devices, timeout, devices=devices, wire=wire)


class SingleDeviceComm:
    """The communicator of a plan on one device: each collective only copies its operand."""

    rank: int = 0
    size: int = 1
    plan_device_count: int = 1
    spans_processes: bool = False
    timeout: float = 0.0
    signal_pad: npt.NDArray[np.int64] | None = None
    shared_buffers: SharedCollectiveBuffers | None = None
    devices: Sequence[Device] = ()
    transfer_dtype: DType = DType.F32

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        np.copyto(into, source)

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        for target, origin in parts[0]:
            np.copyto(into[target], source[origin])

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        for target, origin in parts:
            np.copyto(into[target], source[origin])

    def send(self, source: Array, to: int, sequence: int) -> None:
        """Do nothing, because there is no receiver."""

    def receive(self, into: Array, source: int, sequence: int) -> None:
        """Fill the array with zeros, because there is no sender."""
        into[...] = 0


def find_device_rank(device: Device, world: World) -> int:
    """Return the rank (number) of the process to which a device belongs. Raises `PlanError` if there is none."""
    if device.rank is None and world.size > 1:
        raise PlanError(f"device {device}: say of which of {world.size} processes, as {device}@0")
    if (device.rank or 0) >= world.size:
        raise PlanError(
            f"device {device} is one of process {device.rank}, but the last one is {world.size - 1}; "
            f"start more, as mpiexec -n {(device.rank or 0) + 1} hocket ..."
        )
    return device.rank or 0
