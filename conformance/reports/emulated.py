"""Cases whose CUDA launches are counted in the emulation, or put in order, and are right as well."""

from __future__ import annotations

from collections.abc import Iterable

from ...backends.cupy.backend import DriverBackend
from ...backends.cupy.device.limits import MOST, Limits
from ...backends.cupy.emulation.counted import Counted, CountingDriver
from ...backends.cupy.emulation.order import disorder
from ...backends.cupy.emulation.ordered import OrderedBackend, OrderedDriver
from ...graph.errors import BackendError
from ..judging.run import Outcome, run_case
from ..trials.case import parse


def counters(texts: Iterable[str], limits: Limits = MOST) -> list[Counted]:
    """What each kernel of some cases did, a kernel once, on devices that have so much.  Raises `BackendError` where a
    result is wrong."""
    driver = CountingDriver(limits, only=1)  # a case runs three times, and the second is judged
    for text in texts:
        _run(text, DriverBackend(driver))
    return list(driver.found.values())


def disorders(texts: Iterable[str]) -> list[str]:
    """The accesses of some cases that nothing puts in an order, a line a pair.  Raises `BackendError` where a result is
    wrong."""
    lines = []
    for text in texts:
        driver = OrderedDriver()
        _run(text, OrderedBackend(driver))
        lines += [f"{text}: {pair}" for pair in disorder(driver.taken(), driver.memory)]
    return lines


def _run(text: str, backend: DriverBackend) -> None:
    result = run_case(parse(text), backend, backend.device(0))
    if result.outcome not in (Outcome.PASS, Outcome.NO_REFERENCE):
        raise BackendError(f"{text}: {result.outcome}: {result.why}")
