"""Collectives of one program that are launched like kernels: over peer addresses, or with a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....graph.dtypes import DType
from ....ops.collectives import POINT_TO_POINT_OPS, as_integer
from ...base import Array, Comm, Device
from ...board import runs_of
from ...operands import Bound, NoKernelError
from ..binding.launches import Launches
from ..device.driver import Driver
from ..kernels import collective, moves
from .hang_watchdog import HangWatchdog, Membership, Memberships, call_with_timeout
from .nccl_collectives import bind_library_collective as bind_exchange
from .peer_exchange import exchange_peer_addresses, wait_until_ready
from .transport import MIN_NARROW_ELEMENTS, choose_group_transport


class ProgramCollectives:
    """What a program knows of the others of its group; what it has to learn of them it learns before its first run.

    `keep` puts an array into the memory of the device, for as long as the program lives.
    """

    def __init__(
        self, comm: Comm, driver: Driver, on: Device, keep: Callable[[Array], Any], memberships: Memberships
    ) -> None:
        self.comm, self.driver, self.device, self.upload, self.memberships = comm, driver, on, keep, memberships
        self.transport = choose_group_transport(comm, driver)
        self.is_ready = not self.transport.launches_collectives
        self._group: collective.Group | None = None
        self._membership: Membership | None = None
        self._watchdog: HangWatchdog | None = None
        self._exchange_count = self._pushed_count = 0
        self._staging: list[tuple[int, Any]] = []

    def prepare(self) -> None:
        """Everything but what only the others can tell, so that nobody waits for a compiler."""
        assert self.comm.board is not None
        is_first = all(device.rank != self.device.rank for device in self.comm.devices[: self.comm.rank])
        self._board = self.driver.share(self.comm.board, is_first)
        self._signals = self.driver.address(self.upload(np.zeros(collective.SIGNAL_WORDS, np.int64)))
        self._min_narrow_elements = MIN_NARROW_ELEMENTS if self.comm.wire is DType.BF16 else None
        for source in (collective.SOURCE, moves.SOURCE):  # the last copies
            for name in source.names:
                self.driver.prepare(source[name], self.device)

    def exchange_addresses(self, calls: Sequence[Bound], record: Callable[[], None]) -> None:
        """Meet all others and hear where their memory is, then record what is launched.  Raises `BackendError`."""
        comm, library = self.comm, self.transport.library
        own = [call for call in calls if not self._crosses_groups(call)]
        offers = {as_integer(call.attrs["sequence"]): collective.offer_of(call) for call in own}
        me = collective.Peer(self._signals, self._allocate_transfer_buffer(own), self._allocate_inbox(own), offers)
        self.driver.synchronise(self.device)  # the signals are zeros from now on, whoever asks
        self._group = exchange_peer_addresses(comm, me, self._board, self._min_narrow_elements)
        if library is None:
            record()
        else:
            self._membership = self.memberships.join(comm, library, self.device)
            self._watchdog = HangWatchdog(comm, self.driver, self.device, self._membership)
            call_with_timeout(comm.timeout, record, f"{self.device}, recording with {library.name}")
        wait_until_ready(comm)
        self.is_ready = True

    def _allocate_transfer_buffer(self, calls: Sequence[Bound]) -> int:
        """Where the device has room for the largest sum that is sent in 16 bits; 0 if there is none."""
        sums = [math.prod(call.out.shape) for call in calls if call.op == "all_reduce" and call.out.is_float]
        counts = [n for n in sums if self._min_narrow_elements is not None and n >= self._min_narrow_elements]
        return self.driver.address(self.upload(np.zeros(max(counts), np.int16))) if counts else 0

    def _allocate_inbox(self, calls: Sequence[Bound]) -> int:
        """Where the others push summands; 0 if they push none."""
        is_needed = any(collective.is_pushed(call, self.comm.size) for call in calls)
        return self.driver.address(self.upload(np.zeros(collective.INBOX, np.int8))) if is_needed else 0

    def count_run(self) -> None:
        """Tell all others by which number this device knows the run that it begins."""
        if self.transport.launches_collectives:
            assert self.comm.board is not None
            runs_of(self.comm.board)[self.comm.rank] += 1

    def begin(self, launches: Launches) -> None:
        """Append what is launched at the beginning of a run."""
        self._exchange_count = self._pushed_count = 0
        if self._group is not None:
            launches.number = 0
            collective.launch_begin(launches, self._group, follows=self.comm.everybody > self.comm.size)

    def launch(self, launches: Launches, call: Bound) -> bool:
        """Append a collective, if there are kernels or a library for it; all devices get the same answer."""
        group, membership = self._group, self._membership
        if group is None or self._crosses_groups(call):
            return False
        try:
            if membership is not None and self.transport.uses_library(_compute_max_operand_bytes(call, group)):
                self._bind_with_staging(launches, partial(bind_exchange, launches, call, group, membership.ring))
                self._exchange_count += 1
            elif self.transport.has_peer_access:
                collective.bind(launches, call, replace(group, turn=self._pushed_count % 2))
                self._pushed_count += collective.is_pushed(call, self.comm.size)
            else:
                return False
        except NoKernelError:
            return False
        return True

    def _crosses_groups(self, call: Bound) -> bool:
        """Whether a letter may go to another team or come from one: it takes the way through the host."""
        return call.op in POINT_TO_POINT_OPS and self.comm.everybody > self.comm.size

    def _bind_with_staging(self, launches: Launches, bind: Callable[[], None]) -> None:
        """Bind at no address, to see what memory it asks for, then at that memory, which all meetings share: they come
        one after the other."""
        items, faults, launches.scratch_at, launches.taken = len(launches.items), len(launches.faults), 0, 0
        bind()
        wanted = launches.taken
        del launches.items[items:], launches.faults[faults:]
        if wanted > (self._staging[-1][0] if self._staging else 0):
            self._staging.append((wanted, self.upload(np.zeros(wanted, np.int8))))
        launches.scratch_at = self.driver.address(self._staging[-1][1]) if self._staging else 0
        launches.taken = 0
        bind()

    def check(self) -> None:
        """Raises `BackendError` where the group was lost in an earlier run."""
        if self._watchdog is not None:
            self._watchdog.check()

    def wait(self) -> None:
        """Until everything that was launched is done.  Raises `LostError` where another device does not come."""
        if self._watchdog is not None and self.may_hang:
            self._watchdog.wait()
        else:
            self.driver.synchronise(self.device)

    @property
    def may_hang(self) -> bool:
        """Whether another device may be waited for without end, as calls of the library do; where there are none,
        nobody has to look at the stream again and again."""
        return self._watchdog is not None and bool(self._exchange_count)


def _compute_max_operand_bytes(call: Bound, group: collective.Group) -> int:
    """Bytes of the largest operand that a device has in a collective, which all of them know."""
    sequence = as_integer(call.attrs["sequence"])
    if call.op in ("send", "receive"):
        sender = group.rank if call.op == "send" else as_integer(call.attrs["source"])
        return group.offer(sender, sequence).source.tensor.spec.nbytes
    return max(x.tensor.spec.nbytes for o in group.offers(sequence) for x in (o.source, o.target))
