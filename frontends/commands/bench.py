"""``hocket bench``: measures tokens per second of prompts and new tokens, as in ``llama-bench``, and time by kernel."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from statistics import mean, median, stdev

import numpy as np

from ...backends.base import Backend
from ...backends.capabilities import SupportsThreads, TimedKernel
from ...backends.cpu.backend import CpuBackend
from ...backends.cpu.tuning.machine_limits import MemoryBandwidthTest, read_largest_cache_bytes
from ...distributed import SINGLE_PROCESS, World
from ...graph.errors import format_count
from ...graph.node import Node
from ...ops import op_of
from ..errors import ModelError
from ..flag_values import parse_naturals, parse_positive, parse_positives
from ..inference.session import Session
from ..models import Model, Step
from ..open_model import open_adapted_model, open_session
from ..run_config import DEFAULT_BATCH, DeviceGroup
from ..terminal.bench_rows import ROW_FORMATS, format_benchmark_rows
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_to_stdout_unless_closed
from .bench_batched import BATCHED_TABLE, BatchedBenchmark
from .shared_flags import (
    SESSION_OPTIONS,
    add_model_file_argument,
    add_option_flags,
    add_trace_flag,
    config_from_flags,
    mark_as_multi_rank_command,
    trace_to_file,
)

BENCH_OPTIONS = SESSION_OPTIONS - {"context", "threads", "exact", "fast"}
"""The options of a model run that all benchmarks of a call share."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub)
    mark_as_multi_rank_command(sub)
    add = partial(sub.add_argument, type=parse_naturals, metavar="LIST")
    add("-p", "--n-prompt", dest="prompts", default=[512], help="token counts of prompts (512)")
    add("-n", "--n-gen", dest="new", default=[128], help="counts of new tokens (128)")
    add(
        "-d",
        "--n-depth",
        dest="depths",
        default=[0],
        help="counts of tokens in the context before the timed tokens (0)",
    )
    add("-np", "--parallel", help="sequence counts; measure each as llama-batched-bench does")
    threads = "thread counts of each device (its share of the processors)"
    add("-t", "--threads", dest="counts", type=parse_positives, help=threads)
    sub.add_argument(
        "-r", "--repetitions", type=parse_positive, default=5, metavar="N", help="timed runs of each test (5)"
    )
    add_option_flags(sub, BENCH_OPTIONS)
    sub.add_argument("-o", "--output", choices=tuple(ROW_FORMATS), default="md", help="output format (md)")
    timed = sub.add_mutually_exclusive_group()
    timed.add_argument("--profile", action="store_true", help="print the time of each kernel in a run instead")
    add_trace_flag(timed)


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    config, todo = config_from_flags(args), list_benchmark_tests(args.prompts, args.new, args.depths)
    model = open_adapted_model(config)
    work = BenchmarkSettings(model, todo, args.repetitions, args.batch, args.trace, args.world)
    if args.trace and args.counts and len(args.counts) > 1:
        raise ModelError(f"got {len(args.counts)} numbers of threads; a trace is of one, as in -t {args.counts[0]}")
    groups = [replace(config.group, threads=threads) for threads in args.counts or [None]]
    if args.parallel:
        return run_batched_benchmark(args, model, groups)
    for line in (
        measure_kernel_profile_lines(work, groups)
        if args.profile
        else format_benchmark_rows(measure_benchmark_rows(work, groups), args.output)
    ):
        write_to_stdout_unless_closed(line + "\n")
    return 0


