"""Where in the sources of kernels the code of a compiled library comes from."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

from ....graph.errors import BackendError

BEFORE_ALL = ("types.cuh", "cuda.cuh", "hip.cuh", "prelude.cuh")


class _Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("file", "base", "symbol", "address"))


def lines_of(made: ctypes.CDLL, codes: Sequence[int]) -> list[str]:
    """``file:line`` in the sources of kernels, for addresses that calls return to."""
    if not codes:
        return []
    tool = shutil.which("addr2line")
    if tool is None:
        raise BackendError("accesses are named by lines with addr2line, which is not installed; install binutils")
    place = _Place()
    ctypes.CDLL(None).dladdr(ctypes.cast(made.launch_0, ctypes.c_void_p), ctypes.byref(place))
    asked = [hex(code - (place.base or 0) - 1) for code in codes]
    done = subprocess.run([tool, "-a", "-i", "-e", made._name, *asked], capture_output=True, text=True, check=True)
    answers = done.stdout.split("0x")[1:]
    return [_line(answer.splitlines()[1:]) for answer in answers]


def _line(frames: Sequence[str]) -> str:
    """The innermost frame that is in a source of ours but not in what stands before all, if there is one."""
    names = [os.path.basename(frame.partition(" ")[0]) for frame in frames]
    ours = [name for name in names if name.partition(":")[0].endswith((".cu", ".cuh"))]
    return next((name for name in ours if not name.startswith(BEFORE_ALL)), (ours or names)[0])
