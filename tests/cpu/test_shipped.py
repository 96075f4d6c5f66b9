"""Kernels that are ready when installation ends: a first run of a usual file compiles none."""

from __future__ import annotations

import pytest

from hocket.backends.base import group_of
from hocket.backends.cpu.binding import kernels_of
from hocket.frontends.devices import ONE_DEVICE
from hocket.frontends.models import Step
from hocket.frontends.open import open_model
from hocket.frontends.shipping import TOKENS, kernels
from hocket.scheduler import plan_for

from ..given.models.goldens import FIXTURES

FILES = ("llama", "qwen2", "qwen3-bf16", "qwen3-q4_0", "qwen3-q4_1", "qwen3-q6_k", "qwen3-q8_0")
KEYS, VALUES = ONE_DEVICE.caches


@pytest.mark.long
def test_a_first_run_of_a_usual_file_compiles_no_kernel():
    ready, group = {kernel.name for kernel in kernels(of_all_types=False)}, group_of(["cpu:0"], 1)
    for file in FILES:
        model = open_model(FIXTURES / file / "model.gguf")
        for tokens in TOKENS:
            (lane,) = plan_for(model.graph(Step(1, tokens, 256, 256, 1, keys=KEYS, values=VALUES)), group).lanes
            assert {kernel.name for kernel in kernels_of(lane.program, 1)} <= ready, file
