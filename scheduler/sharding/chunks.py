"""Tokens in chunks: the sum of one is on its way while the next one is computed.

A sum over all devices waits for the product before it, and what follows waits for the sum.  None of them mixes tokens,
so each can be done for some tokens first.  Then there is always work beside a sum: the product of the next chunk, or
what follows the sum of the one before.  A chunk begins where a product with a weight ends in a sum, and goes on through
everything that treats each token alone, up to what needs all of them; there chunks are put together again.

    whole    product  SUM        next
    chunks   p0       p1   n0    n1        products and what follows
                      SUM0 SUM1            beside them

Computing one node for some of its rows is what a device does that has only these, so nothing else is to be known of
ops, and the verifier proves it as it proves shares.

Where the rows of sums are dealt (`rows`), it is each chunk that is dealt: a device has its share of every chunk,
between the reduce-scatter of a chunk and its all-gather.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...graph.attrs import Attr, Attrs
from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import concat, op_of, slice_
from ...ops.collectives import find_collective_number
from .assign import Assignment
from .axes import Factor
from .emit import Sharded, shard
from .factors import Factors
from .rows import rows_of
from .shares import Shares, joined

COUNTS = (2, 4)
"""Into how many chunks tokens are cut, if the clock says that it pays."""
FEWEST = 256
"""Tokens of a chunk: with fewer, products wait for their weights, which each chunk reads again."""


def tokens_of(laid: Assignment, factors: Factors) -> Factor | None:
    """What the tokens are of sums over devices, if they are enough for two chunks."""
    rows = [f for f in rows_of(laid, factors, COUNTS[0]) if f.size >= COUNTS[0] * FEWEST]
    return max(rows, key=lambda f: f.size, default=None)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Into how many chunks tokens go; and if each is to be dealt to the devices, more than how many seconds of their
    own work that has to save."""

    count: int
    saving: float | None = None


WHOLE = Chunks(1)


def laid_in_chunks(
    graph: Graph,
    factors: Factors,
    laid: Assignment,
    shares: Shares,
    tokens: Factor,
    count: int,
    *,
    first: int = 0,
    whole: Container[Value] = frozenset(),
) -> Sharded | None:
    """What `shard` emits, in so many chunks from sum to sum."""
    dealt = [shares.of(tokens)[d] for d in range(len(shares))] if tokens in laid.chosen else ()
    return in_chunks(shard(graph, factors, laid, shares, first=first, whole=whole), factors, tokens, count, dealt)


def in_chunks(
    sharded: Sharded, factors: Factors, tokens: Factor, count: int, dealt: Sequence[tuple[int, int]] = ()
) -> Sharded | None:
    """Graphs that do in so many chunks what these do, up to each sum over devices and behind it; None where one of them
    needs together what it has of all chunks.  Where tokens are `dealt`, device d has those from one place to another.
    """
    parts: dict[Graph, _Chunks] = {}
    for device, (graph, origins) in enumerate(zip(sharded.graphs, sharded.origins, strict=True)):
        if graph not in parts:
            parts[graph] = _Chunks(graph, origins, factors, _Dealt(device, tokens, count, dealt))
    if not all(own.is_possible() for own in parts.values()):
        return None
    met = {number: own.meetings[number] for own in parts.values() for number in own.meetings}
    starts = accumulate((met[number] for number in sorted(met)), initial=min(met, default=0))
    numbers = dict(zip(sorted(met), starts, strict=False))
    made = {graph: own.made(numbers) for graph, own in parts.items()}
    return replace(sharded, graphs=tuple(made[graph] for graph in sharded.graphs))


