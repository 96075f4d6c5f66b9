"""Repetitions are found by structure, and a short graph has the first few of them."""

from __future__ import annotations

import pytest

from hocket import ops
from hocket.graph import Graph, input, state, weight
from hocket.graph.repeated_runs import PREAMBLE, find_largest_repeated_runs, shorten_graph

from ..given.graphs.layered import decoder, perceptron


def test_a_layer_is_a_run_that_carries_the_residual_to_the_next():
    graph = decoder(8)
    runs = find_largest_repeated_runs(graph)
    assert runs is not None
    assert runs.count == 7  # from one feed-forward layer to the next; the last is followed by no attention
    (carried,) = runs.carried_positions
    assert graph.nodes[runs.first_node_of(PREAMBLE) + carried].name == "blk.0.mixed"
    assert graph.nodes[runs.first_node_of(3) + carried].name == "blk.4.mixed"


def test_what_the_first_run_carries_on_is_no_leaf():
    graph = perceptron(8)
    runs = find_largest_repeated_runs(graph)
    assert runs is not None
    assert not any(graph.nodes[runs.first_node_of(PREAMBLE) + place].is_leaf for place in runs.carried_positions)


def skipping() -> Graph:
    """Each layer reads the last but one."""
    x = [input("x", (2, 8)), input("y", (2, 8))]
    for layer in range(9):
        x.append(ops.add(ops.mul_mat(weight(f"w.{layer}", (8, 8)), x[-1]), x[-2]))
    return Graph({"y": x[-1]})


def early() -> Graph:
    """An output lies in the midst of the layers."""
    graph = perceptron(9)
    (middle,) = (n.results[0] for n in graph.nodes if n.name == "out.4")
    return Graph({**graph.outputs, "middle": middle})


@pytest.mark.parametrize("graph", [perceptron(2), early(), skipping(), Graph({"y": input("x", (2, 2))})])
def test_a_graph_without_runs_or_that_reads_within_or_behind_them_has_none(graph):
    assert find_largest_repeated_runs(graph) is None


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_short_graph_has_the_first_runs_and_what_is_around_them(times):
    graph = decoder(9)
    runs = find_largest_repeated_runs(graph)
    of = shorten_graph(graph, runs, times)
    assert len(of.short_graph.nodes) == len(graph.nodes) - (runs.count - times) * runs.length
    assert [n.op for n in of.short_graph.nodes] == [
        n.op for at, n in enumerate(graph.nodes) if not runs.first_node_of(times) <= at < runs.first_node_of(runs.count)
    ]
    assert of.deep_name_in_repetition(of.short_graph.nodes[-1].name, runs.count, times) == graph.nodes[-1].name
    assert of.deep_name_in_repetition(f"{runs.start}.sum", 3, 0) == f"{graph.nodes[runs.first_node_of(3)].name}.sum"
    assert len(of.short_graph.updates) == 2 * (times + 1)


def remembering(layers: int) -> Graph:
    """Build layers with state updates that no node reads in the same run."""
    x, updates = input("x", (2, 8)), {}
    for layer in range(layers):
        memory = state(f"memory.{layer}", (2, 8))
        product = ops.mul_mat(weight(f"w.{layer}", (8, 8)), ops.add(x, memory))
        updates[memory] = ops.neg(product, name=f"new.{layer}")
        x = ops.add(x, ops.silu(product))
    return Graph({"y": ops.neg(x, name="y")}, updates)


def test_a_run_has_what_only_its_own_new_state_needs():
    graph = remembering(8)
    runs = find_largest_repeated_runs(graph)
    assert runs is not None
    assert runs.count >= 6
    of = shorten_graph(graph, runs, 1)
    assert [name for name in of.deep_node_names_by_number if name.startswith("new")] == [
        f"new.{layer}" for layer in range(8)
    ]
    places = {
        (at - runs.start) % runs.length
        for at, name in enumerate(of.deep_node_names_by_number)
        if name.startswith("new")
    }
    assert len(places) == 1
