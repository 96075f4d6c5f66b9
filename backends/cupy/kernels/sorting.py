"""Kernels that sort rows and select their largest entries.

1. Sort runs of a row in shared memory.
2. Merge sorted runs in pairs until a row is one run, or sort again where runs are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...operands import Bound, Operand, need
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import as_float

EACH, TILE = 8, 2048
"""Items of a thread; items of a block that merges, or that sorts a part of a row."""
LONGEST = 4096
"""The most items that one block sorts if it is the only block of its row."""
SOURCE = Source("sorting.cu", ("sort_runs", "merge_runs"), ("items.cuh",))
SOURCES = (SOURCE,)


@dataclass(frozen=True, slots=True)
class Round:
    """A pass that turns each row of `columns` items into `runs` sorted runs of `items_per_run` items.

    It sorts parts of `length` columns, or it merges pairs of runs that have this length.
    """

    columns: int
    length: int
    kept: int
    runs: int
    merges: bool


def rounds(columns: int, kept: int) -> Iterator[Round]:
    """Yield the passes that select the first `kept` items of a sorted row."""
    made = _sorting(columns, 1, kept)
    yield made
    while made.runs > 1:
        many, length = made.runs * made.kept, made.kept
        if 2 * length <= TILE:
            made = _sorting(many, length, kept)
        else:
            made = Round(many, length, min(kept, 2 * length), blocks(made.runs, 2), merges=True)
        yield made


def _sorting(columns: int, unit: int, kept: int) -> Round:
    """Return a pass that sorts runs of complete units."""
    length = columns if columns <= LONGEST else TILE // unit * unit
    return Round(columns, length, min(kept, length), blocks(columns, length), merges=False)


def _sort(launches: Launches, x: Operand, out: Operand, kept: int, *, descending: bool) -> None:
    """Launch the passes that write the numbers of the first `kept` entries of each sorted row."""
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    need(x.is_dense, "rows that are sorted are not dense")
    need(columns < 2**31, f"rows of {columns} entries are too long")
    if 0 in (rows, kept):
        return
    all_rounds = list(rounds(columns, kept))
    *sizes, _ = (rows * r.runs * r.kept for r in all_rounds)
    rooms = [launches.scratch((max(part),), DType.I64) for part in (sizes[::2], sizes[1::2]) if part]
    source: Operand | int = 0  # the first pass reads the entries
    for at, made in enumerate(all_rounds):
        last = made is all_rounds[-1]
        target: list[Word] = [0, out] if last else [rooms[at % 2], 0]
        if made.merges:
            tiles = blocks(made.kept, TILE)
            words: list[Word] = [made.columns // made.length, made.length, made.kept, tiles, source, *target]
            launches.add(SOURCE["merge_runs"], rows * made.runs * tiles, TILE // EACH, words)
        else:
            bits = max(3, (made.length - 1).bit_length())
            words = [made.columns, made.runs, made.length, bits, made.kept, descending, 0 if at else x, source, *target]
            launches.add(SOURCE["sort_runs"], rows * made.runs, max(32, 2**bits // EACH), words, 8 * 2**bits)
        source = target[0] if isinstance(target[0], Operand) else 0


def _argsort(launches: Launches, call: Bound) -> None:
    x = as_float(launches, call.operand(0))
    _sort(launches, x, call.out, x.shape[-1], descending=bool(call.attrs["descending"]))


def _top_k(launches: Launches, call: Bound) -> None:
    _sort(
        launches, as_float(launches, call.operand(0)), call.out, int(float_attribute(call.attrs, "k")), descending=True
    )


BINDINGS: Mapping[str, Binding] = MappingProxyType({"argsort": _argsort, "top_k": _top_k})
