"""Flags of the test run."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from hocket.graph.storage.disk_cache import cache_folder

# Tests run in as many processes as there are processors, which leaves one to the threads of each.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Speeds that `hocket calibrate` measured for the user would decide which plans tests see. Workers inherit the folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HOCKET_CACHE_DIR"] = str(cache_folder() / "tests")
# Hundreds of tests start processes; each would compile the package again where bytecode is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A busy host is no fault of an example.
settings.register_profile("hocket", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hocket")

GOLDEN_RATIO = (5**0.5 - 1) / 2
MAX_CASES = 2
"""The number of cases of one test that run without --all or --most; the mark of a long test may lower it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")
    parser.addoption("--every-architecture", action="store_true", help="compile CUDA kernels for all architectures")
    parser.addoption("--all", action="store_true", help="run long tests, as if their files were named")
    parser.addoption("--nightly", action="store_true", help="with --all: every case of the slowest tests, too")
    parser.addoption("--most", type=int, metavar="N", help=f"cases of a test ({MAX_CASES}; with --all every one)")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "long(cases=0): without --all so many of its cases run",
    )
    config.addinivalue_line("markers", "nightly(cases): without --nightly so many of its cases run, spread over all")
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        # A call that names files or tests runs all of their cases; workers get the same arguments.
        config.option.all = config.option.nightly = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which is an eighth of the time: the 23,000 items stay anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests. Of a test with many cases some stay, so that each kind is tried."""
    max_cases = config.option.most or (len(items) if config.option.all else MAX_CASES)
    limits = {}
    for item in items:
        mark = item.get_closest_marker("long")
        limit = min(max_cases, mark.kwargs.get("cases", 0)) if mark and not config.option.all else max_cases
        if (nightly := item.get_closest_marker("nightly")) and not config.option.nightly:
            limit = min(limit, nightly.kwargs["cases"])
        limits[item] = limit
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if limits[item]:
            cases[item.nodeid.partition("[")[0]].append(item)
    stays = {item for each in cases.values() for item in choose_cases(each, max(limits[item] for item in each))}
    leaves = [item for item in items if item not in stays]
    items[:] = [item for item in items if item in stays]
    config.hook.pytest_deselected(items=leaves)


def choose_cases(cases: list[pytest.Item], limit: int) -> list[pytest.Item]:
    """Choose at most `limit` cases, the first among them, which are spread over the list without a period.

    Cases are numbered by multiples of the golden ratio modulo 1 (a Kronecker sequence), and the least are chosen. A
    fixed step could choose the same value of one parameter each time.
    """
    ranks = sorted(range(len(cases)), key=lambda number: number * GOLDEN_RATIO % 1)
    return [cases[number] for number in ranks[:limit]]


def pytest_collection_finish() -> None:
    """Exempt modules and test items from garbage collection: they live until the process ends."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Free the cycles of a module's tests: Python rarely looks for cycles among many old objects.

    Caches stay, and are exempted as well. Otherwise each collection visits all of them again.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.most or not config.option.nightly:
        what = "cases" if config.option.all else "long tests, or some of their cases,"
        terminalreporter.write_line(f"{what} were left out; --all runs more, --all --nightly everything")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written."""
    return bool(request.config.getoption("--update-golden"))
