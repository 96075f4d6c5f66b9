"""Measure each kernel of the CPU backend as a share of the machine's limits, which are measured just before.

Run ``python benchmarks/cpu/kernels.py``. A product for one token reads copies of its weight that together exceed the
cache. Times are taken inside the compiled loop, on the first thread. Kernels that read little (norms, one token of a
delta net) stay in the cache, so they may exceed the memory limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from hocket import ops
from hocket.backends.cpu.backend import HALF_DTYPES, CpuBackend
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.tuning.machine_limits import (
    MemoryBandwidthTest,
    measure_bf16_tile_peak,
    measure_float32_peak,
    measure_int8_peak,
)
from hocket.benchmarks import results_file as results
from hocket.benchmarks.write_models import make_random_rows
from hocket.graph import Graph, Value, input, state, weight
from hocket.graph.dtypes import DType
from hocket.ops import op_of
from hocket.scheduler import load, plan_for_group

ROWS = COLUMNS = 2048
PROMPT_TOKENS = 512
"""The number of tokens of a prompt."""
CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class MachineLimits:
    """The limits of `threads` threads.

    `bandwidth` is in bytes/s from memory. `multiply`, `dot` and `tiles` are operations/s of float32, of 8-bit dot
    products, and of bfloat16 tiles (0 without AMX).
    """

    threads: int
    bandwidth: float
    multiply: float
    dot: float
    tiles: float

    def choose_peak(self, kernel: str, in_bytes: bool) -> float:
        """Return the largest operations/s that a kernel could reach."""
        return self.tiles if "tiled" in kernel and self.tiles else self.dot if in_bytes else self.multiply


class MeasuredMachine:
    """A number of threads of this machine.

    Its limits change with the load of other users, so they are measured repeatedly.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self._reading = threads, MemoryBandwidthTest(threads)
        self._limit_samples: list[MachineLimits] = []

    def measure_limits(self) -> MachineLimits:
        """Measure the current limits."""
        multiply = measure_float32_peak(self.threads)
        dot, tiles = measure_int8_peak(self.threads) or multiply, measure_bf16_tile_peak(self.threads) or 0.0
        self._limit_samples.append(
            MachineLimits(self.threads, self._reading.measure_best_bytes_per_second(), multiply, dot, tiles)
        )
        return self._limit_samples[-1]

    def __str__(self) -> str:
        """Return the smallest and the largest sample of each limit."""

        def range_of(name: str, unit: str, digits: int = 0) -> str:
            rates = [getattr(limits, name) / 1e9 for limits in self._limit_samples]
            return f"{min(rates):.{digits}f} to {max(rates):.{digits}f} {unit}"

        rates = [range_of("bandwidth", "GB/s", 1), range_of("multiply", "GFLOP/s"), range_of("dot", "GOP/s")]
        if self._limit_samples[0].tiles:
            rates.append(range_of("tiles", "GFLOP/s of tiles"))
        return ", ".join(rates)


@dataclass(frozen=True)
class KernelCase:
    """A graph with several copies of one op, each with its own leaves.

    The names of its kernels begin with one of `kernel_prefixes`.
    """

    title: str
    kernel_prefixes: tuple[str, ...]
    op: str
    build: Callable[[int], Value]
    copy_count: int = 1
    uses_int8: bool = False
    """Whether the op multiplies 8-bit numbers."""


def make_matmul_case(dtype: DType, tokens: int, copies: int) -> KernelCase:
    """Make the case of a matmul with a weight of 2048 × 2048."""
    x = input("x", (tokens, COLUMNS))

    def build(i: int) -> Value:
        return ops.mul_mat(weight(f"w{i}", (ROWS, COLUMNS), dtype), x)

    packed = dtype in FORMATS
    title = f"{dtype} {ROWS}×{COLUMNS}, {tokens} tokens"
    return KernelCase(
        title,
        ("amx_matmul.multiply", "packed_matmul.multiply" if packed else "float_matmul.multiply"),
        "mul_mat",
        build,
        copies,
        packed,
    )


