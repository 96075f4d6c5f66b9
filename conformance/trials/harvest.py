"""The exact cases of a model: every distinct op, shape and attribute of its prefill and decode graphs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...graph.graph import Graph
from ...ops import REGISTRY
from .case import Case, make_case


def from_graph(graph: Graph, most_elements: int = 1 << 24) -> list[Case]:
    """The distinct cases of `graph`, views left out, those with an operand of more elements too."""
    cases: dict[Case, None] = {}
    for node in graph.nodes:
        if node.is_leaf or REGISTRY[node.op].is_view:
            continue
        op = REGISTRY[node.op]
        named = zip(op.operand_names, node.src, strict=False)
        parts = {**{n: v.spec for n, v in named if v is not None}, **node.attrs}
        if max((s.spec.size for s in node.inputs), default=0) <= most_elements:
            cases[make_case(op, parts)] = None
    return list(cases)


def from_model(path: Path, tokens: Iterable[int] = (1, 32), cells: int = 256) -> list[Case]:
    """The cases of a GGUF model at some numbers of tokens, whose weights are not read, or of an exported PyTorch
    program.  Raises `ModelError` for a file that is neither."""
    from ...frontends.gguf import open_gguf  # the only use of frontends here, and only when asked for
    from ...frontends.graph_file import PROGRAM, read_graph
    from ...frontends.models import load_model
    from ...frontends.step import Step

    with open(path, "rb") as file:
        is_program = file.read(len(PROGRAM)) == PROGRAM or str(path).lower().endswith(".onnx")
    if is_program:
        return from_graph(read_graph(str(path)))
    model = load_model(open_gguf(path, header_only=True))
    context = min(cells, model.context_length)
    cases: dict[Case, None] = {}
    for count in tokens:
        step = Step(sequences=1, tokens=min(count, context), cells=context, context=context, outputs=1)
        cases.update(dict.fromkeys(from_graph(model.graph(step))))
    return list(cases)


def texts_of(cases: Iterable[str], path: Path | None) -> tuple[str, ...]:
    """Cases by their texts: those given, and those of the model in a file, if one is named."""
    return (*cases, *([] if path is None else [case.text for case in from_model(path)]))
