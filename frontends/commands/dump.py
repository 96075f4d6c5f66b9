"""``hocket dump``: a graph as text, or one layer cut out of it to look at it alone."""

from __future__ import annotations

import argparse

from ...graph import Graph, GraphError, Value, input, to_json
from ...graph.graph import assign_names
from ...graph.layer_folding import find_layer_nodes
from ...ops.text import dump
from ...view.dot import to_dot
from ..devices import Group
from ..graph_file import read_graph
from ..terminal.arguments import parse_natural
from ..terminal.output import write_data
from .shared_flags import add_batch_flag, add_cache_flags, add_context_flag, add_model_flags

DUMP_FORMATS = {"text": dump, "json": to_json, "dot": to_dot}


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_flags(sub, "GGUF file (only its header is read), or a dumped graph", "MODEL|GRAPH")
    sub.add_argument("--format", choices=DUMP_FORMATS, default="text", help="text and json read back (text)")
    sub.add_argument("--layer", type=parse_natural, metavar="N", help="only this layer, what it reads as inputs")
    add_context_flag(sub)
    add_batch_flag(sub, 1, "new tokens of the step (1)")
    add_cache_flags(sub)


def run(args: argparse.Namespace) -> int:
    caches = Group(cache_type_k=args.cache_type_k, cache_type_v=args.cache_type_v).caches
    graph = read_graph(args.model, context=args.context, tokens=args.batch, caches=caches)
    if args.layer is not None:
        graph = extract_layer(graph, args.layer)
    write_data(DUMP_FORMATS[args.format](graph).removesuffix("\n") + "\n")
    return 0


def extract_layer(graph: Graph, layer: int) -> Graph:
    """The nodes of one layer as a graph of its own: what other nodes give becomes an input, what they take an output.

    Layers are found by structure, so names tell nothing.  Raises `GraphError` for one that is not there.
    """
    every = find_layer_nodes(graph)
    if layer >= len(every):
        have = f"those there are: 0 to {len(every) - 1}" if every else "this graph has none"
        raise GraphError(f"no node belongs to layer {layer}; {have}")
    mine, called = every[layer], assign_names(graph)

    def label(value: Value) -> str:
        return called[value.node] + (f".{value.index}" if len(value.node.specs) > 1 else "")

    became: dict[Value, Value] = {}
    for node in mine:
        for source in node.inputs:
            if source not in became:  # the sources of this layer come first
                became[source] = source if source.node.is_leaf else input(label(source), source.shape, source.dtype)
        new = node.with_src(tuple(None if s is None else became[s] for s in node.src))
        became.update(zip(node.results, new.results, strict=True))
    users, own = graph.users(), set(mine)
    inside = {value for node in mine for value in node.results}
    wanted = [v for v in inside if v in graph.outputs.values() or not own.issuperset(users[v])]
    updates = {became[old]: became[new] for old, new in graph.updates.items() if new in inside and old in became}
    return Graph({label(v): became[v] for v in sorted(wanted, key=label)}, updates)
