"""A whole run: which cases, on which backend, in how many processes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends import find
from ..graph.errors import BackendError
from ..ops import REGISTRY
from .judging.run import Result, run_case
from .reports.expected import Expected, read_expected, required
from .trials.case import Case, parse
from .trials.generate import cases

CHUNK = 64
"""Cases handed to a process at a time."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What is asked for: a backend (``cpu`` or ``cpu:1``), ops by regular expression or cases by text, how many."""

    backend: str = "cpu"
    op: str = ""
    texts: tuple[str, ...] = ()
    full: bool = False
    seed: int = 0
    require: str = ""
    xfail: Path | None = None
    thorough: bool = False
    jobs: int = 1

    def cases(self) -> Iterator[Case]:
        """The cases asked for.  Raises `GraphError` for a text that is none, `BackendError` for a bad pattern."""
        if self.texts:
            for text in self.texts:
                case = parse(text)
                yield case.but(seed=self.seed) if self.seed else case
            return
        self.ops()
        yield from cases(self.op, full=self.full or self.thorough, seed=self.seed)

    def expected(self) -> Expected:
        """The failures that are expected of the backend.  Raises `BackendError` for their file and for the backend:
        both are asked before any case is chosen, which takes seconds."""
        find(self.backend)
        return read_expected(self.xfail) if self.xfail else Expected()

    def ops(self) -> list[str]:
        """Names of the ops that `op` matches."""
        try:
            matching = [name for name in REGISTRY if not self.op or re.fullmatch(self.op, name)]
        except re.error as why:
            raise BackendError(f"--op {self.op!r} is no regular expression: {why}") from None
        if not matching:
            raise BackendError(f"--op {self.op!r} matches no op; `hocket ops` lists them")
        return matching


def check(
    suite: Suite, on_result: Callable[[Result], None] = lambda result: None, wanted: Sequence[Case] | None = None
) -> list[Result]:
    """Run `suite`, or of its cases those that are `wanted`; `on_result` is told each result as it comes.

    Raises `BackendError` for an unknown backend.
    """
    expected = suite.expected()
    chosen = list(suite.cases()) if wanted is None else wanted
    jobs = min(suite.jobs, -(-len(chosen) // CHUNK))
    raw = _parallel(suite, chosen, jobs) if jobs > 1 else _serial(suite, chosen)
    results = []
    for result in required(map(expected.judged, raw), suite.require):
        on_result(result)
        results.append(result)
    return results


def _serial(suite: Suite, wanted: Sequence[Case]) -> Iterator[Result]:
    backend, device = find(suite.backend)
    for number, case in enumerate(wanted, 1):
        yield run_case(case, backend, device)
        if number % CHUNK == 0:
            gc.collect()  # programs and their memory hold each other, and Python hardly looks for such in a command
    if suite.thorough and not suite.texts:
        for name in suite.ops():
            yield from _explored(name, suite)


def _explored(name: str, suite: Suite) -> list[Result]:
    from .trials.thorough import explore  # hypothesis is wanted here only

    backend, device = find(suite.backend)
    return list(explore(REGISTRY[name], backend, device, suite.seed))


def _parallel(suite: Suite, wanted: Sequence[Case], jobs: int) -> Iterator[Result]:
    """The same results in the same order, by processes that each open the backend themselves."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    chunks = [(suite.backend, wanted[i : i + CHUNK]) for i in range(0, len(wanted), CHUNK)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for results in pool.map(_run_chunk, chunks):
            yield from results
        if suite.thorough and not suite.texts:
            for results in pool.map(_explored, suite.ops(), [suite] * len(suite.ops())):
                yield from results


def _run_chunk(chunk: tuple[str, Sequence[Case]]) -> list[Result]:
    backend, device = find(chunk[0])
    return [run_case(case, backend, device) for case in chunk[1]]
