"""The interface of a transport, such as MPI, that carries packets of bytes between ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Packet = npt.NDArray[np.uint8]


class PacketLink(Protocol):
    """The end of a packet transport in one rank. Packets of one sender and channel arrive in the order of `send` calls.

    Threads may share the link. Only `close` waits: a caller polls, and checks for failed ranks between two polls.
    """

    rank: int
    size: int
    host: str

    def send(self, to: int, channel: int, packet: Packet) -> Any:
        """Start to send `packet` to a rank on a channel, and return an object for `is_sent`.

        The caller must not change the packet after the call.
        """

    def is_sent(self, posted: Any) -> bool:
        """Return whether a packet is sent, so that the link no longer reads its memory."""

    def try_receive(self, source: int, channel: int) -> Packet | None:
        """Return the next packet from a rank on a channel, or None before a packet arrives."""

    def allocate_shared_words(self, words: int) -> npt.NDArray[np.int64] | None:
        """Allocate zeroed memory of `words` 8-byte integers that all ranks share, or return None on several machines.

        All ranks call the method with the same `words`.
        """

    def close(self) -> None:
        """Close the link; all ranks call the method, and no packet is pending."""
