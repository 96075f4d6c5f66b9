"""Labels of the blocks of a graph, from the names of the weights that the blocks read.

The structure of the graph defines the blocks; names only label them. Without useful names a label is ``part 3``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..graph.layer_folding import Item, NodeBlock, iterate_blocks_of_all_repetitions

_NUMBERED = re.compile(r"(.*?)(\d+)(?![A-Za-z0-9])")


def extract_name_prefix(name: str) -> str:
    """Extract the prefix of a name up to its first number, such as ``blk.0`` of ``blk.0.attn_q.weight``.

    Without a number, the prefix ends before the last dot.
    """
    match = _NUMBERED.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def make_block_label_from_leaf_names(block: NodeBlock, number: int) -> str:
    """Make the label of a block from the names of the weights and states that it reads, or of its nodes."""
    leaves = {s.node.name: None for n in block.nodes for s in n.inputs if s.node.op in ("weight", "state")}
    heads = Counter(map(extract_name_prefix, leaves))
    if heads:
        prefix, count = heads.most_common(1)[0]
        return prefix if 2 * count >= len(leaves) else shorten_labels_to_range(list(heads))
    named = [n.name for n in block.nodes if n.name]
    return shorten_labels_to_range([named[0], named[-1]]) if named else f"part {number + 1}"


def shorten_labels_to_range(labels: Sequence[str]) -> str:
    """Join labels to one: ``blk.0 … 3`` if they differ only in a number, else the first and the last label."""
    labels = list(dict.fromkeys(labels))
    matches = [_NUMBERED.match(label) for label in labels]
    stems = {m[1] for m in matches if m}
    if len(labels) > 1 and all(matches) and len(stems) == 1:
        numbers = [n for label in labels for n in map(int, re.findall(r"\d+", label[len(next(iter(stems))) :]))]
        return f"{next(iter(stems))}{min(numbers)} … {max(numbers)}"
    return labels[0] if len(labels) == 1 else f"{labels[0]} … {labels[-1]}"


class BlockLabels:
    """The labels of all blocks of a graph, and of sequences of blocks."""

    def __init__(self, items: Sequence[Item]) -> None:
        all_blocks = list(iterate_blocks_of_all_repetitions(items))
        self.number = {id(block): number for number, block in enumerate(all_blocks)}
        self.blocks = [make_block_label_from_leaf_names(block, number) for number, block in enumerate(all_blocks)]

    def label_of(self, items: Sequence[Item]) -> str:
        return shorten_labels_to_range(
            [self.blocks[self.number[id(block)]] for block in iterate_blocks_of_all_repetitions(items)]
        )
