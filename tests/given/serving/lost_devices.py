"""A CPU device that is lost as a GPU is after an illegal address: every call fails from then on, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hocket.backends import capabilities
from hocket.backends.cpu.backend import CpuBackend
from hocket.graph.errors import BackendError
from hocket.scheduler import Executor
from hocket.scheduler.runtime.store import Store

REASON = "cudaErrorIllegalAddress: an illegal memory access was encountered"


def lose_devices_after_tokens(runs: int, patch: pytest.MonkeyPatch | None = None) -> threading.Event:
    """Let all devices be lost after a number of runs of one token, or when the result is set.

    Args:
        runs: The number of runs.
        patch: Undoes the change; None leaves it for the rest of the process.
    """
    patch, is_lost, left = patch or pytest.MonkeyPatch(), threading.Event(), [runs]

    def fail_if_lost() -> None:
        if is_lost.is_set():
            raise BackendError(f"cpu:0 cannot end what was launched: {REASON}; if that goes on, start the process anew")

    def plant(kind: type, name: str) -> None:
        run: Callable[..., object] = getattr(kind, name)

        def fail_or_run(target: Any, *args: Any, **options: Any) -> object:
            if kind is Executor and target.label.startswith("1 token,"):
                left[0] -= 1
                if left[0] < 0:
                    is_lost.set()
            fail_if_lost()
            return run(target, *args, **options)

        patch.setattr(kind, name, fail_or_run)

    plant(Executor, "run")
    plant(Store, "state")
    patch.setattr(capabilities, "CanLoseDevices", CpuBackend)  # a protocol would keep its answer for later tests
    patch.setattr(CpuBackend, "find_device_loss", lambda self, on: REASON if is_lost.is_set() else "", raising=False)
    return is_lost
