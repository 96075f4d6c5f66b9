"""Ops that no device runs are decomposed into simpler ones; the results stay the same."""

from __future__ import annotations

import pytest

from hocket.backends.base import Device, Support
from hocket.backends.reference.backend import ReferenceBackend
from hocket.frontends.models import Batch, Step
from hocket.frontends.open_model import open_model
from hocket.graph import Node
from hocket.graph.errors import PlanError
from hocket.scheduler import load, plan_for_group
from hocket.scheduler.planning.decompose import decompose_unsupported_ops

from ...given.models.goldens import golden, nmse, path_of

FUSED = frozenset({"gated_delta_net", "attention", "swiglu"})


class Lacking(ReferenceBackend):
    """The references without some ops."""

    def __init__(self, lacks: frozenset[str]) -> None:
        self.lacks = lacks

    def supports(self, node: Node, on: Device) -> Support:
        return Support(node.op not in self.lacks, f"{node.op} is not here")


@pytest.mark.parametrize(("name", "tokens"), [("qwen35", 1), ("qwen35", 7), ("qwen3next", 24)])
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_runs_on_devices_without_fused_ops(name: str, tokens: int, devices: int) -> None:
    model, (ids, want) = open_model(path_of(name)), golden(name)
    step = Step(1, tokens, tokens, tokens, tokens)
    backend = Lacking(FUSED)
    group = [(backend, Device("reference", i)) for i in range(devices)]
    plan = plan_for_group(model.graph(step), group, split_mode="tensor" if devices > 1 else "auto")
    assert not FUSED & {node.op for node in plan.graph.nodes}
    executor = load(
        plan, {leaf.node.name: model.gguf.tensor(leaf.node.name).stored_elements for leaf in plan.graph.weights}
    )
    batch = Batch([ids[:tokens]], [0], [(0, i) for i in range(tokens)])
    assert nmse(executor.run(model.inputs(step, batch))["logits"], want[:tokens]) <= 1e-8


def test_what_one_device_runs_stays_as_it_is() -> None:
    graph = open_model(path_of("qwen35")).graph(Step(1, 1, 8, 8, 1))
    able, lacking = ReferenceBackend(), Lacking(FUSED)
    assert (
        decompose_unsupported_ops(graph, [(lacking, Device("reference", 0)), (able, Device("reference", 1))]) is graph
    )


def test_an_op_whose_parts_are_missing_too_is_refused_by_its_own_name() -> None:
    graph = open_model(path_of("qwen35")).graph(Step(1, 1, 8, 8, 1))
    with pytest.raises(PlanError, match="gated_delta_net is not here"):
        plan_for_group(graph, [(Lacking(FUSED | {"solve_tri"}), Device("reference", 0))])