def run_batched_benchmark(args: argparse.Namespace, model: Model, groups: Sequence[DeviceGroup]) -> int:
    """Run the benchmark with several sequences at a time and print its rows; return the exit code.

    Raises:
        ModelError: A flag is only for one sequence.
    """
    if args.profile or args.trace or any(args.depths):
        raise ModelError("got -np with --profile, --trace or -d, which are of one sequence; leave out one of the two")
    work = BatchedBenchmark(model, args.prompts, args.new, args.parallel, args.repetitions, args.batch, args.world)
    about = {"model_filename": str(model.gguf.path), "n_batch": args.batch}
    known = ({**about, "n_threads": on.threads, "devices": ",".join(on.devices)} for on in groups)
    rows = ({**of, **row} for of, on in zip(known, groups, strict=True) for row in work.measure_row_per_combination(on))
    for line in format_benchmark_rows(rows, args.output, BATCHED_TABLE):
        write_to_stdout_unless_closed(line + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class BenchmarkTest:
    """One benchmark test: how long the model takes for a number of tokens.

    - `kind`: ``pp`` reads `tokens` tokens as one prompt, ``tg`` generates them one by one.
    - `depth`: tokens that are in the context before, without being timed.
    """

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


PROMPT_KIND, NEW_KIND = "pp", "tg"
MIN_READ_BYTES, MAX_READ_BYTES = 128 << 20, 512 << 20
"""Limits in bytes of the array for the memory bandwidth; its size is twice the last-level cache."""


def list_benchmark_tests(prompts: Sequence[int], new: Sequence[int], depths: Sequence[int]) -> list[BenchmarkTest]:
    """List the benchmark tests: at each depth, one for each prompt length and one for each count of new tokens.

    Args:
        prompts: The prompt lengths in tokens; 0 gives no test.
        new: The counts of new tokens; 0 gives no test.
        depths: Counts of untimed tokens before a test.

    Raises:
        ModelError: There is no test.
    """
    chosen = [
        BenchmarkTest(kind, n, d)
        for d in depths
        for kind, counts in ((PROMPT_KIND, prompts), (NEW_KIND, new))
        for n in counts
        if n
    ]
    if not chosen:
        raise ModelError("there is nothing to measure; ask for a prompt with -p or for new tokens with -n")
    return chosen


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """The settings of `hocket bench`: the model, its tests, and the number `repeats` of timed runs of each test.

    A run has at most `batch` tokens.
    """

    model: Model
    tests: Sequence[BenchmarkTest]
    repeats: int
    batch: int = DEFAULT_BATCH
    trace: str | None = None
    world: World = SINGLE_PROCESS

    def open_session_for_longest_test(self, on: DeviceGroup) -> Session:
        """Open a session on a device group, with a context for the longest test.

        Raises:
            ModelError: The context of the model is shorter.
        """
        longest = max(self.tests, key=lambda t: t.depth + t.tokens)
        context = longest.depth + longest.tokens
        self.model.require_context_within_training(context, f"the context of {longest.name}")
        return open_session(self.model, on=on, context=context, batch=self.batch, world=self.world)


def measure_benchmark_rows(work: BenchmarkSettings, groups: Sequence[DeviceGroup]) -> Iterator[dict[str, object]]:
    """Measure each test on each device group, and yield a row of results for each."""
    about = create_llama_bench_model_columns(work.model)
    for on in groups:
        session = work.open_session_for_longest_test(on)
        nbytes = count_weight_bytes_per_token(work.model, session.group[0][0])
        reading = create_cpu_bandwidth_test(session) if any(test.kind == NEW_KIND for test in work.tests) else None
        known = {**about, "n_batch": work.batch, "n_ubatch": work.batch, "n_threads": count_threads_per_device(session)}
        known |= {"split_mode": on.split_mode, "devices": format_device_names_as_flag(session)}
        known |= {"type_k": str(on.cache_dtypes[0]), "type_v": str(on.cache_dtypes[1])}
        known |= {"tensor_split": "/".join(map(str, on.tensor_split)), "weight_bytes": nbytes}
        with trace_to_file(session, work.trace):
            for test in work.tests:
                times, read = measure_seconds_and_bandwidth_alternately(
                    session, test, work.repeats, reading if test.kind == NEW_KIND else None
                )
                yield {
                    **known,
                    **create_llama_bench_result_row(
                        test, times, nbytes=nbytes, bandwidth=median(read) if read else None
                    ),
                }


def measure_kernel_profile_lines(work: BenchmarkSettings, groups: Sequence[DeviceGroup]) -> Iterator[str]:
    """Measure the kernel times of each test on each device group, and yield them as lines of text."""
    for on in groups:
        session = work.open_session_for_longest_test(on)
        for test in work.tests:
            for (_, device), shares in zip(
                session.group, measure_kernel_times_of_median_run(session, test, work.repeats), strict=True
            ):
                yield f"{test.name}, {format_count(count_threads_per_device(session), 'thread')}, {device}"
                yield from format_kernel_profile(shares)


def format_device_names_as_flag(session: Session) -> str:
    """Format the device names of a session in the form of `--devices`."""
    return ",".join(str(device) for _, device in session.group)


def count_threads_per_device(session: Session) -> int:
    """Count the threads of each device of a session."""
    backend, _ = session.group[0]
    return backend.threads if isinstance(backend, SupportsThreads) else 1


def create_cpu_bandwidth_test(session: Session) -> MemoryBandwidthTest | None:
    """Make a test that measures the memory bandwidth with the threads of all devices of a session.

    The result is None if a device is not ``cpu``.
    """
    if not all(isinstance(backend, CpuBackend) for backend, _ in session.group):
        return None
    return MemoryBandwidthTest(
        count_threads_per_device(session) * len(session.group),
        min(MAX_READ_BYTES, max(MIN_READ_BYTES, 2 * read_largest_cache_bytes())),
    )


def reset_and_prefill_depth(session: Session, test: BenchmarkTest, tokens: Sequence[int]) -> None:
    """Reset a session, and evaluate the `depth` tokens that a test does not time."""
    session.reset(0)
    if test.depth:
        session.evaluate([list(tokens[: test.depth])])


def measure_test_seconds(session: Session, test: BenchmarkTest, tokens: Sequence[int]) -> float:
    """Run a test once in a session of one sequence, and return the seconds."""
    reset_and_prefill_depth(session, test, tokens)
    timed = list(tokens[test.depth : test.depth + test.tokens])
    parts = [timed] if test.kind == PROMPT_KIND else [[token] for token in timed]
    start = time.perf_counter()
    for part in parts:
        session.evaluate([part])
    return time.perf_counter() - start


def create_random_context_tokens(session: Session, seed: int = 0) -> list[int]:
    """Make random tokens that fill the context of a session."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, session.model.vocabulary_size, session.context)]


def measure_seconds_and_bandwidth_alternately(
    session: Session, test: BenchmarkTest, repeats: int, reading: MemoryBandwidthTest | None
) -> tuple[list[float], list[float]]:
    """Measure the seconds of each run of a test, and the memory bandwidth in bytes/s before each run.

    The two measurements alternate, since the load of a shared machine changes. A first run builds the plans and is not
    counted.

    Args:
        session: The session.
        test: The test.
        repeats: Number of runs that count.
        reading: The bandwidth test; with None the second list is empty.
    """
    tokens, times, read = create_random_context_tokens(session), [], []
    measure_test_seconds(session, test, tokens)
    for _ in range(repeats):
        if reading:
            read.append(reading.measure_best_bytes_per_second())
        times.append(measure_test_seconds(session, test, tokens))
    return times, read


def count_weight_bytes_per_token(model: Model, backend: Backend | None = None) -> int:
    """Count the bytes of weights that a device reads for one new token.

    Matrices count as a whole. Of embedding tables and experts, only the rows and the experts that a token uses count.

    Args:
        model: The model.
        backend: Backend with the dtypes of the stored weights; None uses the dtypes of the file.
    """
    graph = model.graph(Step(1, 1, 256, 256, 1))
    return sum(_count_weight_bytes_read_by_node(node, backend) for node in graph.nodes)


def _count_weight_bytes_read_by_node(node: Node, backend: Backend | None) -> int:
    """Count the bytes of weights that a graph node reads; a view reads none."""
    weights = [v.spec for v in node.inputs if v.node.op == "weight"]
    if not weights:
        return 0
    share = min(1.0, op_of(node).count_bytes(node) / sum(spec.nbytes for spec in weights))
    stored = weights if backend is None else [backend.storage_spec(spec, "weight") for spec in weights]
    return round(share * sum(spec.nbytes for spec in stored))


def create_llama_bench_model_columns(model: Model) -> dict[str, object]:
    """Make the columns of llama-bench that describe a model: file, type, bytes and parameter count.

    The type names the architecture and the dtype that has the most bytes.
    """
    tensors, stored = model.gguf.tensors.values(), Counter[str]()
    for t in tensors:
        stored[t.dtype.text] += t.nbytes
    (dtype, _), *_ = stored.most_common(1)
    return {
        "model_filename": str(model.gguf.path),
        "model_type": f"{model.architecture} {dtype}",
        "model_size": sum(t.nbytes for t in tensors),
        "model_n_params": sum(prod(t.shape) for t in tensors),
    }


def create_llama_bench_result_row(
    test: BenchmarkTest, times: Sequence[float], *, nbytes: int, bandwidth: float | None
) -> dict[str, object]:
    """Make the columns of llama-bench for one test: nanoseconds, and rates in tokens per second.

    Additional columns are the median rate and, for new tokens, the weight bytes per second and their share of
    `bandwidth`.

    Args:
        test: The test.
        times: Seconds of each run.
        nbytes: Bytes of weights that one token reads.
        bandwidth: Measured memory bandwidth in bytes per second, or None.
    """
    nanoseconds, rates = [round(s * 1e9) for s in times], [test.tokens / s for s in times]
    read = median(rates) * nbytes if test.kind == NEW_KIND else None
    return {
        "n_prompt": test.tokens * (test.kind == PROMPT_KIND),
        "n_gen": test.tokens * (test.kind == NEW_KIND),
        "n_depth": test.depth,
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(mean(nanoseconds)),
        "stddev_ns": round(compute_standard_deviation(nanoseconds)),
        "avg_ts": mean(rates),
        "stddev_ts": compute_standard_deviation(rates),
        "samples_ns": nanoseconds,
        "samples_ts": rates,
        "test": test.name,
        "median_ts": median(rates),
        "weight_bytes_per_second": read,
        "bandwidth": bandwidth,
        "share_of_bandwidth": read / bandwidth if read and bandwidth else None,
    }


def compute_standard_deviation(samples: Sequence[float]) -> float:
    """Compute the standard deviation of samples; 0 for a single sample."""
    return stdev(samples) if len(samples) > 1 else 0.0


# ------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of one kernel in a run on a device: how often it was called, and the seconds of all calls together."""

    kernel: str
    count: int
    seconds: float


OUTSIDE_KERNELS = "outside kernels"


def measure_kernel_times_of_median_run(session: Session, test: BenchmarkTest, repeats: int) -> list[list[KernelTime]]:
    """Run a step several times, and return the kernel times of each device in the median run, the longest first.

    The step is the whole prompt, or one token. The last entry of each list is the time outside of kernels.
    """
    tokens = create_random_context_tokens(session)
    many = test.tokens if test.kind == PROMPT_KIND else 1
    reset_and_prefill_depth(session, test, tokens)
    new = tokens[test.depth : test.depth + min(many, session.batch)]
    session.evaluate([new])
    runs = []
    for _ in range(1 + repeats):
        session.lengths[0] = test.depth
        with session.tracing() as trace:
            start = time.perf_counter()
            session.evaluate([new])
            runs.append((time.perf_counter() - start, trace.runs[-1]))
    wall, run = sorted(runs[1:], key=lambda run: run[0])[repeats // 2]
    return [_sum_kernel_shares(steps, wall) for steps in run.steps]


def _sum_kernel_shares(steps: Iterable[TimedKernel], wall: float) -> list[KernelTime]:
    times: dict[str, list[float]] = {}
    for step in steps:
        times.setdefault(step.kernel, []).append(step.seconds)
    inside = sum(map(sum, times.values()))
    shares = [KernelTime(kernel, len(t), sum(t)) for kernel, t in times.items()]
    return [*sorted(shares, key=lambda s: -s.seconds), KernelTime(OUTSIDE_KERNELS, 1, wall - inside)]


def format_kernel_profile(shares: Sequence[KernelTime]) -> Iterator[str]:
    """Format the kernel times of a device as table lines: microseconds, percentage, calls and name of each kernel."""
    whole = sum(s.seconds for s in shares)
    for s in shares:
        yield f"{s.seconds * 1e6:10.1f} µs  {s.seconds / whole:6.1%}  {s.count:5} ×  {s.kernel}"
