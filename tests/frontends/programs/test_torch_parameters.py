"""Parameters of PyTorch that change where PyTorch does not count it: through ``data``, NumPy, or a tensor below."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]
MAX_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest difference of entries of at most 1."""
PLACES = {
    "dense": lambda draw: draw(32, 32),
    "transposed": lambda draw: draw(32, 32).t(),
    "strided": lambda draw: draw(32, 64)[:, ::2],
    "unaligned": lambda draw: draw(32 * 32 + 1)[1:].view(32, 32),
    "rows of a larger matrix": lambda draw: draw(40, 32)[3:35],
    "narrow": lambda draw: draw(32, 7),
}
"""How the memory of a parameter lies; a device reads some of these where they are, and copies others."""


@pytest.mark.long(cases=4)
@pytest.mark.nightly(cases=11)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1", "numpy:0"])
def test_changes_of_parameters_that_pytorch_does_not_count_are_seen(dtype, place, devices):
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    torch.manual_seed(0)
    module = torch.nn.Module()
    memory = []

    def draw(*shape):
        memory.append((torch.randn(shape) * 0.1).to(getattr(torch, dtype)))
        return memory[0]

    module.weight = torch.nn.Parameter(PLACES[place](draw))

    def compute(module, x):
        return torch.tanh(x @ module.weight) + module.weight[0]

    torch._dynamo.reset()
    ours = torch.compile(compute, backend=compile_graph, options={"devices": devices, "split_mode": "tensor"})
    x = torch.randn(3, 32).to(module.weight.dtype)

    def halve_first_row():
        module.weight.data[0] *= 0.5

    changes = (
        lambda: None,
        lambda: module.weight.data.mul_(3),
        halve_first_row,
        lambda: memory[0].add_(0.25),
        lambda: module.weight.mul_(-1),
    )
    with torch.no_grad():
        for change in changes:
            change()
            assert torch.allclose(ours(module, x), compute(module, x), rtol=0, atol=4 * MAX_ERROR[dtype])