def make_attention_case(tokens: int) -> KernelCase:
    """Make the case of an attention of 32 heads on 8 over `CONTEXT_TOKENS` cached tokens."""
    heads, shared, size = 32, 8, 128
    mask = ops.causal_mask(input("pos", (1, tokens), "i32"), cells=CONTEXT_TOKENS)

    def build(i: int) -> Value:
        q = input(f"q{i}", (1, tokens, heads, size))
        k, v = (input(f"{n}{i}", (1, CONTEXT_TOKENS, shared, size)) for n in "kv")
        return ops.attention(q, k, v, mask, scale=size**-0.5)

    return KernelCase(
        f"{heads} heads of {size} on {shared}, {tokens} tokens on {CONTEXT_TOKENS}", ("attention",), "attention", build
    )


def make_delta_net_case(tokens: int) -> KernelCase:
    """Make the case of a gated delta net with 16 heads of size 128."""
    heads, size = 16, 128

    def build(i: int) -> Value:
        q, k, v = (input(f"{n}{i}", (1, tokens, heads, size)) for n in "qkv")
        decay, beta = input(f"decay{i}", (1, tokens, heads, 1)), input(f"beta{i}", (1, tokens, heads))
        old = state(f"s{i}", (1, heads, size, size))
        return ops.gated_delta_net(q, k, v, decay, beta, old, heads="tiled")[0]

    return KernelCase(f"{heads} heads of {size}, {tokens} tokens", ("gated_delta_net.",), "gated_delta_net", build)


def make_norm_case(tokens: int) -> KernelCase:
    """Make the case of an RMS norm."""

    def build(i: int) -> Value:
        return ops.rms_norm(input(f"x{i}", (tokens, COLUMNS)), eps=1e-6)

    return KernelCase(f"{tokens}×{COLUMNS}", ("norms.",), "rms_norm", build, 8)


def selective_scan(heads: int, channels: int, columns: int, rates: int, tokens: int) -> KernelCase:
    """Return the case of Mamba 1 (one channel per head, a rate per column) or Mamba 2 (one rate per head)."""

    def build(i: int) -> Value:
        x, dt = input(f"x{i}", (1, tokens, heads, channels)), input(f"dt{i}", (1, tokens, heads))
        b, c = (input(f"{name}{i}", (1, tokens, 1, columns)) for name in "bc")
        old = state(f"s{i}", (1, heads, channels, columns))
        return ops.ssm_scan(x, dt, input(f"a{i}", (heads, rates)), b, c, old)[0]

    title = f"{heads} heads of {channels}, {columns} columns, {tokens} tokens"
    return KernelCase(title, ("selective_scan.",), "ssm_scan", build)


def gated_linear_attention(tokens: int) -> KernelCase:
    heads, size = 16, 64

    def build(i: int) -> Value:
        k, v, q, g = (input(f"{name}{i}", (1, tokens, heads, size)) for name in "kvqg")
        return ops.gated_linear_attn(k, v, q, g, state(f"s{i}", (1, heads, size, size)), scale=size**-0.5)[0]

    return KernelCase(f"{heads} heads of {size}, {tokens} tokens", ("linear_attention.",), "gated_linear_attn", build)


def running_sums() -> KernelCase:
    def build(i: int) -> Value:
        return ops.cumsum(input(f"x{i}", (512, 4096)))

    return KernelCase("512×4096", ("reductions.",), "cumsum", build)


def sliding_windows() -> KernelCase:
    def build(i: int) -> Value:
        padding = {"left": (1, 1), "right": (1, 1)}
        return ops.windows(input(f"x{i}", (1, 64, 64, 64)), size=(3, 3), stride=(1, 1), dilation=(1, 1), **padding)

    return KernelCase("3×3 of 64×64×64", ("sliding_windows.",), "windows", build)


