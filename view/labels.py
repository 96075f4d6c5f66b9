"""What blocks of a graph are called: by the names of the weights that they read, where these tell them apart.

Names only label what was found by structure; without telling names blocks are ``part 3``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..graph.layer_folding import Item, NodeBlock, iterate_blocks

_NUMBERED = re.compile(r"(.*?)(\d+)(?![A-Za-z0-9])")
SHOWN = 2
"""How many names a label joins."""


def head(name: str) -> str:
    """The start of a name up to its first number, ``blk.0`` of ``blk.0.attn_q.weight``; else up to its last dot."""
    match = _NUMBERED.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def block_label(block: NodeBlock, number: int) -> str:
    """The label of a block from most of the weights and states it reads, else from all, else from its named nodes."""
    leaves = {s.node.name: None for n in block.nodes for s in n.inputs if s.node.op in ("weight", "state")}
    heads = Counter(map(head, leaves))
    if heads:
        most, count = heads.most_common(1)[0]
        return most if 2 * count >= len(leaves) else span(list(heads))
    named = [n.name for n in block.nodes if n.name]
    return span([named[0], named[-1]]) if named else f"part {number + 1}"


def span(labels: Sequence[str]) -> str:
    """Labels as one: ``blk.0 … 3`` where they differ in a number, else the first and the last."""
    labels = list(dict.fromkeys(labels))
    matches = [_NUMBERED.match(label) for label in labels]
    stems = {m[1] for m in matches if m}
    if len(labels) > 1 and all(matches) and len(stems) == 1:
        numbers = [n for label in labels for n in map(int, re.findall(r"\d+", label[len(next(iter(stems))) :]))]
        return f"{next(iter(stems))}{min(numbers)} … {max(numbers)}"
    return labels[0] if len(labels) == 1 else f"{labels[0]} … {labels[-1]}"


class Labels:
    """The labels of all blocks of a graph, and what a sequence of items is called."""

    def __init__(self, items: Sequence[Item]) -> None:
        all_blocks = list(iterate_blocks(items))
        self.number = {id(block): number for number, block in enumerate(all_blocks)}
        self.blocks = [block_label(block, number) for number, block in enumerate(all_blocks)]

    def of(self, items: Sequence[Item]) -> str:
        return span([self.blocks[self.number[id(block)]] for block in iterate_blocks(items)])
