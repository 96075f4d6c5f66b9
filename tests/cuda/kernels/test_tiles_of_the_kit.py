"""The conformance kit on the largest tiles of products, which are too large for its own cases.

It runs on devices with and without warpgroup products.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.backends.cupy.device.device_limits import find_kernel_limits
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.products import matmul, tiled
from hocket.backends.fusion.operands import Operand
from hocket.conformance import Outcome, run_case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.graph.dtypes import DType
from hocket.ops import REGISTRY

from ...given.devices.emulation import needs_compiler
from ...given.devices.products import Choice, tiles_of

pytestmark = [needs_compiler, pytest.mark.long()]


@dataclass(frozen=True)
class TileVariant:
    """Tiles of 16-bit weights, blocks that may share one, and tiles of packed weights.

    `kernel` is the beginning of the kernel names on devices of this compute capability.
    """

    capability: str
    kernel: str
    tile: tiled.Tile
    packed: tiled.Tile
    shares: int = tiled.COLUMN_SPLITS[2]

    def choose(self, w: Operand, is_even: bool) -> Choice:
        if w.dtype in PLANE_LAYOUTS:
            return self.packed, self.shares if is_even and self.packed == tiled.WARPGROUP_TILE else 1
        return self.tile, self.shares if is_even else 1


TALL = TileVariant("80", "tiled", tiled.TALL_TILE, tiled.LARGE_TILE)
GROUPED = TileVariant("90", "grouped", tiled.WARPGROUP_TILE, tiled.WARPGROUP_TILE)
CLUSTERED = TileVariant("90", "clustered", tiled.CLUSTER_TILE, tiled.WARPGROUP_TILE)
CASES = [
    *(
        (op, variant, t)
        for variant in (TALL, GROUPED)
        for t in (*tiled.FLOAT_DTYPES, *PLANE_LAYOUTS)
        for op in ("mul_mat", "mul_mat_id")
    ),
    *(("mul_mat", CLUSTERED, t) for t in tiled.FLOAT_DTYPES),
]


class Noting(EmulatedDriver):
    """A driver that records the names of launched kernels."""

    def __init__(self, capability: str) -> None:
        super().__init__(limits=find_kernel_limits(capability))
        self.names: set[str] = set()

    def record(self, steps, on):
        self.names |= {step.kernel.name for step in steps if isinstance(step, KernelLaunch)}
        return super().record(steps, on)


@pytest.mark.nightly(cases=13)
@pytest.mark.parametrize(
    ("op", "variant", "dtype"), CASES, ids=[f"{op}-{variant.kernel}-{t}" for op, variant, t in CASES]
)
def test_the_largest_tiles_do_what_a_product_means(op: str, variant: TileVariant, dtype: DType, monkeypatch):
    monkeypatch.setattr(matmul, "MAX_GEMV_ROWS", 0)
    driver = Noting(variant.capability)
    backend = DriverBackend(driver)
    cases = [case for case in select_quick_cases(REGISTRY[op]) if case.specs["w"].dtype is dtype]
    with tiles_of(variant.choose):
        results = {str(case): run_case(case, backend, backend.device(0)) for case in cases}
    assert {case: r.why for case, r in results.items() if r.outcome is not Outcome.PASS} == {}
    assert any(name.startswith(variant.kernel) for name in driver.names)
