"""Kernels with AMD instructions, emulated; a wave of 64 lanes is two warps."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.base import Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import HIP_HEADER, LaunchError, read_kernel_text
from hocket.backends.cupy.emulation.emulated_driver import EmulatedHipDriver
from hocket.backends.fusion.operands import Operand
from hocket.conformance import Outcome, parse_case, run_case
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError

from ..given.devices.emulation import EditedSource, FaultyDriver, needs_compiler

pytestmark = [needs_compiler, pytest.mark.long()]
MATRICES, SUMS = "mul_mat(w=f16[64,256], x=f32[70,256])", "rms_norm(x=f32[3,4,130])"
CASES = (
    "gated_delta_net(q=f32[1,1,2,64], k=f32[1,1,2,64], v=f32[1,1,4,64], g=f32[1,1,4,1], beta=f32[1,1,4], "
    'state=f32[1,4,64,64], heads="interleaved")',
    "attention(q=f32[2,3,4,16], k=f16[2,40,2,16], v=f16[2,40,2,16], mask=f16[3,40], scale=0.25)",
    "mul_mat(w=q4_K[64,256], x=f32[1,256])",
    "mul_mat(w=f16[64,256], x=f32[1,256])",
    MATRICES,
    SUMS,
    "softmax(x=f32[1,3,1030])",
    "argsort(x=f32[3,300])",
    "cumsum(x=f32[3,300])",
)
"""One case for each cooperation of lanes.

They cover states, few queries, packed and dense weights, matrices, sums of warps and of blocks, votes, and prefix
sums.
"""


def outcome(driver, case):
    backend = DriverBackend(driver)
    return run_case(parse_case(case), backend, backend.device(0))


@pytest.mark.parametrize("case", CASES)
def test_what_decoding_needs_holds_in_waves_of_64_lanes(case):
    found = outcome(EmulatedHipDriver(), case)
    assert found.outcome is Outcome.PASS, found.why


HALVES = """
struct Halves { const float *x; float *out; };
template <int HOW> __global__ void halves(const __grid_constant__ Halves a) {
    const int i = threadIdx.x;
    float y = a.x[i];
    if (HOW == 0 && i < 32) y = warp_sum(y);
    if (HOW == 1) y = i % 2 ? __shfl_xor_sync(ALL_LANES, y, 2) : __shfl_xor_sync(ALL_LANES, y + 1.0f, 4);
    if (HOW == 2 && i % 2) y = warp_sum(y);
    if (HOW == 3) y = __shfl_xor(y, 32);
    if (HOW == 4) y = __ballot_sync(ALL_LANES, i == 40) != 0;
    a.out[i] = y;
}
"""


def halves(how, mask="ALL_LANES"):
    """Return the results of a block of one wave for 0, 1, 2, ..."""
    before = "".join(read_kernel_text(name) for name in ("types.cuh", HIP_HEADER, "prelude.cuh"))
    body = before + HALVES.replace("ALL_LANES", mask)
    source = EditedSource("halves.cu", (f"halves<{how}>",), instructions=HIP_HEADER, body=body)
    driver = EmulatedHipDriver()
    device = driver.device(0)
    memory = [driver.alloc(4 * 64, device) for _ in range(2)]
    memory[0].view(np.float32)[:] = np.arange(64)
    launches = LaunchBuilder(upload_array=lambda array: 0)
    operands = [Operand(driver.address(m), Tensor(i, 0, (64,), (1,), DType.F32)) for i, m in enumerate(memory)]
    launches.add_launch(source[f"halves<{how}>"], 1, 64, operands)
    driver.record(launches.items, device)()
    return memory[1].view(np.float32).copy()


def test_a_half_of_a_wave_may_branch_alone():
    x = np.arange(64, dtype=np.float32)
    assert np.array_equal(halves(0), np.where(x < 32, x[:32].sum(), x))
    assert np.array_equal(halves(4), x >= 32)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (1, "shuffle at two places of the code"),
        (2, "deadlock"),
        (3, "shuffle over 64 lanes, of which the half of a wave has 32"),
    ],
)
def test_what_a_wave_cannot_do_is_an_error(how, message):
    with pytest.raises(LaunchError) as caught:
        halves(how)
    assert message in str(caught.value)


def test_a_mask_of_some_lanes_does_not_compile():
    with pytest.raises(BackendError) as caught:
        halves(0, "0xffff")
    assert "all 32 lanes or none" in str(caught.value)


VOTES = "attention(q=f32[3,4,16], k=f32[200,2,16], v=f32[200,2,16], mask=f32[3,200], scale=0.25)"
FAULTS = {
    "the votes of the other half": (VOTES, "(__ballot(yes) >> __lane_id() / 32 * 32)", "__ballot(yes)"),
    "lanes of the other half": (SUMS, "__shfl_xor(x, by, 32)", "__shfl_xor(x, by)"),
    "the column of another lane": (MATRICES, "column = lane % 4 * 8", "column = lane % 4 * 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_the_instructions_is_found(fault):
    case, good, bad = FAULTS[fault]
    assert outcome(FaultyDriver(HIP_HEADER, good, bad, HIP_HEADER), case).outcome is Outcome.FAIL
