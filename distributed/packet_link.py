"""The interface of a transport, such as MPI, that carries packets of bytes between ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Packet = npt.NDArray[np.uint8]


class PacketLink(Protocol):
    """One rank's end of a packet transport. Packets of one sender and channel arrive in the order of `send` calls.

    Threads may share the link. No method except `close` waits. A caller must poll, and check for failed ranks between
    two polls.
    """

    rank: int
    size: int
    host: str

    def send(self, to: int, channel: int, packet: Packet) -> Any:
        """Start to send `packet` to a rank on a channel, and return an object from which `is_sent` tells the state.

        The caller must not change the packet after the call.
        """

    def is_sent(self, posted: Any) -> bool:
        """Return whether a packet is sent; if so, the link no longer reads its memory."""

    def try_receive(self, source: int, channel: int) -> Packet | None:
        """Return the next packet from a rank on a channel, or None before a packet arrives."""

    def allocate_shared_words(self, words: int) -> npt.NDArray[np.int64] | None:
        """Allocate zeroed memory that all ranks share, as `words` 8-byte integers; None on several machines.

        All ranks call the method with the same `words`.
        """

    def close(self) -> None:
        """Close the link. All ranks must call this method, and all packets must have been sent and received before."""
