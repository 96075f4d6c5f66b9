"""Bindings that are cached on disk next to plans, and relocated to the buffers of the next process.

With a cached binding, neither kernels nor the code that binds them is imported. A damaged file, or one with missing
kernels, is replaced by a new binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..base import Comm, Device, Program
from ..cache import cache_folder, keep, recalled
from ..flow import Flow
from .compiler import ALIGNMENT, make_ready, source_digest, stored_addresses
from .crew import Crew
from .fetching import measure_for
from .kernels.loop import run
from .relocation import read
from .replay import Replay, Segment


def kept_replay(program: Program, buffers: Sequence[np.ndarray], on: Device, crew: Crew, comm: Comm) -> Replay | None:
    """Return a program ready to run from a cached binding, or bind it and cache the result.

    Returns None if the program is not cached or needs more than compiled code of this package for one device.
    """
    file, addresses = file_of(program, crew.threads), [b.ctypes.data for b in buffers]
    if file is None or any(address % ALIGNMENT for address in addresses):
        return None
    tables = None if (data := recalled(file)) is None else read(data)
    loops = [run, *crew.kernels]
    kernels = None if tables is None else stored_addresses([*(loop.name for loop in loops), *tables.names])
    if tables is None or kernels is None:
        from .binding import foreseen  # and with it all kernels

        measure_for(program, buffers)
        tables, needed = foreseen(program, crew.threads)
        if tables is None:
            return None
        make_ready([*loops, *needed])
        kernels = {wanted.name: wanted.address for wanted in needed}
        keep(file, tables.data())
    names = [tables.names[kernel] for kernel in tables.kernels]
    segment = Segment(names, *tables.at(addresses, kernels))
    return Replay(program, on, [(segment.numbers[0], segment)], partial(_flow_of, program), crew, comm, buffers)


def _flow_of(program: Program) -> Flow:
    from .binding import arranged

    return arranged(program)


def file_of(program: Program, threads: int) -> Path | None:
    """Return the cache file of the binding of a program; None for a program that is not cached."""
    if not program.kept:
        return None
    from hashlib import sha256

    name = sha256(repr((program.kept, threads, source_digest())).encode()).hexdigest()[:40]
    return cache_folder() / "bindings" / f"{name}.i64"
