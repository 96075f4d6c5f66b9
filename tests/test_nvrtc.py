"""Every kernel that a binding can ask for compiles for every architecture, and takes no more than before."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from hocket.backends.cupy import nvrtc
from hocket.backends.cupy.cubins import cubin
from hocket.backends.cupy.driver import Source
from hocket.backends.cupy.resources import ARCHITECTURES, measured, recorded
from hocket.backends.cupy.table import SOURCES
from hocket.graph.errors import BackendError

SLACK = 8
"""Registers by which compilers of other versions may differ."""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        nvrtc.nvrtc()
    except BackendError as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def compiled(request):
    """What the tests that were chosen need, by number of the source and architecture: compiled on all processors."""
    chosen = [i.callspec.params for i in request.session.items if "arch" in getattr(i, "fixturenames", ())]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        keys = [(c["number"], c["arch"]) for c in chosen]
        yield {key: pool.submit(measured, SOURCES[key[0]], key[1]) for key in keys}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("number", range(len(SOURCES)), ids=[f"{i}-{s.file}" for i, s in enumerate(SOURCES)])
def test_a_source_compiles_and_takes_what_is_recorded(compiled, number, arch):
    """Where a kernel changed on purpose: ``python -m hocket.backends.cupy.resources``."""
    found, table = compiled[number, arch].result(), recorded()
    assert len(found) == len(SOURCES[number].names)
    for name, resources in found.items():
        assert not resources.spilled, f"{name} spills {resources.spilled} bytes for {arch}"
        assert name in table, f"{name} is not in resources.json; write it anew"
        registers, shared = table[name][arch]
        assert resources.registers <= registers + SLACK, f"{name} took {registers} registers for {arch}"
        assert resources.shared == shared, f"{name} took {shared} bytes of shared memory for {arch}"


def test_nothing_is_recorded_of_kernels_that_are_gone():
    assert recorded().keys() == {f"{s.file}: {name}" for s in SOURCES for name in s.names}


def test_what_does_not_compile_is_named():
    with pytest.raises(BackendError) as caught:
        nvrtc.compile(Source("rows.cu", ("no_such_kernel",)), "sm_90a")
    assert "rows.cu does not compile for sm_90a" in str(caught.value)
    assert "no_such_kernel" in str(caught.value)


def test_machine_code_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    source = Source("rotary.cu", ("timesteps",))
    first = cubin(source, "sm_90a")
    (kept,) = (tmp_path / "cubins").iterdir()
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("it is compiled again"))
    assert cubin(source, "sm_90a") == first
    monkeypatch.undo()
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged
    assert cubin(source, "sm_90a") == first
