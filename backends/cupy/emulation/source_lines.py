"""Where in the sources of kernels the code of a compiled library comes from."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

from ....graph.errors import BackendError

PRELUDE_FILES = ("types.cuh", "cuda.cuh", "hip.cuh", "prelude.cuh")


class _SharedObjectInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("file", "base", "symbol", "address"))


def find_lines(made: ctypes.CDLL, codes: Sequence[int]) -> list[str]:
    """``file:line`` in the sources of kernels, for addresses that calls return to."""
    return [select_innermost_line(frames) for frames in find_frames(made, codes)]


def find_frames(made: ctypes.CDLL, codes: Sequence[int]) -> list[tuple[str, ...]]:
    """``file:line`` of each function that code of these addresses is inlined in, the innermost first."""
    if not codes:
        return []
    tool = shutil.which("addr2line")
    if tool is None:
        raise BackendError("accesses are named by lines with addr2line, which is not installed; install binutils")
    place = _SharedObjectInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(made.launch_0, ctypes.c_void_p), ctypes.byref(place))
    asked = [hex(code - (place.base or 0) - 1) for code in codes]
    done = subprocess.run([tool, "-a", "-i", "-e", made._name, *asked], capture_output=True, text=True, check=True)
    answers = done.stdout.split("0x")[1:]
    frames = (answer.splitlines()[1:] for answer in answers)
    return [tuple(os.path.basename(frame.partition(" ")[0]) for frame in of) for of in frames]


def select_innermost_line(frames: Sequence[str]) -> str:
    """The innermost frame that is in a source of ours but not in what stands before all, if there is one."""
    ours = [name for name in frames if name.partition(":")[0].endswith((".cu", ".cuh"))]
    return next(iter(select_kernel_frames(frames)), (ours or frames)[0])


def select_kernel_frames(frames: Sequence[str]) -> tuple[str, ...]:
    """The frames in sources of ours, without what stands before all."""
    ours = (name for name in frames if name.partition(":")[0].endswith((".cu", ".cuh")))
    return tuple(name for name in ours if not name.startswith(PRELUDE_FILES))
