"""Flags of the test run."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# Tests run in as many processes as there are processors, which leaves one to the threads of each.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# A busy host is no fault of an example.
settings.register_profile("hocket", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hocket")

MOST_CASES = 6
"""So many cases of one test, or fewer, are run without --all: every second or third of those that have more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")
    parser.addoption("--every-architecture", action="store_true", help="compile CUDA kernels for all architectures")
    parser.addoption("--all", action="store_true", help="run long tests whole, as if their files were named")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long(every=None): without --all only each such case is run, or none")
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput"):
        config.option.all = True  # who names files or tests wants them whole; workers get the options of their master


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long.  Of a test with many cases some stay, so that each kind is tried."""
    if config.option.all:
        return
    cases: Counter[str] = Counter()
    counts = Counter(item.nodeid.partition("[")[0] for item in items)
    stays, leaves = [], []
    for item in items:
        mark = item.get_closest_marker("long")
        test = item.nodeid.partition("[")[0]
        every = mark.kwargs.get("every") if mark else -(-counts[test] // MOST_CASES)
        (stays if every and cases[test] % every == 0 else leaves).append(item)
        cases[test] += 1
    items[:] = stays
    config.hook.pytest_deselected(items=leaves)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.all:
        terminalreporter.write_line("long tests were left out, or some of their cases; --all runs everything")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written."""
    return bool(request.config.getoption("--update-golden"))
