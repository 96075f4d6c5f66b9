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
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import as_float

ITEMS_PER_THREAD, ITEMS_PER_BLOCK = 8, 2048
"""Items of a thread; items of a block that merges, or that sorts a part of a row."""
MAX_SINGLE_BLOCK_ITEMS = 4096
"""The most items that one block sorts if it is the only block of its row."""
MAX_COMPUTED_ROWS, MAX_COMPUTED_COLUMNS = 4, 1024
"""The most rows and columns of a top-k for which its scratch has room; see `_bind_top_k`."""
SOURCE = KernelSource("sorting.cu", ("sort_runs", "merge_runs"), ("items.cuh",))
SOURCES = (SOURCE,)


@dataclass(frozen=True, slots=True)
class SortPass:
    """One pass of a merge sort over all rows: it sorts parts of a row, or merges pairs of sorted parts.

    - `columns`: the items of a row before the pass.
    - `length`: the items of a part.
    - `items_per_run`: the items of each sorted part after the pass.
    - `runs`: the number of sorted parts of a row after the pass.
    - `is_merge`: whether the pass merges.
    """

    columns: int
    length: int
    items_per_run: int
    runs: int
    is_merge: bool


def iterate_passes_to_sort_first_items(columns: int, count: int) -> Iterator[SortPass]:
    """Yield the passes that sort rows of `columns` items, as far as needed for the first `count` sorted items."""
    sort_pass = _make_shared_memory_sort_pass(columns, 1, count)
    yield sort_pass
    while sort_pass.runs > 1:
        many, length = sort_pass.runs * sort_pass.items_per_run, sort_pass.items_per_run
        if 2 * length <= ITEMS_PER_BLOCK:
            sort_pass = _make_shared_memory_sort_pass(many, length, count)
        else:
            sort_pass = SortPass(many, length, min(count, 2 * length), count_blocks(sort_pass.runs, 2), is_merge=True)
        yield sort_pass


def _make_shared_memory_sort_pass(columns: int, unit: int, count: int) -> SortPass:
    """Make a pass that sorts parts of a row in shared memory.

    Args:
        columns: The items of a row.
        unit: The items of a sorted run of an earlier pass, else 1. A part has complete runs.
        count: The number of sorted items that are needed.
    """
    length = columns if columns <= MAX_SINGLE_BLOCK_ITEMS else ITEMS_PER_BLOCK // unit * unit
    return SortPass(columns, length, min(count, length), count_blocks(columns, length), is_merge=False)


def _launch_argsort(launches: LaunchBuilder, x: Operand, out: Operand, count: int, *, descending: bool) -> None:
    """Launch an argsort of each row: write the column indices of the first `count` entries in sorted order."""
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    require_supported(x.is_dense, "rows that are sorted are not dense")
    require_supported(columns < 2**31, f"rows of {columns} entries are too long")
    if 0 in (rows, count):
        return
    passes = list(iterate_passes_to_sort_first_items(columns, count))
    *sizes, _ = (rows * r.runs * r.items_per_run for r in passes)
    buffers = [launches.allocate_scratch((max(part),), DType.I64) for part in (sizes[::2], sizes[1::2]) if part]
    source: Operand | int = 0  # the first pass reads the entries
    for at, sort_pass in enumerate(passes):
        last = sort_pass is passes[-1]
        target: list[LaunchWord] = [0, out] if last else [buffers[at % 2], 0]
        if sort_pass.is_merge:
            tiles = count_blocks(sort_pass.items_per_run, ITEMS_PER_BLOCK)
            words: list[LaunchWord] = [
                sort_pass.columns // sort_pass.length,
                sort_pass.length,
                sort_pass.items_per_run,
                tiles,
                source,
                *target,
            ]
            launches.add_launch(
                SOURCE["merge_runs"], rows * sort_pass.runs * tiles, ITEMS_PER_BLOCK // ITEMS_PER_THREAD, words
            )
        else:
            bits = max(3, (sort_pass.length - 1).bit_length())
            words = [
                sort_pass.columns,
                sort_pass.runs,
                sort_pass.length,
                bits,
                sort_pass.items_per_run,
                descending,
                0 if at else x,
                source,
                *target,
            ]
            launches.add_launch(
                SOURCE["sort_runs"], rows * sort_pass.runs, max(32, 2**bits // ITEMS_PER_THREAD), words, 8 * 2**bits
            )
        source = target[0] if isinstance(target[0], Operand) else 0


def _bind_argsort(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x = as_float(launches, call.operand(0))
    _launch_argsort(launches, x, call.out, x.shape[-1], descending=bool(call.attrs["descending"]))


def _bind_top_k(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind a top-k. Its scratch has room for few and short rows, which a fusion may compute in the same launch."""
    x = call.operand(0)
    if math.prod(x.shape[:-1]) <= MAX_COMPUTED_ROWS and x.shape[-1] <= MAX_COMPUTED_COLUMNS:
        launches.allocate_scratch(x.shape)
    _launch_argsort(
        launches, as_float(launches, call.operand(0)), call.out, int(float_attribute(call.attrs, "k")), descending=True
    )


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"argsort": _bind_argsort, "top_k": _bind_top_k})
