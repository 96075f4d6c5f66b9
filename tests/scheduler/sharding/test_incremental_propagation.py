"""A layout that is propagated from another one equals the layout that is propagated from nothing."""

from __future__ import annotations

import random

import pytest

from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.sharding.cost import AssignmentCost
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.propagation import propagate_layouts
from hocket.scheduler.sharding.search.incremental_propagation import IncrementalLayoutPropagator

from ...given.graphs.wide_graphs import wide_graph
from ...given.plans.ways import some_that_fit

PARTS = ("produced_layouts", "node_layouts", "operand_layouts", "index_operands", "conversions", "replicated_weights")


@pytest.mark.parametrize("seed", [*range(8), 19])
def test_a_layout_found_from_another_is_the_same(seed):
    graph, dice = wide_graph(seed), random.Random(seed)
    factors, costs = Factors(graph), AssignmentCost(graph, 2, Hardware())
    layer = IncrementalLayoutPropagator(graph, factors)
    base = layer.unsharded_assignment
    for _ in range(4):
        chosen = some_that_fit(graph, factors, dice)
        anew, again = propagate_layouts(graph, factors, chosen), layer.propagate_from_base(chosen, base)
        for part in PARTS:
            assert getattr(again, part) == getattr(anew, part), part
        assert costs.estimate_run_time(again) == costs.estimate_run_time(anew)
        assert costs.compute_max_stored_bytes(again) == costs.compute_max_stored_bytes(anew)
        base = again
