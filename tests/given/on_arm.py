"""The command line of hocket with the kernels of ``cpu`` for AArch64, which QEMU runs.

    python on_arm.py 'dotprod i8mm' check --backend cpu -j 1

The command runs in one process, as with native kernels. Kernels are loaded into a process of QEMU. All memory that
they touch is fetched from this process, and their changes come back, so that everything except the code of kernels is
as on any machine.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

SYSROOT, PAGE = "/usr/aarch64-linux-gnu", 4096
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
DONE, REQUESTED, CHANGED = range(3)
SOURCE = Path(__file__).with_name("arm_guest.c")


class Guest:
    """A process of QEMU that has kernels, and calls them one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._many, self._turn = folder, 0, threading.Lock()
        subprocess.run([COMPILER, "-O1", "-o", folder / "guest", SOURCE, "-ldl"], check=True)
        command = [EMULATOR, "-cpu", "max", "-L", SYSROOT, folder / "guest"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._memory = os.open("/proc/self/mem", os.O_RDWR)

    def load(self, code: bytes, symbol: str) -> int:
        """The address there of a kernel in an object file."""
        self._many += 1
        object_file, library = self._folder / "kernel.o", self._folder / f"{self._many}.so"
        object_file.write_bytes(code)
        subprocess.run([COMPILER, "-shared", "-o", library, object_file, "-lm"], check=True)
        with self._turn:
            self._put(b"L" + b"".join(text.encode().ljust(256, b"\0") for text in (str(library), symbol)))
            return self._receive_answer()

    def call(self, kernel: int, words: int, thread: int, threads: int) -> int:
        """The status of a kernel, which has read and changed memory of this process."""
        with self._turn:
            self._put(b"C" + struct.pack("=4q", kernel, words, thread, threads))
            return self._receive_answer()

    def _receive_answer(self) -> int:
        addresses: dict[int, bytes] = {}
        while True:
            kind, value = struct.unpack("=2q", self._get(16))
            if kind == DONE:
                return value
            if kind == REQUESTED:
                addresses[value] = os.pread(self._memory, PAGE, value)
                self._put(addresses[value])
            else:
                self._change(value, addresses[value], self._get(PAGE))

    def _change(self, page: int, before: bytes, after: bytes) -> None:
        """Write the bytes that differ: others of a page may be of objects of Python, which have changed meanwhile."""
        old, new = (np.frombuffer(data, np.uint8) for data in (before, after))
        changes = np.flatnonzero(np.diff(np.concatenate([[False], old != new, [False]]))).reshape(-1, 2)
        for start, end in changes.tolist():
            os.pwrite(self._memory, after[start:end], page + start)

    def _put(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _get(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise RuntimeError(f"QEMU ended with {self._process.wait()}")
        return data


def main(features: str, arguments: Sequence[str]) -> int:
    """Run the command line; callers of kernels are loaded once the kernels are in the guest."""
    from hocket.backends.cpu import target_cpu
    from hocket.backends.cpu.compilation import compiler

    (like,) = (t for t in target_cpu.PRECOMPILED_TARGETS if t.name == "aarch64")
    target = target_cpu._make_target(
        f"aarch64-{features}", like.triple, like.cpu, f"{' '.join(like.features)} {features}"
    )
    with tempfile.TemporaryDirectory() as folder:
        guest = Guest(Path(folder))
        target_cpu.find_host_or_requested_target = lambda: target
        compiler._load_object_code = lambda required, code: (
            guest.load(code, compiler._make_symbol_name(required)),
            code,
        )
        compiler.KERNEL_FUNCTION = lambda address: partial(guest.call, address)
        from hocket import cli

        return cli.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
