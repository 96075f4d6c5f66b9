"""What a backend says that a plan will call is what a run of it calls."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket.backends.abilities import Foretells
from hocket.scheduler import load, plan

from ..given.graphs.pictured import vision_transformer


def weights(graph):
    rng = np.random.default_rng(0)
    return {v.node.name: rng.random(v.shape, np.float32) for v in graph.weights}


def told(kernels):
    """What can be known before devices meet; an instruction may be several calls of NumPy."""
    own = [k for k in kernels if "all_" not in k]
    return [k for at, k in enumerate(own) if not k == own[at - 1] == "NumPy"]


@pytest.mark.parametrize(
    "devices",
    ["cpu:0", "numpy:0", "cpu:0,cpu:1", pytest.param("cuda-emulated:0", marks=pytest.mark.long())],
)
def test_the_kernels_foretold_are_those_that_are_called(devices):
    graph = vision_transformer()
    made = plan(graph, devices, split_mode="tensor")
    executor = load(made, weights(graph))
    for device, lane in enumerate(made.lanes):
        assert isinstance(lane.backend, Foretells)
        foretold = lane.backend.foretold(lane.program, lane.device)
        assert told(c.kernel for c in foretold) == told(executor.kernels(device))
        assert all(
            re.fullmatch(r"hocket/backends/\S+\.(py|cu):\d+|hocket/ops/\S+:\d+", c.source.place) for c in foretold
        )
