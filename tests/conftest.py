"""Flags of the test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests run in as many processes as there are processors, which leaves one to the threads of each.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")
    parser.addoption("--every-architecture", action="store_true", help="compile CUDA kernels for all architectures")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_with_faults_are_compiled_fast() -> Iterator[None]:
    """They run a few times; optimising them takes longer than everything else about them."""
    from hocket.backends.cupy.device.driver import Source
    from hocket.backends.cupy.emulation import building

    from .given.emulation import Written

    plain, fast = building._built, tuple("-O1" if o == "-O2" else o for o in building.OPTIONS)

    def built(source: Source) -> Path:
        return plain(source, fast if isinstance(source, Written) else building.OPTIONS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_built", built)
        yield
