"""Prologues that are generated for products of few rows: their faults are found, and no kernel spills registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.generated import row_prologue
from hocket.graph import DType, StepError

from ...given.devices.chains import (
    CHAINS,
    RecordingDriver,
    assert_equal_runs,
    gates_before_unit,
    heads_before_product,
    norm_before_products,
    run_graph,
)
from ...given.devices.emulation import needs_compiler
from ...given.devices.routing_graphs import routed_products
from ...given.devices.tools import needs

pytestmark = needs_compiler
NORM, LONG_NORM = "norm before products", "norm before products of long rows"
HEADS, GATES = "norm of heads before a product", "gates before a unit"
PLANTS = {
    "every second column is summed": ("c += threads", "c += 2 * threads", NORM),
    "sums of one warp": ("block_sum(sum, room)", "warp_sum(sum)", LONG_NORM),
    "a row of another token": ("a.p0[token * a.row0 + c]", "a.p0[c]", NORM),
    "columns are squared once too often": ("fmaf(s2, s2, sum)", "fmaf(s2, s2 * s2, sum)", NORM),
    "a sum is written elsewhere": ("token * a.row3 + part", "part", NORM),
    "the parts of a head are not joined": ("by < 8; by *= 2", "by < 4; by *= 2", HEADS),
    "heads lie side by side": ("part = first / 64", "part = 0 * first", HEADS),
    "all columns are of the first head": ("within = first % 64", "within = first % 32", HEADS),
    "gates of another part": ("part * a.head0", "part * a.head1", GATES),
}


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_in_generated_text_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    good, bad, chain_name = PLANTS[name]
    chain, planted = CHAINS[chain_name], []
    write: Callable[..., str] = row_prologue.write_prologue_struct

    def write_with_fault(*args: object) -> str:
        text = write(*args)
        if good in text:
            planted.append(text)
        return text.replace(good, bad)

    single = run_graph(chain.graph(False), False)
    monkeypatch.setattr(row_prologue, "write_prologue_struct", write_with_fault)
    with pytest.raises((AssertionError, StepError), match=r"Not equal to tolerance|touches memory that is not its own"):
        assert_equal_runs(run_graph(chain.graph(False), True), single, chain.tolerance)
    assert planted, "the text of the fault is not generated"


@pytest.mark.long
@pytest.mark.nightly(cases=1)
@pytest.mark.parametrize("dtype", PLANE_LAYOUTS, ids=str)
def test_no_kernel_with_a_prologue_spills_registers(dtype: DType):
    needs(nvrtc.load_nvrtc)
    driver = RecordingDriver()
    for graph in (norm_before_products(dtype, 1, 256), heads_before_product(dtype, 2, 128), gates_before_unit(dtype)):
        run_graph(graph(False), True, backend=DriverBackend(driver))
    sources = {launch.kernel.source for launch in driver.launches if launch.kernel.source.generated}
    assert len(sources) == 3
    for source in sources:
        assert not any(found.spilled_bytes for found in nvrtc.compile(source, "sm_90a").resources.values())


@pytest.mark.long
@pytest.mark.nightly(cases=1)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32], ids=str)
def test_no_kernel_that_chooses_experts_spills_registers(dtype: DType):
    needs(nvrtc.load_nvrtc)
    driver = RecordingDriver()
    graph = routed_products(ops.softmax, 1000, dtype=dtype, norm=dtype is not DType.F16, tokens=4)
    run_graph(graph(False), True, backend=DriverBackend(driver))
    (kernel,) = {launch.kernel for launch in driver.launches if "RoutingEpilogue" in launch.kernel.source.generated}
    assert not nvrtc.compile(kernel.single_kernel_source, "sm_90a").resources[kernel.name].spilled_bytes
