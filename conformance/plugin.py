"""The conformance kit as a pytest plugin: ``pytest --pyargs hocket.conformance --backend NAME``.

The plugin is an entry point of the group ``pytest11``, because options must be known before any test file is found.
Imports are inside the functions, so that the plugin does not slow down other test runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .cases.case import Case
    from .suite import Suite

FIXTURE = "conformance_case"
"""The name of the fixture that has the case of a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit to pytest."""
    group = parser.getgroup("hocket", "conformance of hocket backends")
    group.addoption("--backend", default="cpu", help="the backend or device under test (default: cpu)")
    group.addoption("--conformance-op", default="", metavar="REGEX", help="only ops whose whole name matches")
    group.addoption(
        "--conformance-case", action="append", default=[], metavar="STRING", help="one case as printed; repeatable"
    )
    group.addoption(
        "--conformance-from-graph", type=Path, metavar="MODEL", help="the exact cases of a GGUF, .pt2 or .onnx file"
    )
    group.addoption("--conformance-full", action="store_true", help="every case, not the covering choice")
    group.addoption("--conformance-seed", type=int, default=0, metavar="N", help="move all random numbers")
    group.addoption("--conformance-xfail", type=Path, metavar="FILE", help="file of cases expected to fail")
    group.addoption("--require", choices=("MUST", "SHOULD"), default="", help="unsupported ops of that tier fail")


def make_suite_from_options(config: pytest.Config) -> Suite:
    """Return the suite that the options of a pytest run describe."""
    from .cases.model_cases import collect_case_texts
    from .suite import Suite

    return Suite(
        backend=config.getoption("--backend"),
        op=config.getoption("--conformance-op"),
        texts=collect_case_texts(config.getoption("--conformance-case"), config.getoption("--conformance-from-graph")),
        full=config.getoption("--conformance-full"),
        seed=config.getoption("--conformance-seed"),
        require=config.getoption("--require"),
        xfail=config.getoption("--conformance-xfail"),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each case of the suite."""
    if FIXTURE in metafunc.fixturenames:
        from ..backends import find_device
        from ..graph.errors import HocketError
        from .reports.expected_failures import read_expected_failures

        try:
            suite = make_suite_from_options(metafunc.config)
            find_device(suite.backend)  # raise before the first case runs
            if suite.xfail:
                read_expected_failures(suite.xfail)
            cases = list(suite.generate_cases())
        except HocketError as why:
            raise pytest.UsageError(str(why)) from None
        except OSError as why:
            raise pytest.UsageError(f"{why.filename}: {why.strerror}; check its name and its folder") from None
        metafunc.parametrize(FIXTURE, cases, ids=str)


@pytest.fixture(scope="session")
def case_runner(request: pytest.FixtureRequest) -> Callable[[Case], None]:
    """Return a function that runs one case, and then passes, fails or skips the test."""
    from ..backends import find_device
    from .checks.run_case import Outcome
    from .reports.expected_failures import ExpectedFailures, fail_required_unsupported, read_expected_failures
    from .reports.text_report import format_reproduction_command
    from .suite import run_case_or_report_fault

    suite = make_suite_from_options(request.config)
    expected = read_expected_failures(suite.xfail) if suite.xfail else ExpectedFailures()
    backend, device = find_device(suite.backend)

    def run(case: Case) -> None:
        (result,) = fail_required_unsupported(
            [expected.mark_expected_outcome(run_case_or_report_fault(case, backend, device))], suite.require
        )
        if result.outcome is Outcome.FAIL:
            pytest.fail(f"{result.why}\n{format_reproduction_command(result, suite.backend)}", pytrace=False)
        if result.outcome is Outcome.XFAIL:
            pytest.xfail(result.why)
        if result.outcome is not Outcome.PASS:
            pytest.skip(f"{result.outcome}: {result.why}")

    return run
