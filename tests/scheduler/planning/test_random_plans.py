"""Random graphs that go after the planner, in every mode over one to five devices, against one device.

A few of them: ``benchmarks/planning/random_plans.py`` makes as many as asked for.
"""

from __future__ import annotations

import random

import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, Value, input, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.sharding.axes import Factor
from hocket.scheduler.sharding.factors import Factors

from ...given.graphs.random_graphs import seeded_graph
from ...given.graphs.wide_graphs import OPS, SAMPLES, wide_graph
from ...given.plans.ways import SLOW, compare_results, results, try_all_modes, values_of


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_of_a_random_graph_gives_what_one_device_gives(seed):
    faults = [f"{mode}: {fault}" for mode, fault in try_all_modes(wide_graph(seed), seed) if fault]
    assert not faults


def test_the_generator_has_samples_of_every_op_it_is_to_try():
    assert all(SAMPLES[name] for name in OPS)


def square(name: str, n: int) -> Value:
    return weight(name, (n, n))


def gram() -> Value:
    w = weight("w", (8, 6))
    return ops.mul_mat(w, w)


def gram_of_activations() -> Value:
    h = ops.cont(ops.transpose(ops.mul_mat(weight("w", (8, 4)), input("x", (6, 4)))))
    return ops.mul_mat(h, h)


def symmetric() -> Value:
    w = square("w", 6)
    return ops.mul_mat(ops.add(w, ops.cont(ops.transpose(w))), ops.mul_mat(weight("v", (6, 4)), input("x", (3, 4))))


def vision() -> Value:
    """Learned positions, and scores by hand: tokens are rows and columns of the scores."""
    x = ops.add(ops.mul_mat(weight("patch", (4, 5)), input("x", (6, 5))), weight("positions", (6, 4)))
    q, k, v = (ops.mul_mat(weight(name, (4, 4)), x) for name in "qkv")
    scores = ops.softmax(ops.reshape(ops.mul_mat(k, q), shape=(1, 6, 6)), scale=0.5)
    return ops.mul_mat(ops.cont(ops.transpose(v)), ops.reshape(scores, shape=(6, 6)))


def slice_and_whole() -> Value:
    w, x = weight("w", (9, 4)), input("x", (3, 4))
    part = ops.mul_mat(ops.slice_(w, axis=0, start=0, stop=5), x)
    return ops.concat(part, ops.mul_mat(weight("v", (4, 9)), ops.silu(ops.mul_mat(w, x))), axis=1)


def empty_contraction() -> Value:
    """An axis of 4 times 0 entries is summed over, cut by the 4."""
    w = ops.reshape(weight("w", (6, 4, 0)), shape=(6, 0))
    x = ops.reshape(ops.mul(weight("y", (3, 4, 0)), input("x", (3, 4, 0))), shape=(3, 0))
    return ops.add(ops.mul_mat(w, x), input("z", (3, 6)))


def many_meanings() -> Value:
    """A part that occurs often in both operands of a product, so that its meaning is found among many."""
    w, x = weight("w", (2, 4)), input("x", (2, 4))
    for _ in range(5):
        w, x = ops.concat(w, w, axis=0), ops.concat(x, x, axis=0)
    return ops.add(ops.mul_mat(w, x), ops.mul(ops.mul_mat(w, x), ops.mul_mat(w, x)))


CASES = (gram, gram_of_activations, symmetric, vision, slice_and_whole, empty_contraction, many_meanings)


@pytest.mark.parametrize("mode", ["tensor", "layer", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_a_graph_that_was_once_refused_is_planned_and_right(case, mode):
    graph = Graph({"y": case()})
    values = values_of(graph, 0)
    one = results(plan_for_group(graph, [find_device("reference:0")]), values)
    group = [find_device(f"reference:{d}") for d in range(3)]
    plan = plan_for_group(graph, group, split_mode=mode, hardware=SLOW, tensor_split=(2, 1, 1))
    assert not compare_results(results(plan, values), one)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_factors_a_caller_chooses_the_plan_is_right(seed):
    """Also two that meet in one weight, which can be cut on one axis only."""

    def any_two(graph: Graph, factors: Factors) -> frozenset[Factor]:
        stored = (*graph.weights, *graph.states)
        shared_factors = [f for leaf in stored for axis in factors.axes_of(leaf) for segment in axis for f in segment]
        free = [f for f in dict.fromkeys(shared_factors) if not f.blocked]
        return frozenset(random.Random(seed).sample(free, min(2, len(free))))

    graph = seeded_graph(seed)
    values = values_of(graph, seed)
    group = [find_device(f"reference:{i}") for i in range(3)]
    got = results(plan_for_group(graph, group, choose=any_two), values)
    assert not compare_results(got, results(plan_for_group(graph, group[:1]), values))
