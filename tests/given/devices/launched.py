"""A plugin of pytest that lists the compiled kernels which no test has run on emulated devices:
``python -m pytest -p tests.given.devices.launched tests/cuda``."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.backends.cupy.device.driver import KernelLaunch, flatten_steps
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernel_resources import read_resource_table

LAUNCHED_KERNELS: set[str] = set()
"""Kernels that tests of this process have launched, and in the main process the kernels of its workers as well."""


def pytest_configure() -> None:
    record = EmulatedDriver.record

    def noting(self, steps, on):
        LAUNCHED_KERNELS.update(str(step.kernel) for step in flatten_steps(steps) if isinstance(step, KernelLaunch))
        return record(self, steps, on)

    EmulatedDriver.record = noting


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launched"] = sorted(LAUNCHED_KERNELS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LAUNCHED_KERNELS.update(getattr(node, "workeroutput", {}).get("launched", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    kernels = read_resource_table().kernels.keys()
    terminalreporter.section("kernels that no test has run")
    terminalreporter.write_line("\n".join(sorted(kernels - LAUNCHED_KERNELS)))
    terminalreporter.write_line(f"{len(kernels & LAUNCHED_KERNELS)} of {len(kernels)} were run")
