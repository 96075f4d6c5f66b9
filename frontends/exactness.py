"""How exactly a session computes: the graphs of its steps, with what its group asks of their ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..graph.graph import Graph
from ..graph.node import Node, Value
from ..graph.rewrite import rewrite
from .devices import Group
from .errors import ModelError
from .models import Model, Step

Rule = Callable[[Node], Sequence[Value] | None]


def graphs_of(model: Model, on: Group) -> Callable[[Step], Graph]:
    """The graph of each step of a model.  Raises `ModelError` for a group that asks for what excludes each other."""
    if on.exact and on.wire != "f32":
        raise ModelError(f"results that are to be exact are not sent as {on.wire}; leave out one of the two")
    if on.exact and on.fast:
        raise ModelError("results that are to be exact are not rounded to bfloat16; leave out one of the two")
    rule = hurried if on.fast else ordered if on.exact and model.looks_up else None
    return partial(changed, model, rule) if rule else model.graph


def changed(model: Model, rule: Rule, step: Step) -> Graph:
    """The graph of a step, with `rule` applied to its nodes."""
    return rewrite(model.graph(step), rule)


def hurried(node: Node) -> Sequence[Value] | None:
    """No op is exact that need not be."""
    return replace(node, attrs={**node.attrs, "exact": False}).results if node.attrs.get("exact") else None


def ordered(node: Node) -> Sequence[Value] | None:
    """Devices share no sum, so that its last bit is that of one device."""
    return replace(node, attrs={**node.attrs, "ordered": True}).results if node.op == "mul_mat" else None
