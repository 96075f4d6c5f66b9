"""Access counters and race checks of the CUDA kernels of cases, in the emulator."""

from __future__ import annotations

from collections.abc import Iterable

from ...backends.cupy.backend import DriverBackend
from ...backends.cupy.device.device_limits import LARGEST_LIMITS, KernelLimits
from ...backends.cupy.emulation.access_counters import AccessCountingDriver, LaunchCounters
from ...backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from ...backends.cupy.emulation.race_detector import list_races_between_launches
from ...graph.errors import BackendError
from ..cases.case import parse_test_case
from ..checks.run_case import Outcome, run_case


def emulate_cases_and_count_accesses(
    case_texts: Iterable[str], limits: KernelLimits = LARGEST_LIMITS
) -> list[LaunchCounters]:
    """Run cases in the emulator, and return the memory access counters of each kernel launch.

    Args:
        case_texts: texts of the cases.
        limits: limits of the emulated device.

    Raises:
        BackendError: a result is wrong.
    """
    driver = AccessCountingDriver(limits, counted_run=1)  # of three runs of a case, the second is compared
    for text in case_texts:
        _run_case_in_emulator(text, DriverBackend(driver))
    return list(driver.counters.values())


def emulate_cases_and_list_races(case_texts: Iterable[str]) -> list[str]:
    """Run cases in the emulator, and return a line for each pair of unordered conflicting accesses.

    Args:
        case_texts: texts of the cases.

    Raises:
        BackendError: a result is wrong.
    """
    lines = []
    for text in case_texts:
        driver = AccessLogDriver()
        _run_case_in_emulator(text, AccessLogBackend(driver))
        lines += [f"{text}: {pair}" for pair in list_races_between_launches(driver.take_log(), driver.memory)]
    return lines


def _run_case_in_emulator(case_text: str, backend: DriverBackend) -> None:
    """Run one case on an emulated device, and raise `BackendError` if its result is wrong."""
    result = run_case(parse_test_case(case_text), backend, backend.device(0))
    if result.outcome not in (Outcome.PASS, Outcome.NO_REFERENCE):
        raise BackendError(f"{case_text}: {result.outcome}: {result.why}")
