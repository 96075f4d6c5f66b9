"""The exact cases of a model: every distinct op, shape and attribute of its prefill and decode graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...graph.graph import Graph
from ...ops import REGISTRY
from .case import Case, make_case


def collect_graph_cases_within_size(graph: Graph, max_elements: int = 1 << 24) -> list[Case]:
    """Return the distinct cases of the nodes of `graph`, without views and without nodes that have a larger operand.

    Args:
        graph: the graph of a model.
        max_elements: maximum elements of an operand.
    """
    cases: dict[Case, None] = {}
    for node in graph.nodes:
        if node.is_leaf or REGISTRY[node.op].is_view:
            continue
        op = REGISTRY[node.op]
        named = zip(op.operand_names, node.src, strict=False)
        parts = {**{n: v.spec for n, v in named if v is not None}, **node.attrs}
        if max((s.spec.size for s in node.inputs), default=0) <= max_elements:
            cases[make_case(op, parts)] = None
    return list(cases)


def collect_model_cases(path: Path, tokens: Iterable[int] = (1, 32), cells: int = 256) -> list[Case]:
    """Return the distinct cases of a model file or an exported program.

    A GGUF model gives its cases for some token counts. An exported program is one of PyTorch or ONNX. Weights are not
    read. The arguments are as in `read_model_graphs`.

    Raises:
        ModelError: the file is no model.
    """
    graphs = read_model_graphs(path, tokens, cells)
    return list(dict.fromkeys(case for graph in graphs for case in collect_graph_cases_within_size(graph)))


def read_model_graphs(path: Path, tokens: Iterable[int] = (1, 32), cells: int = 256) -> Iterator[Graph]:
    """Yield the graphs of a model file or an exported program.

    A GGUF model gives a graph for each token count, an exported PyTorch or ONNX program only one. Weights are not read.

    Args:
        path: a GGUF file, or a ``.pt2`` or ``.onnx`` program.
        tokens: token counts of the steps of a GGUF model.
        cells: KV cache cells of the steps.

    Raises:
        ModelError: the file is no model.
    """
    from ...frontends.graph_file import (  # the only use of frontends here, when asked for
        is_torch_or_onnx_program,
        read_graph,
    )
    from ...frontends.models.inputs.step import Step
    from ...frontends.open_model import open_model

    if is_torch_or_onnx_program(str(path)):
        yield read_graph(str(path))
        return
    model = open_model(path, header_only=True)
    context = min(cells, model.context_length)
    for count in tokens:
        yield model.graph(Step(sequences=1, tokens=min(count, context), cells=context, context=context, outputs=1))


def collect_case_texts(cases: Iterable[str], path: Path | None) -> tuple[str, ...]:
    """Return the texts `cases`, followed by the texts of the cases of the model at `path`, if there is one."""
    return (*cases, *([] if path is None else [case.text_without_seed for case in collect_model_cases(path)]))
