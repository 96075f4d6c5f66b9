"""What tests of machine code need, which not every machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hocket.graph.errors import BackendError


def needs(*tools: Callable[[], object]) -> None:
    """Skip the test where one of the tools is missing, each of which raises `BackendError` then."""
    try:
        for tool in tools:
            tool()
    except BackendError as why:
        pytest.skip(str(why))
