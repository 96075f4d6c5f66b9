"""Loader of ELF object code: it copies the code into executable memory and fills in addresses.

The loader handles objects of x86-64 on Linux. LLVM could do it, but takes 40 MB of memory and more time than all other
work of a warm start. An object has three parts:

- Sections; some of them are loaded.
- Symbols, each in a section or a function of the system.
- Relocations: places in sections that need an address or a distance.

Code finds functions of the system in a table of addresses after the sections:

    0x0000 .ltext    call by entry 0 of the table, which lies 0x1240 - 0x0010 behind this place
    0x1200 .rodata
    0x1240 table     address of usleep
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....graph.errors import BackendError

ELF_MAGIC, X86_64 = b"\x7fELF\x02\x01", 62
_HEADER = np.dtype(
    {
        "names": ["machine", "sections", "count", "names"],
        "formats": ["<u2", "<u8", "<u2", "<u2"],
        "offsets": [18, 40, 60, 62],
        "itemsize": 64,
    }
)
_SECTION = np.dtype("<u4, <u4, <u8, <u8, <u8, <u8, <u4, <u4, <u8, <u8")
_SYMBOL = np.dtype("<u4, <u2, <u2, <u8, <u8")
_RELOCATION = np.dtype("<u8, <u4, <u4, <i8")
SYMBOLS, RELOCATIONS, EMPTY = 2, 4, 8
"""Kinds of ELF sections: symbol table, relocations with addends, and zero-filled memory."""
WRITABLE, LOADED = 1, 2
"""Flags of ELF sections."""
UNWIND_SECTION, OFFSET_TABLE_SYMBOL = ".eh_frame", "_GLOBAL_OFFSET_TABLE_"
"""A section that is not loaded, because kernels do not raise; and the symbol of the address table."""
ABSOLUTE, DISTANCE_32, CALL_DISTANCE_32, DISTANCE, FROM_TABLE, ENTRY, TO_TABLE, CALL_FROM_TABLE = KNOWN_RELOCATIONS = (
    1,
    2,
    4,
    24,
    25,
    27,
    29,
    31,
)
"""Kinds of relocations: R_X86_64_64, PC32, PLT32, PC64, GOTOFF64, GOT64, GOTPC64 and PLTOFF64 (psABI, 4.4.1)."""


class Section(NamedTuple):
    """One ELF section header.

    Relocation sections have a `target_section`. The `link` of a symbol table is the section with symbol names.
    """

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    target_section: int
    alignment: int
    entry_bytes: int


class Symbol(NamedTuple):
    """One entry of an ELF symbol table."""

    name: int
    info: int
    section: int
    value: int
    nbytes: int


class Relocation(NamedTuple):
    """One ELF relocation: a place in the loaded code that must be filled with the address of, or distance to, a symbol.

    `position` counts bytes from the start of the loaded code. `symbol` is an index in the symbol table.
    """

    position: int
    kind: int
    symbol: int
    addend: int


def is_loadable_x86_64_code(code: bytes) -> bool:
    """Return whether `load_function` can load object code: x86-64 code, in a 64-bit process on x86-64 Linux."""
    is_elf = len(code) >= _HEADER.itemsize and code.startswith(ELF_MAGIC)
    fits = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32
    return fits and is_elf and int(np.frombuffer(code, _HEADER, 1)["machine"][0]) == X86_64


def load_function(code: bytes, function_name: str) -> int:
    """Load object code into executable memory and return the address of one function.

    The code stays in memory for the whole process, because threads may run it while Python ends.

    Raises:
        BackendError: The object has writable data, other kinds of relocations, or functions that the system lacks.
    """
    there = _ObjectFile(code)
    entries = {number: there.end + 8 * n for n, number in enumerate(there.list_symbols_in_address_table())}
    content = _map_permanent_zeroed_pages(there.end + 8 * len(entries))
    base = content.ctypes.data
    table = base + there.end
    for start, data in there.list_section_offsets_and_contents():
        content[start : start + len(data)] = np.frombuffer(data, np.uint8)
    for number, entry in entries.items():
        _write_integer(content, entry, there.find_symbol_address(number, base), 8)
    for at, kind, number, more in there.relocations:
        if kind == ENTRY:
            value = entries[number] - there.end
        elif kind == TO_TABLE:
            value = table - base - at
        elif kind in (FROM_TABLE, CALL_FROM_TABLE):
            value = there.find_symbol_address(number, base) - table
        else:
            value = there.find_symbol_address(number, base) - (0 if kind == ABSOLUTE else base + at)
        _write_integer(content, at, value + more, 4 if kind in (DISTANCE_32, CALL_DISTANCE_32) else 8)
    _make_executable(content)
    return there.find_symbol_address(there.find_symbol(function_name), base)


class _ObjectFile:
    """A parsed ELF object file, with the loaded sections laid out in consecutive memory from 0 to `end`."""

    def __init__(self, code: bytes) -> None:
        header = np.frombuffer(code, _HEADER, 1)[0]
        self._code = code
        sections = np.frombuffer(code, _SECTION, int(header["count"]), int(header["sections"]))
        self._sections = [Section(*of) for of in sections.tolist()]
        self._section_names = self._read_section(int(header["names"]))
        self._section_starts, self.end = self._lay_out_sections()
        (symbols,) = (at for at, section in enumerate(self._sections) if section.kind == SYMBOLS)
        self._symbol_names = self._read_section(self._sections[symbols].link)
        self._symbols = [Symbol(*of) for of in np.frombuffer(self._read_section(symbols), _SYMBOL).tolist()]
        self.relocations = [*self._read_relocations()]

    def _read_section(self, at: int) -> bytes:
        of = self._sections[at]
        return bytes(of.nbytes) if of.kind == EMPTY else self._code[of.offset : of.offset + of.nbytes]

    def _lay_out_sections(self) -> tuple[Mapping[int, int], int]:
        starts: dict[int, int] = {}
        end = 0
        for at, of in enumerate(self._sections):
            if not of.flags & LOADED or not of.nbytes or _read_name(self._section_names, of.name) == UNWIND_SECTION:
                continue
            if of.flags & WRITABLE:
                raise BackendError(
                    f"object code has data that it writes, in {_read_name(self._section_names, of.name)}"
                )
            starts[at] = -(-end // max(1, of.alignment)) * max(1, of.alignment)
            end = starts[at] + of.nbytes
        return starts, -(-end // 8) * 8

    def _read_relocations(self) -> Iterator[Relocation]:
        for number, of in enumerate(self._sections):
            if of.kind != RELOCATIONS or of.target_section not in self._section_starts:
                continue
            for at, kind, symbol, more in np.frombuffer(self._read_section(number), _RELOCATION).tolist():
                if kind not in KNOWN_RELOCATIONS:
                    raise BackendError(f"object code has a relocation of kind {kind}, which kernels do not have")
                yield Relocation(self._section_starts[of.target_section] + at, kind, symbol, more)

    def list_section_offsets_and_contents(self) -> Iterator[tuple[int, bytes]]:
        """Yield the start offset and the contents of each loaded section."""
        return ((start, self._read_section(at)) for at, start in self._section_starts.items())

    def list_symbols_in_address_table(self) -> list[int]:
        """Return the indices of the symbols that need an entry in the address table."""
        return [*dict.fromkeys(r.symbol for r in self.relocations if r.kind == ENTRY)]

    def find_symbol_address(self, number: int, base: int) -> int:
        """Return the address of symbol `number` if the loaded object begins at the address `base`."""
        symbol = self._symbols[number]
        if symbol.section in self._section_starts:
            return base + self._section_starts[symbol.section] + symbol.value
        name = _read_name(self._symbol_names, symbol.name)
        return base + self.end if name == OFFSET_TABLE_SYMBOL else _find_system_symbol(name)

    def find_symbol(self, name: str) -> int:
        return next(n for n, symbol in enumerate(self._symbols) if _read_name(self._symbol_names, symbol.name) == name)


def _read_name(texts: bytes, at: int) -> str:
    return texts[at : texts.index(0, at)].decode()


def _write_integer(content: npt.NDArray[np.uint8], at: int, value: int, nbytes: int) -> None:
    content[at : at + nbytes] = np.frombuffer(value.to_bytes(nbytes, "little", signed=value < 0), np.uint8)


@cache
def _open_process_library() -> ctypes.CDLL:
    """Open a handle to all libraries of the process, for system functions such as ``mmap``."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    return system


@cache
def _find_system_symbol(name: str) -> int:
    try:
        return ctypes.cast(getattr(_open_process_library(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise BackendError(f"object code calls {name!r:.60}, which this system has not") from None


def _map_permanent_zeroed_pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Map zeroed writable memory pages that are never freed."""
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    at = _open_process_library().mmap(None, ctypes.c_size_t(nbytes), access, flags, -1, ctypes.c_long(0))
    if at == ctypes.c_void_p(-1).value:
        raise BackendError(f"no memory for {nbytes} bytes of kernels: {os.strerror(ctypes.get_errno())}")
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at))


def _make_executable(content: npt.NDArray[np.uint8]) -> None:
    access = mmap.PROT_READ | mmap.PROT_EXEC
    if _open_process_library().mprotect(ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content)), access):
        why = os.strerror(ctypes.get_errno())
        raise BackendError(f"memory of kernels cannot be made executable ({why}); use the device numpy:0")
