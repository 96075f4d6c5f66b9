"""A whole run: which cases, on which backend, in how many processes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends import find_device
from ..graph.errors import BackendError
from ..ops import REGISTRY
from .cases.case import Case, parse_test_case
from .checks.run_case import Result, run_case
from .generate_cases import select_cases
from .reports.expected_failures import ExpectedFailures, apply_requirement, read_expected

CASES_PER_TASK = 64
"""Cases handed to a process at a time."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The settings of a run: a backend (``cpu`` or ``cpu:1``), and ops by regular expression or cases by text."""

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
        """Yield the cases of the suite.

        Raises:
            GraphError: a text describes no case.
            BackendError: the pattern is wrong, or matches no op.
        """
        if self.texts:
            for text in self.texts:
                case = parse_test_case(text)
                yield case.with_settings(seed=self.seed) if self.seed else case
            return
        self.ops()
        yield from select_cases(self.op, full=self.full or self.thorough, seed=self.seed)

    def expected_failures(self) -> ExpectedFailures:
        """The failures that are expected of the backend.  Raises `BackendError` for their file and for the backend:
        both are asked before any case is chosen, which takes seconds."""
        find_device(self.backend)
        return read_expected(self.xfail) if self.xfail else ExpectedFailures()

    def ops(self) -> list[str]:
        """Names of the ops that `op` matches."""
        try:
            matching = [name for name in REGISTRY if not self.op or re.fullmatch(self.op, name)]
        except re.error as why:
            raise BackendError(f"--op {self.op!r} is no regular expression: {why}") from None
        if not matching:
            raise BackendError(f"--op {self.op!r} matches no op; `hocket ops` lists them")
        return matching


def run_suite(
    suite: Suite, on_result: Callable[[Result], None] = lambda result: None, selected: Sequence[Case] | None = None
) -> list[Result]:
    """Run the cases of `suite`, or only `selected` ones; call `on_result` with each result.

    Raises:
        BackendError: the backend is unknown.
    """
    expected = suite.expected_failures()
    chosen = list(suite.cases()) if selected is None else selected
    jobs = min(suite.jobs, -(-len(chosen) // CASES_PER_TASK))
    raw = _parallel(suite, chosen, jobs) if jobs > 1 else _serial(suite, chosen)
    results = []
    for result in apply_requirement(map(expected.apply_expectation, raw), suite.require):
        on_result(result)
        results.append(result)
    return results


def _serial(suite: Suite, cases: Sequence[Case]) -> Iterator[Result]:
    backend, device = find_device(suite.backend)
    for number, case in enumerate(cases, 1):
        yield run_case(case, backend, device)
        if number % CASES_PER_TASK == 0:
            gc.collect()  # programs and their memory hold each other, and Python hardly looks for such in a command
    if suite.thorough and not suite.texts:
        for name in suite.ops():
            yield from _explore_op(name, suite)


def _explore_op(name: str, suite: Suite) -> list[Result]:
    from .hypothesis_search import explore_op  # imports hypothesis

    backend, device = find_device(suite.backend)
    return list(explore_op(REGISTRY[name], backend, device, suite.seed))


def _parallel(suite: Suite, cases: Sequence[Case], jobs: int) -> Iterator[Result]:
    """The same results in the same order, by processes that each open the backend themselves."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    chunks = [(suite.backend, cases[i : i + CASES_PER_TASK]) for i in range(0, len(cases), CASES_PER_TASK)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for results in pool.map(_run_chunk, chunks):
            yield from results
        if suite.thorough and not suite.texts:
            for results in pool.map(_explore_op, suite.ops(), [suite] * len(suite.ops())):
                yield from results


def _run_chunk(chunk: tuple[str, Sequence[Case]]) -> list[Result]:
    backend, device = find_device(chunk[0])
    return [run_case(case, backend, device) for case in chunk[1]]
