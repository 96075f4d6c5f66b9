"""Communicators of devices that belong to several ranks.

Devices of one rank exchange data through the memory of the rank. A sum over ranks has three steps:

1. A reduce-scatter within each rank: each device has the sum of one slice.
2. A sum of each slice over the ranks: the devices of a rank send at the same time.
3. An all-gather of the slices within each rank.

No byte is sent to another rank twice. If all ranks are on one machine, compiled code sums through shared memory
(`SharedCollectiveBuffers`) and needs no packets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Array, Device, SharedCollectiveBuffers
from ..backends.host.progress_board import FAILURE_WORD, make_signal_pad, set_run_numbers_to_highest_and_clear_failure
from ..graph.dtypes import DType
from .array_packets import pack_array, unpack_array
from .thread_group import ThreadGroup
from .world import DATA, World

MIN_DISTRIBUTED_SUM = 16 * 1024
"""Minimum elements of a sum that the ranks compute in parts; each rank computes all of a smaller sum."""
SHARED_SUM_ELEMENTS = 64 * 1024
"""Float32 elements of each device in one step of a sum through shared memory."""


class DevicePlacement:
    """The rank on which each device runs, and methods that exchange the devices' parts of a value between ranks.

    `local_devices` are the devices of this rank.
    """

    world: World
    ranks: tuple[int, ...]
    local_devices: tuple[int, ...]

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.local_devices = tuple(d for d, rank in enumerate(ranks) if rank == world.rank)
        self._shared_buffers: SharedCollectiveBuffers | None = None

    @property
    def spans_ranks(self) -> bool:
        return self.world.size > 1

    def exchange_parts(self, parts: Mapping[int, Any], needed: Sequence[int]) -> dict[int, Any]:
        """Exchange parts between ranks: return the part of each `needed` device, on all ranks.

        All ranks call the method.

        Args:
            parts: The parts of the devices of this rank.
            needed: The devices.
        """
        own = {device: parts[device] for device in needed if device in self.local_devices}
        posted = [p for device, part in own.items() for p in self._send(part, device, range(self.world.size))]
        all_parts = {d: own[d] if d in own else self._receive(d) for d in needed}
        self.world.wait_until_sent(posted)
        return all_parts

    def broadcast_part(self, parts: Mapping[int, Any], holders: Sequence[int]) -> Any:
        """Return, on all ranks, the part that the devices `holders` have. They all have the same part.

        A rank without a holder receives the part from the rank of the first holder.

        Args:
            parts: The parts of the devices of this rank.
            holders: The devices that have the part.
        """
        if not self.spans_ranks:  # the path of every token on one machine
            return parts[holders[0]]
        first, lacking = holders[0], set(range(self.world.size)) - {self.ranks[d] for d in holders}
        posted = self._send(parts[first], first, sorted(lacking)) if first in self.local_devices else []
        here = next((parts[d] for d in holders if d in self.local_devices), None)
        part = self._receive(first) if here is None else here
        self.world.wait_until_sent(posted)
        return part

    def _send(self, part: Any, device: int, to: Sequence[int]) -> list[object]:
        others = [rank for rank in to if rank != self.world.rank]
        packet = pack_array(np.asarray(part), device) if others else None
        return [
            self.world.start_sending_packet(rank, self._find_broadcast_channel(device), packet)
            for rank in others
            if packet is not None
        ]

    def _receive(self, device: int) -> Array:
        rank = self.ranks[device]
        packet = self.world.receive_packet(rank, self._find_broadcast_channel(device))
        assert packet is not None  # there is no timeout
        return unpack_array(packet, self.world.describe_rank(rank), device)

    def open_shared_sum_buffers(self) -> SharedCollectiveBuffers | None:
        """Return buffers that all ranks share, in which compiled code computes sums; None on several machines.

        The first call allocates the buffers. All ranks call the method.
        """
        if self._shared_buffers is None:
            head, devices = 16 + 8 * len(self.ranks), len(self.ranks)
            words = self.world.allocate_zeroed_shared_words(head + devices * SHARED_SUM_ELEMENTS)
            if words is None:
                return None
            self._shared_buffers = SharedCollectiveBuffers(
                words[:head], words[head:].view(np.float32).reshape(2, devices, SHARED_SUM_ELEMENTS)
            )
            self.world.register_failure_callback(self._wake)
        return self._shared_buffers

    def _wake(self, why: str) -> None:
        assert self._shared_buffers is not None
        self._shared_buffers.signal_pad[FAILURE_WORD] = 1

    def _find_broadcast_channel(self, device: int) -> int:
        """Return the channel of the packets that broadcast the part of a device from its rank to the other ranks."""
        return DATA + len(self.ranks) ** 2 + device

    def find_pair_channel(self, source: int, to: int) -> int:
        """Return the channel on which device `source` sends to device `to`."""
        return DATA + source * len(self.ranks) + to


class RankGroup:
    """The state that all communicators of this rank share, for devices on several ranks.

    `member(number)` is the communicator of one device of this rank.
    """

    def __init__(
        self,
        between: DevicePlacement,
        devices: Sequence[Device],
        timeout: float,
        wire: DType,
        collective_groups: Sequence[Sequence[int]] = (),
        *,
        shares: bool = True,
    ) -> None:
        """Create the group; `is_apart` tells whether a collective group has devices of several ranks.

        Args:
            between: The rank of each device.
            devices: All devices.
            timeout: Maximum seconds of a wait.
            wire: The dtype of a transfer.
            collective_groups: For each device the devices of its collectives, itself included; all devices by default.
            shares: Whether devices may share a signal pad. Without it, they exchange data through host memory.
        """
        self.between, self.devices, self.timeout, self.wire = between, devices, timeout, wire
        all_devices = tuple(range(len(devices)))
        self.collective_groups = [tuple(group) for group in collective_groups] or [all_devices] * len(devices)
        is_one = all(group == all_devices for group in self.collective_groups)
        self.shared_buffers = (
            between.open_shared_sum_buffers() if is_one and len({d.kind for d in devices}) == 1 else None
        )
        apart = {group for group in self.collective_groups if len({between.ranks[d] for d in group}) > 1}
        self.is_apart = bool(apart)
        own = {group: [d for d in group if d in between.local_devices] for group in self.collective_groups}
        self.thread_groups = {group: ThreadGroup(len(mine), timeout) for group, mine in own.items() if mine}
        self.signal_pads = {
            group: make_signal_pad(len(group))
            for group in apart
            if shares and len({devices[d].kind for d in group}) == 1
        }
        between.world.register_failure_callback(self._wake)

    def member(self, number: int) -> RankGroupMember:
        return RankGroupMember(self, number)

    def abort(self, why: str) -> None:
        """Wake all waiting devices and announce the failure to all ranks, with the reason `why`."""
        self.between.world.announce_failure(why)

    def _wake(self, why: str) -> None:
        for board in self.signal_pads.values():
            board[FAILURE_WORD] = 1
        for group in self.thread_groups.values():
            group.abort(why)

    def clear_messages_and_failures(self) -> None:
        """Clear messages and failures after a run; run numbers stay.

        If a rank has failed in the meantime, its failure is reported again.
        """
        for board in self.signal_pads.values():
            set_run_numbers_to_highest_and_clear_failure(board)
        for group in self.thread_groups.values():
            group.clear_messages_and_failures()
        self.between.world.call_failure_callbacks_again()


class RankGroupMember:
    """The communicator (`Comm`) of device number `number` in a `RankGroup`. The thread of the device calls it.

    `rank` is the index of the device in its collective group, not the rank of the process.
    """

    spans_processes: bool = True

    def __init__(self, group: RankGroup, number: int) -> None:
        self.group, self.number, self.device_numbers = group, number, group.collective_groups[number]
        self.rank, self.size, self.plan_device_count = (
            self.device_numbers.index(number),
            len(self.device_numbers),
            len(group.devices),
        )
        self.timeout, self.transfer_dtype, self.shared_buffers = group.timeout, group.wire, group.shared_buffers
        self.signal_pad: npt.NDArray[np.int64] | None = group.signal_pads.get(self.device_numbers)
        self.devices: Sequence[Device] = [group.devices[d] for d in self.device_numbers]
        self._between, self._world = group.between, group.between.world
        by_rank: dict[int, list[int]] = {}
        for device in self.device_numbers:
            by_rank.setdefault(self._between.ranks[device], []).append(device)
        self._mates = by_rank[self._world.rank]
        self._place = self._mates.index(number)
        self._thread_member = group.thread_groups[self.device_numbers].member(self._place)
        self._groups = list(by_rank.values())
        self._slice_count = min(map(len, self._groups))

    def _send(self, array: Array, to: int, sequence: int) -> object:
        channel = self._between.find_pair_channel(self.number, to)
        return self._world.start_sending_packet(self._between.ranks[to], channel, pack_array(array, sequence))

    def _receive(self, source: int, sequence: int) -> Array:
        rank = self._between.ranks[source]
        packet = self._world.receive_packet(rank, self._between.find_pair_channel(source, self.number), self.timeout)
        if packet is None:
            raise self._world.record_timeout(rank, self.timeout)
        return unpack_array(packet, self._world.describe_rank(rank), sequence)

    def _exchange_arrays(self, peers: Sequence[int], own: Callable[[int], Array], sequence: int) -> list[Array]:
        """Exchange arrays with the devices `peers`, and return the arrays that they send to this device.

        This device may be one of the peers.

        Args:
            peers: The devices.
            own: Returns the array for a peer, by its index in `peers`.
            sequence: Number of the collective, equal on all members.
        """
        others = [(place, d) for place, d in enumerate(peers) if d != self.number]
        posted = [self._send(own(place), to, sequence) for place, to in others]
        arrays = [own(p) if d == self.number else self._receive(d, sequence) for p, d in enumerate(peers)]
        self._world.wait_until_sent(posted, self.timeout)
        return arrays

    def _sum_over_ranks(self, part: Array, sequence: int) -> Array:
        """Sum a slice over all ranks: each rank takes part with the device that has the same index as this one.

        Large slices are divided into blocks. Each rank sums one block and sends the sum to the others.
        """
        peers = [mates[self._place] for mates in self._groups]
        if len(part) < MIN_DISTRIBUTED_SUM or len(peers) < 3:
            return _sum_in_order_in_narrowest_dtype(self._exchange_arrays(peers, lambda to: part, sequence))
        blocks = _split_into_even_slices(len(part), len(peers))
        mine = _sum_in_order_in_narrowest_dtype(self._exchange_arrays(peers, lambda to: part[blocks[to]], sequence))
        return np.concatenate(self._exchange_arrays(peers, lambda to: mine, sequence))

    def _sum_over_group(self, source: Array, sequence: int) -> Array:
        """Return the sum of an array over all devices of the collective group.

        Addends are in the order of devices within a rank, then in rank order.
        """
        flat, total = np.ascontiguousarray(source).reshape(-1), np.empty(source.size, source.dtype)
        slices = [
            *_split_into_even_slices(flat.size, self._slice_count),
            *[slice(0, 0)] * (len(self._mates) - self._slice_count),
        ]
        mine = slices[self._place]
        whole = slice(0, mine.stop - mine.start)
        partial_sum = np.empty(whole.stop, source.dtype)
        self._thread_member.reduce_scatter(flat, partial_sum, [(whole, mine)], sequence)
        if self._place < self._slice_count:
            partial_sum = self._sum_over_ranks(partial_sum, sequence)
        self._thread_member.all_gather(
            partial_sum, total, [[(at, slice(0, at.stop - at.start))] for at in slices], sequence
        )
        return total.reshape(source.shape)

    def all_reduce(self, source: Array, into: Array, scratch: Array, sequence: int) -> None:
        np.copyto(into, self._sum_over_group(source, sequence))

    def reduce_scatter(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        total = self._sum_over_group(source, sequence)
        for target, origin in parts:
            np.copyto(into[target], total[origin])

    def all_gather(self, source: Array, into: Array, parts: Sequence[Any], sequence: int) -> None:
        """Copy slices of the sources of all devices into `into`; see `Comm.all_gather`.

        One device of each other rank receives a source. The other devices of this rank copy the source from it.
        """
        others = [mates for mates in self._groups if mates is not self._mates]
        posted = [self._send(source, mates[self._place % len(mates)], sequence) for mates in others]
        own = len(self._mates)
        received = {d: self._receive(d, sequence) for mates in others for d in mates[self._place :: own]}
        self._world.wait_until_sent(posted, self.timeout)
        known: dict[int, Array] = {}
        for theirs in self._thread_member.exchange_values({self.number: source, **received}, sequence):
            known |= theirs
        for device, pairs in zip(self.device_numbers, parts, strict=True):
            for target, origin in pairs:
                np.copyto(into[target], known[device][origin])
        self._thread_member.group.wait(self._place, sequence)  # no device overwrites a source that another still reads

    def send(self, source: Array, to: int, sequence: int) -> None:
        self._world.wait_until_sent([self._send(source, to, sequence)], self.timeout)

    def receive(self, into: Array, source: int, sequence: int) -> None:
        np.copyto(into, self._receive(source, sequence))


def _split_into_even_slices(size: int, count: int) -> list[slice]:
    """Split ``range(size)`` into `count` slices of nearly equal sizes."""
    bounds = [size * part // count for part in range(count + 1)]
    return [slice(*ends) for ends in pairwise(bounds)]


def _sum_in_order_in_narrowest_dtype(arrays: Sequence[Array]) -> Array:
    """Sum arrays in order, in the narrowest of their dtypes, so that all ranks get the same sum."""
    wire = min((a.dtype for a in arrays), key=lambda d: (d.itemsize, d.str))
    total = arrays[0].astype(wire)
    for other in arrays[1:]:
        np.add(total, other.astype(wire, copy=False), out=total)
    return total
