"""Every kernel that a binding can ask for compiles, takes no more than before, and its machine code does no more: each
for one architecture, and with ``--every-architecture`` for all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hocket.backends.cupy.device import disassembly, nvrtc
from hocket.backends.cupy.device.cubin_cache import load_or_compile_cubin
from hocket.backends.cupy.device.driver import KernelSource
from hocket.backends.cupy.kernel_resources import (
    compile_resource_rows,
    compute_source_digest,
    list_architectures,
    read_resource_table,
)
from hocket.backends.cupy.kernel_table import SOURCES
from hocket.backends.cupy.kernels.products import tiled
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError

from ...given.devices.recorded import find_resource_regressions
from ...given.devices.tools import needs


@pytest.fixture(scope="module")
def _compiler():
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)


def test_the_table_is_of_these_sources():
    """Check that ``python -m hocket.backends.cupy.kernel_resources`` wrote the table from these sources."""
    table = read_resource_table()
    assert list(table.digests) == [compute_source_digest(source) for source in SOURCES], "write resources.json anew"
    expected = {f"{s.file}: {name}": list_architectures(s) for s in SOURCES for name in s.names}
    assert {name: tuple(rows) for name, rows in table.kernels.items()} == expected


def pytest_generate_tests(metafunc):
    """Every source for one architecture, each for another one than the source before; or for all."""
    if "arch" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--every-architecture")
    all_of = [list_architectures(source) for source in SOURCES]
    chosen = [of if every else of[i % len(of) :][:1] for i, of in enumerate(all_of)]
    cases = [(i, arch) for i, some in enumerate(chosen) for arch in some]
    metafunc.parametrize(("number", "arch"), cases, ids=[f"{i}-{SOURCES[i].file}-{arch}" for i, arch in cases])


@pytest.mark.nightly(cases=13)
@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
def test_a_source_compiles_and_takes_what_is_recorded(number, arch):
    """Where a kernel changed on purpose: ``python -m hocket.backends.cupy.kernel_resources``."""
    found, table = compile_resource_rows(SOURCES[number], arch), read_resource_table().kernels
    assert len(found) == len(SOURCES[number].names)
    for name, (row, spills) in found.items():
        assert not spills, f"{name} spills {spills} bytes for {arch}"
        assert name in table, f"{name} is not in resources.json; write it anew"
        for why in find_resource_regressions(row, table[name][arch]):
            pytest.fail(f"{name} for {arch}: {why}")


COMPILER_OUTPUT = """
.text.add:
        /*0000*/                   LDG.E.U8 R1, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32 R4, R4, R8, R12 ;
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R11], desc[UR6][R6.64] ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/              @UP1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3);
"""


def test_loops_loads_and_products_are_counted_in_what_the_disassembler_shows():
    ((name, lines),) = disassembly.split_disassembly_by_kernel(COMPILER_OUTPUT)
    assert name == "add"
    assert disassembly.compute_code_statistics(lines) == disassembly.CodeStatistics(
        8, loop=3, products=1, loads={8: 1, 128: 2}
    )


@dataclass
class Planted:
    """A source of one kernel."""

    text: str
    file: str = "planted.cu"
    names: tuple[str, ...] = ("planted",)


SOUND = """
extern "C" __global__ void __launch_bounds__(128, 1) planted(const float4* x, float* y, int n) {
    float sums[40] = {};
    for (int i = threadIdx.x; i < n; i += 32) {
        float4 v = x[i];
        for (int j = 0; j < 4; ++j) sums[j] += v.x * j + v.y * j + v.z + v.w;
    }
    for (int j = 0; j < 40; ++j) y[40 * threadIdx.x + j] = sums[j];
}
"""
PLANTED = {
    "a load is narrowed": SOUND.replace(
        "float4 v = x[i];", "struct { float x, y, z, w; } v; memcpy(&v, 4 * i + (const float*)x, 16);"
    ),
    "a loop does more": SOUND.replace("sums[j] +=", "sums[j] += __sinf(sums[j]) * __cosf(sums[j]) +"),
    "fewer warps fit": SOUND.replace("(128, 1)", "(32, 1)"),
    "registers are spilled": SOUND.replace("j < 4;", "j < 40;").replace("(128, 1)", "(1024, 2)"),
}


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
def test_what_is_planted_in_machine_code_is_found():
    ((before, spills),) = compile_resource_rows(Planted(SOUND), "sm_90a").values()
    assert not spills
    assert not list(find_resource_regressions(before, before))
    for what, text in PLANTED.items():
        assert text != SOUND
        ((now, spills),) = compile_resource_rows(Planted(text), "sm_90a").values()
        findings = [*find_resource_regressions(now, before), *["spilled"] * bool(spills)]
        expected = {"narrowed": "bits", "more": "loop", "fit": "warps", "spilled": "spilled"}[what.split()[-1]]
        assert any(expected in why for why in findings), (what, before, now, spills)


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
def test_a_product_that_the_compiler_waits_for_is_found():
    """Registers that are touched while a product adds to them."""
    source = tiled.WARPGROUP_SOURCE_BY_DTYPE[DType.BF16]
    good = "wgmma_wait<1>(block.sum);"
    assert source.text.count(good) == 1
    with pytest.raises(BackendError, match="wait is injected"):
        compile_resource_rows(
            Planted(source.text.replace(good, "block.sum[3] += 1.0f;" + good), names=source.names), "sm_90a"
        )


@pytest.mark.usefixtures("_compiler")
def test_what_does_not_compile_is_named():
    with pytest.raises(BackendError) as caught:
        nvrtc.compile(KernelSource("indexer.cu", ("no_such_kernel",)), "sm_90a")
    assert "indexer.cu does not compile for sm_90a" in str(caught.value)
    assert "no_such_kernel" in str(caught.value)


@pytest.mark.usefixtures("_compiler")
def test_machine_code_is_cached_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    source = KernelSource("rotary.cu", ("timesteps",), ("cells.cuh", "heads.cuh"))
    first = load_or_compile_cubin(source, "sm_90a")
    (cached_file,) = (tmp_path / "cubins").iterdir()
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("it is compiled again"))
    assert load_or_compile_cubin(source, "sm_90a") == first
    monkeypatch.undo()
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    cached_file.write_bytes(cached_file.read_bytes()[:-1])  # damaged
    assert load_or_compile_cubin(source, "sm_90a") == first
