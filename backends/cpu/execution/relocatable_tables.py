"""Step tables with addresses relative to buffers: cached as bytes, and relocated to other buffers.

A program is bound to placeholder addresses. Placeholder addresses are far from each other and from all other numbers in
argument words, so the value of a word shows whether the word is an address.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....graph.lazy_dataclass import dataclass
from ..compilation.compiler import ALIGNMENT
from ..steps.step_table import TableMemory, TableStep
from .replay import build_step_table

I64 = npt.NDArray[np.int64]
PLACEHOLDER_ZONE, PLACEHOLDER_OFFSET_BITS = 0x5A17 << 48, 36
"""Start of the placeholder addresses, and number of bits of an offset within one placeholder buffer."""
KERNEL_ZONE = 0x5A16 << 48
"""Start of the placeholder addresses of kernels, which are one byte apart."""


@dataclass(slots=True)
class PlaceholderMemory(TableMemory):
    """Memory of a step table that has no real address yet; its placeholder address follows the buffers.

    `start` is the first address, `size` the allocated bytes, and `contents` has the bytes at each offset.
    """

    start: int
    size: int = 0
    contents: dict[int, bytes] = field(default_factory=dict)

    def allocate_zeroed(self, nbytes: int) -> int:
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self.start + self.size - -(-nbytes // ALIGNMENT) * ALIGNMENT

    def fill(self, address: int, data: bytes) -> None:
        self.contents[address - self.start] = data


def make_placeholder_addresses(count: int) -> list[int]:
    """Return a placeholder address for each of `count` buffers, to bind a program before its buffers exist."""
    return [PLACEHOLDER_ZONE + (number << PLACEHOLDER_OFFSET_BITS) for number in range(count)]


@dataclass(frozen=True, slots=True)
class RelocatableTable:
    """The step table of a program and its memory of `nbytes` bytes, with addresses that are relative to buffers.

    - `table` [threads, steps, STEP] has the index of a kernel in `names`, plus one, in place of the kernel address. In
      place of the address of argument words it has a byte position in the memory, or -1 for a step without words.
    - `numbers` and `kernels` have one entry per step: the instruction number, and the index of the kernel in `names`.
    - `initial_contents` are the 64-bit words of the memory, block after block.
    - `address_positions` has a row for each block: the word position in the memory, and the number of words.
    - `base_buffers` has a row for each word that is an address: the index in `initial_contents`, and the number of the
      buffer to which the address is relative. The number after the last buffer means the memory itself, and the numbers
      after that mean the kernels of `names`.
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
        """Return the step table with real buffer and kernel addresses, and the memory to which the table points."""
        raw = np.zeros(self.nbytes // 8 + ALIGNMENT // 8, np.int64)
        memory = raw[-raw.ctypes.data % ALIGNMENT // 8 :]
        start = memory.ctypes.data
        contents, table = self.initial_contents.copy(), self.table.copy()
        bases = np.array([*buffers, start, *(kernels[name] for name in self.names)], np.int64)
        contents[self.base_buffers[:, 0]] += bases[self.base_buffers[:, 1]]
        begin = 0
        for place, count in self.address_positions.tolist():
            memory[place : place + count] = contents[begin : begin + count]
            begin += count
        table[..., 0] = np.array([0, *(kernels[name] for name in self.names)], np.int64)[table[..., 0]]
        table[..., 1] = np.where(table[..., 1] < 0, 0, table[..., 1] + start)
        return table, raw

    def to_bytes(self) -> bytes:
        arrays = (self.table, self.initial_contents, self.address_positions, self.base_buffers)
        header_fields = {"names": self.names, "numbers": self.numbers, "kernels": self.kernels, "nbytes": self.nbytes}
        header = json.dumps({**header_fields, "shapes": [array.shape for array in arrays]}).encode()
        return b"".join((header, b"\n", *(array.tobytes() for array in arrays)))


def parse_relocatable_table(data: bytes) -> RelocatableTable | None:
    """Parse the bytes that `RelocatableTable.to_bytes` made; return None for other data."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        header, _, rest = data.partition(b"\n")
        header_fields, at, arrays = json.loads(header), 0, []
        for shape in header_fields.pop("shapes"):
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(rest, np.int64, count, at).reshape(shape))
            at += 8 * count
        names, numbers, kernels = (tuple(header_fields[name]) for name in ("names", "numbers", "kernels"))
        table, contents, places, base_buffers = arrays
        return RelocatableTable(names, numbers, kernels, header_fields["nbytes"], table, contents, places, base_buffers)
    return None


def build_relocatable_table(
    steps: Sequence[TableStep], threads: int, memory: PlaceholderMemory, sizes: Sequence[int]
) -> RelocatableTable | None:
    """Build a step table that can be moved to other addresses, from steps with placeholder addresses; or return None.

    None means that a word looks like a placeholder address but lies in no buffer.

    Args:
        steps: The steps.
        threads: Thread count.
        memory: Memory of the steps; its placeholder address follows the buffers.
        sizes: Bytes of each buffer.
    """
    names = tuple(dict.fromkeys(kernel.name for step in steps for kernel in step.kernels))
    for step in steps:
        step.set_kernel_words(lambda kernel: KERNEL_ZONE + names.index(kernel.name))
    kernels = tuple(names.index(step.kernel.name) for step in steps)
    blocks = [(at, _pad_to_words(data)) for at, data in memory.contents.items()]

    def append_words(words: I64) -> int:
        at = memory.allocate_zeroed(words.nbytes) - memory.start
        blocks.append((at, words))
        return at

    table = build_step_table(
        steps, threads, lambda step: names.index(step.kernel.name) + 1, append_words, idle_entries=(0, -1)
    )
    contents = np.concatenate([np.zeros(0, np.int64), *(words for _, words in blocks)])
    places = np.array([(at // 8, len(words)) for at, words in blocks], np.int64).reshape(-1, 2)
    bounds = np.array([*sizes, memory.size], np.int64)
    buffer, offset = (
        (contents - PLACEHOLDER_ZONE) >> PLACEHOLDER_OFFSET_BITS,
        (contents - PLACEHOLDER_ZONE) & ((1 << PLACEHOLDER_OFFSET_BITS) - 1),
    )
    is_in_placeholder_zone = (buffer >= -1) & (buffer <= len(bounds))
    is_address = (buffer >= 0) & (buffer < len(bounds))
    is_address[is_address] = offset[is_address] <= bounds[buffer[is_address]]
    if (is_in_placeholder_zone & ~is_address).any():
        return None
    contents[is_address] = offset[is_address]
    is_kernel = (contents >= KERNEL_ZONE) & (contents < KERNEL_ZONE + len(names))
    buffer[is_kernel] = len(bounds) + contents[is_kernel] - KERNEL_ZONE
    contents[is_kernel] = 0
    is_address |= is_kernel
    base_buffers = np.stack([np.flatnonzero(is_address), buffer[is_address]], axis=1)
    numbers = tuple(step.instruction_number for step in steps)
    return RelocatableTable(names, numbers, kernels, memory.size, table, contents, places, base_buffers)


def _pad_to_words(data: bytes) -> I64:
    return np.frombuffer(data + bytes(-len(data) % 8), np.int64)
