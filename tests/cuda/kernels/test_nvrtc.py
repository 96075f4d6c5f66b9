"""Every kernel that a binding can ask for compiles, and takes no more than before: each for one architecture, and with
``--every-architecture`` for all."""

from __future__ import annotations

import pytest

from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.device.cubins import cubin
from hocket.backends.cupy.device.driver import Source
from hocket.backends.cupy.resources import ARCHITECTURES, digest, measured, recorded
from hocket.backends.cupy.table import SOURCES
from hocket.graph.errors import BackendError

SLACK = 8
"""Registers by which compilers of other versions may differ."""


@pytest.fixture(scope="module")
def _compiler():
    try:
        nvrtc.nvrtc()
    except BackendError as why:
        pytest.skip(str(why))


def test_the_table_is_of_these_sources():
    """Whoever wrote it has compiled them for every architecture; ``python -m hocket.backends.cupy.resources`` does."""
    table = recorded()
    assert list(table.digests) == [digest(source) for source in SOURCES], "write resources.json anew"
    assert table.kernels.keys() == {f"{s.file}: {name}" for s in SOURCES for name in s.names}
    assert all(tuple(rows) == ARCHITECTURES for rows in table.kernels.values())


def pytest_generate_tests(metafunc):
    """Every source for one architecture, each for another one than the source before; or for all."""
    if "arch" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--every-architecture")
    chosen = [ARCHITECTURES if every else ARCHITECTURES[i % 4 :][:1] for i in range(len(SOURCES))]
    cases = [(i, arch) for i, some in enumerate(chosen) for arch in some]
    metafunc.parametrize(("number", "arch"), cases, ids=[f"{i}-{SOURCES[i].file}-{arch}" for i, arch in cases])


@pytest.mark.long(every=33)
@pytest.mark.usefixtures("_compiler")
def test_a_source_compiles_and_takes_what_is_recorded(number, arch):
    """Where a kernel changed on purpose: ``python -m hocket.backends.cupy.resources``."""
    found, table = measured(SOURCES[number], arch), recorded().kernels
    assert len(found) == len(SOURCES[number].names)
    for name, resources in found.items():
        assert not resources.spilled, f"{name} spills {resources.spilled} bytes for {arch}"
        assert name in table, f"{name} is not in resources.json; write it anew"
        registers, shared = table[name][arch]
        assert resources.registers <= registers + SLACK, f"{name} took {registers} registers for {arch}"
        assert resources.shared == shared, f"{name} took {shared} bytes of shared memory for {arch}"


@pytest.mark.usefixtures("_compiler")
def test_what_does_not_compile_is_named():
    with pytest.raises(BackendError) as caught:
        nvrtc.compile(Source("rows.cu", ("no_such_kernel",)), "sm_90a")
    assert "rows.cu does not compile for sm_90a" in str(caught.value)
    assert "no_such_kernel" in str(caught.value)


@pytest.mark.usefixtures("_compiler")
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
