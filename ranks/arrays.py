"""Arrays as packets: a number, the dtype and the shape before the entries.  Nothing is pickled."""

from __future__ import annotations

import math
import struct

import numpy as np

from ..backends.base import Array
from .link import Packet
from .world import RanksError

HEAD = struct.Struct("<q8sq")
"""The number of a meeting, the dtype, how many axes; their lengths follow."""
KINDS = "biuf"
"""What NumPy calls dtypes of numbers."""


def packed(array: Array, number: int) -> Packet:
    """A packet with a copy of `array`."""
    head = HEAD.pack(number, array.dtype.str.encode(), array.ndim) + struct.pack(f"<{array.ndim}q", *array.shape)
    packet = np.empty(len(head) + array.nbytes, np.uint8)
    packet[: len(head)] = np.frombuffer(head, np.uint8)
    np.copyto(np.ndarray(array.shape, array.dtype, packet, len(head)), array)
    return packet


def unpacked(packet: Packet, sender: str, expected: int) -> Array:
    """The array of a packet, which is to be of meeting `expected`.  Raises `RanksError` for any other."""
    number, kind, axes = HEAD.unpack_from(packet.data)
    if number != expected:
        raise RanksError(f"{sender} is at meeting {number}, and is expected at {expected}: the plans do not match")
    dtype = np.dtype(kind.rstrip(b"\0").decode())
    shape = struct.unpack_from(f"<{axes}q", packet.data, HEAD.size)
    start = HEAD.size + 8 * axes
    if dtype.kind not in KINDS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(packet) - start:
        raise RanksError(f"{sender} sent {len(packet)} bytes that are no {dtype}{list(shape)}")
    return np.ndarray(shape, dtype, packet, start)
