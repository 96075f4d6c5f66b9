"""Computes statistics of machine code from the text of NVIDIA's disassembler.

For each kernel, ``nvdisasm`` writes a line with its name, and then labels and instructions:

    .text.add:
    .L_x_1:
            /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
            /*0020*/              @P0  BRA `(.L_x_1) ;

This is a loop of two instructions. One of them loads 128 bits.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ....graph.errors import BackendError

NVDISASM_INSTALL_HINT = "pip install nvidia-cuda-nvdisasm"
KERNEL_PATTERN = re.compile(r"\.text\.(\S+):")
LABEL_PATTERN = re.compile(r"(\.L_\w+):")
INSTRUCTION_PATTERN = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
BRANCH_TARGET_PATTERN = re.compile(r"`\((\.L_\w+)\)")
GLOBAL_LOAD_PATTERN, MATMUL_PATTERN = re.compile(r"LDG(STS)?(\.|$)"), re.compile(r"\w*MMA(\.|$)")
ACCESS_WIDTHS = (("256", 256), ("128", 128), ("64", 64), ("U16", 16), ("S16", 16), ("U8", 8), ("S8", 8))


@dataclass(frozen=True, slots=True)
class CodeStatistics:
    """Instruction counts of one kernel's machine code.

    - `instructions`: all instructions.
    - `loop`: the instructions of the longest inner loop.
    - `products`: the matrix products on tensor cores.
    - `loads`: the global loads, by the bits that one load reads for a thread.
    """

    instructions: int
    loop: int
    products: int
    loads: Mapping[int, int]


def find_nvdisasm() -> str:
    """Find nvdisasm in its wheel or in a CUDA toolkit. Raises `BackendError` if neither is installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    wheels = sorted(p for folder in folders for p in Path(folder).glob("*/bin/nvdisasm"))
    program = str(wheels[-1]) if wheels else shutil.which("nvdisasm")
    if program is None:
        raise BackendError(f"nvdisasm, which shows machine code, is not installed; {NVDISASM_INSTALL_HINT}")
    return program


def disassemble_kernels(image: bytes) -> dict[str, CodeStatistics]:
    """Disassemble a cubin and return the code statistics of each kernel, by mangled name.

    Raises:
        BackendError: The cubin is unreadable, or nvdisasm is not installed.
    """
    return {
        name: compute_code_statistics(lines) for name, lines in split_disassembly_by_kernel(run_disassembler(image))
    }


def run_disassembler(image: bytes, *options: str) -> str:
    """Run nvdisasm on a cubin with additional command-line options, and return its output.

    Raises:
        BackendError: The cubin is unreadable, or nvdisasm is not installed.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cubin"
        file.write_bytes(image)
        done = subprocess.run([find_nvdisasm(), "-c", *options, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"nvdisasm: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout


def split_disassembly_by_kernel(text: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Split the output of nvdisasm by kernel: yield the mangled name of each kernel and its lines."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if begins := KERNEL_PATTERN.match(line):
            if name:
                yield name, lines
            name, lines = begins[1], []
        else:
            lines.append(line)
    if name:
        yield name, lines


def compute_code_statistics(lines: Sequence[str]) -> CodeStatistics:
    """Compute the code statistics of one kernel from its lines of disassembly."""
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    ops: list[str] = []
    for line in lines:
        if label := LABEL_PATTERN.match(line):
            labels[label[1]] = len(ops)
        elif instruction := INSTRUCTION_PATTERN.match(line):
            op, operands = instruction.groups()
            ops.append(op)
            if op.startswith("BRA") and (to := BRANCH_TARGET_PATTERN.search(operands)) and to[1] in labels:
                loops.append((labels[to[1]], len(ops)))
    inner = [(a, z) for a, z in loops if not any((a, z) != (b, y) and a <= b and y <= z for b, y in loops)]
    loads = Counter(map(compute_access_bits, filter(GLOBAL_LOAD_PATTERN.match, ops)))
    longest = max((z - a for a, z in inner), default=0)
    return CodeStatistics(
        len(ops), longest, sum(1 for op in ops if MATMUL_PATTERN.match(op)), dict(sorted(loads.items()))
    )


def compute_access_bits(op: str) -> int:
    """Return how many bits a load or store moves for each thread, from its opcode such as ``LDG.E.128``."""
    parts = op.split(".")
    return next((bits for word, bits in ACCESS_WIDTHS if word in parts), 32)
