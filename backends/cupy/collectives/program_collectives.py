"""The collectives of one program that are launches: over peer memory, or with a library.

Before the first run, the devices of the group exchange the addresses of their operands. Then each device records its
launches. Collectives without a kernel or a library stay on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....graph.dtypes import DType
from ....ops.collectives import POINT_TO_POINT_OPS, narrow_to_integer
from ...base import Array, Comm, Device
from ...fusion.operands import BoundInstruction, NoKernelError
from ...host.progress_board import view_run_numbers
from ..binding.launch_builder import LaunchBuilder
from ..device.driver import Driver
from ..kernels import collective, moves
from .hang_watchdog import CollectiveLibraryMembership, CollectiveLibraryMemberships, HangWatchdog, call_with_timeout
from .nccl_collectives import bind_library_collective as bind_exchange
from .peer_exchange import exchange_peer_addresses, wait_until_group_ready
from .transport import MIN_NARROW_ELEMENTS, choose_group_transport


class ProgramCollectives:
    """The collectives of one program with the other devices of its group.

    The object has the addresses of all devices, the library's communicator, and the staging memory of library
    exchanges.

    Args:
        comm: Communicator of the device.
        driver: Driver of all devices of the group.
        device: The device of the program.
        upload: Copies an array to the memory of the device and keeps it while the program exists.
        memberships: Library memberships of the backend.
    """

    def __init__(
        self,
        comm: Comm,
        driver: Driver,
        device: Device,
        upload: Callable[[Array], Any],
        memberships: CollectiveLibraryMemberships,
    ) -> None:
        self.comm, self.driver, self.device, self.upload, self.memberships = comm, driver, device, upload, memberships
        self.transport = choose_group_transport(comm, driver)
        self.is_ready = not self.transport.has_device_collectives
        self._group: collective.PeerGroup | None = None
        self._membership: CollectiveLibraryMembership | None = None
        self._watchdog: HangWatchdog | None = None
        self._exchange_count = self._pushed_count = 0
        self._staging: list[tuple[int, Any]] = []

    def allocate_signals_and_compile_kernels(self) -> None:
        """Allocate signals and compile the kernels of collectives, before the exchange of addresses.

        No device then waits for a compiler during the exchange.
        """
        assert self.comm.signal_pad is not None
        is_first = all(device.rank != self.device.rank for device in self.comm.devices[: self.comm.rank])
        self._board = self.driver.map_signal_pad(self.comm.signal_pad, is_first)
        self._signals = self.driver.address(self.upload(np.zeros(collective.SIGNAL_WORD_COUNT, np.int64)))
        self._min_narrow_elements = MIN_NARROW_ELEMENTS if self.comm.transfer_dtype is DType.BF16 else None
        for source in (collective.SOURCE, moves.SOURCE):  # the last copies
            for name in source.names:
                self.driver.prepare_kernel(source[name], self.device)

    def exchange_addresses_and_record(self, calls: Sequence[BoundInstruction], record: Callable[[], None]) -> None:
        """Exchange the addresses of all collective operands with the group, then record the program's launches.

        Args:
            calls: The collectives of the program.
            record: Records the launches of the program. It calls `add_run_begin_launches` and
            `add_collective_if_possible`.

        Raises:
            BackendError: A device failed or did not arrive.
        """
        comm, library = self.comm, self.transport.library
        own = [call for call in calls if not self._can_message_leave_device_group(call)]
        offers = {
            narrow_to_integer(call.attrs["sequence"]): collective.select_peer_accessible_operands(call) for call in own
        }
        me = collective.PeerAddresses(
            self._signals, self._allocate_bfloat16_sum_buffer(own), self._allocate_partial_sum_inbox(own), offers
        )
        self.driver.synchronise(self.device)  # other devices may read the signals from now on: they are zeros
        self._group = exchange_peer_addresses(comm, me, self._board, self._min_narrow_elements)
        if library is None:
            record()
        else:
            self._membership = self.memberships.find_or_join(comm, library, self.device)
            self._watchdog = HangWatchdog(comm, self.driver, self.device, self._membership)
            call_with_timeout(comm.timeout, record, f"{self.device}, recording with {library.name}")
        wait_until_group_ready(comm)
        self.is_ready = True

    def _allocate_bfloat16_sum_buffer(self, calls: Sequence[BoundInstruction]) -> int:
        """Allocate the buffer of sums that are transferred in bfloat16, and return its address.

        The result is 0 without such sums.
        """
        sums = [math.prod(call.out.shape) for call in calls if call.op == "all_reduce" and call.out.is_float]
        counts = [n for n in sums if self._min_narrow_elements is not None and n >= self._min_narrow_elements]
        return self.driver.address(self.upload(np.zeros(max(counts), np.int16))) if counts else 0

    def _allocate_partial_sum_inbox(self, calls: Sequence[BoundInstruction]) -> int:
        """Allocate the inbox, to which other devices push partial sums, and return its address.

        The result is 0 if no inbox is needed.
        """
        is_needed = any(collective.uses_pushed_all_reduce(call, self.comm.size) for call in calls)
        return self.driver.address(self.upload(np.zeros(collective.INBOX_BYTES, np.int8))) if is_needed else 0

    def increment_run_number(self) -> None:
        """Increment the number of runs that this device has begun, on the group's signal pad."""
        if self.transport.has_device_collectives:
            assert self.comm.signal_pad is not None
            view_run_numbers(self.comm.signal_pad)[self.comm.rank] += 1

    def add_run_begin_launches(self, launches: LaunchBuilder) -> None:
        """Add the launches at the beginning of a run, before the first collective."""
        self._exchange_count = self._pushed_count = 0
        if self._group is not None:
            launches.number = 0
            collective.launch_run_number_signal(
                launches, self._group, is_pipelined=self.comm.plan_device_count > self.comm.size
            )

    def add_collective_if_possible(self, launches: LaunchBuilder, call: BoundInstruction) -> bool:
        """Add a collective to the launches, as a library exchange or as kernels over peer memory, if one is possible.

        Returns:
            Whether the collective was added. If not, it runs through host memory. All devices get the same result.
        """
        group, membership = self._group, self._membership
        if group is None or self._can_message_leave_device_group(call):
            return False
        try:
            if membership is not None and self.transport.uses_library(_compute_max_operand_bytes(call, group)):
                self._bind_exchange_with_shared_staging(
                    launches, partial(bind_exchange, launches, call, group, membership.ring)
                )
                self._exchange_count += 1
            elif self.transport.has_peer_access:
                collective.bind_peer_collective(launches, call, replace(group, inbox_half=self._pushed_count % 2))
                self._pushed_count += collective.uses_pushed_all_reduce(call, self.comm.size)
            else:
                return False
        except NoKernelError:
            return False
        return True

    def _can_message_leave_device_group(self, call: BoundInstruction) -> bool:
        """Return whether `call` is a send or receive that may leave the device group; it then uses host memory."""
        return call.op in POINT_TO_POINT_OPS and self.comm.plan_device_count > self.comm.size

    def _bind_exchange_with_shared_staging(self, launches: LaunchBuilder, bind: Callable[[], None]) -> None:
        """Add a library exchange, with one staging memory for the messages of all exchanges of the program.

        They run one after the other, so sharing is safe. `bind` is called twice: first at address 0, to measure the
        staging bytes, then at the real address.
        """
        items, faults, launches.scratch_address, launches.scratch_bytes = (
            len(launches.items),
            len(launches.faults),
            0,
            0,
        )
        bind()
        staging_bytes = launches.scratch_bytes
        del launches.items[items:], launches.faults[faults:]
        if staging_bytes > (self._staging[-1][0] if self._staging else 0):
            self._staging.append((staging_bytes, self.upload(np.zeros(staging_bytes, np.int8))))
        launches.scratch_address = self.driver.address(self._staging[-1][1]) if self._staging else 0
        launches.scratch_bytes = 0
        bind()

    def require_live_communicator(self) -> None:
        """Raise `BackendError` if the group was lost in an earlier run."""
        if self._watchdog is not None:
            self._watchdog.require_live_communicator()

    def wait_for_stream(self) -> None:
        """Wait until the device's stream has ended all launches.

        Raises:
            DeviceMissedCollectiveError: Another device did not arrive at a collective.
        """
        if self._watchdog is not None and self.has_exchanges_without_timeout:
            self._watchdog.wait_for_stream()
        else:
            self.driver.synchronise(self.device)

    @property
    def has_exchanges_without_timeout(self) -> bool:
        """Whether the program has exchanges of a library such as NCCL, which wait for other devices without a timeout.

        Only then must the host poll the stream for hangs.
        """
        return self._watchdog is not None and bool(self._exchange_count)


def _compute_max_operand_bytes(call: BoundInstruction, group: collective.PeerGroup) -> int:
    """Return the bytes of the largest operand or result of a collective on any device of the group.

    The number is the same on all devices.
    """
    sequence = narrow_to_integer(call.attrs["sequence"])
    if call.op in ("send", "receive"):
        sender = group.rank if call.op == "send" else narrow_to_integer(call.attrs["source"])
        return group.require_device_operands(sender, sequence).source.tensor.spec.nbytes
    return max(x.tensor.spec.nbytes for o in group.list_device_operands(sequence) for x in (o.source, o.target))
