"""Maps code addresses of a compiled library to source lines of kernels, with addr2line."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

from ....graph.errors import BackendError

PRELUDE_FILES = ("types.cuh", "cuda.cuh", "hip.cuh", "prelude.cuh")
"""Source files that stand before every kernel."""


class _SharedObjectInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("file", "base", "symbol", "address"))


def find_source_lines(library: ctypes.CDLL, codes: Sequence[int]) -> list[str]:
    """Find the kernel source line, ``file:line``, of each return address in `codes`."""
    return [select_innermost_kernel_line(frames) for frames in find_inlined_frames(library, codes)]


def find_inlined_frames(library: ctypes.CDLL, codes: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the inlined frames of each return address in `codes`, as ``file:line``.

    The innermost frame comes first.

    Raises:
        BackendError: addr2line is not installed.
    """
    if not codes:
        return []
    tool = shutil.which("addr2line")
    if tool is None:
        raise BackendError("accesses are named by lines with addr2line, which is not installed; install binutils")
    place = _SharedObjectInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(library.launch_0, ctypes.c_void_p), ctypes.byref(place))
    addresses = [hex(code - (place.base or 0) - 1) for code in codes]
    command = [tool, "-a", "-i", "-e", library._name, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = done.stdout.split("0x")[1:]
    frames = (answer.splitlines()[1:] for answer in answers)
    return [tuple(os.path.basename(frame.partition(" ")[0]) for frame in of) for of in frames]


def select_innermost_kernel_line(frames: Sequence[str]) -> str:
    """Select the innermost of inlined frames that is in a kernel source; frames are ``file:line``, innermost first.

    Without one, return the innermost frame in any CUDA file, or else in any file.
    """
    ours = [name for name in frames if name.partition(":")[0].endswith((".cu", ".cuh"))]
    return next(iter(select_kernel_frames(frames)), (ours or frames)[0])


def select_kernel_frames(frames: Sequence[str]) -> tuple[str, ...]:
    """Select the frames in kernel sources, without the files of the prelude."""
    ours = (name for name in frames if name.partition(":")[0].endswith((".cu", ".cuh")))
    return tuple(name for name in ours if not name.startswith(PRELUDE_FILES))
