"""`torch.compile` with hocket's backend, given as a function: an entry point is seen once hocket is installed."""

from __future__ import annotations

import importlib.util

import pytest

from hocket.frontends.errors import ModelError

from ...given.tensors import encoder_layer, nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


def through_hocket(model, **options):
    import torch

    from hocket.frontends.torch.dynamo import compiled

    return torch.compile(model, backend=compiled, options=options)


@pytest.mark.long
def test_a_model_runs_on_devices_for_each_shape_and_sees_its_weights_change():
    import torch

    model = encoder_layer()
    ours = through_hocket(model, devices="cpu:0,cpu:1", split_mode="tensor")
    with torch.no_grad():
        for length in (5, 5, 3):
            x = torch.randn(2, length, 32)
            assert nmse(ours(x), model(x)) < 1e-10
        model.linear1.weight.mul_(2)
        assert nmse(ours(x), model(x)) < 1e-10
    with pytest.raises(ModelError, match="no gradients"):
        ours(x)


@pytest.mark.long
def test_pytorch_runs_what_has_no_row_and_a_warning_says_so():
    import torch

    ours = through_hocket(lambda x: torch.special.i1(x) + 1)
    with pytest.warns(UserWarning, match="special_i1"):
        assert torch.equal(ours(torch.ones(3)), torch.special.i1(torch.ones(3)) + 1)


@pytest.mark.long
def test_a_graph_breaks_at_an_op_without_a_row_and_nowhere_else(monkeypatch):
    """PyTorch runs that op; before and behind it are one program of hocket each, which see their weights change."""
    import torch

    from hocket.frontends.torch import dynamo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x):
            hidden = torch.special.i1(self.first(x).tanh())
            return self.second(hidden) + hidden.sum(), hidden

    programs = []
    taken = dynamo.from_torch
    monkeypatch.setattr(dynamo, "from_torch", lambda exported: programs.append(taken(exported)) or programs[-1])
    model, x = Model().eval(), torch.randn(3, 8)
    ours = through_hocket(model, devices="cpu:0,cpu:1", split_mode="tensor")
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"has no row for: .*special_i1.* \(1\)"):
            ours(x)
        model.second.weight.mul_(2)
        for mine, theirs in zip(ours(x), model(x), strict=True):
            assert nmse(mine, theirs) < 1e-10
    ops_of = [{node.op for node in program.graph.nodes} for program in programs]
    assert [("mul_mat" in ops, "tanh" in ops) for ops in ops_of] == [(True, True), (True, False)]


@pytest.mark.long
def test_an_option_that_is_none():
    import torch

    from hocket.frontends.torch.dynamo import compiled

    with pytest.raises(ModelError, match="'device'"):
        compiled(torch.fx.symbolic_trace(torch.nn.ReLU()), [], options={"device": "cpu:0"})


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_from_call_to_call_are_those_of_a_program_each(dynamic, monkeypatch, recwarn):
    """Dynamo hands over a float that has changed, and all floats of a dynamic model, as a tensor that it reads."""
    import torch

    from hocket.frontends.torch import dynamo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

        def forward(self, x, *, scale=1.0):
            return {"y": self.norm(self.linear(x) * scale)}

    monkeypatch.setattr(dynamo, "MOST_NUMBERS", 3)
    model, x = Model().eval(), torch.randn(3, 8)
    ours = torch.compile(model, backend=dynamo.compiled, options={"devices": "cpu:0,cpu:1"}, dynamic=dynamic)
    with torch.no_grad():
        for scale in (1.0, 2.5, 0.25, 2.5):
            assert nmse(ours(x, scale=scale)["y"], model(x, scale=scale)["y"]) < 1e-10
        assert not [w for w in recwarn if "PyTorch runs" in str(w.message)]
        results = {}
        with pytest.warns(UserWarning, match="more than 3 numbers"):
            results.update({scale: ours(x, scale=scale)["y"] for scale in (3.0, 4.0, 5.0)})
        for scale, result in results.items():
            assert nmse(result, model(x, scale=scale)["y"]) < 1e-10
