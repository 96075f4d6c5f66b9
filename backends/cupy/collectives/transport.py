"""How the devices of a group meet: over each other's memory, with a library, or through memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base import Comm, Device
from ..device.driver import Driver, Library, has_parts
from ..kernels.collective import MOST_DEVICES

MIN_LIBRARY_BYTES = 8 << 20
"""Bytes of a value from which a library is preferred to kernels over each other's memory.  A guess, not measured yet:
up to some MiB what counts is when a message arrives, not how many bytes of it pass a second."""
MIN_NARROW_ELEMENTS = 1 << 15
"""Elements from which a sum is sent in 16 bits, if that is asked for (`Comm.wire`); where a token is decoded, none are.
Not measured yet, either."""


@dataclass(frozen=True, slots=True)
class Transport:
    """Whether kernels reach the memory of all devices, and the library that joins them, if any; `why` says both."""

    has_peer_access: bool = False
    library: Library | None = None
    description: str = "through memory of the host"

    @property
    def launches_collectives(self) -> bool:
        """Whether at least some collectives are launched like kernels."""
        return self.has_peer_access or self.library is not None

    def uses_library(self, nbytes: int) -> bool:
        """Whether a collective over so many bytes is for the library."""
        return self.library is not None and (not self.has_peer_access or nbytes >= MIN_LIBRARY_BYTES)


HOST_TRANSPORT = Transport()


def choose_transport(devices: Sequence[Device], driver: Driver) -> Transport:
    """How `devices`, all of them of this driver, meet."""
    library, far = driver.library(devices), _explain_no_peer_access(devices)
    are_peers = not far and driver.are_peers(devices)
    far = far or "they do not reach each other's memory"
    if isinstance(library, str):
        return Transport(
            are_peers,
            None,
            "over each other's memory" if are_peers else f"{HOST_TRANSPORT.description}: {far}, and {library}",
        )
    if are_peers:
        why = f"over each other's memory; values of {MIN_LIBRARY_BYTES >> 20} MiB and more with {library.name}"
        return Transport(True, library, why)
    return Transport(False, library, f"with {library.name}: {far}")


def _explain_no_peer_access(devices: Sequence[Device]) -> str:
    """Why kernels of `devices` cannot meet, whatever memory they reach; nothing if they can."""
    if len(devices) > MOST_DEVICES:
        return f"they are more than {MOST_DEVICES}"
    if len({device.rank for device in devices}) > 1:
        return "they are of several processes"
    return "kernels of parts of one device must not wait for each other" if has_parts(devices) else ""


def choose_group_transport(comm: Comm, driver: Driver) -> Transport:
    """How the members of `comm` meet; on devices only where all are of this driver."""
    if comm.board is None or comm.size < 2:
        return HOST_TRANSPORT
    return choose_transport(comm.devices, driver)
