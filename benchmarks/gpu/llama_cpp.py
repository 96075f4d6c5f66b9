"""Compare hocket with llama.cpp on the same device and shapes, by llama.cpp's program ``test-backend-ops perf``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hocket.graph.dtypes import DType

from . import delta_net, matmul
from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow

PROGRAM = "test-backend-ops"
RESULT_LINE = re.compile(r"^\s*(?P<op>[A-Z_]+)\((?P<named>.*)\): +\d+ runs - +(?P<microseconds>[0-9.]+) us/run")
GGML_TYPE_NAMES = {DType.Q4_K: "q4_K", DType.Q8_0: "q8_0", DType.BF16: "bf16"}
SELECTED_CASES = {
    "GATED_DELTA_NET": "permuted=0,kda=0,K=1$",
    "MUL_MAT": rf"type_a=({'|'.join(GGML_TYPE_NAMES.values())}),type_b=f32,m=4096,n=(1|8|512),k=14336,bs=\[1,1\]",
    "FLASH_ATTN_EXT": "hsk=128,hsv=128.*type_K=f16",
}
"""For each op of llama.cpp, a regular expression that selects some of the cases of the program."""
BACKEND_NAMES = {"cuda": "CUDA", "hip": "ROCm"}
"""The names of backends in llama.cpp."""
MAX_SECONDS = 280
"""Seconds after which the program is stopped."""


def make_llama_cpp_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    for op, chosen in SELECTED_CASES.items():
        yield Case(op, partial(_compare_op, bench, op, chosen))


def _compare_op(bench: BenchmarkDevice, op: str, chosen: str) -> Iterator[ResultRow]:
    """Yield a row for each case of an op: the time of llama.cpp, and the time of hocket for ops in `TIMER_BY_OP`."""
    for named, theirs in run_llama_perf(bench, op, chosen):
        row: ResultRow = {"llama.cpp": ", ".join(f"{k}={v}" for k, v in named.items()), "theirs µs": theirs}
        for ours in TIMER_BY_OP[op](bench, named) if op in TIMER_BY_OP else ():
            row |= {"ours µs": ours, "theirs / ours": theirs / ours}
        yield row


def run_llama_perf(bench: BenchmarkDevice, op: str, chosen: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the parameters of each selected case of an op, and its microseconds.

    Raises:
        NothingToMeasure: The program is not installed.
        RuntimeError: The program measured nothing.
    """
    program = bench.llama / PROGRAM if bench.llama else shutil.which(PROGRAM)
    if program is None or not Path(program).exists():
        raise NothingToMeasure(f"there is no {PROGRAM} of llama.cpp; name the folder that has it with --llama")
    backend = f"{BACKEND_NAMES[bench.on.kind]}{bench.on.index}" if bench.on.kind in BACKEND_NAMES else "CPU"
    command = [str(program), "perf", "-o", op, "-b", backend, "-p", chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
    lines = [line for line in map(RESULT_LINE.match, done.stdout.splitlines()) if line]
    if done.returncode or not lines:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise RuntimeError(f"{PROGRAM} measured no {op} on {backend} (exit code {done.returncode}) and said: {last[0]}")
    for line in lines:
        pairs = re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", line["named"])
        yield dict(pairs), float(line["microseconds"])


def _time_delta_net(bench: BenchmarkDevice, named: dict[str, str]) -> Iterator[float]:
    """Yield the microseconds of hocket for a delta net. In llama.cpp several value heads share a key head.

    A state is read and written once.
    """
    keys, size, tokens, batch, repeat = (
        int(named[name]) for name in ("head_count", "head_size", "n_seq_tokens", "n_seqs", "v_repeat")
    )
    if bench.tiny:  # the emulation is too slow for the sizes of llama.cpp
        keys, size, tokens, batch = 1, 64, min(tokens, 2), 1
    p = delta_net.make_problem(bench, delta_net.DeltaNetShape(keys, keys * repeat, size), batch, tokens)
    by_chunks = delta_net.kernels.uses_chunk_kernels(p.rule, tokens)
    launches = delta_net.bind_chunks(bench, p, p.state, True) if by_chunks else delta_net.bind_steps(bench, p, p.state)
    yield bench.measure_launches([launches]).seconds * 1e6


def _time_matmul(bench: BenchmarkDevice, named: dict[str, str]) -> Iterator[float]:
    """Yield the microseconds of hocket for a matmul."""
    dtype = next(t for t, name in GGML_TYPE_NAMES.items() if name == named["type_a"])
    rows, columns, tokens = (int(named[name]) for name in "mkn")
    if bench.tiny:
        rows, columns, tokens = 32, 256, min(tokens, 5)
    for row in matmul.measure_matmul(bench, dtype, (rows, columns), tokens):
        yield float(str(row["µs"]))


TIMER_BY_OP = {"GATED_DELTA_NET": _time_delta_net, "MUL_MAT": _time_matmul}
"""Functions that yield the microseconds of hocket for the parameters of a llama.cpp case."""
