"""Bindings that are cached on disk next to plans, and relocated to the buffers of the next process.

With a cached binding, a process imports neither kernels nor the code that binds kernels. A new binding replaces a
damaged file, or a file with missing kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ....graph.storage.disk_cache import make_cache_path, read_cached, write_cached
from ...base import Comm, Device, Program
from ...fusion.dataflow import Dataflow
from ..compilation.compiler import (
    ALIGNMENT,
    compile_missing_kernels,
    compute_kernel_code_digest,
    find_cached_kernel_addresses,
)
from ..steps.step_loop import run_step_table
from ..tuning.prefetch_tuning import tune_uncached_program_prefetch
from .relocatable_tables import parse_relocatable_table
from .replay import CompiledSegment, Replay
from .thread_pool import ThreadPool


def load_or_bind_cached_replay(
    program: Program, buffers: Sequence[np.ndarray], on: Device, thread_pool: ThreadPool, comm: Comm
) -> Replay | None:
    """Load the cached step table of a program, ready to run on `buffers`; if it is missing, build and cache it.

    The result is None if the table cannot be cached: the program has no cache name, or its buffers are not aligned. It
    is also None if the program needs other devices, Python calls or kernels of other packages.
    """
    file, addresses = find_binding_file(program, thread_pool.threads), [b.ctypes.data for b in buffers]
    if file is None or any(address % ALIGNMENT for address in addresses):
        return None
    tables = None if (data := read_cached(file)) is None else parse_relocatable_table(data)
    loops = [run_step_table, *thread_pool.start_and_end_kernels]
    kernels = None if tables is None else find_cached_kernel_addresses([*(loop.name for loop in loops), *tables.names])
    if tables is None or kernels is None:
        from .program_binding import bind_relocatable_program  # and with it all kernels

        tune_uncached_program_prefetch(program, buffers)
        tables, needed = bind_relocatable_program(program, thread_pool.threads)
        if tables is None:
            return None
        compile_missing_kernels([*loops, *needed])
        kernels = {kernel.name: kernel.address for kernel in needed}
        write_cached(file, tables.to_bytes())
    names = [tables.names[kernel] for kernel in tables.kernels]
    segment = CompiledSegment(names, *tables.relocate(addresses, kernels))
    return Replay(
        program,
        on,
        [(segment.instruction_numbers[0], segment)],
        partial(_build_dataflow, program),
        thread_pool,
        comm,
        buffers,
    )


def _build_dataflow(program: Program) -> Dataflow:
    from .program_binding import build_fused_dataflow

    return build_fused_dataflow(program)


def find_binding_file(program: Program, threads: int) -> Path | None:
    """Return the path of the cache file for the step table of a program; None for a program without a cache name."""
    name = program.cache_name
    return make_cache_path("bindings", name, threads, compute_kernel_code_digest()) if name else None
