"""Models of PyTorch on emulated CUDA devices: every op has a kernel there and gives the results of PyTorch."""

from __future__ import annotations

import importlib.util

import pytest

import hocket

from ..given.devices.emulation import needs_compiler
from ..given.tensors import nmse

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cuda-emulated:0", "cuda-emulated:0,cuda-emulated:1"])
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "DebertaV2Model", "Wav2Vec2Model", "SwinModel"])
def test_a_model_equals_pytorch(name, devices):
    from ..given.models.torch_models import export_model, make_model, tensors_of

    model, arguments = make_model(name)
    expected = tensors_of(model(**arguments))
    runner = hocket.from_torch(export_model(model, arguments)).on(devices, split_mode="tensor")
    assert {lane.backend.name for lane in runner.plan.device_plans} == {"cuda-emulated"}
    assert max(map(nmse, tensors_of(runner(**arguments)), expected)) <= 1e-10
