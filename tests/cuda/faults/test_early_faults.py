"""Launches begin while earlier launches run: every memory access before the wait is found."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.emulation.access_log import AccessLogBackend
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.graph import DType, Graph, input, weight
from hocket.graph.errors import StepError
from hocket.scheduler import load, plan_for_group

from ...given.devices.edited import EditedDriver, edit_kernels
from ...given.devices.emulation import needs_compiler
from ...given.random_rows import random_rows

pytestmark = [needs_compiler, pytest.mark.long()]
RNG = np.random.default_rng(5)


def faults_of(edit=list):
    """Return the unordered accesses to results of other launches, in two runs of packed and plain products."""
    packed, plain = weight("packed", (650, 256), DType.Q4_0), weight("plain", (100, 650), DType.BF16)
    hidden = ops.rms_norm(ops.mul_mat(packed, ops.gelu_erf(input("x", (1, 256)))), eps=1e-6)
    graph = Graph({"y": ops.rms_norm(ops.mul_mat(plain, hidden), eps=1e-6)})
    driver = EditedDriver(edit)
    backend = AccessLogBackend(driver)
    weights = {
        "packed": random_rows(DType.Q4_0, 650, 256, RNG),
        "plain": RNG.standard_normal((100, 650)).astype(np.float32),
    }
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), weights)
    run.run({"x": RNG.standard_normal((1, 256)).astype(np.float32)})
    log = driver.take_log()
    assert [ran.kernel.partition(":")[0] for ran in log] == [
        *("elementwise.cu", "packed_few.cu", "rows.cu", "dense.cu", "rows.cu")
    ]
    return list_races_between_launches(log, driver.memory)


def test_launches_that_begin_early_are_in_order():
    assert faults_of() == []


WAIT, UNARY = "    wait_for_earlier();\n", "(const __grid_constant__ Unary a) {\n"
NORM = "norm_by(const __grid_constant__ Rows a) {\n"
ASKED = "            load(even);\n        }\n        if (start == 0) F::load_book();\n        wait_for_earlier();\n"
PLANTED = {
    "a first kernel that never waits": ("elementwise.cu", UNARY + WAIT, UNARY),
    "a kernel that never waits": ("rows.cu", NORM + WAIT, NORM),
    "a wait of some threads": ("rows.cu", NORM + WAIT, NORM + "    if (threadIdx.x >= 32) wait_for_earlier();\n"),
    "a wait of some blocks": ("packed_few.cu", ASKED, ASKED.replace("wait", "if (blockIdx.x == 0) wait")),
    "activations that are read too early": ("packed_few.cu", ASKED, ASKED.replace("wait", "if (*x > -9.0f) wait")),
    "a result that is written too early": (
        "dense.cu",
        "    wait_for_earlier();\n#pragma unroll\n    for (int n = 0; n < N; n++)\n        x[n]",
        "    if (lane == 0) made.out[first] = 0.0f;\n"
        "    wait_for_earlier();\n#pragma unroll\n    for (int n = 0; n < N; n++)\n        x[n]",
    ),
}


@pytest.mark.nightly(cases=3)
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_done_too_early_is_found(what):
    found = faults_of(edit_kernels(*PLANTED[what]))
    assert found
    assert not what.endswith("never waits") or any("never waits for the launches before" in why for why in found)


def test_a_kernel_that_asks_for_memory_that_is_not_its_own_is_stopped():
    edit = edit_kernels("dense.cu", "prefetch(w[r] + line)", "prefetch(w[r] + (line << 32))")
    with pytest.raises(StepError, match="touches memory"):
        faults_of(edit)
