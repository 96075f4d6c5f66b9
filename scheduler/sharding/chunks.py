"""Overlap chunks: split the tokens, so that the sum of one chunk is sent while the next chunk is computed.

A sum over all devices waits for the matmul before it, and the next op waits for the sum. Each of them can be done for
some of the tokens first, because none of them mixes tokens. Then another chunk gives work during each sum:

    unsplit    matmul  SUM         next
    2 chunks   m0      m1    n0    n1
                       SUM0  SUM1

1. A chunk begins where a matmul with a weight ends in a sum.
2. It goes on through all nodes that treat each token separately.
3. The chunks are joined where a node needs all tokens.

A node computes some of its rows exactly as on a device that has only these rows. So ops declare nothing more, and the
verifier proves chunks like shards. With sequence parallelism (`rows`), each device has its shard of every chunk,
between the reduce-scatter and the all-gather of the chunk.
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
"""The numbers of chunks that are considered; the predicted time decides."""
FEWEST = 256
"""The least number of tokens of a chunk. Matmuls with fewer tokens wait for their weights, which each chunk reads
again."""


def tokens_of(laid: Assignment, factors: Factors) -> Factor | None:
    """Return the token factor of the partial sums if it is large enough for two chunks, otherwise None."""
    rows = [f for f in rows_of(laid, factors, COUNTS[0]) if f.size >= COUNTS[0] * FEWEST]
    return max(rows, key=lambda f: f.size, default=None)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The number of chunks, and the condition for sequence parallelism.

    With `required_saving_seconds`, each chunk is sharded by tokens if that saves more seconds of compute.
    """

    count: int
    saving: float | None = None


WHOLE = Chunks(1)
"""All tokens in one chunk."""


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
    """Emit the graphs of `partition_graph` in `count` chunks between two sums; None if that is impossible.

    Args:
        graph: The graph to partition.
        factors: The factors of `graph`.
        laid: The assignment of `graph`.
        shares: The shard ranges of the factors.
        tokens: The token factor.
        count: The number of chunks.
        first: The sequence number of the first collective.
        whole: Outputs that end whole on every device.
    """
    dealt = [shares.of(tokens)[d] for d in range(len(shares))] if tokens in laid.chosen else ()
    return in_chunks(shard(graph, factors, laid, shares, first=first, whole=whole), factors, tokens, count, dealt)


