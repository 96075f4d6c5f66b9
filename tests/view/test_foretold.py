"""The predicted kernels of a backend are the ones that a run calls."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket.backends.capabilities import ListsKernels
from hocket.scheduler import load, plan

from ..given.graphs.pictured import vision_transformer


def weights(graph):
    rng = np.random.default_rng(0)
    return {v.node.name: rng.random(v.shape, np.float32) for v in graph.weights}


def select_known_kernels(kernels):
    """Return the kernels that are known before collectives; an instruction may be several calls of NumPy."""
    own = [k for k in kernels if "all_" not in k]
    return [k for at, k in enumerate(own) if not k == own[at - 1] == "NumPy"]


@pytest.mark.parametrize(
    "devices",
    ["cpu:0", "numpy:0", "cpu:0,cpu:1", pytest.param("cuda-emulated:0", marks=pytest.mark.long())],
)
def test_the_predicted_kernels_are_those_that_are_called(devices):
    graph = vision_transformer()
    new_plan = plan(graph, devices, split_mode="tensor")
    executor = load(new_plan, weights(graph))
    for device, device_plan in enumerate(new_plan.device_plans):
        assert isinstance(device_plan.backend, ListsKernels)
        predicted = device_plan.backend.list_kernels(device_plan.program, device_plan.device)
        assert select_known_kernels(c.kernel for c in predicted) == select_known_kernels(
            executor.list_kernel_names(device)
        )
        assert all(
            re.fullmatch(r"hocket/backends/\S+\.(py|cu):\d+|hocket/ops/\S+:\d+", c.source.file_and_line)
            for c in predicted
        )
