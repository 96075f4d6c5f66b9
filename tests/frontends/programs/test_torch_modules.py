"""Graphs that Dynamo captures once for several modules: each call computes with the parameters of its own module.

Two models of a class take turns in one compiled function, with a graph break in each layer. Between calls parameters
are updated in place, loaded, moved, replaced, swapped and tied. Eager PyTorch is the oracle.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings

import pytest

from ...given.tensors import nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)

ONE_DEVICE = {"devices": "cpu:0"}
TWO_DEVICES = {"devices": "cpu:0,cpu:1", "split_mode": "tensor"}
MAX_MODULE_NMSE = {"transformers": 1e-10, "torchvision": 1e-9}
"""By package; the deepest models of `torchvision` round to 1.4e-10 after their parameters have grown."""
MAX_ENTRY_ERROR = 1e-4
"""Largest difference of an entry, relative to the largest entry of the tensor."""
WITHOUT_PARAMETERS = ("computes nothing that depends", "meta device")
"""Parts of the reasons for which PyTorch may run a graph itself."""

WITHOUT_EQUAL_LAYERS = ("ConvNextModel", "ResNetModel", "SegformerForSemanticSegmentation")
"""Classes with other shapes in each layer; in each other class two layers of two models share a graph."""


@pytest.fixture(autouse=True)
def _without_captured_graphs():
    import torch

    torch._dynamo.reset()
    limits = {"recompile_limit": 512, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": True}
    with torch.no_grad(), torch._dynamo.config.patch(limits):
        yield
    torch._dynamo.reset()


@pytest.fixture
def bound_sets(monkeypatch):
    """The sets of parameters with which each graph of Dynamo has been called, by graph."""
    from hocket.frontends.torch.parameter_binding import ExecutorsByParameters

    known = {}
    bind = ExecutorsByParameters._build_executor_for_parameters

    def bind_and_count(self, key, parameters):
        if key:
            known.setdefault(self.module, set()).add(key)
        return bind(self, key, parameters)

    monkeypatch.setattr(ExecutorsByParameters, "_build_executor_for_parameters", bind_and_count)
    return known


def measure_errors(ours, theirs):
    """The NMSE of a tensor and the error of its worst entry, relative to the largest entry."""
    import torch

    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if not ours.numel():
        return 0.0, 0.0
    worst = (ours.double() - theirs.double()).nan_to_num(0.0, 0.0, 0.0).abs().max()
    largest = torch.where(theirs.isfinite(), theirs, 0).double().abs().max()
    return nmse(ours, theirs), float(worst / max(float(largest), 1e-30))


def assert_models_take_turns(first, second, arguments, options, max_nmse):
    """Call two models in turn, and again after each change of their parameters; give the title of each change."""
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    from ...given.models.parameter_changes import CHANGES
    from ...given.models.torch_models import tensors_of

    call = torch.compile(lambda model, arguments: model(**arguments), backend=compile_graph, options=options)

    def assert_right(title, *models):
        for model in models:
            theirs = tensors_of(model(**arguments))
            ours = tensors_of(call(model, arguments))
            assert len(ours) == len(theirs) > 0, title
            for mine, other in zip(ours, theirs, strict=True):
                errors = measure_errors(mine, other)
                assert errors[0] <= max_nmse, (title, errors)
                assert errors[1] <= MAX_ENTRY_ERROR, (title, errors)

    assert_right("unchanged", first, second, first)
    yield "unchanged"
    for title, change in CHANGES.items():
        before = tensors_of((first(**arguments), second(**arguments)))
        change(first, second)
        after = tensors_of((first(**arguments), second(**arguments)))
        assert not all(map(torch.equal, before, after)), f"{title}: no result has changed"
        assert_right(title, first, second)
        yield title


def check_class(make, package, options, bound_sets, monkeypatch, min_sets=2):
    """Check two models of a class, and that a graph is called with at least `min_sets` sets of parameters."""
    import torch

    from ...given.models.parameter_changes import break_in_parts, list_repeated_parts, wrap_stages

    (first, arguments), (second, _) = make(), make()
    for parameter in second.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    parts = list_repeated_parts(first, package) or wrap_stages(first) + wrap_stages(second)
    assert parts
    break_in_parts(parts, monkeypatch.setattr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turns = assert_models_take_turns(first, second, arguments, options, MAX_MODULE_NMSE[package])
        next(turns)
        set_count = max(map(len, bound_sets.values()))
        for _ in turns:
            pass
    reasons = {str(w.message) for w in caught if "PyTorch runs this graph" in str(w.message)}
    assert [r for r in reasons if not any(part in r for part in WITHOUT_PARAMETERS)] == []
    assert set_count >= min_sets, f"a graph is called with {set_count} sets of parameters"


@pytest.mark.long
@pytest.mark.nightly(cases=4)
@needs_transformers
def test_models_of_a_class_of_transformers_compute_with_their_own_parameters(torch_class, bound_sets, monkeypatch):
    from ...given.models.torch_models import make_model

    min_sets = 2 if torch_class in WITHOUT_EQUAL_LAYERS else 4
    check_class(lambda: make_model(torch_class), "transformers", ONE_DEVICE, bound_sets, monkeypatch, min_sets)


@pytest.mark.long
@pytest.mark.nightly(cases=2)
@needs_transformers
def test_devices_with_shards_see_the_changes_of_parameters(torch_class, bound_sets, monkeypatch):
    from ...given.models.torch_models import make_model

    check_class(lambda: make_model(torch_class), "transformers", TWO_DEVICES, bound_sets, monkeypatch)


@pytest.mark.long(cases=1)
@pytest.mark.nightly(cases=2)
@needs_torchvision
def test_models_of_torchvision_compute_with_their_own_parameters(vision_class, bound_sets, monkeypatch):
    from ...given.models.vision_models import make_model

    def make():
        model, picture = make_model(vision_class)
        return model, {next(iter(inspect.signature(model.forward).parameters)): picture}

    check_class(make, "torchvision", ONE_DEVICE, bound_sets, monkeypatch)


def pytest_generate_tests(metafunc):
    for fixture, package, module in (
        ("torch_class", "transformers", "torch_models"),
        ("vision_class", "torchvision", "vision_models"),
    ):
        if fixture in metafunc.fixturenames:
            names = ["none"]
            if importlib.util.find_spec("torch") and importlib.util.find_spec(package):
                models = importlib.import_module(f"...given.models.{module}", __package__)
                names = list({**models.MODELS, **models.MORE_MODELS})
            metafunc.parametrize(fixture, names)
