"""Kernels for other processors: translated in a process of their own, and those for AArch64 run by QEMU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
TRANSLATE = """
import sys
from hocket.backends.cpu import compiler, processor
from hocket.graph.dtypes import DType

base, features, form, *kernels = sys.argv[1:]
(like,) = (t for t in processor.SHIPPED if t.name == base)
target = processor._of("other", like.triple, like.cpu, f"{' '.join(like.features)} {features}")
processor.target = lambda: target
from hocket.backends.cpu.kernels import dense, norms, products
from hocket.backends.cpu.kernels.formats import FORMATS

for name in kernels:
    dtype = DType(name)
    kernel = products.product(FORMATS[dtype]) if dtype in FORMATS else dense.product(dtype)
    module, machine = compiler._translated(kernel)
    if form == "text":
        print(machine.emit_assembly(module))
    else:
        open(form, "wb").write(machine.emit_object(module))
"""
BASE, PAGE = 0x2_0000_0000, 4096
"""Where all memory of a call lies, and of what each array in it has whole ones, and one behind it."""
CALL = """
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
extern int64_t kernel(int64_t, int64_t, int64_t) __asm__("%s");
int main(int count, char **given) {
    int file = open(given[1], O_RDWR), threads = atoi(given[2]);
    struct stat about;
    if (fstat(file, &about)) return 2;
    void *base = (void *)%dL;
    if (mmap(base, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != base) return 3;
    for (int thread = 0; thread < threads; thread++)
        if (kernel((int64_t)base, thread, threads)) return 4;
    return 0;
}
"""


def needs_arm() -> None:
    """Skip a test where nothing links or runs code for AArch64."""
    for program, package in ((COMPILER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian has it in {package})")


def translated(base: str, features: str, form: str, *dtypes: str) -> str:
    """Products with weights of these types for a processor like `base` with more features: as ``text``, or in an object
    file."""
    done = subprocess.run(
        [sys.executable, "-c", TRANSLATE, base, features, form, *dtypes], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class ProductOnArm:
    """A product with a weight of some type, linked to a program for a processor with these features; called as `REPLAY`
    would, on every thread in turn.  Arrays among its words are memory, which it may write."""

    def __init__(self, folder: Path, features: str, dtype: str, symbol: str) -> None:
        needs_arm()
        self.program, self.memory = folder / "call", folder / "memory"
        translated("aarch64", features, str(folder / "kernel.o"), dtype)
        (folder / "call.c").write_text(CALL % (symbol, BASE))
        subprocess.run([COMPILER, "-static", "-o", self.program, folder / "call.c", folder / "kernel.o"], check=True)

    def __call__(self, words: Sequence[object], threads: int) -> None:
        arrays = [w for w in words if isinstance(w, np.ndarray)]
        sizes = [-(-n // PAGE) * PAGE for n in (8 * len(words), *(array.nbytes + PAGE for array in arrays))]
        starts = dict(zip(map(id, arrays), np.cumsum(sizes)[:-1].tolist(), strict=True))
        block = [BASE + starts[id(w)] if isinstance(w, np.ndarray) else w for w in words]
        memory = np.zeros(sum(sizes), np.uint8)
        memory[: 8 * len(words)] = np.array(block, np.int64).view(np.uint8)
        for array in arrays:
            memory[starts[id(array)] :][: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        memory.tofile(self.memory)
        subprocess.run([EMULATOR, "-cpu", "max", self.program, self.memory, str(threads)], check=True)
        after = np.fromfile(self.memory, np.uint8)
        for array in arrays:
            array[...] = after[starts[id(array)] :][: array.nbytes].view(array.dtype).reshape(array.shape)
