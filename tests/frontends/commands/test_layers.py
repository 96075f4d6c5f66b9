"""``hocket dump --layer``: one layer of a graph as a graph of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import hocket
from hocket.cli import main
from hocket.frontends.gguf import open_gguf

from ...given.commands import Capture
from ...given.graphs.pictured import vision_transformer, without_names
from ...given.models.goldens import TINY


@pytest.mark.parametrize("layer", range(8))
def test_a_layer_alone_is_a_graph_that_verifies(layer: int, capsys: Capture) -> None:
    assert main(["dump", TINY, "--layer", str(layer)]) == 0
    graph = hocket.parse(capsys.readouterr().out)
    hocket.verify(graph)
    named = [v.node.name for v in graph.weights]
    assert named
    assert all(name.startswith(f"blk.{layer}.") for name in named)
    header = open_gguf(TINY, header_only=True)
    assert set(named) == {name for name in header.tensors if name.startswith(f"blk.{layer}.")}
    assert f"blk.{layer}.ffn_residual" in graph.outputs
    assert len(graph.updates) == 2


def test_a_layer_of_a_graph_whose_names_tell_nothing(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "graph").write_text(hocket.dump(without_names(vision_transformer(layers=5))), encoding="utf-8")
    assert main(["dump", str(tmp_path / "graph"), "--layer", "4"]) == 0
    layer = hocket.parse(capsys.readouterr().out)
    hocket.verify(layer)
    assert [n.op for n in layer.nodes].count("softmax") == 1
    assert len(layer.outputs) == 1
    assert main(["dump", str(tmp_path / "graph"), "--layer", "5"]) == 2
    assert "layer 5; those there are: 0 to 4" in capsys.readouterr().err


def test_a_layer_that_is_not_there_is_named(capsys: Capture) -> None:
    assert main(["dump", TINY, "--layer", "8"]) == 2
    assert "layer 8; those there are: 0 to 7" in capsys.readouterr().err
