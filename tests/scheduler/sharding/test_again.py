"""A layout that is propagated from another one equals the layout that is propagated from nothing."""

from __future__ import annotations

import random

import pytest

from hocket.scheduler.machines.hardware import Hardware
from hocket.scheduler.sharding.again import Layer
from hocket.scheduler.sharding.assign import assign
from hocket.scheduler.sharding.cost import Costs
from hocket.scheduler.sharding.factors import Factors

from ...given.graphs.wide_graphs import wide_graph
from ...given.plans.ways import some_that_fit

PARTS = ("made", "by", "wants", "dealt", "conversions", "whole")


@pytest.mark.parametrize("seed", [*range(8), 19])
def test_a_layout_found_from_another_is_the_same(seed):
    graph, dice = wide_graph(seed), random.Random(seed)
    factors, costs = Factors(graph), Costs(graph, 2, Hardware())
    layer = Layer(graph, factors)
    base = layer.uncut
    for _ in range(4):
        chosen = some_that_fit(graph, factors, dice)
        anew, again = assign(graph, factors, chosen), layer.lay(chosen, base)
        for part in PARTS:
            assert getattr(again, part) == getattr(anew, part), part
        assert costs.estimate(again) == costs.estimate(anew)
        assert costs.held(again) == costs.held(anew)
        base = again
