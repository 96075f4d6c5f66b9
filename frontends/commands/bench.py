"""``hocket bench``: how fast prompts and new tokens at a depth run, as ``llama-bench`` counts them; where time goes."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import prod
from statistics import mean, median, stdev

import numpy as np

from ...backends.abilities import Threaded, Timed
from ...backends.base import Backend
from ...backends.cpu.backend import CpuBackend
from ...backends.cpu.limits import Reading, last_cache_bytes
from ...distributed import SINGLE_PROCESS, World
from ...graph.node import Node
from ...ops import op_of
from ..errors import ModelError
from ..models import Model, Step
from ..open import open_session
from ..session import DEFAULT_BATCH, Group, Session
from ..terminal.arguments import number_list, positive, positive_list
from ..terminal.bench_rows import FORMS, written
from ..terminal.output import write
from ..terminal.progress import compiling_shown
from .batched import BATCHED, Batched
from .flags import (
    adapter_flags,
    batch_flag,
    cache_flags,
    caches_of,
    group_flags,
    group_of,
    in_ranks,
    model_flags,
    model_of,
    packed_flag,
    trace_flag,
    traced,
    wire_flag,
)


def flags(sub: argparse.ArgumentParser) -> None:
    model_flags(sub)
    in_ranks(sub)
    add = partial(sub.add_argument, type=number_list, metavar="LIST")
    add("-p", "--n-prompt", dest="prompts", default=[512], help="tokens of prompts (512)")
    add("-n", "--n-gen", dest="new", default=[128], help="new tokens (128)")
    add("-d", "--n-depth", dest="depths", default=[0], help="tokens in the context before the timed ones (0)")
    add("-np", "--parallel", help="sequences at once, in turn: measure as llama-batched-bench does")
    threads = "threads of each device, in turn (its share of the processors)"
    add("-t", "--threads", dest="counts", type=positive_list, help=threads)
    sub.add_argument("-r", "--repetitions", type=positive, default=5, metavar="N", help="timed runs of each test (5)")
    batch_flag(sub, DEFAULT_BATCH, "tokens a run")
    group_flags(sub, sub)
    adapter_flags(sub)
    wire_flag(sub)
    cache_flags(sub)
    packed_flag(sub)
    sub.add_argument("-o", "--output", choices=tuple(FORMS), default="md", help="how to print (md)")
    timed = sub.add_mutually_exclusive_group()
    timed.add_argument("--profile", action="store_true", help="print how long each kernel takes in a run instead")
    trace_flag(timed)


@compiling_shown()
def run(args: argparse.Namespace) -> int:
    model, todo = model_of(args), tests(args.prompts, args.new, args.depths)
    work = Work(model, todo, args.repetitions, args.batch, args.trace, args.world)
    if args.trace and args.counts and len(args.counts) > 1:
        raise ModelError(f"got {len(args.counts)} numbers of threads; a trace is of one, as in -t {args.counts[0]}")
    computed = {"wire": args.wire, "keep_packed": args.keep_packed, **caches_of(args)}
    groups = [group_of(args, threads=threads, **computed) for threads in args.counts or [None]]
    if args.parallel:
        return together(args, model, groups)
    for line in profiles(work, groups) if args.profile else written(rows(work, groups), args.output):
        write(line + "\n")
    return 0


def together(args: argparse.Namespace, model: Model, groups: Sequence[Group]) -> int:
    """Measure several sequences at once."""
    if args.profile or args.trace or any(args.depths):
        raise ModelError("got -np with --profile, --trace or -d, which are of one sequence; leave out one of the two")
    work = Batched(model, args.prompts, args.new, args.parallel, args.repetitions, args.batch, args.world)
    about = {"model_filename": str(model.gguf.path), "n_batch": args.batch}
    known = ({**about, "n_threads": on.threads, "devices": ",".join(on.devices)} for on in groups)
    rows = ({**of, **row} for of, on in zip(known, groups, strict=True) for row in work.rows(on))
    for line in written(rows, args.output, BATCHED):
        write(line + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class Test:
    """`tokens` at once (a prompt) or one by one, after `depth` others that are not timed."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


