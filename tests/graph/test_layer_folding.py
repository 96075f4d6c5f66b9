"""Blocks of graphs: every node once, layers found by structure, nothing larger than a picture."""

from __future__ import annotations

import pytest

from hocket.frontends.models import Step, load_model
from hocket.graph import Graph
from hocket.graph.layer_folding import (
    MAX_BLOCK_NODES,
    NodeBlock,
    RepeatedGroup,
    find_adjacent_repetitions,
    find_layer_nodes,
    fold_layers,
    iterate_blocks_of_all_repetitions,
)

from ..given.graphs.pictured import PICTURED, encoder_decoder, mixer, vision_transformer, without_names
from ..given.graphs.random_graphs import seeded_graph
from ..given.models.goldens import open_fixture


def shape(items):
    """The fold with the number of nodes in place of blocks: ``[3, (6, [33]), 4]``."""
    return [len(i.nodes) if isinstance(i, NodeBlock) else (len(i.repetitions), shape(i.repetitions[0])) for i in items]


@pytest.mark.parametrize("name", PICTURED)
def test_every_computed_node_is_in_one_block_behind_what_it_reads(name):
    graph = PICTURED[name]()
    order = [node for block in iterate_blocks_of_all_repetitions(fold_layers(graph)) for node in block.nodes]
    assert set(order) == {n for n in graph.nodes if not n.is_leaf}
    place = {node: at for at, node in enumerate(order)}
    assert len(place) == len(order)
    for node in order:
        assert all(place[s.node] < place[node] for s in node.inputs if not s.node.is_leaf)


def test_the_layers_of_a_vision_transformer_are_one_group():
    (first, group, last) = fold_layers(vision_transformer(layers=7))
    assert isinstance(first, NodeBlock)
    assert isinstance(group, RepeatedGroup)
    assert isinstance(last, NodeBlock)
    assert len(group.repetitions) == 7


@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_encoder_and_a_decoder_are_two_groups_of_as_many_layers(count):
    """The first layer of the decoder has no other to wait for, but reads the encoder as all of them do."""
    graph = encoder_decoder(layers=count)
    assert [i[0] for i in shape(fold_layers(graph)) if isinstance(i, tuple)] == [count, count]
    assert [len(layer) for layer in find_layer_nodes(without_names(graph))] == [31] * count + [54] * count


@pytest.mark.parametrize("name", PICTURED)
def test_names_do_not_decide_what_repeats(name):
    graph = PICTURED[name]()
    assert shape(fold_layers(without_names(graph))) == shape(fold_layers(graph))


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize(("build_graph", "nodes"), [(vision_transformer, 31), (mixer, 20)])
def test_layers_are_found_without_names(build_graph, nodes, count):
    graph = without_names(build_graph(layers=count))
    assert [len(layer) for layer in find_layer_nodes(graph)] == [nodes] * count
    (group,) = (item for item in fold_layers(graph) if isinstance(item, RepeatedGroup))
    assert len(group.repetitions) == count


def test_two_layers_that_share_a_mask_are_two_though_the_last_chooses_rows():
    graph = load_model(open_fixture("llama")).graph(Step(1, 4, 16, 16, 1))
    assert len(find_layer_nodes(without_names(graph))) == 2


def test_repetitions_of_a_group_have_the_same_ops():
    for item in fold_layers(PICTURED["mixer"]()):
        if isinstance(item, RepeatedGroup):
            ops = [[n.op for b in iterate_blocks_of_all_repetitions(one) for n in b.nodes] for one in item.repetitions]
            assert all(o == ops[0] for o in ops)


@pytest.mark.parametrize("seed", range(2))
def test_a_graph_without_layers_is_split_into_small_blocks(seed):
    graph = seeded_graph(seed, steps=600)
    blocks = list(iterate_blocks_of_all_repetitions(fold_layers(graph)))
    assert sum(len(b.nodes) for b in blocks) == sum(not n.is_leaf for n in graph.nodes)
    assert max(len(b.nodes) for b in blocks) <= MAX_BLOCK_NODES


def test_two_thousand_random_nodes_are_as_many_blocks_as_people_can_see():
    assert len(fold_layers(PICTURED["random"]())) < 60


def test_a_graph_of_leaves_has_no_blocks():
    from hocket.graph import input

    assert fold_layers(Graph({"y": input("x", (3,))})) == ()


def test_repetitions_are_found_between_single_items():
    assert list(find_adjacent_repetitions("abbbcdcde")) == [(0, 1, 1), (1, 1, 3), (4, 2, 2), (8, 1, 1)]
