"""Requirements of tests of machine code, which some machines lack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hocket.graph.errors import BackendError


def needs(*tools: Callable[[], object]) -> None:
    """Skip the test if one of the tools is missing; a missing tool raises `BackendError`."""
    try:
        for tool in tools:
            tool()
    except BackendError as why:
        pytest.skip(str(why))
