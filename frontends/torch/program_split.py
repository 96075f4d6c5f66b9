"""Split a program into segments at the ops that the op table lacks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

LEAF_NODE_KINDS = ("placeholder", "get_attr", "output")
"""FX node kinds that compute nothing."""


def split_at_unsupported_ops(
    exported: ExportedProgram, can_convert: Callable[[Node], bool]
) -> tuple[GraphModule, list[str]]:
    """Split a decomposed program at ops that hocket cannot compute, into segments that hocket and PyTorch run in turn.

    Args:
        exported: A decomposed program.
        can_convert: Returns whether hocket can compute a node.

    Returns:
        A module that calls the segments in order, and the names of the segments that hocket runs.
    """
    from torch.fx.passes.split_module import split_module

    module = exported.module()
    parts: dict[Node, int] = {}
    ours: list[bool] = []
    for node in module.graph.nodes:
        if node.op in LEAF_NODE_KINDS:
            continue
        if node.target is operator.getitem:  # an entry of a tuple, which a segment cannot return
            parts[node] = parts[node.args[0]]
            continue
        mine = can_convert(node)
        if not ours or ours[-1] != mine:
            ours.append(mine)
        parts[node] = len(ours) - 1
    whole = split_module(module, module, lambda node: parts.get(node, 0))
    return whole, [f"submod_{number}" for number, mine in enumerate(ours) if mine]
