"""What carries packets of bytes from rank to rank: the one thing that MPI, or a stand-in for it, has to do."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Packet = npt.NDArray[np.uint8]


class Link(Protocol):
    """One rank's end.  Packets of one sender and channel arrive in the order in which they were posted.

    Threads may share it.  Nothing here waits: whoever waits looks again, and notices meanwhile that others failed.
    """

    rank: int
    size: int
    host: str

    def post(self, to: int, channel: int, packet: Packet) -> Any:
        """Send `packet`, which nobody changes any more; what `is_sent` asks about."""

    def is_sent(self, posted: Any) -> bool:
        """Whether a packet is out of this rank's hands."""

    def poll(self, source: int, channel: int) -> Packet | None:
        """The next packet of a rank on a channel; None if none has come."""

    def shared(self, words: int) -> npt.NDArray[np.int64] | None:
        """Memory that all ranks share, zeros to begin with; None if they are on several machines.  All ranks call it,
        with the same number of words of 8 bytes."""

    def close(self) -> None:
        """Leave, when all ranks do; nothing is under way."""
