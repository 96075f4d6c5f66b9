"""Models of `transformers` that nobody here wrote: equal to PyTorch on one device, and to that on several."""

from __future__ import annotations

import importlib.util

import pytest

import hocket

from ...given.tensors import nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_models_of_transformers_equal_pytorch_on_one_to_four_devices(torch_model):
    from ...given.models.torch_models import exported, made, tensors_of

    model, arguments = made(torch_model)
    expected = tensors_of(model(**arguments))
    program = hocket.from_torch(exported(model, arguments))
    alone = tensors_of(program.on("cpu:0")(**arguments))
    assert max(map(nmse, alone, expected)) <= 1e-10
    for count in (2, 3, 4):
        devices = ",".join(f"cpu:{i}" for i in range(count))
        cut = tensors_of(program.on(devices, split_mode="tensor")(**arguments))
        assert max(map(nmse, cut, alone)) <= 1e-10


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma2", "Phi3", "Granite"])
def test_a_layer_meets_no_oftener_than_the_plan_of_transformers_says(name):
    """Its table sums what attention and the feed-forward of each layer give; some models gather more besides."""
    from hocket.ops.collective import COLLECTIVES

    from ...given.models.torch_models import exported, made

    model, arguments = made(f"{name}ForCausalLM")
    theirs = model.config.base_model_tp_plan
    assert sum("o_proj" in part or "down_proj" in part for part in theirs) >= 2
    plan = hocket.plan(hocket.from_torch(exported(model, arguments)).graph, "cpu:0,cpu:1", split_mode="tensor")
    for lane in plan.lanes:
        assert sum(i.op in COLLECTIVES for i in lane.program.instructions) <= 2 * model.config.num_hidden_layers
    weights = [sum(b.nbytes for b in lane.program.buffers if b.kind == "weight") for lane in plan.lanes]
    assert max(weights) <= 1.02 * sum(weights) / len(weights)


def pytest_generate_tests(metafunc):
    if "torch_model" in metafunc.fixturenames:
        known = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
        names: list[str] = []
        if known:
            from ...given.models.torch_models import MODELS

            names = list(MODELS)
        metafunc.parametrize("torch_model", names)
