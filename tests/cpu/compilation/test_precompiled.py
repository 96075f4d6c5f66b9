"""Kernels that are ready when installation ends: a first run of a usual file compiles none."""

from __future__ import annotations

import pytest

from hocket.backends.base import find_devices
from hocket.backends.cpu.execution.program_binding import find_program_kernels
from hocket.frontends.inference.device_group import ONE_DEVICE
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.frontends.precompile_kernels import STEP_TOKEN_COUNTS, list_kernels_to_precompile
from hocket.scheduler import plan_for_group

from ...given.models.goldens import FIXTURES

FILES = ("llama", "qwen2", "qwen3-bf16", "qwen3-q4_0", "qwen3-q4_1", "qwen3-q6_k", "qwen3-q8_0")
KEYS, VALUES = ONE_DEVICE.cache_dtypes


@pytest.mark.long
def test_a_first_run_of_a_usual_file_compiles_no_kernel():
    ready, group = (
        {kernel.name for kernel in list_kernels_to_precompile(of_all_types=False)},
        find_devices(["cpu:0"], 1),
    )
    for file in FILES:
        model = open_model(FIXTURES / file / "model.gguf")
        for tokens in STEP_TOKEN_COUNTS:
            (lane,) = plan_for_group(
                model.graph(Step(1, tokens, 256, 256, 1, keys=KEYS, values=VALUES)), group
            ).device_plans
            assert {kernel.name for kernel in find_program_kernels(lane.program, 1)} <= ready, file
