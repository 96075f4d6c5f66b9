"""Ops without a compiled kernel: no architecture needs one, and a plan names them."""

from __future__ import annotations

import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.gguf import open_gguf
from hocket.frontends.models import Step, load_model
from hocket.scheduler import plan_for_group

from ...given.models.architectures import ALL, write_model


@pytest.mark.nightly(cases=100)
@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("name", ALL)
def test_every_op_of_a_listed_architecture_has_a_compiled_kernel(name, tokens, tmp_path):
    backend = CpuBackend(1)
    graph = load_model(open_gguf(write_model(name, tmp_path))).graph(Step(1, tokens, 64, 64, tokens))
    (lane,) = plan_for_group(graph, [(backend, backend.device(0))]).device_plans
    assert {lane.program.instructions[position].op for position in lane.find_numpy_fallback_positions()} == set()


def test_a_plan_names_the_ops_that_numpy_computes():
    x = hocket.input("x", (4, 8))
    plan = hocket.plan(hocket.Graph({"y": ops.argsort(ops.sin(ops.sin(x)))}), "cpu:0")
    assert "cpu has no compiled kernel for these nodes, which NumPy computes: argsort (1), sin (2)" in plan.explain()
    assert "NumPy" not in hocket.plan(hocket.Graph({"y": ops.exp(x)}), "cpu:0").explain()


def test_the_price_of_an_op_that_numpy_computes_is_that_of_numpy():
    def seconds(op):
        return hocket.plan(hocket.Graph({"y": op(hocket.input("x", (512, 2048)))}), "cpu:0").cost.total

    assert seconds(ops.argsort) > 50 * seconds(ops.exp)
