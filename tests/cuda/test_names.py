"""The stand-ins for CuPy and NCCL have only attributes of the real packages.

No call of the driver then goes astray. The test needs CuPy, but no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest

from ..given.fakes.fake_cupy import fake_cupy
from ..given.fakes.fake_nccl import FakeNccl

OF_TESTS = {"enabled", "pinned", "launch", "functions"}
"""Names of the stand-ins that are their own."""
METHODS = {
    "ndarray": ("__getitem__", "__setitem__", "data", "device", "dtype", "flags", "shape"),
    "cuda.MemoryPointer": ("__add__", "ptr"),
    "cuda.Device": ("__enter__", "__exit__", "compute_capability"),
    "cuda.Stream": ("__enter__", "__exit__", "begin_capture", "end_capture", "synchronize"),
    "cuda.Graph": ("launch",),
    "cuda.Event": ("record", "synchronize"),
    "cuda.function.Module": ("load", "get_function"),
    "cuda.nccl.NcclCommunicator": ("allReduce", "send", "recv", "check_async_error", "abort"),
}
"""Methods that the driver calls, by the type name of the object."""


def unknown(stand_in: Any, real: Any, path: str = "") -> Iterator[str]:
    for name, part in vars(stand_in).items():
        if name in OF_TESTS:
            continue
        if not hasattr(real, name):
            yield path + name
        elif isinstance(part, SimpleNamespace):
            yield from unknown(part, getattr(real, name), f"{path}{name}.")


@pytest.fixture
def cupy() -> Any:
    real = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="CuPy has no NCCL", exc_type=ImportError)
    if not nccl.available:
        pytest.skip("NCCL is not installed beside CuPy")
    return real


def test_the_stand_in_for_cupy_has_nothing_that_cupy_lacks(cupy):
    assert list(unknown(fake_cupy({}), cupy)) == []
    for path, names in METHODS.items():
        there = reduce(getattr, path.split("."), cupy)
        assert [n for n in names if not hasattr(there, n)] == [], path


def test_the_stand_in_for_nccl_has_nothing_that_nccl_lacks(cupy):
    nccl, stand_in = cupy.cuda.nccl, FakeNccl(lambda: 0)
    names = {n for n in vars(FakeNccl) if n[0] != "_"} - OF_TESTS
    assert [n for n in names if not hasattr(nccl, n)] == []
    assert len(nccl.get_unique_id()) == len(stand_in.get_unique_id())