def in_chunks(
    sharded: Sharded, factors: Factors, tokens: Factor, count: int, dealt: Sequence[tuple[int, int]] = ()
) -> Sharded | None:
    """Split the work before and after each sum over devices into `count` chunks.

    None is the result if a device needs its shards of all chunks at once.

    Args:
        sharded: The graphs of all devices.
        factors: The factors of the unsharded graph.
        tokens: The token factor.
        count: The number of chunks.
        dealt: The first token and the end of the tokens of each device, if tokens are sharded.
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
    """The tokens in `chunk_count` chunks, and the range of each chunk on this device if chunks are sharded."""

    def __init__(self, device: int, tokens: Factor, count: int, dealt: Sequence[tuple[int, int]]) -> None:
        self.device, self.tokens, self.count, size = device, tokens, count, tokens.size
        self.bounds = [*pairwise(size * n // count for n in range(count + 1))]
        self.whole = tuple([joined([(low, high - low)]) for low, high in dealt])
        """The index ranges of all tokens on each device, as attributes of collectives."""
        self.runs = [
            tuple([joined([(at := (b - a) * low // size, (b - a) * high // size - at)]) for low, high in dealt])
            for a, b in self.bounds
        ]
        """The index ranges of each chunk on each device, from the start of the chunk."""

    def length(self, *, is_share: bool, number: int | None = None) -> int:
        """Return the number of tokens of chunk `number`, or of all; with `is_share` only the tokens of this device."""
        if is_share:
            return sum(n for _, n in (self.whole if number is None else self.runs[number])[self.device])
        return self.tokens.size if number is None else self.bounds[number][1] - self.bounds[number][0]


class _Chunks:
    """One graph during the split: for each value its chunks, the whole value, or both."""

    def __init__(self, graph: Graph, origins: Mapping[Node, Node], factors: Factors, dealt: _Dealt) -> None:
        self.graph, self.origins, self.factors, self.dealt = graph, origins, factors, dealt
        self.tokens, self.count = dealt.tokens, dealt.count
        self.numbers: Mapping[int, int] = {}
        self.axis: dict[Value, int] = {}  # of each value with tokens: the axis of the tokens
        self.shares: set[Value] = set()  # values with the tokens of this device only
        self.alone = {node for node in graph.nodes if self._treats_each_alone(node)}
        self.parted = self._parted()
        numbers = ((find_collective_number(node.op, node.attrs), node) for node in graph.nodes)
        self.meetings = {n: self.count if node in self.parted else 1 for n, node in numbers if n is not None}
        self.whole: dict[Value, Value] = {}
        self.chunks: dict[Value, list[Value]] = {}

    def is_possible(self) -> bool:
        """Return whether sharded tokens are produced in chunks exactly where they are read in chunks."""
        pairs = [(s, node in self.parted) for node in self.graph.nodes for s in node.inputs]
        pairs += [(value, False) for value in self.graph.roots()]
        return all((value.node in self.parted) == in_chunks for value, in_chunks in pairs if value in self.shares)

    def made(self, numbers: Mapping[int, int]) -> Graph:
        """Return the graph in chunks; `numbers` maps each sequence number to the number of its first chunk."""
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
        """Return whether a node treats each token separately, or converts the layout of a value with tokens.

        Such a conversion sums, scatters or gathers the tokens, or is zeros in their place. The axes of the results are
        stored.
        """
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
        """Return whether a conversion sums, scatters or gathers tokens, or is zeros in their place; store its token
        axis.
        """
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
        """Return the axis of `own` with the tokens alone, all of them or only the tokens of this device; otherwise
        None.
        """
        axes = self.factors.axes(value)
        at = next((n for n, axis in enumerate(axes) if axis == [[self.tokens]]), None)
        return at if at is not None and own.shape[at] == self.dealt.length(is_share=is_share) else None

    def _parted(self) -> set[Node]:
        """Return the nodes that are computed in chunks."""
        first, parted = self._first(), set[Node]()
        for node in self.graph.nodes:
            if node in self.alone and (node in first or any(s.node in parted for s in node.inputs)):
                parted.add(node)
        read = {s.node for node in parted for s in node.inputs}
        return parted | {node for node in read & self.alone if node.op == "slice" and node.results[0] in self.shares}

    def _first(self) -> set[Node]:
        """Return the nodes with which chunks begin: those between matmuls with weights and sums over devices."""
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
        """Return a whole node, or its chunk `number`."""
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
        """Return the attributes of a chunk that state a shape, or the tokens of each device."""
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
        """Return chunk `number` of a value; a value without tokens is read whole."""
        if value in self.chunks:
            return self.chunks[value][number]
        if value not in self.axis:
            return self.whole[value]
        low, high = self.dealt.bounds[number]
        name = value.node.name and f"{value.node.name}.chunk.{number}.part"
        return slice_(self.whole[value], axis=self.axis[value], start=low, stop=high, name=name)

    def _all_of(self, value: Value) -> Value:
        """Return a whole value; chunks are joined in pairs."""
        if value not in self.whole:
            parts = self.chunks[value]
            while len(parts) > 1:  # in pairs, for the fewest copies
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [concat(one, two, axis=self.axis[value], name=value.node.name) for one, two in pairs]
            self.whole[value] = parts[0]
        return self.whole[value]


def _run(attrs: Attrs) -> tuple[int, int] | None:
    """Return offset and length of a slice with two given bounds, otherwise None."""
    start, stop = attrs.get("start"), attrs.get("stop")
    return (start, stop - start) if isinstance(start, int) and isinstance(stop, int) else None
