"""Two sums over devices; the product of the second does not need the first one, and may overlap it."""

from __future__ import annotations

from hocket import ops
from hocket.graph import Graph, input, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.hardware import Hardware

SPEEDS = Hardware(flops=1e6, bandwidth=1e9, launch=0.0, link_bandwidth=1e6, link_latency=1e-3)


def two_branches() -> Graph:
    x = input("x", (8, 16))
    halves = [ops.mul_mat(weight(f"down.{i}", (16, 16)), x, name=f"product.{i}") for i in range(2)]
    return Graph({f"y.{i}": ops.rms_norm(half, name=f"norm.{i}") for i, half in enumerate(halves)})


def columns(graph, factors):
    """Each device has some columns of the weights, so that products are sums."""
    return frozenset(factors.axes_of(graph.weights[0])[1][0])


def branches_on(backend):
    group = [(backend, backend.device(d)) for d in range(2)]
    return plan_for_group(two_branches(), group, choose=columns, hardware=SPEEDS)
