"""Mistakes that kernels make: each that is planted is found by the emulation of CUDA, or by conformance on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.base import Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import LaunchError, read_kernel_text
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.fusion.operands import NoKernelError, Operand
from hocket.conformance import Outcome, run_case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.graph import DType
from hocket.ops import REGISTRY

from ...given.devices.emulation import EditedSource, FaultyDriver, needs_compiler

pytestmark = needs_compiler
BEFORE = [read_kernel_text(name) for name in ("types.cuh", "cuda.cuh", "prelude.cuh")]
PLANTED = Path(__file__).with_name("planted.cu").read_text("utf-8")

# kernel, threads, blocks, elements of x and of out, and its faults: name, message (None for a wrong result)
FAULTS = {
    ("reversed", 64, 1, 64, 64): {
        "NO_BARRIER": "",
        "HALF_BARRIER": "deadlock: of 64 threads 32 wait at a barrier",
        "TWO_BARRIERS": "meet at the barriers of lines",
        "EARLY_RETURN": "1 have ended",
        "READS_PAST": "0 bytes past the end of word 0",
        "WRITES_PAST": "0 bytes past the end of word 1",
        "WRITES_BEFORE": "writes next to word 1",
        "READS_BEFORE": "",
        "SHARED_PAST": "array outside of its bounds",
        "DYNAMIC_PAST": "touches shared memory outside of its 256 bytes",
        "NEVER_WRITTEN": "",
        "TAIL_LEFT": "",
    },
    ("summed", 64, 1, 64, 64): {
        "WRONG_LANE": "",
        "WRONG_MASK": "0000ffff",
        "LANE_OUTSIDE": "reads lane 16, which the mask 0000ffff lacks",
        "HALF_WARP": "32 in a warp operation (shuffle)",
        "OTHER_OPERATION": "__syncwarp",
    },
    ("fetched", 64, 1, 256, 256): {
        "NO_WAIT": "",
        "WAITS_FOR_TOO_FEW": "",
        "IN_FLIGHT": "ends with copies to shared memory in flight",
    },
    ("multiplied", 32, 1, 384, 128): {
        "WRONG_FRAGMENT": "",
        "MISALIGNED_ROW": "not aligned to 16 bytes",
    },
    ("copied", 32, 2, 50, 50): {
        "MISALIGNED_VECTOR": "misaligned pointer",
        "DIVIDES_BY_0": "divides an integer by 0",
        "DEEP_STACK": "more than 64 KiB of local memory",
        "NULL_POINTER": "memory that is not its own",
        "ARRAY_PAST": "array outside of its bounds",
        "OTHER_BLOCK": "",
    },
}
CASES = [
    (*how, fault, message) for how, faults in FAULTS.items() for fault, message in {"NONE": None, **faults}.items()
]
NAMES = tuple(f"{kernel}<{fault}>" for kernel, *_, fault, _ in CASES)
SOURCE = EditedSource("planted.cu", NAMES, body="".join((*BEFORE, '#line 1 "planted.cu"\n', PLANTED)))


def expected_result(kernel, x):
    """Return the result of a correct kernel for `x`."""
    if kernel == "reversed":
        return x[::-1]
    if kernel == "summed":
        return np.repeat(x.reshape(-1, 32).sum(-1), 32)
    if kernel == "multiplied":
        return (x[:256].reshape(16, 16) @ x[256:].reshape(16, 8)).reshape(-1)
    return x


@pytest.mark.long
@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_is_wrong_with_a_kernel_is_found_and_named(case, order):
    """A wrong result in one order of threads is enough."""
    kernel, threads, grid, size, results, fault, message = case
    x = np.random.default_rng(0).integers(-3, 4, size).astype(np.float32)  # sums are exact
    if message:
        with pytest.raises(LaunchError) as caught:
            launch(kernel, fault, threads, grid, x, results, order)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    with np.errstate(invalid="ignore"):
        right = [
            np.array_equal(launch(kernel, fault, threads, grid, x, results, o), expected_result(kernel, x))
            for o in ({order} if fault == "NONE" else range(4))
        ]
    assert all(right) if fault == "NONE" else not all(right)


def launch(kernel, fault, threads, grid, x, results, order):
    """The result of one launch, in memory that held NaN."""
    driver = EmulatedDriver(order)
    device = driver.device(0)
    memory = [driver.alloc(4 * n, device) for n in (len(x), results)]
    operands = [Operand(driver.address(m), Tensor(i, 0, (len(m) // 4,), (1,), DType.F32)) for i, m in enumerate(memory)]
    memory[0].view(np.float32)[:] = x
    memory[1][:] = 0xFF
    launches = LaunchBuilder(upload_array=lambda array: 0)
    launches.add_launch(SOURCE[f"{kernel}<{fault}>"], grid, threads, [*operands, len(x)], shared_bytes=4 * threads)
    driver.record(launches.items, device)()
    return memory[1].view(np.float32).copy()


def test_a_launch_that_no_device_takes_is_refused():
    driver = EmulatedDriver()
    device = driver.device(0)
    for grid, block, words, message in (
        (1, 1025, 3, "no device has a grid of 1 x 1 x 1 blocks of 1025 threads"),
        ((1, 70000), 32, 3, "no device has"),
        (1, 32, 2, "takes 3 words, the launch gives 2"),
    ):
        launches = LaunchBuilder(upload_array=lambda array: 0)
        launches.add_launch(SOURCE["copied<NONE>"], grid, block, [0] * words)
        with pytest.raises(LaunchError) as caught:
            driver.record(launches.items, device)()
        assert message in str(caught.value)
    with pytest.raises(NoKernelError, match="takes 1048576 bytes of shared memory"):
        LaunchBuilder(upload_array=lambda array: 0).add_launch(
            SOURCE["copied<NONE>"], 1, 32, [0] * 3, shared_bytes=1 << 20
        )


# --------------------------------------------------------------------------------------------- in the package's own


@dataclass(frozen=True)
class Plant:
    """A mistake in one of our kernels: `old` becomes `new` in a file (or the prelude)."""

    op: str
    name: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


PLANTS = (
    Plant(
        "softmax",
        "no barrier before the sums of warps are read",
        "prelude.cuh",
        "if (lane == 0) room[warp] = x;\n    __syncthreads();\n    x = warp_sum",
        "if (lane == 0) room[warp] = x;\n    x = warp_sum",
    ),
    Plant(
        "rms_norm",
        "no barrier before the room is used again",
        "rows.cu",
        "const float factor = F::factor(squares",
        "if (threadIdx.x == 40) return;\n    const float factor = F::factor(squares",
    ),
    Plant(
        "softmax",
        "the sum of a warp leaves out a lane",
        "prelude.cuh",
        "for (int by = 16; by > 0; by >>= 1) x += ",
        "for (int by = 16; by > 1; by >>= 1) x += ",
    ),
    Plant(
        "neg",
        "the last element is not written",
        "elements.cuh",
        "if (first + e * blockDim.x < end) put",
        "if (first + e * blockDim.x + 1 < end) put",
    ),
    Plant(
        "add",
        "one element too many",
        "elements.cuh",
        "if (i < end) loaded[e]",
        "if (i <= end) loaded[e]",
    ),
    Plant(
        "cumsum",
        "the sum of earlier entries is of the wrong lane",
        "rows.cu",
        "__shfl_sync(ALL_LANES, sum, 31)",
        "__shfl_sync(ALL_LANES, sum, 30)",
    ),
    Plant(
        "cumsum",
        "all lanes add",
        "rows.cu",
        "if (lane >= by) sum += other;",
        "sum += other;",
    ),
    Plant(
        "get_rows",
        "a column too far is taken",
        "moves.cu",
        "each_column(a.columns, [&](i64 c) { return row[",
        "each_column(a.columns + 1, [&](i64 c) { return row[",
    ),
    Plant(
        "rope",
        "the position of another token",
        "rotary.cu",
        "a.positions.at + p.at[2]",
        "a.positions.at",
    ),
    Plant(
        "argmax",
        "the first warp alone",
        "rows.cu",
        "for (u32 w = 1; w < blockDim.x / 32; w++) take",
        "for (u32 w = 1; w < 1; w++) take",
    ),
    Plant(
        "cast",
        "rounded down",
        "types.cuh",
        "u + 0x7fffu + (u >> 16 & 1)",
        "u",
    ),
)


@pytest.mark.nightly(cases=4)
@pytest.mark.long
@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_mistake_in_a_kernel_of_ours_is_found(plant):
    backend = DriverBackend(FaultyDriver(plant.file, plant.old, plant.new))
    cases = select_quick_cases(REGISTRY[plant.op])
    assert any(run_case(case, backend, backend.device(0)).outcome is Outcome.FAIL for case in cases)
