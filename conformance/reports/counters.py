"""Cases whose CUDA launches are counted in the emulation, and are right as well."""

from __future__ import annotations

from collections.abc import Iterable

from ...backends.cupy.backend import DriverBackend
from ...backends.cupy.emulation.counted import Counted, CountingDriver
from ...graph.errors import BackendError
from ..judging.run import Outcome, run_case
from ..trials.case import parse


def counters(texts: Iterable[str]) -> list[Counted]:
    """What each kernel of some cases did, a kernel once.  Raises `BackendError` where a result is wrong."""
    driver = CountingDriver()
    backend = DriverBackend(driver)
    for text in texts:
        result = run_case(parse(text), backend, backend.device(0))
        if result.outcome not in (Outcome.PASS, Outcome.NO_REFERENCE):
            raise BackendError(f"{text}: {result.outcome}: {result.why}")
    return list(driver.found.values())
