"""The tables of a program with addresses that count from the start of each buffer: moved to where buffers lie, and as
bytes that can be kept.

A program is bound at made-up addresses, far from each other and from all other numbers that kernels are given, so that
every address in a table can be told from what is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from .compiler import ALIGNMENT
from .replay import build_step_table
from .steps import TableMemory, TableStep

I64 = npt.NDArray[np.int64]
PLACEHOLDER_ZONE, PLACEHOLDER_OFFSET_BITS = 0x5A17 << 48, 36
"""Where made-up memory begins, and the bits of an address within one of its buffers."""


@dataclass(slots=True)
class SymbolicMemory(TableMemory):
    """Memory of tables that is only reckoned with; it lies behind the made-up buffers."""

    start: int
    size: int = 0
    contents: dict[int, bytes] = field(default_factory=dict)

    def allocate(self, nbytes: int) -> int:
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self.start + self.size - -(-nbytes // ALIGNMENT) * ALIGNMENT

    def fill(self, address: int, data: bytes) -> None:
        self.contents[address - self.start] = data


def make_placeholder_addresses(count: int) -> list[int]:
    """Addresses of so many buffers where nothing lies."""
    return [PLACEHOLDER_ZONE + (number << PLACEHOLDER_OFFSET_BITS) for number in range(count)]


@dataclass(frozen=True, slots=True)
class RelocatableTable:
    """The tables of a program, and what the memory that belongs to them holds at the start.

    `table` [threads, steps, STEP] has for the address of a kernel its place in `names` and one more, for that of its
    words the byte within the memory, and -1 where there are none.  `held` are 64-bit words of that memory: row by row
    of `places` where in memory (in words) so many of them go.  `moved` names those that are addresses, and the buffer
    from whose start they count; the last one is the memory itself, of `nbytes`.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    kernels: tuple[int, ...]
    nbytes: int
    table: I64
    initial_contents: I64
    address_positions: I64
    base_buffers: I64

    def relocate(self, buffers: Sequence[int], kernels: Mapping[str, int]) -> tuple[I64, Any]:
        """The table for buffers and kernels at these addresses, and the memory that has to live as long."""
        raw = np.zeros(self.nbytes // 8 + ALIGNMENT // 8, np.int64)
        memory = raw[-raw.ctypes.data % ALIGNMENT // 8 :]
        start = memory.ctypes.data
        held, table = self.initial_contents.copy(), self.table.copy()
        held[self.base_buffers[:, 0]] += np.array([*buffers, start], np.int64)[self.base_buffers[:, 1]]
        begin = 0
        for place, count in self.address_positions.tolist():
            memory[place : place + count] = held[begin : begin + count]
            begin += count
        table[..., 0] = np.array([0, *(kernels[name] for name in self.names)], np.int64)[table[..., 0]]
        table[..., 1] = np.where(table[..., 1] < 0, 0, table[..., 1] + start)
        return table, raw

    def to_bytes(self) -> bytes:
        arrays = (self.table, self.initial_contents, self.address_positions, self.base_buffers)
        said = {"names": self.names, "numbers": self.numbers, "kernels": self.kernels, "nbytes": self.nbytes}
        header = json.dumps({**said, "shapes": [array.shape for array in arrays]}).encode()
        return b"".join((header, b"\n", *(array.tobytes() for array in arrays)))


def parse_relocatable_table(data: bytes) -> RelocatableTable | None:
    """What `Relocatable.data` gave; None for what is no such thing."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        header, _, rest = data.partition(b"\n")
        said, at, arrays = json.loads(header), 0, []
        for shape in said.pop("shapes"):
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(rest, np.int64, count, at).reshape(shape))
            at += 8 * count
        names, numbers, kernels = (tuple(said[name]) for name in ("names", "numbers", "kernels"))
        table, held, places, moved = arrays
        return RelocatableTable(names, numbers, kernels, said["nbytes"], table, held, places, moved)
    return None


def build_relocatable_table(
    steps: Sequence[TableStep], threads: int, memory: SymbolicMemory, sizes: Sequence[int]
) -> RelocatableTable | None:
    """Steps that were bound at made-up addresses to buffers of these sizes in bytes, and `memory` behind them; None if
    a word lies where an address would, and is none within its buffer."""
    names = tuple(dict.fromkeys(step.kernel.name for step in steps))
    kernels = tuple(names.index(step.kernel.name) for step in steps)
    pieces = [(at, _pad_to_words(data)) for at, data in memory.contents.items()]

    def placed(words: I64) -> int:
        at = memory.allocate(words.nbytes) - memory.start
        pieces.append((at, words))
        return at

    table = build_step_table(steps, threads, lambda step: names.index(step.kernel.name) + 1, placed, none=(0, -1))
    held = np.concatenate([np.zeros(0, np.int64), *(words for _, words in pieces)])
    places = np.array([(at // 8, len(words)) for at, words in pieces], np.int64).reshape(-1, 2)
    bounds = np.array([*sizes, memory.size], np.int64)
    buffer, offset = (
        (held - PLACEHOLDER_ZONE) >> PLACEHOLDER_OFFSET_BITS,
        (held - PLACEHOLDER_ZONE) & ((1 << PLACEHOLDER_OFFSET_BITS) - 1),
    )
    is_near = (buffer >= -1) & (buffer <= len(bounds))
    is_address = (buffer >= 0) & (buffer < len(bounds))
    is_address[is_address] = offset[is_address] <= bounds[buffer[is_address]]
    if (is_near & ~is_address).any():
        return None
    held[is_address] = offset[is_address]
    moved = np.stack([np.flatnonzero(is_address), buffer[is_address]], axis=1)
    numbers = tuple(step.instruction_number for step in steps)
    return RelocatableTable(names, numbers, kernels, memory.size, table, held, places, moved)


def _pad_to_words(data: bytes) -> I64:
    return np.frombuffer(data + bytes(-len(data) % 8), np.int64)
