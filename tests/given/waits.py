"""How long tests wait: nothing that is right may fail because a thread of it had no processor for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_SECONDS = 3600.0
"""Seconds. A longer wait is a hang: pytest ends it then, and shows where (``faulthandler_timeout``)."""


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until that holds."""
    while not holds():
        time.sleep(0.005)