PROMPT, NEW = "pp", "tg"
MIN_READ_BYTES, MAX_READ_BYTES = 128 << 20, 512 << 20
"""Bytes that are read to measure the bandwidth of memory: twice the last cache within these limits."""


def tests(prompts: Sequence[int], new: Sequence[int], depths: Sequence[int]) -> list[Test]:
    """Every prompt and every number of new tokens at every depth; 0 leaves one out."""
    chosen = [Test(kind, n, d) for d in depths for kind, counts in ((PROMPT, prompts), (NEW, new)) for n in counts if n]
    if not chosen:
        raise ModelError("there is nothing to measure; ask for a prompt with -p or for new tokens with -n")
    return chosen


@dataclass(frozen=True, slots=True)
class Work:
    """What to measure: tests of a model, each so many times, with at most `batch` tokens a run, traced to a file."""

    model: Model
    tests: Sequence[Test]
    repeats: int
    batch: int = DEFAULT_BATCH
    trace: str | None = None
    world: World = SINGLE_PROCESS

    def session(self, on: Group) -> Session:
        """With the context that the longest test needs.  Raises `ModelError` if the model has not got it."""
        context = max(t.depth + t.tokens for t in self.tests)
        self.model.check_context(context)
        return open_session(self.model, on=on, context=context, batch=self.batch, world=self.world)


def rows(work: Work, groups: Sequence[Group]) -> Iterator[dict[str, object]]:
    """One row for each test on each group of devices."""
    about = of_model(work.model)
    for on in groups:
        session = work.session(on)
        nbytes = weight_bytes(work.model, session.group[0][0])
        reading = reading_of(session) if any(test.kind == NEW for test in work.tests) else None
        known = {**about, "n_batch": work.batch, "n_ubatch": work.batch, "n_threads": threads_of(session)}
        known |= {"split_mode": on.split_mode, "devices": names_of(session)}
        known |= {"type_k": str(on.caches[0]), "type_v": str(on.caches[1])}
        known |= {"tensor_split": "/".join(map(str, on.tensor_split)), "weight_bytes": nbytes}
        with traced(session, work.trace):
            for test in work.tests:
                times, read = samples(session, test, work.repeats, reading if test.kind == NEW else None)
                yield {**known, **row(test, times, nbytes=nbytes, bandwidth=median(read) if read else None)}


def profiles(work: Work, groups: Sequence[Group]) -> Iterator[str]:
    """For each test on each group what every device spends its time on."""
    for on in groups:
        session = work.session(on)
        for test in work.tests:
            for (_, device), shares in zip(session.group, profile(session, test, work.repeats), strict=True):
                yield f"{test.name}, {threads_of(session)} threads, {device}"
                yield from profile_lines(shares)


def names_of(session: Session) -> str:
    """The devices of a session, as `--devices` has them."""
    return ",".join(str(device) for _, device in session.group)


def threads_of(session: Session) -> int:
    """Threads of each device."""
    backend, _ = session.group[0]
    return backend.threads if isinstance(backend, Threaded) else 1


def reading_of(session: Session) -> Reading | None:
    """What all threads of all devices read together from memory; None unless all are ``cpu``."""
    if not all(isinstance(backend, CpuBackend) for backend, _ in session.group):
        return None
    return Reading(
        threads_of(session) * len(session.group), min(MAX_READ_BYTES, max(MIN_READ_BYTES, 2 * last_cache_bytes()))
    )


def begin(session: Session, test: Test, tokens: Sequence[int]) -> None:
    """Forget what a session has read, and read the tokens before those that a test times."""
    session.reset(0)
    if test.depth:
        session.evaluate([list(tokens[: test.depth])])


def seconds(session: Session, test: Test, tokens: Sequence[int]) -> float:
    """Run a test once on a session of one sequence."""
    begin(session, test, tokens)
    timed = list(tokens[test.depth : test.depth + test.tokens])
    parts = [timed] if test.kind == PROMPT else [[token] for token in timed]
    start = time.perf_counter()
    for part in parts:
        session.evaluate([part])
    return time.perf_counter() - start