class _Dealt:
    """Tokens in so many chunks, and which of them a device has where each chunk is dealt."""

    def __init__(self, device: int, tokens: Factor, count: int, dealt: Sequence[tuple[int, int]]) -> None:
        self.device, self.tokens, self.count, size = device, tokens, count, tokens.size
        self.bounds = [*pairwise(size * n // count for n in range(count + 1))]
        self.whole = tuple([joined([(low, high - low)]) for low, high in dealt])
        """What each device has of all tokens, as collectives say it."""
        self.runs = [
            tuple([joined([(at := (b - a) * low // size, (b - a) * high // size - at)]) for low, high in dealt])
            for a, b in self.bounds
        ]
        """The same of each chunk."""

    def length(self, *, is_share: bool, number: int | None = None) -> int:
        """How many tokens there are, or the device has of them; of a chunk or of all."""
        if is_share:
            return sum(n for _, n in (self.whole if number is None else self.runs[number])[self.device])
        return self.tokens.size if number is None else self.bounds[number][1] - self.bounds[number][0]


class _Chunks:
    """One graph on its way: of each of its values all of it, its chunks, or both."""

    def __init__(self, graph: Graph, origins: Mapping[Node, Node], factors: Factors, dealt: _Dealt) -> None:
        self.graph, self.origins, self.factors, self.dealt = graph, origins, factors, dealt
        self.tokens, self.count = dealt.tokens, dealt.count
        self.numbers: Mapping[int, int] = {}
        self.axis: dict[Value, int] = {}  # along which tokens lie
        self.shares: set[Value] = set()  # those with the device's tokens alone
        self.alone = {node for node in graph.nodes if self._treats_each_alone(node)}
        self.parted = self._parted()
        numbers = ((find_collective_number(node.op, node.attrs), node) for node in graph.nodes)
        self.meetings = {n: self.count if node in self.parted else 1 for n, node in numbers if n is not None}
        self.whole: dict[Value, Value] = {}
        self.chunks: dict[Value, list[Value]] = {}

    def is_possible(self) -> bool:
        """Whether a share of the tokens is made in chunks where it is read so, and nowhere else."""
        pairs = [(s, node in self.parted) for node in self.graph.nodes for s in node.inputs]
        pairs += [(value, False) for value in self.graph.roots()]
        return all((value.node in self.parted) == in_chunks for value, in_chunks in pairs if value in self.shares)

    def made(self, numbers: Mapping[int, int]) -> Graph:
        """The graph, where the meeting that had a number has, or begins with, what `numbers` gives for it."""
        self.numbers = numbers
        for node in self.graph.nodes:
            if node in self.parted:
                made = [self._node(node, n) for n in range(self.count)]
                for value, *its in zip(node.results, *(one.results for one in made), strict=True):
                    self.chunks[value] = its
            else:
                self.whole |= zip(node.results, self._node(node).results, strict=True)
        outputs = {name: self._all_of(value) for name, value in self.graph.outputs.items()}
        return Graph(outputs, {self._all_of(old): self._all_of(new) for old, new in self.graph.updates.items()})

    def _treats_each_alone(self, node: Node) -> bool:
        """Whether a node does the same for each token, or sums that over devices, or is zeros in place of it; or deals
        the tokens, or puts them together."""
        if node not in self.origins and node.inputs and node.inputs[0] in self.axis:
            return self._converts(node, node.inputs[0])
        if node.is_leaf or (origin := self.origins.get(node)) is None:
            return False
        uses = self.factors.uses(origin)
        if self.tokens in uses.coupled | uses.contracted or self.tokens is uses.looked_up:
            return False
        pairs = [*zip(origin.results, node.results, strict=True), *zip(origin.src, node.src, strict=True)]
        having = {own: v for v, own in pairs if v is not None and own is not None and self.tokens in self.factors.of(v)}
        is_share = any(own in self.shares for own in having)
        if any((source in self.shares) != is_share for source in node.inputs if source in having):
            return False
        axes = {own: self._along(v, own, is_share) for own, v in having.items()}
        if None in axes.values() or not axes.keys() >= {*node.results}:
            return False
        self.axis |= {own: axis for own, axis in axes.items() if axis is not None}
        self.shares |= {*node.results} if is_share else set()
        return True

    def _converts(self, node: Node, source: Value) -> bool:
        """Whether a conversion sums, deals or gathers tokens, or is zeros in place of them."""
        axis, is_share, runs = self.axis[source], source in self.shares, self.dealt.whole
        kept = next(iter(runs[self.dealt.device]), (0, 0)) if runs else None
        deals = {
            "reduce_scatter": (axis, runs) == (node.attrs.get("axis"), node.attrs.get("runs")),
            "slice": (axis, kept) == (node.attrs.get("axis"), _run(node.attrs)),
        }
        gathers = node.op == "all_gather" and is_share and axis == node.attrs["axis"]
        if gathers or node.op in ("all_reduce", "fill") or (not is_share and deals.get(node.op)):
            self.axis[node.results[0]] = axis
            if node.op in deals or (is_share and not gathers):
                self.shares.add(node.results[0])
            return True
        return False

    def _along(self, value: Value, own: Value, is_share: bool) -> int | None:
        """The axis of a value that is the tokens and nothing else, of which the device has all, or its share."""
        axes = self.factors.axes(value)
        at = next((n for n, axis in enumerate(axes) if axis == [[self.tokens]]), None)
        return at if at is not None and own.shape[at] == self.dealt.length(is_share=is_share) else None

    def _parted(self) -> set[Node]:
        """Nodes that are done in chunks."""
        first, parted = self._first(), set[Node]()
        for node in self.graph.nodes:
            if node in self.alone and (node in first or any(s.node in parted for s in node.inputs)):
                parted.add(node)
        read = {s.node for node in parted for s in node.inputs}
        return parted | {node for node in read & self.alone if node.op == "slice" and node.results[0] in self.shares}

    def _first(self) -> set[Node]:
        """Nodes with which chunks begin: from products with weights to sums over devices."""
        found: set[Node] = set()
        sums = ("all_reduce", "reduce_scatter")
        stack = [n.inputs[0].node for n in self.graph.nodes if n.op in sums and n in self.alone]
        while stack:
            if (node := stack.pop()) in self.alone and node not in found:
                found.add(node)
                if not any(s.node.op == "weight" for s in node.inputs):
                    stack += [s.node for s in node.inputs]
        return found

    def _node(self, node: Node, number: int | None = None) -> Node:
        """All of a node, or its chunk of that number."""
        src = [None if s is None else self._all_of(s) if number is None else self._chunk(s, number) for s in node.src]
        attrs, name = dict(node.attrs), node.name
        if (sequence := find_collective_number(node.op, node.attrs)) is not None:
            attrs["sequence"] = self.numbers[sequence] + (number or 0)
        if number is not None:
            attrs |= self._local(node, number)
            kind = ".zero" if node.op == "fill" and node not in self.origins else ""
            name = name and f"{name.removesuffix(kind)}.chunk.{number}{kind}"
        if attrs == node.attrs and src == [*node.src]:
            return node
        return op_of(node).build_node(src, attrs, name)

    def _local(self, node: Node, number: int) -> Mapping[str, Attr]:
        """Attributes that say a shape, or which tokens the devices have."""
        result, runs = node.results[0], self.dealt.runs[number]
        if node.op in ("reduce_scatter", "all_gather"):
            return {"runs": runs}
        if node not in self.origins and node.op == "slice":
            start, size = next(iter(runs[self.dealt.device]), (0, 0))
            return {"start": start, "stop": start + size}
        localise, axis = op_of(node).localise, self.axis[result]
        size = self.dealt.length(is_share=result in self.shares, number=number)
        shape = (*result.shape[:axis], size, *result.shape[axis + 1 :])
        return {} if localise is None else localise(node.attrs, shape, lambda _, n: n)

    def _chunk(self, value: Value, number: int) -> Value:
        """A chunk of a value; one that has no tokens is read whole."""
        if value in self.chunks:
            return self.chunks[value][number]
        if value not in self.axis:
            return self.whole[value]
        low, high = self.dealt.bounds[number]
        name = value.node.name and f"{value.node.name}.chunk.{number}.part"
        return slice_(self.whole[value], axis=self.axis[value], start=low, stop=high, name=name)

    def _all_of(self, value: Value) -> Value:
        if value not in self.whole:
            parts = self.chunks[value]
            while len(parts) > 1:  # in pairs, so that nothing is copied more often than it has to be
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [concat(one, two, axis=self.axis[value], name=value.node.name) for one, two in pairs]
            self.whole[value] = parts[0]
        return self.whole[value]


def _run(attrs: Attrs) -> tuple[int, int] | None:
    """Offset and length of a slice that says both."""
    start, stop = attrs.get("start"), attrs.get("stop")
    return (start, stop - start) if isinstance(start, int) and isinstance(stop, int) else None
