"""The interface of a transport, such as MPI, that carries packets of bytes between ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Packet = npt.NDArray[np.uint8]


class PacketLink(Protocol):
    """One rank's end of the transport. Packets of one sender and channel arrive in the order of their `send` calls.

    Threads may share it. No method except `close` waits: a caller polls, and checks for failed ranks between two polls.
    """

    rank: int
    size: int
    host: str

    def send(self, to: int, channel: int, packet: Packet) -> Any:
        """Send `packet`, which must not change any more; `is_sent` takes the result."""

    def is_sent(self, posted: Any) -> bool:
        """Return whether the link needs a packet no more."""

    def try_receive(self, source: int, channel: int) -> Packet | None:
        """Return the next packet of a rank on a channel, or None before it arrives."""

    def shared_words(self, words: int) -> npt.NDArray[np.int64] | None:
        """Return zeroed memory of `words` 8-byte integers that all ranks share; None if they are on several machines.

        All ranks call it with the same `words`.
        """

    def close(self) -> None:
        """Close the link; all ranks call it, and no packet is pending."""
