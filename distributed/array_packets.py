"""Arrays as packets of bytes: a sequence number, the dtype and the shape, then the entries."""

from __future__ import annotations

import math
import struct

import numpy as np

from ..backends.base import Array
from .packet_link import Packet
from .world import RanksError

PACKET_HEADER = struct.Struct("<q8sq")
"""The sequence number of a collective, the dtype, and the number of axes; the sizes of the axes follow."""
NUMERIC_DTYPE_KINDS = "biuf"
"""The kinds of NumPy dtypes that a packet may have."""


def pack_array(array: Array, sequence: int) -> Packet:
    """Pack a copy of `array` and its sequence number into a packet, which is a block of bytes."""
    head = PACKET_HEADER.pack(sequence, array.dtype.str.encode(), array.ndim) + struct.pack(
        f"<{array.ndim}q", *array.shape
    )
    packet = np.empty(len(head) + array.nbytes, np.uint8)
    packet[: len(head)] = np.frombuffer(head, np.uint8)
    np.copyto(np.ndarray(array.shape, array.dtype, packet, len(head)), array)
    return packet


def unpack_array(packet: Packet, sender: str, expected_sequence: int) -> Array:
    """Return the array that a packet from `sender` contains, after a check of the packet's sequence number.

    Raises:
        RanksError: The sequence number is not `expected_sequence`, or the bytes are not an array.
    """
    sequence, kind, axes = PACKET_HEADER.unpack_from(packet.data)
    if sequence != expected_sequence:
        raise RanksError(
            f"{sender} is at collective {sequence}, and is expected at {expected_sequence}: the plans do not match"
        )
    dtype = np.dtype(kind.rstrip(b"\0").decode())
    shape = struct.unpack_from(f"<{axes}q", packet.data, PACKET_HEADER.size)
    start = PACKET_HEADER.size + 8 * axes
    if (
        dtype.kind not in NUMERIC_DTYPE_KINDS
        or min(shape, default=0) < 0
        or math.prod(shape) * dtype.itemsize != len(packet) - start
    ):
        raise RanksError(f"{sender} sent {len(packet)} bytes that are no {dtype}{list(shape)}")
    return np.ndarray(shape, dtype, packet, start)