def make_kernel_cases(cold: int) -> Iterator[KernelCase]:
    """Yield all cases; weights of one-token matmuls have copies of `cold` bytes in total."""
    for dtype in (*FORMATS, *HALF_DTYPES, DType.F32):
        nbytes = ROWS * COLUMNS // dtype.block * dtype.block_bytes
        yield make_matmul_case(dtype, 1, max(2, cold // nbytes))
        yield make_matmul_case(dtype, PROMPT_TOKENS, 2)
    for tokens in (1, PROMPT_TOKENS):
        yield make_attention_case(tokens)
        yield make_delta_net_case(tokens)
        yield make_norm_case(tokens)
        yield selective_scan(1024, 1, 16, 16, tokens)
        yield selective_scan(48, 64, 128, 1, tokens)
        yield gated_linear_attention(tokens)
    yield running_sums()
    yield sliding_windows()


def measure_case(case: KernelCase, limits: MachineLimits, repeats: int, seed: int = 5) -> Iterator[dict[str, object]]:
    """Yield a row for the kernel of the op, and one for the kernel that quantises its activations.

    Args:
        case: The op and its shape.
        limits: The current limits of the machine.
        repeats: Timed runs, after one that warms up.
        seed: The seed of the random operands.

    Raises:
        SystemExit: The op has no compiled kernel.
    """
    rng = np.random.default_rng(seed)
    graph = Graph({f"y{i}": case.build(i) for i in range(case.copy_count)})
    backend = CpuBackend(limits.threads)
    raw: dict[DType, np.ndarray] = {}
    for w in graph.weights:
        raw.setdefault(w.dtype, make_random_rows(w.dtype, *w.shape, rng))
    run = load(
        plan_for_group(graph, [(backend, backend.device(0))]), {w.node.name: raw[w.dtype] for w in graph.weights}
    )
    inputs = {
        v.node.name: np.arange(v.shape[-1])[None] + CONTEXT_TOKENS - v.shape[-1]
        if v.dtype.is_integer
        else -rng.random(v.shape, np.float32) * np.float32(0.1)
        for v in graph.inputs
    }
    times: dict[str, list[float]] = {}
    for i in range(1 + repeats):
        run.bind(inputs)
        for step in run.time_kernels()[0]:
            if i:
                times.setdefault(step.kernel, []).append(step.seconds)
    if "NumPy" in times:
        raise SystemExit(f"{case.op} {case.title}: has no compiled kernel")
    node = next(n for n in graph.nodes if n.op == case.op)
    known = {"threads": limits.threads, "case": case.title}
    for kernel, samples in times.items():
        if kernel.startswith(case.kernel_prefixes):
            peak = limits.choose_peak(kernel, case.uses_int8)
            rates = op_of(node).count_bytes(node) / median(samples), op_of(node).count_flops(node) / median(samples)
            share = max(rates[0] / limits.bandwidth, rates[1] / peak)
        elif kernel == "activation_quantisation.quantise_activation_rows" and case.title.endswith(
            f"{PROMPT_TOKENS} tokens"
        ):
            rates = PROMPT_TOKENS * COLUMNS * 5.5 / median(samples), 0.0
            share = rates[0] / limits.bandwidth
        else:
            continue
        figures = {"seconds": median(samples), "gbs": rates[0] / 1e9, "gflops": rates[1] / 1e9, "share": share}
        yield {**known, "kernel": kernel, **figures}


HEAD = ("kernel", "case", "threads", "µs", "GB/s", "GFLOP/s", "share of limit")


def format_cells(row: dict[str, object]) -> list[str]:
    """Return the cells of a result row for the table."""
    numbers = [f"{row['seconds'] * 1e6:.1f}", f"{row['gbs']:.1f}", f"{row['gflops']:.0f}", f"{row['share']:.0%}"]
    return [row["kernel"], row["case"], str(row["threads"]), *numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", default="1,2", help="numbers of threads (1,2)")
    parser.add_argument("-r", type=int, default=3, help="repetitions (3)")
    parser.add_argument("--cold", type=int, default=512, help="MiB of copies of a weight (512)")
    parser.add_argument("-k", default="", help="only cases whose name contains this")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about, rows = results.collect_circumstances(args.shared), []
    for threads in map(int, args.t.split(",")):
        machine = MeasuredMachine(threads)
        print(results.format_table(HEAD, []), end="")
        for case in make_kernel_cases(args.cold << 20):
            if args.k in f"{case.op} {case.title}":
                for row in measure_case(case, machine.measure_limits(), args.r):
                    rows.append(row)
                    print(f"| {' | '.join(format_cells(row))} |", flush=True)
        about[f"limits_{threads}"] = str(machine)
        print(f"limits of {threads} threads: {machine}")
    if args.save:
        known = [(key[7:], value) for key, value in about.items() if key.startswith("limits")]
        limits_text = "".join(f"Limits of {t} threads, measured before each case: {rates}.\n\n" for t, rates in known)
        results.write_result(
            args.save, about, rows, limits_text + results.format_table(HEAD, list(map(format_cells, rows)))
        )


if __name__ == "__main__":
    main()
