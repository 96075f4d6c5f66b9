"""How the devices of a group learn of each other's memory, before their first run together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...base import Comm, Tensor
from ...operands import Operand
from ..kernels.collective import Group, Offer, Peer

Words = npt.NDArray[np.int64]
MAX_AXES = 8
OPERAND_WORDS = 3 + 2 * MAX_AXES
"""Words: address, dtype, number of axes, then sizes and strides."""
CODED_DTYPES = tuple(DType)
EMPTY_WORD = -1


def exchange_peer_addresses(comm: Comm, me: Peer, board: int, narrow_from: int | None) -> Group:
    """Tell all others where this device's signals and operands are, and hear it of them.  Raises `BackendError`."""
    mine = _encode_peer(me)
    rows = int(all_gather_words(comm, np.array([len(mine)], np.int64), -1).max())
    padded = np.full((rows, mine.shape[1]), EMPTY_WORD, np.int64)
    padded[: len(mine)] = mine
    peers = tuple(map(_decode_peer, all_gather_words(comm, padded, -2)))
    return Group(comm.rank, board, comm.timeout, peers, narrow_from)


def wait_until_ready(comm: Comm) -> None:
    """Wait until everybody is ready to run.  Raises `BackendError`."""
    all_gather_words(comm, np.zeros(1, np.int64), -3)


def all_gather_words(comm: Comm, mine: Words, sequence: int) -> Words:
    """What each device says, in order of the devices; all say as many words.  Raises `BackendError`."""
    into = np.empty((comm.size, *mine.shape), np.int64)
    comm.all_gather(mine, into, [[(d, ...)] for d in range(comm.size)], sequence)
    return into


def _encode_peer(me: Peer) -> Words:
    """First where the signals, the room for the wire and the inbox are, then a row for each offer: number, source,
    target."""
    table = np.full((1 + len(me.offers), 1 + 2 * OPERAND_WORDS), EMPTY_WORD, np.int64)
    table[0, :3] = me.signals, me.wire, me.inbox
    for row, (sequence, offer) in zip(table[1:], me.offers.items(), strict=True):
        row[0] = sequence
        row[1 : 1 + OPERAND_WORDS] = _encode_operand(offer.source)
        row[1 + OPERAND_WORDS :] = _encode_operand(offer.target)
    return table


def _encode_operand(x: Operand) -> list[int]:
    room = [0] * (MAX_AXES - len(x.shape))
    return [x.address, CODED_DTYPES.index(x.dtype), len(x.shape), *x.shape, *room, *x.strides, *room]


def _decode_peer(table: Words) -> Peer:
    first, *rows = table.tolist()
    offers = {
        r[0]: Offer(_decode_operand(r[1 : 1 + OPERAND_WORDS]), _decode_operand(r[1 + OPERAND_WORDS :]))
        for r in rows
        if r[0] != EMPTY_WORD
    }
    signals, wire, inbox = first[:3]
    return Peer(signals, wire, inbox, offers)


def _decode_operand(words: Sequence[int]) -> Operand:
    address, dtype, rank, *rest = words
    shape, strides = tuple(rest[:rank]), tuple(rest[MAX_AXES : MAX_AXES + rank])
    return Operand(address, Tensor(-1, 0, shape, strides, CODED_DTYPES[dtype]))
