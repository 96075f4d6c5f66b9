"""Models of `transformers`, unchanged: one device gives the results of PyTorch, and several devices give the same."""

from __future__ import annotations

import importlib.util
import re

import pytest

import hocket
from hocket.backends.base import find_devices
from hocket.scheduler import plan_for_group
from hocket.scheduler.reports.weight_balance import find_weight_imbalance

from ...given.tensors import nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.nightly(cases=6)
@pytest.mark.long
@needs_transformers
def test_models_of_transformers_equal_pytorch_on_one_to_four_devices(torch_model):
    from ...given.models.torch_models import export_model, make_model, tensors_of

    model, arguments = make_model(torch_model)
    expected = tensors_of(model(**arguments))
    program = hocket.from_torch(export_model(model, arguments))
    alone = tensors_of(program.on("cpu:0")(**arguments))
    assert max(map(nmse, alone, expected)) <= 1e-10
    for count in (2, 3, 4):
        devices = ",".join(f"cpu:{i}" for i in range(count))
        sharded = tensors_of(program.on(devices, split_mode="tensor")(**arguments))
        assert max(map(nmse, sharded, alone)) <= 1e-10


BY_HAND = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next", "Mixtral", "Gemma2", "Gemma3", "Phi3", "Phi"),
    *("GPTNeoX", "Starcoder2", "Olmo2", "Granite", "Cohere2", "DeepseekV3"),
)
"""Models for which `transformers` has a plan by hand."""
DEVICE_COUNTS = {"Qwen3Next": (3,)}
"""Counts of devices other than 2, 3 and 4.  PyTorch writes its delta rule as 63 steps, and a plan takes 25 seconds."""
COLLECTIVE_STYLES = ("rowwise", "rowwise_split_input", "colwise_gather_output", "moe_tp_experts")
"""The styles of modules with an output that is then summed or gathered over the devices."""


def read_manual_style(model, name):
    """Return the style of a module or a parameter in that plan, or None."""
    return model.config.base_model_tp_plan.get(re.sub(r"\d+", "*", name.partition(".")[2].removesuffix(".weight")))


def count_manual_collectives(model):
    return sum(read_manual_style(model, name) in COLLECTIVE_STYLES for name, _ in model.named_modules())


def choose_manual_shards(model):
    """Return the `choose` function of a plan with the manual shards."""

    def choose(graph, factors):
        styles = {w: read_manual_style(model, w.node.name) for w in graph.weights}
        axes = {w: factors.axes_of(w)[-2 if "colwise" in how else -1] for w, how in styles.items() if how}
        return frozenset(part[0] for parts in axes.values() for part in parts)

    return choose


def on_devices(graph, count, **options):
    return plan_for_group(graph, find_devices([f"cpu:{i}" for i in range(count)], 1), split_mode="tensor", **options)


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@needs_transformers
@pytest.mark.parametrize("name", BY_HAND)
def test_layers_have_no_more_collectives_than_the_plan_of_transformers_and_share_weights_evenly_or_report_why(name):
    from ...given.models.torch_models import export_model, make_model

    model, arguments = make_model(f"{name}ForCausalLM")
    graph = hocket.from_torch(export_model(model, arguments)).graph
    for count in DEVICE_COUNTS.get(name, (2, 3, 4)):
        plan = on_devices(graph, count)
        if name == "DeepseekV3":  # its manual attention is whole; the next test covers it
            plan = on_devices(graph, count, choose=choose_manual_shards(model))
        assert 0 < plan.count_collectives() <= count_manual_collectives(model)
        weight_bytes, share = (
            [device_plan.count_memory_bytes_by_kind()["weight"] for device_plan in plan.device_plans],
            sum(v.spec.nbytes for v in graph.weights) / count,
        )
        if max(abs(n - share) for n in weight_bytes) > 0.02 * share:
            reported = find_weight_imbalance(plan)
            assert list(reported.stored_bytes) == weight_bytes
            assert sum(cause.excess_bytes for cause in reported.causes) == pytest.approx(max(weight_bytes) - share)
            assert all(line in plan.explain() for line in reported.format_lines())


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@needs_transformers
@pytest.mark.parametrize("count", [2, 3, 4])
def test_attention_that_is_whole_by_hand_is_sharded_as_that_takes_less_time_and_fewer_bytes(count):
    """One sum a layer more pays: both are judged by the cost of their programs, and on the same graph."""
    from ...given.models.torch_models import export_model, make_model

    model, arguments = make_model("DeepseekV3ForCausalLM")
    assert not any("attn" in part for part in model.config.base_model_tp_plan)
    graph = hocket.from_torch(export_model(model, arguments)).graph
    ours, theirs = on_devices(graph, count), on_devices(graph, count, choose=choose_manual_shards(model))
    assert ours.count_collectives() == theirs.count_collectives() + model.config.num_hidden_layers
    assert theirs.count_collectives() < count_manual_collectives(model)
    assert ours.cost.total < theirs.cost.total
    assert max(device_plan.count_memory_bytes_by_kind()["weight"] for device_plan in ours.device_plans) < min(
        device_plan.count_memory_bytes_by_kind()["weight"] for device_plan in theirs.device_plans
    )


def pytest_generate_tests(metafunc):
    if "torch_model" in metafunc.fixturenames:
        known = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
        names: list[str] = []
        if known:
            from ...given.models.torch_models import MODELS

            names = list(MODELS)
        metafunc.parametrize("torch_model", names)
