"""A program cut at ops that hocket has no row for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

LEAVES = ("placeholder", "get_attr", "output")


def parts_of(exported: ExportedProgram, has_row: Callable[[Node], bool]) -> tuple[GraphModule, list[str]]:
    """A decomposed program as a module of parts in order, and the names of the parts that hocket can run."""
    from torch.fx.passes.split_module import split_module

    module = exported.module()
    parts: dict[Node, int] = {}
    ours: list[bool] = []
    for node in module.graph.nodes:
        if node.op in LEAVES:
            continue
        if node.target is operator.getitem:  # an entry of a tuple, which no part can return
            parts[node] = parts[node.args[0]]
            continue
        mine = has_row(node)
        if not ours or ours[-1] != mine:
            ours.append(mine)
        parts[node] = len(ours) - 1
    whole = split_module(module, module, lambda node: parts.get(node, 0))
    return whole, [f"submod_{number}" for number, mine in enumerate(ours) if mine]
