"""Compare hocket with llama.cpp on the same device, by llama.cpp's programs.

``test-backend-ops perf`` measures the same shapes, ``llama-bench`` the same files. The programs are built on the
machine of the device from a source: a folder, or an archive such as the source distribution of ``llama-cpp-python``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hocket.graph.dtypes import DType

from . import delta_net, matmul, random_models
from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow

PROGRAM, BENCH_PROGRAM = "test-backend-ops", "llama-bench"
SOURCE_FOLDER = "vendor/llama.cpp/"
"""The folder of llama.cpp in the archive."""
BUILD_FLAGS = {
    "cuda": ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DGGML_CUDA_NCCL=OFF"),
    "hip": ("-DGGML_HIP=ON",),
}
"""For each kind of device the flags of CMake, in addition to `COMMON_BUILD_FLAGS`."""
COMMON_BUILD_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=ON")
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
    yield Case("build", partial(_build_programs, bench))
    for op, chosen in SELECTED_CASES.items():
        yield Case(op, partial(_compare_op, bench, op, chosen))
    for path in bench.models:
        yield Case(f"{BENCH_PROGRAM}, {path.name}", partial(_measure_file, bench, lambda path=path: path))
    title, write = bench.select_size(
        ("Qwen3.5-4B, random Q4_K", random_models.write_qwen35_4b), ("random, tiny", random_models.write_qwen35_tiny)
    )
    yield Case(f"{BENCH_PROGRAM}, {title}", partial(_measure_file, bench, lambda: write(bench.folder)))


def _find_source_folder(bench: BenchmarkDevice) -> Path | None:
    """Return the folder with the source of llama.cpp; an archive is extracted once, to a folder next to it."""
    if bench.llama is None or bench.llama.is_dir():
        return bench.llama
    folder = bench.llama.with_name(f"{bench.llama.name}.source")
    if not folder.exists():
        with tarfile.open(bench.llama) as archive:
            for member in archive:
                _, found, name = member.name.partition(SOURCE_FOLDER)
                if found and name:
                    archive.extract(member.replace(name=name), folder, filter="data")
    return folder


def _find_program(bench: BenchmarkDevice, name: str) -> Path:
    """Return the path of a program of llama.cpp. Raises `NothingToMeasure` if it is not there."""
    folder = _find_source_folder(bench)
    places = [folder / name, folder / "build" / "bin" / name] if folder else [Path(shutil.which(name) or name)]
    for place in places:
        if place.exists():
            return place
    raise NothingToMeasure(f"there is no {name} of llama.cpp; name the folder that has it, or a source, with --llama")


def _build_programs(bench: BenchmarkDevice) -> Iterator[ResultRow]:
    """Build both programs in the folder ``build`` of the source, which stays there for later runs.

    Raises:
        NothingToMeasure: There is no source, no CMake, or the programs are there.
        RuntimeError: CMake failed.
    """
    folder = _find_source_folder(bench)
    if folder is None or not (folder / "CMakeLists.txt").exists():
        raise NothingToMeasure("--llama names no source of llama.cpp")
    if all((folder / "build" / "bin" / name).exists() for name in (PROGRAM, BENCH_PROGRAM)):
        raise NothingToMeasure("the programs are built")
    if (cmake := shutil.which("cmake")) is None:
        raise NothingToMeasure("there is no cmake")
    flags = (*COMMON_BUILD_FLAGS, *BUILD_FLAGS.get(bench.on.kind, ()))
    jobs = str(max(1, (os.cpu_count() or 1) - 2))  # the other processors time short kernels
    commands = {
        "configured": [cmake, "-S", str(folder), "-B", str(folder / "build"), *flags],
        "built": [cmake, "--build", str(folder / "build"), "-j", jobs, "--target", PROGRAM, BENCH_PROGRAM],
    }
    for step, command in commands.items():
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise RuntimeError(f"llama.cpp is not {step} (exit code {done.returncode}): {last[0]}")
        yield {"step": step, "seconds": time.monotonic() - start}


def _measure_file(bench: BenchmarkDevice, find: Callable[[], Path]) -> Iterator[ResultRow]:
    """Measure prompts and decode of llama.cpp on a file; the part ``models`` has hocket's times of the same file.

    Args:
        bench: The device.
        find: Returns the path of the file; it may write the file first.
    """
    program = _find_program(bench, BENCH_PROGRAM)
    prompts, new, depths = bench.select_size(("512,2048,8192", "128", "0,4096"), ("8", "4", "0"))
    command = [str(program), "-m", str(find()), "-o", "json", "-fa", "1", "-ngl", "99"]
    command += ["-p", prompts, "-n", new, "-d", depths, "-r", bench.select_size("5", "1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
    try:
        rows = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise RuntimeError(f"{BENCH_PROGRAM} failed (exit code {done.returncode}) and said: {last[0]}") from None
    for row in rows:
        test = f"prompt of {row['n_prompt']}" if row["n_prompt"] else f"{row['n_gen']} new tokens"
        yield {
            "llama.cpp": f"{test} after {row['n_depth']}",
            "theirs tokens/s": row["avg_ts"],
            "deviation": row["stddev_ts"],
            "by": f"{row['backends']}, {row['build_commit']}",
        }


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
    program = _find_program(bench, PROGRAM)
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
