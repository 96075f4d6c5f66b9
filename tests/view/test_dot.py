"""DOT of large models: layers once, and drawn by Graphviz in seconds."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from hocket import to_dot
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.frontends.models import Step, load_model

from ..given.graphs.pictured import PICTURED, vision_transformer
from ..given.models.goldens import open_fixture
from ..given.models.large_headers import qwen_80b


def render_plain(dot):
    """The picture as plain text of Graphviz."""
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    return subprocess.run(["dot", "-Tplain"], input=dot, capture_output=True, text=True, check=True).stdout


def test_layers_that_repeat_are_one_cluster_that_says_how_often():
    dot = to_dot(vision_transformer(layers=7))
    assert dot.count("subgraph cluster_") == 1
    assert "encoder.0 … 6  × 7" in dot
    assert dot.count('label="softmax') == 1
    assert "style=dotted" in dot


def test_a_box_says_attributes_and_cost():
    dot = to_dot(vision_transformer())
    assert "eps=1e-06" in dot
    assert "MFLOP" in dot
    assert "KiB" in dot


@pytest.mark.parametrize("name", PICTURED)
def test_graphviz_draws_any_graph_that_is_folded(name):
    if name != "random":  # two thousand nodes without layers are for the page
        assert render_plain(to_dot(PICTURED[name]())).endswith("stop\n")


def test_states_of_layers_are_updated_in_the_one_of_the_picture():
    dot = to_dot(load_model(open_fixture("llama")).graph(Step(1, 1, 16, 16, 1)))
    assert dot.count('label="update"') >= 2
    render_plain(dot)


def test_sixty_layers_have_a_few_hundred_boxes(tmp_path):
    graph, _ = read_step_graph_and_context(qwen_80b(tmp_path / "q.gguf", 60), context=4096, tokens=1)
    dot = to_dot(graph)
    assert len(graph.nodes) > 5000
    assert dot.count("shape=") < 500
