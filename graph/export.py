"""Export of graphs as JSON and as networkx graphs, and import of the JSON. `hocket.view.dot` writes DOT."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .attrs import MAX_DEPTH, Attr
from .dtypes import DTYPE_BY_NAME, DType
from .errors import GraphError
from .graph import Graph, assign_names
from .node import Node, Value
from .spec import MAX_SIZE, make_spec
from .validation import TEXT, instance_of, validate_arguments

if TYPE_CHECKING:
    import networkx

GRAPH_JSON_FORMAT = "hocket-graph-1"


@validate_arguments(GraphError, graph=instance_of(Graph))
def to_json(graph: Graph) -> str:
    """Return a graph as the text of one JSON object with one node on each line; `from_json` reads it.

    Operands are pairs [node number, result number].
    """
    data = graph_to_data(graph)
    rows = ",\n    ".join(json.dumps(node, allow_nan=False) for node in data["nodes"])
    ends = f'"outputs": {json.dumps(data["outputs"])},\n  "updates": {json.dumps(data["updates"])}'
    return f'{{\n  "format": "{GRAPH_JSON_FORMAT}",\n  "nodes": [\n    {rows}\n  ],\n  {ends}\n}}'


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data for JSON, which `graph_from_data` reads."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def ref(value: Value | None) -> list[int] | None:
        return None if value is None else [number[value.node], value.index]

    nodes = [
        {
            "name": node.name,
            "op": node.op,
            "src": [ref(s) for s in node.src],
            "attrs": {k: _attribute_to_json(v) for k, v in node.attrs.items()},
            "specs": [{"dtype": s.dtype.text, "shape": list(s.shape)} for s in node.specs],
        }
        for node in graph.nodes
    ]
    outputs = {name: ref(v) for name, v in graph.outputs.items()}
    updates = [[ref(old), ref(new)] for old, new in graph.updates.items()]
    return {"format": GRAPH_JSON_FORMAT, "nodes": nodes, "outputs": outputs, "updates": updates}


@validate_arguments(GraphError, text=TEXT)
def from_json(text: str) -> Graph:
    """Build the graph from the JSON text of `to_json`. Raises `GraphError` for any other text."""
    return graph_from_data(text)


def graph_from_data(data: Any) -> Graph:
    """Build the graph from the plain data of `graph_to_data`, or from their JSON text.

    Raises:
        GraphError: It is no such data.
    """
    try:
        document = json.loads(data) if isinstance(data, str) else data
        if document["format"] != GRAPH_JSON_FORMAT:
            raise GraphError(f"format is {document['format']!r}; this reads {GRAPH_JSON_FORMAT}")
        nodes: list[Node] = []

        def ref(pair: list[int] | None) -> Value | None:
            if pair is None:
                return None
            node, index = pair
            if type(node) is not int or type(index) is not int:  # False is 0 to Python, but not to a digest
                raise GraphError(f"a reference is two integers, not {pair!r}")
            if not 0 <= node < len(nodes):
                raise GraphError(f"a node refers to node {node} before it is defined")
            if not 0 <= index < len(nodes[node].specs):
                raise GraphError(f"node {node} has no result {index}")
            return nodes[node].results[index]

        def required_ref(pair: list[int]) -> Value:
            value = ref(pair)
            if value is None:
                raise GraphError("an output or update refers to no value")
            return value

        for entry in document["nodes"]:
            specs = tuple(make_spec(s["shape"], s["dtype"]) for s in entry["specs"])
            attrs = MappingProxyType({k: _attribute_from_json(v) for k, v in entry["attrs"].items()})
            nodes.append(
                Node(
                    _require_text(entry["op"]),
                    tuple(map(ref, entry["src"])),
                    attrs,
                    specs,
                    _require_text(entry["name"]),
                )
            )
        outputs = {name: required_ref(v) for name, v in document["outputs"].items()}
        updates = {required_ref(old): required_ref(new) for old, new in document["updates"]}
        if len(updates) < len(document["updates"]):
            raise GraphError("a state is updated twice")
        return Graph(outputs, updates)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as why:
        raise GraphError(f"not a graph in JSON ({type(why).__name__}: {why}); write one with `hocket dump`") from None


def _attribute_to_json(value: Attr) -> object:
    match value:
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case bytes():
            return {"hex": value.hex()}
        case DType():
            return {"dtype": value.text}
        case tuple():
            return [_attribute_to_json(v) for v in value]
        case _:
            return value


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise GraphError(f"expected a string, got {value!r}")
    return value


def _attribute_from_json(value: Any, depth: int = 0) -> Attr:
    match value:
        case {"float": str(text)}:
            return float(text)
        case {"hex": str(text)}:
            return bytes.fromhex(text)
        case {"dtype": str(text)}:
            return DTYPE_BY_NAME[text]
        case list() if depth == MAX_DEPTH:
            raise GraphError(f"attributes are nested more than {MAX_DEPTH} deep")
        case list():
            return tuple(_attribute_from_json(v, depth + 1) for v in value)
        case int() if abs(value) > MAX_SIZE:
            raise GraphError("an integer does not fit in 64 bits")
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise GraphError(f"attribute value {value!r} is not of a known kind")


@validate_arguments(GraphError, graph=instance_of(Graph))
def to_networkx(graph: Graph) -> networkx.MultiDiGraph:
    """Return a graph as a networkx multigraph with one edge for each operand.

    The key of a networkx node is its printed name. An edge has the position of the operand, the number of the
    result, and the spec.
    """
    import networkx as nx

    names = assign_names(graph)
    out = nx.MultiDiGraph()
    for node in graph.nodes:
        out.add_node(names[node], op=node.op, attrs=dict(node.attrs), specs=node.specs)
        for position, operand in enumerate(node.src):
            if operand is not None:
                out.add_edge(
                    names[operand.node], names[node], operand=position, result=operand.index, spec=operand.spec
                )
    return out
