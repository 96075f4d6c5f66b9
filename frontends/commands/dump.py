"""``hocket dump``: a graph, or one layer of it, as text, JSON or DOT."""

from __future__ import annotations

import argparse

from ...graph import Graph, GraphError, Value, input, to_json
from ...graph.graph import assign_names
from ...graph.layer_folding import find_layer_nodes
from ...ops.text import dump
from ...view.dot import to_dot
from ..flag_values import parse_natural
from ..graph_file import read_graph
from ..inference.device_group import DeviceGroup
from ..terminal.output import write_to_stdout_unless_closed
from .shared_flags import add_model_file_argument, add_option_flags

DUMP_FORMATS = {"text": dump, "json": to_json, "dot": to_dot}


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(
        sub,
        "GGUF file (only its header is read), a Hugging Face folder, a dumped graph (- is stdin), or a .pt2 or .onnx "
        "program",
        "MODEL|GRAPH",
    )
    sub.add_argument(
        "--format", choices=DUMP_FORMATS, default="text", help="output format; hocket can read text and json (text)"
    )
    sub.add_argument(
        "--layer", type=parse_natural, metavar="N", help="only this layer; the values that it reads become inputs"
    )
    step = {"default": 1, "help": "new tokens of the step (1)"}
    add_option_flags(sub, ("context", "batch", "cache_type_k", "cache_type_v"), batch=step)


def run(args: argparse.Namespace) -> int:
    caches = DeviceGroup(cache_type_k=args.cache_type_k, cache_type_v=args.cache_type_v).cache_dtypes
    graph = read_graph(args.model, context=args.context, tokens=args.batch, caches=caches)
    if args.layer is not None:
        graph = extract_layer_graph(graph, args.layer)
    write_to_stdout_unless_closed(DUMP_FORMATS[args.format](graph).removesuffix("\n") + "\n")
    return 0


def extract_layer_graph(graph: Graph, layer: int) -> Graph:
    """Extract one layer of a graph as a graph of its own.

    Values that come from outside of the layer become inputs. Values that other layers read become outputs. A layer is
    recognised by the structure of the graph, not by names.

    Raises:
        GraphError: The graph has no such layer.
    """
    every = find_layer_nodes(graph)
    if layer >= len(every):
        have = f"those there are: 0 to {len(every) - 1}" if every else "this graph has none"
        raise GraphError(f"no node belongs to layer {layer}; {have}")
    layer_nodes, names = every[layer], assign_names(graph)

    def label(value: Value) -> str:
        return names[value.node] + (f".{value.index}" if len(value.node.specs) > 1 else "")

    replacements: dict[Value, Value] = {}
    for node in layer_nodes:
        for source in node.inputs:
            if source not in replacements:  # operands of this layer precede their users
                replacements[source] = (
                    source if source.node.is_leaf else input(label(source), source.shape, source.dtype)
                )
        new = node.with_src(tuple(None if s is None else replacements[s] for s in node.src))
        replacements.update(zip(node.results, new.results, strict=True))
    users, layer_set = graph.users(), set(layer_nodes)
    inside = {value for node in layer_nodes for value in node.results}
    outputs = [v for v in inside if v in graph.outputs.values() or not layer_set.issuperset(users[v])]
    updates = {
        replacements[old]: replacements[new]
        for old, new in graph.updates.items()
        if new in inside and old in replacements
    }
    return Graph({label(v): replacements[v] for v in sorted(outputs, key=label)}, updates)
