"""DOT, networkx, digests, rewriting, and exports to other programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import networkx as nx
import pytest

from hocket import ops, to_dot
from hocket.graph import Graph, constant, input, state, to_networkx, weight

from ..given.graphs.random_graphs import HOSTILE_NAMES, PLAIN_NAMES, seeded_graph
from ..given.models.goldens import ROOT

NAMES = (*HOSTILE_NAMES, *PLAIN_NAMES)
STRING = r'"(?:[^"\\\n]|\\.)*"'
STATEMENT = re.compile(rf"  (?:node|\w+(?: -> \w+)?)(?: \[(?:\w+=(?:{STRING}|\w+)(?:, )?)+\])?;")


@pytest.mark.parametrize("seed", range(30))
def test_dot_has_every_node_edge_output_and_update_and_every_string_is_closed(seed):
    graph = seeded_graph(seed, names=NAMES)
    lines = to_dot(graph, folded=False).split("\n")
    assert (lines[0], lines[-2:]) == ("digraph hocket {", ["}", ""])
    for line in lines[1:-2]:
        assert STATEMENT.fullmatch(line), line
    edges = [line for line in lines if " -> " in re.sub(STRING, "", line)]
    assert len(edges) == sum(len(n.inputs) for n in graph.nodes) + len(graph.outputs) + len(graph.updates)
    node_lines = {line.split()[0] for line in lines if line.startswith("  n") and line not in edges}
    assert node_lines == {f"n{i}" for i in range(len(graph.nodes))} | {"node"}


def test_dot_tells_leaves_apart_and_labels_edges_with_specs():
    x, w, cache, one = input("x", (2, 4)), weight("w", (3, 4)), state("cache", (2, 3)), constant("one", [1.0])
    y = ops.add(ops.mul_mat(w, x), one)
    dot = to_dot(Graph({"y": y}, {cache: y}), folded=False)
    for shape in ("cds", "box3d", "cylinder", "note"):
        assert dot.count(f"shape={shape}]") == 1
    assert '[label="f32[3,4]"]' in dot
    assert 'style=dashed, label="update"' in dot


@pytest.mark.parametrize("seed", range(30))
def test_networkx_gets_an_acyclic_graph_with_an_edge_for_each_operand(seed):
    graph = seeded_graph(seed, names=NAMES)
    network = to_networkx(graph)
    assert nx.is_directed_acyclic_graph(network)
    assert network.number_of_nodes() == len(graph.nodes)
    assert network.number_of_edges() == sum(len(n.inputs) for n in graph.nodes)
    assert [d["op"] for _, d in network.nodes(data=True)] == [n.op for n in graph.nodes]


def test_a_networkx_edge_knows_operand_and_result():
    q, v = input("q", (2, 1, 4)), input("v", (2, 1, 4))
    g, beta, old = input("g", (2, 1, 1)), input("beta", (2, 1)), state("s", (1, 4, 4))
    out, new = ops.gated_delta_net(q, q, v, g, beta, old, name="delta")
    network = to_networkx(Graph({"y": ops.add(out, out, name="y")}, {old: new}))
    assert sorted(d["operand"] for _, _, d in network.in_edges("delta", data=True)) == [0, 1, 2, 3, 4, 5]
    assert [(d["operand"], d["result"]) for _, _, d in network.in_edges("y", data=True)] == [(0, 0), (1, 0)]
    assert network.nodes["delta"]["specs"] == (out.spec, new.spec)


def test_json_follows_the_standard():
    """Check that there are no NaN or Infinity tokens, which JSON lacks though Python writes them."""
    graph = Graph({"y": ops.scale(input("x", (2,)), scale=float("inf"), bias=float("nan"))})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    from hocket.graph import to_json

    document = json.loads(to_json(graph), parse_constant=refuse)
    assert document["nodes"][1]["attrs"] == {"scale": {"float": "inf"}, "bias": {"float": "nan"}}


# ------------------------------------------------------------------------------------------------------- digests

DIGESTS = """
import sys
from tests.given.graphs.random_graphs import seeded_graph, HOSTILE_NAMES
padding = [object() for _ in range(int(sys.argv[1]))]
print([seeded_graph(seed, names=HOSTILE_NAMES).digest() for seed in range(10)])
"""


@pytest.mark.long
def test_a_digest_depends_neither_on_addresses_nor_on_the_hash_seed():
    def run(seed: str, padding: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", DIGESTS, padding]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert run("0", "0") == run("4242", "12345") == run("random", "7")


def model(
    inner: str = "norm", leaf: str = "x", output: str = "y", eps: float = 1e-6, again: bool = False, dim: int = 4
) -> Graph:
    x = input(leaf, (2, dim))
    first = ops.rms_norm(x, eps=eps, name=inner)
    second = ops.rms_norm(x, eps=eps, name=inner) if again else first
    return Graph({output: ops.add(first, second)})


def test_the_digest_ignores_names_of_inner_nodes_only():
    assert model(inner="other").digest() == model().digest()
    assert model(leaf="other").digest() != model().digest()
    assert model(output="other").digest() != model().digest()


def test_the_digest_sees_attributes_shapes_and_sharing():
    digests = {g.digest() for g in (model(), model(eps=1e-5), model(dim=5), model(again=True))}
    assert len(digests) == 4


def test_the_digest_sees_dtypes_operand_order_constants_and_updates():
    a, b = input("a", (2,)), input("b", (2,))
    old = state("old", (2,))
    graphs = [
        Graph({"y": ops.sub(a, b)}),
        Graph({"y": ops.sub(b, a)}),
        Graph({"y": ops.sub(a, input("b", (2,), "f16"))}),
        Graph({"y": ops.sub(a, weight("b", (2,)))}),
        Graph({"y": ops.sub(a, constant("b", [1.0, 2.0]))}),
        Graph({"y": ops.sub(a, constant("b", [1.0, 3.0]))}),
        Graph({"y": ops.sub(a, old)}),
        Graph({"y": ops.sub(a, old)}, {old: a}),
        Graph({"y": ops.sub(a, old)}, {old: old}),
    ]
    assert len({g.digest() for g in graphs}) == len(graphs)


def test_the_digest_sees_which_optional_operand_is_left_out():
    x = input("x", (2, 3, 2))
    mask, sinks = input("m", (3, 2)), input("m", (2,))
    assert Graph({"y": ops.softmax(x, mask)}).digest() != Graph({"y": ops.softmax(x, None, sinks)}).digest()


def test_building_a_graph_twice_gives_the_same_digest():
    assert all(seeded_graph(s).digest() == seeded_graph(s).digest() for s in range(20))
