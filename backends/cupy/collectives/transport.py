"""Chooses the transport of a device group: peer memory, NCCL or RCCL, or host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base import Comm, Device
from ..device.driver import CollectiveLibrary, Driver, has_shared_multiprocessors
from ..kernels.collective import MAX_DEVICES

MIN_LIBRARY_BYTES = 8 << 20
"""Bytes of a value from which a library is preferred to kernels over peer memory. It is an estimate without a
measurement: below some MiB, latency counts more than bandwidth."""
MIN_NARROW_ELEMENTS = 1 << 15
"""Elements from which a sum is transferred in 16 bits, if `Comm.wire` allows it. Sums of one decoded token are smaller.
It is an estimate without a measurement."""


@dataclass(frozen=True, slots=True)
class CollectiveTransport:
    """The way in which the collectives of a device group move data: by peer memory, a library, or host memory.

    Attributes:
        has_peer_access: Kernels of each device can read and write the memory of all others.
        library: The library that joins the devices, or `None`.
        description: The transport as a phrase for reports.
    """

    has_peer_access: bool = False
    library: CollectiveLibrary | None = None
    description: str = "through memory of the host"

    @property
    def has_device_collectives(self) -> bool:
        """Whether collectives can run as launches on the devices, without the host."""
        return self.has_peer_access or self.library is not None

    def uses_library(self, nbytes: int) -> bool:
        """Return whether a collective over `nbytes` bytes uses the library.

        Without peer access every collective does; with peer access only large ones do.
        """
        return self.library is not None and (not self.has_peer_access or nbytes >= MIN_LIBRARY_BYTES)


HOST_TRANSPORT = CollectiveTransport()


def choose_transport(devices: Sequence[Device], driver: Driver) -> CollectiveTransport:
    """Choose the transport between devices, which all belong to `driver`."""
    library, far = driver.find_collective_library(devices), _explain_no_peer_access(devices)
    are_peers = not far and driver.enable_peer_access(devices)
    far = far or "they do not reach each other's memory"
    if isinstance(library, str):
        return CollectiveTransport(
            are_peers,
            None,
            "over each other's memory" if are_peers else f"{HOST_TRANSPORT.description}: {far}, and {library}",
        )
    if are_peers:
        why = f"over each other's memory; values of {MIN_LIBRARY_BYTES >> 20} MiB and more with {library.name}"
        return CollectiveTransport(True, library, why)
    return CollectiveTransport(False, library, f"with {library.name}: {far}")


def _explain_no_peer_access(devices: Sequence[Device]) -> str:
    """Return the reason why kernels of `devices` cannot use peer memory, or "" if no reason is known."""
    if len(devices) > MAX_DEVICES:
        return f"they are more than {MAX_DEVICES}"
    if len({device.rank for device in devices}) > 1:
        return "they are of several processes"
    if has_shared_multiprocessors(devices):
        return "kernels of parts of one device must not wait for each other on multiprocessors that they share"
    return ""


def choose_group_transport(comm: Comm, driver: Driver) -> CollectiveTransport:
    """Choose the transport between the members of a communicator.

    It is host memory for a group of one device, and for a group without a signal pad (memory for signals between
    devices).
    """
    if comm.signal_pad is None or comm.size < 2:
        return HOST_TRANSPORT
    return choose_transport(comm.devices, driver)
