"""A tree of the prompts that are in a pool of blocks: each node is a block with the tokens of its cells.

Slots that read the same prefix share its blocks. A block is evicted if the tree alone refers to it, the block that was
used least recently first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....ops.matrix.attention import BLOCK_KEYS
from ..prefix_cache import count_common_prefix_tokens
from .allocator import BlockAllocator


@dataclass(slots=True, eq=False)
class _BlockNode:
    """A block and the tokens of its first cells, at most 64; only a node with 64 tokens has children."""

    block: int
    tokens: tuple[int, ...]
    parent: _BlockNode | None
    children: dict[tuple[int, ...], _BlockNode] = field(default_factory=dict)


class PrefixTree:
    """Finds the blocks that have the longest known prefix of a prompt.

    The tree has one reference to each of its blocks.

    Args:
        allocator: The blocks of the pool.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._root = _BlockNode(0, (), None)
        self._nodes: OrderedDict[int, _BlockNode] = OrderedDict()
        """The nodes by block, least recently used first."""

    def find_prefix(self, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """Find the blocks that have the longest known prefix of a prompt, and the number of its tokens.

        Of the last block, fewer tokens than it has may belong to the prefix.
        """
        node, blocks, at = self._root, list[int](), 0
        while (child := node.children.get(prompt[at : at + BLOCK_KEYS])) is not None and len(
            child.tokens
        ) == BLOCK_KEYS:
            node, at = child, at + BLOCK_KEYS
            blocks.append(node.block)
        rest = prompt[at : at + BLOCK_KEYS]
        last = max(node.children.values(), key=lambda each: count_common_prefix_tokens(each.tokens, rest), default=None)
        if last is not None and (shared := count_common_prefix_tokens(last.tokens, rest)):
            blocks, at = [*blocks, last.block], at + shared
        self._mark_recently_used(blocks)
        return blocks, at

    def add_prompt(self, tokens: Sequence[int], table: list[int]) -> None:
        """Add the tokens of a prompt that a slot has read, with their blocks.

        If the tree has the same tokens in another block, this block takes the place of the block in `table`.

        Args:
            tokens: The tokens from the start of the prompt on.
            table: The blocks of the slot.
        """
        node, used = self._root, list[_BlockNode]()
        for i in range(0, len(tokens), BLOCK_KEYS):
            part, block = tuple(tokens[i : i + BLOCK_KEYS]), table[i // BLOCK_KEYS]
            child = node.children.get(part)
            if child is None:
                if block in self._nodes:  # the block was added with fewer tokens
                    known = self._nodes[block]
                    assert known.parent is node
                    del node.children[known.tokens]
                    known.tokens, child = part, known
                else:
                    child = self._nodes[block] = _BlockNode(block, part, node)
                    self._allocator.retain(block)
                node.children[part] = child
            elif child.block != block and len(part) == BLOCK_KEYS:
                self._allocator.retain(child.block)
                self._allocator.release(block)
                table[i // BLOCK_KEYS] = child.block
            used.append(child)
            if len(part) < BLOCK_KEYS:
                break
            node = child
        self._mark_recently_used([child.block for child in used])

    def count_evictable_blocks(self) -> int:
        """Count the blocks that evictions can free."""
        counts: dict[int, bool] = {}
        for block, node in self._nodes.items():  # children come before their parents
            is_free = self._allocator.count_references(block) == 1
            counts[block] = is_free and all(counts.get(child.block, False) for child in node.children.values())
        return sum(counts.values())

    def evict_block(self) -> bool:
        """Free the least recently used block to which only the tree refers; return False if there is none."""
        for block, node in self._nodes.items():
            if not node.children and self._allocator.count_references(block) == 1:
                self._remove(node)
                return True
        return False

    def forget_last_blocks(self, table: Sequence[int]) -> None:
        """Remove the last blocks of a slot from the tree, up to a block that another slot or a longer prompt uses.

        Args:
            table: The blocks of the slot, in the order of its tokens.
        """
        for node in [self._nodes[block] for block in reversed(table) if block in self._nodes]:
            if node.children or self._allocator.count_references(node.block) > 2:  # of the slot and of the tree
                return
            self._remove(node)

    def clear(self) -> None:
        """Forget all prompts."""
        for block in self._nodes:
            self._allocator.release(block)
        self._nodes.clear()
        self._root.children.clear()

    def _mark_recently_used(self, blocks: Sequence[int]) -> None:
        """Mark the nodes of a path as recently used. A parent comes after its children in the order of use."""
        for block in reversed(blocks):
            self._nodes.move_to_end(block)

    def _remove(self, node: _BlockNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del self._nodes[node.block]
        self._allocator.release(node.block)
