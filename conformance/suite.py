"""A whole run of the conformance kit: the cases, the backend and the number of processes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends import find_device
from ..backends.base import Backend, Device
from ..graph.errors import BackendError
from ..ops import REGISTRY
from .cases.case import DECLARATION_CHECK, Case, get_tested_op, list_tested_op_names, parse_test_case
from .checks.run_case import Outcome, Result, run_case
from .generate_cases import find_declaration_fault, generate_cases_of_matching_ops
from .reports.expected_failures import ExpectedFailures, fail_required_unsupported, read_expected_failures

CASES_PER_TASK = 64
"""Cases that a process receives at a time."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The settings of a run of the conformance kit.

    The backend has the form ``cpu`` or ``cpu:1``. `op` is a regular expression of op names. `texts` are the texts of
    single cases, in place of ops. `require` is the tier of ops that must be supported: ``MUST``, ``SHOULD`` or the
    empty text. `xfail` is a file of expected failures. `thorough` adds random shapes. `jobs` is the number of
    processes.
    """

    backend: str = "cpu"
    op: str = ""
    texts: tuple[str, ...] = ()
    full: bool = False
    seed: int = 0
    require: str = ""
    xfail: Path | None = None
    thorough: bool = False
    jobs: int = 1

    def generate_cases(self) -> Iterator[Case]:
        """Yield the cases of the suite.

        They are the cases of the given texts, or the generated cases of the matching ops.

        Raises:
            GraphError: a text describes no case.
            BackendError: the pattern is wrong, or matches no op.
        """
        if self.texts:
            for text in self.texts:
                case = parse_test_case(text)
                yield case.with_settings(seed=self.seed) if self.seed else case
            return
        self.list_matching_ops()
        yield from generate_cases_of_matching_ops(self.op, full=self.full or self.thorough, seed=self.seed)

    def read_expected_failures(self) -> ExpectedFailures:
        """Read the file of expected failures, if there is one.

        This also checks that the backend exists. A run calls this before it generates cases, which takes seconds.

        Raises:
            BackendError: the file cannot be read, or the backend is unknown.
        """
        find_device(self.backend)
        return read_expected_failures(self.xfail) if self.xfail else ExpectedFailures()

    def list_matching_ops(self) -> list[str]:
        """Return the names of the ops that the regular expression `op` matches completely.

        Raises:
            BackendError: the pattern is wrong, or matches no op.
        """
        try:
            matching = [
                name
                for name in (*list_tested_op_names(), *REGISTRY.package_entry_faults)
                if not self.op or re.fullmatch(self.op, name)
            ]
        except re.error as why:
            raise BackendError(f"--op {self.op!r} is no regular expression: {why}") from None
        if not matching:
            raise BackendError(f"--op {self.op!r} matches no op; `hocket ops` lists them")
        return matching


def run_cases_of_suite(
    suite: Suite, on_result: Callable[[Result], None] = lambda result: None, selected: Sequence[Case] | None = None
) -> list[Result]:
    """Run the cases of `suite`, or only the `selected` ones, and return their results in order.

    Args:
        suite: settings of the run.
        on_result: called with each result as soon as it is known.
        selected: cases to run, in place of the cases of the suite.

    Raises:
        BackendError: the backend is unknown, or the file of expected failures cannot be read.
    """
    expected = suite.read_expected_failures()
    chosen = list(suite.generate_cases()) if selected is None else selected
    jobs = min(suite.jobs, -(-len(chosen) // CASES_PER_TASK))
    raw = _run_in_processes(suite, chosen, jobs) if jobs > 1 else _run_in_this_process(suite, chosen)
    results = []
    for result in fail_required_unsupported(map(expected.mark_expected_outcome, raw), suite.require):
        on_result(result)
        results.append(result)
    return results


def _run_in_this_process(suite: Suite, cases: Sequence[Case]) -> Iterator[Result]:
    """Run cases in this process, and yield their results in order."""
    backend, device = find_device(suite.backend)
    for number, case in enumerate(cases, 1):
        yield run_case_or_report_fault(case, backend, device)
        if number % CASES_PER_TASK == 0:
            gc.collect()  # programs and their memory hold each other, and Python hardly looks for such in a command
    if suite.thorough and not suite.texts:
        for name in suite.list_matching_ops():
            yield from _run_random_shapes_of_op(name, suite)


def _run_random_shapes_of_op(name: str, suite: Suite) -> list[Result]:
    """Return the results of random shapes of one op; none if its declaration is wrong."""
    if find_declaration_fault(name):
        return []
    from .hypothesis_search import search_random_shapes  # imports hypothesis

    backend, device = find_device(suite.backend)
    return list(search_random_shapes(get_tested_op(name), backend, device, suite.seed))


def _run_in_processes(suite: Suite, cases: Sequence[Case], jobs: int) -> Iterator[Result]:
    """Run cases in `jobs` processes, each with its own backend, and yield their results in order."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    chunks = [(suite.backend, cases[i : i + CASES_PER_TASK]) for i in range(0, len(cases), CASES_PER_TASK)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for results in pool.map(_run_case_chunk, chunks):
            yield from results
        if suite.thorough and not suite.texts:
            for results in pool.map(
                _run_random_shapes_of_op, suite.list_matching_ops(), [suite] * len(suite.list_matching_ops())
            ):
                yield from results


def _run_case_chunk(chunk: tuple[str, Sequence[Case]]) -> list[Result]:
    """Run one chunk of cases in a worker process; the chunk has the backend name and the cases."""
    backend, device = find_device(chunk[0])
    return [run_case_or_report_fault(case, backend, device) for case in chunk[1]]


def run_case_or_report_fault(case: Case, backend: Backend, device: Device) -> Result:
    """Run one case; a case that stands for an op with a wrong declaration fails with the reason."""
    if case.check == DECLARATION_CHECK:
        return Result(case, Outcome.FAIL, find_declaration_fault(case.op))
    return run_case(case, backend, device)