def random_tokens(session: Session, seed: int = 0) -> list[int]:
    """As many tokens as the context holds."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, session.model.vocabulary_size, session.context)]


def samples(session: Session, test: Test, repeats: int, reading: Reading | None) -> tuple[list[float], list[float]]:
    """Seconds of each run, after one to warm up that builds the plans; and bytes a second read before each, in turn,
    since a machine that others use does not stay the same for long."""
    tokens, times, read = random_tokens(session), [], []
    seconds(session, test, tokens)
    for _ in range(repeats):
        if reading:
            read.append(reading.rate())
        times.append(seconds(session, test, tokens))
    return times, read


def weight_bytes(model: Model, backend: Backend | None = None) -> int:
    """Bytes of weights that one token reads: whole matrices, of tables and experts the chosen rows.

    They are counted in the types in which `backend` stores them, or without one in the types of the file.
    """
    graph = model.graph(Step(1, 1, 256, 256, 1))
    return sum(_weight_bytes(node, backend) for node in graph.nodes)


def _weight_bytes(node: Node, backend: Backend | None) -> int:
    """Views pass a weight on and read nothing."""
    weights = [v.spec for v in node.inputs if v.node.op == "weight"]
    if not weights:
        return 0
    share = min(1.0, op_of(node).count_bytes(node) / sum(spec.nbytes for spec in weights))
    stored = weights if backend is None else [backend.stored(spec, "weight") for spec in weights]
    return round(share * sum(spec.nbytes for spec in stored))


def of_model(model: Model) -> dict[str, object]:
    """A model by llama-bench's names; the type is its architecture and the type of most of its bytes."""
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


def row(test: Test, times: Sequence[float], *, nbytes: int, bandwidth: float | None) -> dict[str, object]:
    """What one test says by llama-bench's names: nanoseconds, and rates in tokens a second.

    What llama-bench has not: the median of the rates; of new tokens the bytes of weights read in a second, and their
    share of the `bandwidth` of reading and nothing else.
    """
    nanoseconds, rates = [round(s * 1e9) for s in times], [test.tokens / s for s in times]
    read = median(rates) * nbytes if test.kind == NEW else None
    return {
        "n_prompt": test.tokens * (test.kind == PROMPT),
        "n_gen": test.tokens * (test.kind == NEW),
        "n_depth": test.depth,
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(mean(nanoseconds)),
        "stddev_ns": round(spread(nanoseconds)),
        "avg_ts": mean(rates),
        "stddev_ts": spread(rates),
        "samples_ns": nanoseconds,
        "samples_ts": rates,
        "test": test.name,
        "median_ts": median(rates),
        "weight_bytes_per_second": read,
        "bandwidth": bandwidth,
        "share_of_bandwidth": read / bandwidth if read and bandwidth else None,
    }


def spread(samples: Sequence[float]) -> float:
    """The standard deviation of the samples, 0 of a single one."""
    return stdev(samples) if len(samples) > 1 else 0.0


# ------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of step took in a run of a device: how often it ran, and its seconds in all."""

    kernel: str
    count: int
    seconds: float


OUTSIDE = "outside kernels"


def profile(session: Session, test: Test, repeats: int) -> list[list[Share]]:
    """For each device where the median run of a test's step spends its time, the longest first.

    The step is the whole prompt, or one token.  What is outside kernels is the rest of that run.
    """
    tokens = random_tokens(session)
    many = test.tokens if test.kind == PROMPT else 1
    begin(session, test, tokens)
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
    return [_shares(steps, wall) for steps in run.steps]


def _shares(steps: Iterable[Timed], wall: float) -> list[Share]:
    times: dict[str, list[float]] = {}
    for step in steps:
        times.setdefault(step.kernel, []).append(step.seconds)
    inside = sum(map(sum, times.values()))
    shares = [Share(kernel, len(t), sum(t)) for kernel, t in times.items()]
    return [*sorted(shares, key=lambda s: -s.seconds), Share(OUTSIDE, 1, wall - inside)]


def profile_lines(shares: Sequence[Share]) -> Iterator[str]:
    """A table of what takes how long."""
    whole = sum(s.seconds for s in shares)
    for s in shares:
        yield f"{s.seconds * 1e6:10.1f} µs  {s.seconds / whole:6.1%}  {s.count:5} ×  {s.kernel}"
