"""Every state in which a value is made, with every state in which it may be read: a plan that is proven, and runs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, Value, input, weight
from hocket.scheduler.costs.hardware import DEFAULT_HARDWARE
from hocket.scheduler.ir.layout import PARTIAL, REPLICATE, Local
from hocket.scheduler.planning.plan_builder import PlanBuilder
from hocket.scheduler.sharding.factor_layouts import FactorLayout, FactorShard, TableLookupPartial, find_conversion_path
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.partitioner import partition_graph
from hocket.scheduler.sharding.pins import NO_PINS
from hocket.scheduler.sharding.propagation import LayoutPropagation, ShardingAssignment
from hocket.scheduler.sharding.shard_ranges import ShardRanges
from hocket.scheduler.verifier.plan_verifier import verify_plan

from ...given.plans.grouped import group_of, run_of

STATES = ("replicated", "cut by rows", "cut by columns", "owed", "routed", "on device 0", "on device 2")


class Experts:
    """A product with chosen experts, doubled: a value that can be made in every state, and a node that reads it."""

    def __init__(self) -> None:
        self.table = weight("table", (8, 6, 3))
        self.ids = input("ids", (4, 1), "i32")
        self.product = ops.mul_mat_id(self.table, input("x", (4, 1, 3)), self.ids)
        self.doubled = ops.scale(self.product, scale=2.0)
        self.graph = Graph({"y": self.doubled})
        self.factors = Factors(self.graph)
        ((self.row,),), _, ((self.column,),) = self.factors.axes_of(self.product)
        ((self.expert,),), _, _ = self.factors.axes_of(self.table)
        kinds = (
            REPLICATE,
            FactorShard(self.row),
            FactorShard(self.column),
            PARTIAL,
            TableLookupPartial(self.expert, self.ids),
        )
        self.states = dict(zip(STATES, (*kinds, Local((0,)), Local((2,))), strict=True))

    def assignment(self, produced: FactorLayout, required: FactorLayout) -> ShardingAssignment:
        """The product is made in one state, and read in another."""
        chosen = frozenset({self.row, self.column, self.expert})
        walk = LayoutPropagation(self.graph, self.factors, chosen, self.graph.users(), (), NO_PINS)
        out, node, scale = walk.assignment, self.product.node, self.doubled.node
        by = FactorShard(self.expert) if produced.is_partial else produced
        if produced.is_partial:
            out.index_operands[node] = self.ids
        is_shard_state = isinstance(by, FactorShard)
        out.operand_layouts[node] = tuple(
            REPLICATE if is_shard_state and by.factor not in self.factors.factors_of(s) else by for s in node.inputs
        )
        out.produced_layouts |= dict.fromkeys(node.inputs, REPLICATE) | {self.table: out.operand_layouts[node][0]}
        out.produced_layouts |= {self.product: produced, self.doubled: required}
        out.node_layouts |= {node: by, scale: required}
        out.operand_layouts[scale] = (required,)
        for reader in (node, scale):
            for value, state in zip(reader.inputs, out.operand_layouts[reader], strict=True):
                walk._add_missing_conversions(value, state, reader)
        if required.is_partial:
            walk._add_missing_conversions(self.doubled, REPLICATE, None)
        return out


PAIRS = [
    (produced, required)
    for produced, required in product(STATES, STATES)
    if required != "routed" or produced == "routed"
]


@pytest.mark.parametrize(("produced", "required"), PAIRS)
def test_a_value_goes_from_every_state_to_every_state_in_which_it_may_be_read(produced, required):
    experts = Experts()
    group = group_of(3)
    assignment = experts.assignment(experts.states[produced], experts.states[required])
    sharded = partition_graph(experts.graph, experts.factors, assignment, ShardRanges([1, 2, 1]))
    plan = PlanBuilder(experts.graph, group, (), DEFAULT_HARDWARE)._assemble_plan(sharded, frozenset(), (), {})
    verify_plan(plan)
    table, x, ids = np.arange(144.0).reshape(8, 6, 3), np.arange(12.0).reshape(4, 1, 3), np.array([[7], [0], [3], [3]])
    expected_numbers = 2 * np.einsum("tnk,tvk->tvn", table[ids[:, 0]], x)
    np.testing.assert_array_equal(run_of(plan, {"table": table, "x": x, "ids": ids})["y"], expected_numbers)


@pytest.mark.parametrize("produced", [s for s in STATES if s != "routed"])
def test_only_a_routed_result_is_read_as_routed(produced):
    states = Experts().states
    with pytest.raises(AssertionError, match="cannot become"):
        find_conversion_path(states[produced], states["routed"])


def test_a_sum_that_is_routed_otherwise_is_as_good_as_any_sum():
    experts = Experts()
    other = TableLookupPartial(experts.expert, Value(input("others", (4, 1), "i32").node))
    assert find_conversion_path(other, PARTIAL) == ()
    with pytest.raises(AssertionError, match="cannot become"):
        find_conversion_path(other, experts.states["routed"])
