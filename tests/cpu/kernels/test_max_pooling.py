"""Max pooling on the CPU: one kernel that reads the image in place."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution.program_binding import build_fused_dataflow
from hocket.ops import REGISTRY


@pytest.mark.parametrize(
    ("shape", "size", "stride", "dilation", "left", "right"),
    [
        ((1, 3, 12, 20), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
        ((2, 5, 9, 33), (2, 3), (1, 1), (2, 1), (0, 0), (0, 0)),
        ((1, 1, 4, 5), (4, 4), (3, 1), (1, 1), (2, 3), (1, 3)),
        ((3, 2, 40), (5,), (2,), (3,), (6,), (0,)),
        ((1, 2, 3, 4, 5), (2, 2, 2), (1, 2, 1), (1, 1, 1), (1, 0, 1), (0, 1, 1)),
    ],
)
def test_a_max_pooling_is_one_step_with_the_maxima_of_its_windows(shape, size, stride, dilation, left, right):
    padding = {"size": size, "stride": stride, "dilation": dilation, "left": left, "right": right, "value": -math.inf}
    taken = ops.windows(hocket.input("x", shape), **padding)
    graph = hocket.Graph({"y": ops.reduce(ops.permute(taken, axes=(0, 2, 1, 3)), kind="max")})
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[::7] = -np.inf
    x.reshape(-1)[3] = np.nan
    backend = CpuBackend(2)
    plan = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))])
    flow = build_fused_dataflow(plan.device_plans[0].program)
    assert [*flow.list_groups()] == [(0, 1)]
    windows = REGISTRY["windows"].reference(x.astype(np.float64), **padding)
    with np.errstate(invalid="ignore"):
        expected = windows.transpose(0, 2, 1, 3).max(-1, keepdims=True)
    assert np.array_equal(hocket.load(plan, {}).run({"x": x})["y"], expected, equal_nan=True)
