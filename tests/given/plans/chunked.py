"""Plans in chunks of tokens, distributed over the devices or not, for any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hocket import ops
from hocket.graph import Graph, Value, input, weight
from hocket.scheduler import Plan
from hocket.scheduler.lowering.device_plan import Devices, build_device_plans
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.overlap_chunks import find_chunkable_token_factor, partition_graph_in_token_chunks
from hocket.scheduler.sharding.partitioner import PartitionedGraphs
from hocket.scheduler.sharding.propagation import propagate_layouts
from hocket.scheduler.sharding.search.greedy_search import assign_shard_ranges, list_one_position_per_factor

WIDTH, INNER = 6, 12


def make_gated_layers(tokens: int, layers: int = 2) -> Graph:
    """Residual layers of a gated unit, and a product behind them."""
    x: Value = input("x", (tokens, WIDTH))
    for i in range(layers):
        up, gate = (weight(f"{i}.{name}", (INNER, WIDTH)) for name in ("up", "gate"))
        y = ops.mul(ops.rms_norm(x), weight(f"{i}.norm", (WIDTH,)), name=f"normed.{i}")
        inner = ops.swiglu(ops.mul_mat(gate, y), ops.mul_mat(up, y))
        x = ops.add(x, ops.mul_mat(weight(f"{i}.down", (WIDTH, INNER)), inner, name=f"down.{i}"), name=f"out.{i}")
    return Graph({"y": ops.mul_mat(weight("output", (INNER, WIDTH)), ops.rms_norm(x))})


def chunked_plan(
    graph: Graph, group: Devices, count: int, *, is_distributed: bool, shares: Sequence[float] = ()
) -> Plan:
    """Plan `graph` sharded by the inner widths of its layers, with tokens in `count` chunks from sum to sum."""
    factors = Factors(graph)
    chosen = frozenset(f for v in graph.weights for f in factors.factors_of(v) if f.size == INNER)
    plain = propagate_layouts(graph, factors, chosen)
    tokens = find_chunkable_token_factor(plain, factors)
    assert tokens is not None
    assignment = propagate_layouts(graph, factors, chosen, row_factor=tokens) if is_distributed else plain
    cuts = list_one_position_per_factor(graph, factors, chosen, {})
    own = shares or [1.0] * len(group)
    sharded = partition_graph_in_token_chunks(
        graph, factors, assignment, assign_shard_ranges(graph, factors, cuts, own), tokens, count
    )
    assert isinstance(sharded, PartitionedGraphs)
    return Plan(
        graph,
        build_device_plans(sharded.graphs, group),
        sharded.leaves,
        sharded.outputs,
        cuts,
        (),
        shares=tuple(map(float, own)),
    )
