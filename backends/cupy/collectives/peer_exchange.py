"""Exchanges the addresses of collective operands between the devices of a group, before their first run.

Each device encodes its addresses as a table of 64-bit words. All devices gather the tables of all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...base import Comm, Tensor
from ...fusion.operands import Operand
from ..kernels.collective import OneDeviceCollectiveOperands, PeerAddresses, PeerGroup

Words = npt.NDArray[np.int64]
"""An array of 64-bit words."""
MAX_AXES = 8
"""Axes of an operand."""
OPERAND_WORDS = 3 + 2 * MAX_AXES
"""Words of an encoded operand: address, dtype index, axis count, `MAX_AXES` sizes, `MAX_AXES` strides."""
CODED_DTYPES = tuple(DType)
"""The dtypes by their index in an encoded operand."""
EMPTY_WORD = -1
"""The word that fills unused rows of a table."""


def exchange_peer_addresses(
    comm: Comm, me: PeerAddresses, signal_pad: int, min_narrow_elements: int | None
) -> PeerGroup:
    """Tell all devices of the group the addresses of this device, and return the group with the addresses of all.

    Args:
        comm: Communicator of this device.
        me: Addresses of this device.
        signal_pad: Address of the group's signal pad, the host memory for signals between devices.
        min_narrow_elements: Minimum element count of sums that are transferred in 16 bits; `None` for no such sums.

    Returns:
        The group with the addresses of all its devices.

    Raises:
        BackendError: A device failed or did not arrive.
    """
    mine = _encode_peer_addresses(me)
    rows = int(all_gather_words(comm, np.array([len(mine)], np.int64), -1).max())
    padded = np.full((rows, mine.shape[1]), EMPTY_WORD, np.int64)
    padded[: len(mine)] = mine
    peers = tuple(map(_decode_peer_addresses, all_gather_words(comm, padded, -2)))
    return PeerGroup(comm.rank, signal_pad, comm.timeout, peers, min_narrow_elements)


def wait_until_group_ready(comm: Comm) -> None:
    """Wait until all devices of the group are ready to run. Raises `BackendError` if one fails or does not arrive."""
    all_gather_words(comm, np.zeros(1, np.int64), -3)


def all_gather_words(comm: Comm, mine: Words, sequence: int) -> Words:
    """Gather the arrays `mine` of all devices of a group into one array of 64-bit words [devices, *shape of `mine`].

    All devices pass arrays of the same shape. They also pass the same `sequence` number, which is negative.

    Raises:
        BackendError: A device failed or did not arrive.
    """
    gathered = np.empty((comm.size, *mine.shape), np.int64)
    comm.all_gather(mine, gathered, [[(d, ...)] for d in range(comm.size)], sequence)
    return gathered


def _encode_peer_addresses(me: PeerAddresses) -> Words:
    """Encode the addresses of a device as a table of 64-bit words, which `_decode_peer_addresses` reads.

    The first row has the addresses of the signals, the transfer buffer and the inbox. Each further row has the sequence
    number of a collective, its source operand and its target operand.
    """
    table = np.full((1 + len(me.operands), 1 + 2 * OPERAND_WORDS), EMPTY_WORD, np.int64)
    table[0, :3] = me.signals, me.transfer_buffer, me.inbox
    for row, (sequence, operands) in zip(table[1:], me.operands.items(), strict=True):
        row[0] = sequence
        row[1 : 1 + OPERAND_WORDS] = _encode_operand(operands.source)
        row[1 + OPERAND_WORDS :] = _encode_operand(operands.target)
    return table


def _encode_operand(x: Operand) -> list[int]:
    """Encode an operand as `OPERAND_WORDS` words: its address, dtype, shape and strides."""
    padding = [0] * (MAX_AXES - len(x.shape))
    return [x.address, CODED_DTYPES.index(x.dtype), len(x.shape), *x.shape, *padding, *x.strides, *padding]


def _decode_peer_addresses(table: Words) -> PeerAddresses:
    """Decode the addresses of a device from the table that `_encode_peer_addresses` made."""
    first, *rows = table.tolist()
    offers = {
        r[0]: OneDeviceCollectiveOperands(
            _decode_operand(r[1 : 1 + OPERAND_WORDS]), _decode_operand(r[1 + OPERAND_WORDS :])
        )
        for r in rows
        if r[0] != EMPTY_WORD
    }
    signals, wire, inbox = first[:3]
    return PeerAddresses(signals, wire, inbox, offers)


def _decode_operand(words: Sequence[int]) -> Operand:
    """Decode an operand of another device from its words; it belongs to no buffer of this device."""
    address, dtype, rank, *rest = words
    shape, strides = tuple(rest[:rank]), tuple(rest[MAX_AXES : MAX_AXES + rank])
    return Operand(address, Tensor(-1, 0, shape, strides, CODED_DTYPES[dtype]))
