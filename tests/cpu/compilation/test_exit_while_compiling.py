"""The end of a process while a daemon thread compiles a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILING_PROGRAM = """
import threading
from hocket.backends.cpu.compilation.compiler import IrBody, Kernel, _load_kernel
from llvmlite import ir

begun = threading.Event()

def emit(function):
    begun.set()
    builder = ir.IRBuilder(function.append_basic_block())
    total = function.args[0]
    for factor in range(3, 3_003, 2):
        total = builder.xor(builder.mul(total, total.type(factor)), total.type(factor))
    builder.ret(total)

threading.Thread(target=_load_kernel, args=(Kernel("products", IrBody(emit, emit)),), daemon=True).start()
begun.wait()
"""


def test_a_process_ends_after_the_kernel_that_it_compiles(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILING_PROGRAM],
        env={**os.environ, "HOCKET_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.glob("kernels/*.o")), "the compilation has ended and is cached"
