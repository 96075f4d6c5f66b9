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
from ...ops.collectives import find_collective_sequence_number
from .axes import Factor
from .factors import Factors
from .partitioner import PartitionedGraphs, partition_graph
from .propagation import ShardingAssignment
from .sequence_parallel import list_row_factors_of_whole_sums
from .shard_ranges import ShardRanges, merge_adjacent_ranges

CHUNK_COUNTS = (2, 4)
"""The numbers of chunks that are considered; the predicted time decides."""
MIN_CHUNK_TOKENS = 256
"""The least number of tokens of a chunk. Matmuls with fewer tokens wait for their weights, which each chunk reads
again."""


def find_chunkable_token_factor(assignment: ShardingAssignment, factors: Factors) -> Factor | None:
    """Find the factor (shardable index) of the tokens, along which sums over devices can be cut into overlap chunks.

    The result is None if there are too few tokens for two chunks.
    """
    rows = [
        f
        for f in list_row_factors_of_whole_sums(assignment, factors, CHUNK_COUNTS[0])
        if f.size >= CHUNK_COUNTS[0] * MIN_CHUNK_TOKENS
    ]
    return max(rows, key=lambda f: f.size, default=None)


@dataclass(frozen=True, slots=True)
class OverlapChunkOptions:
    """Into how many chunks the tokens are cut, so that sending one chunk overlaps with computing the next.

    With `required_saving_seconds`, the tokens of each chunk are also sharded over the devices (sequence parallelism),
    if that saves more seconds of compute than this number.
    """

    chunk_count: int
    required_saving_seconds: float | None = None


SINGLE_CHUNK = OverlapChunkOptions(1)
"""All tokens in one chunk."""


def partition_graph_in_token_chunks(
    graph: Graph,
    factors: Factors,
    assignment: ShardingAssignment,
    shard_ranges: ShardRanges,
    token_factor: Factor,
    chunk_count: int,
    *,
    first_sequence_number: int = 0,
    replicated_outputs: Container[Value] = frozenset(),
) -> PartitionedGraphs | None:
    """Partition a graph over devices, with the nodes around each sum over devices split into chunks of tokens.

    So the sum of one chunk overlaps with the compute of the next.

    Args:
        graph: The graph to partition.
        factors: The factors of `graph`.
        assignment: The layouts of all values.
        shard_ranges: The shard ranges of the factors.
        token_factor: The factor that stands for tokens.
        chunk_count: The number of chunks.
        first_sequence_number: The sequence number of the first collective.
        replicated_outputs: Outputs that end whole on every device.

    Returns:
        The graphs of all devices, or None if a node needs all tokens of a device at once.
    """
    token_ranges = (
        [shard_ranges.ranges_of(token_factor)[d] for d in range(len(shard_ranges))]
        if token_factor in assignment.sharded_factors
        else ()
    )
    return split_graphs_into_token_chunks(
        partition_graph(
            graph,
            factors,
            assignment,
            shard_ranges,
            first_sequence_number=first_sequence_number,
            replicated_outputs=replicated_outputs,
        ),
        factors,
        token_factor,
        chunk_count,
        token_ranges,
    )


def split_graphs_into_token_chunks(
    partitioned_graphs: PartitionedGraphs,
    factors: Factors,
    token_factor: Factor,
    chunk_count: int,
    token_ranges: Sequence[tuple[int, int]] = (),
) -> PartitionedGraphs | None:
    """Split the nodes around each sum over devices into chunks of tokens, so that collectives overlap with compute.

    Returns None if a node needs the tokens of all chunks of a device together.

    Args:
        partitioned_graphs: The graphs of all devices.
        factors: The factors of the unsharded graph.
        token_factor: The factor that stands for tokens.
        chunk_count: The number of chunks.
        token_ranges: The pair (first token, end) of each device, if the tokens are sharded.
    """
    parts: dict[Graph, _ChunkedGraph] = {}
    for device, (graph, origins) in enumerate(
        zip(partitioned_graphs.graphs, partitioned_graphs.source_nodes, strict=True)
    ):
        if graph not in parts:
            parts[graph] = _ChunkedGraph(
                graph, origins, factors, _ChunkTokenRanges(device, token_factor, chunk_count, token_ranges)
            )
    if not all(own.can_be_chunked() for own in parts.values()):
        return None
    collective_counts = {
        number: own.collective_counts[number] for own in parts.values() for number in own.collective_counts
    }
    starts = accumulate(
        (collective_counts[number] for number in sorted(collective_counts)), initial=min(collective_counts, default=0)
    )
    numbers = dict(zip(sorted(collective_counts), starts, strict=False))
    chunked_graphs = {graph: own.build_chunked_graph(numbers) for graph, own in parts.items()}
    return replace(partitioned_graphs, graphs=tuple(chunked_graphs[graph] for graph in partitioned_graphs.graphs))


class _ChunkTokenRanges:
    """The range of tokens in each chunk; if tokens are sharded, also the range of each device in each chunk.

    `chunk_bounds` has the pair (first token, end) of each chunk.
    """

    def __init__(
        self, device: int, token_factor: Factor, chunk_count: int, token_ranges: Sequence[tuple[int, int]]
    ) -> None:
        self.device, self.token_factor, self.chunk_count, size = device, token_factor, chunk_count, token_factor.size
        self.chunk_bounds = [*pairwise(size * n // chunk_count for n in range(chunk_count + 1))]
        self.ranges_by_device = tuple([merge_adjacent_ranges([(low, high - low)]) for low, high in token_ranges])
        """The index ranges of all tokens on each device, as attributes of collectives."""
        self.chunk_ranges_by_device = [
            tuple(
                [
                    merge_adjacent_ranges([(at := (b - a) * low // size, (b - a) * high // size - at)])
                    for low, high in token_ranges
                ]
            )
            for a, b in self.chunk_bounds
        ]
        """The index ranges of each chunk on each device, from the start of the chunk."""

    def count_tokens(self, *, is_sharded: bool, chunk_number: int | None = None) -> int:
        """Count the tokens of one chunk, or of all chunks.

        Args:
            is_sharded: Whether to count only the tokens of this device.
            chunk_number: The number of the chunk; None for all tokens.
        """
        if is_sharded:
            return sum(
                n
                for _, n in (
                    self.ranges_by_device if chunk_number is None else self.chunk_ranges_by_device[chunk_number]
                )[self.device]
            )
        return (
            self.token_factor.size
            if chunk_number is None
            else self.chunk_bounds[chunk_number][1] - self.chunk_bounds[chunk_number][0]
        )


class _ChunkedGraph:
    """A device graph while it is split into token chunks; each value is present whole, in chunks, or both."""

    def __init__(
        self, graph: Graph, source_nodes: Mapping[Node, Node], factors: Factors, token_ranges: _ChunkTokenRanges
    ) -> None:
        self.graph, self.origins, self.factors, self.token_ranges = graph, source_nodes, factors, token_ranges
        self.token_factor, self.chunk_count = token_ranges.token_factor, token_ranges.chunk_count
        self.sequence_numbers: Mapping[int, int] = {}
        self.token_axes: dict[Value, int] = {}  # of each value with tokens: the axis of the tokens
        self.sharded_values: set[Value] = set()  # values with the tokens of this device only
        self.per_token_nodes = {node for node in graph.nodes if self._is_per_token(node)}
        self.chunked_nodes = self._find_chunked_nodes()
        numbers = ((find_collective_sequence_number(node.op, node.attrs), node) for node in graph.nodes)
        self.collective_counts = {
            n: self.chunk_count if node in self.chunked_nodes else 1 for n, node in numbers if n is not None
        }
        self.whole_values: dict[Value, Value] = {}
        self.chunk_values: dict[Value, list[Value]] = {}

    def can_be_chunked(self) -> bool:
        """Return whether the graph can be split into token chunks.

        Each value with sharded tokens must be computed and read in the same way, either in chunks or whole. Otherwise
        the reader would get other tokens: a device's shards of all chunks are not its shard of all tokens.
        """
        pairs = [(s, node in self.chunked_nodes) for node in self.graph.nodes for s in node.inputs]
        pairs += [(value, False) for value in self.graph.roots()]
        return all(
            (value.node in self.chunked_nodes) == in_chunks
            for value, in_chunks in pairs
            if value in self.sharded_values
        )

    def build_chunked_graph(self, first_chunk_numbers: Mapping[int, int]) -> Graph:
        """Build the graph in which token chunks replace whole values.

        Args:
            first_chunk_numbers: For each sequence number of the unsplit graph the sequence number of its first chunk.
        """
        self.sequence_numbers = first_chunk_numbers
        for node in self.graph.nodes:
            if node in self.chunked_nodes:
                chunk_nodes = [self._build_whole_or_chunk_node(node, n) for n in range(self.chunk_count)]
                for value, *its in zip(node.results, *(one.results for one in chunk_nodes), strict=True):
                    self.chunk_values[value] = its
            else:
                self.whole_values |= zip(node.results, self._build_whole_or_chunk_node(node).results, strict=True)
        outputs = {name: self._join_chunks(value) for name, value in self.graph.outputs.items()}
        return Graph(
            outputs, {self._join_chunks(old): self._join_chunks(new) for old, new in self.graph.updates.items()}
        )

    def _is_per_token(self, node: Node) -> bool:
        """Return whether a node computes each token separately, so that it can be computed in token chunks.

        A collective that sums, scatters or gathers the tokens counts too, and so do zeros in place of a partial sum.
        The token axes of the results are stored.
        """
        if node not in self.origins and node.inputs and node.inputs[0] in self.token_axes:
            return self._is_chunkable_conversion(node, node.inputs[0])
        if node.is_leaf or (origin := self.origins.get(node)) is None:
            return False
        uses = self.factors.find_factor_roles(origin)
        if (
            self.token_factor in uses.coupled_factors | uses.contracted_factors
            or self.token_factor is uses.indexed_factor
        ):
            return False
        pairs = [*zip(origin.results, node.results, strict=True), *zip(origin.src, node.src, strict=True)]
        having = {
            own: v
            for v, own in pairs
            if v is not None and own is not None and self.token_factor in self.factors.factors_of(v)
        }
        is_sharded = any(own in self.sharded_values for own in having)
        if any((source in self.sharded_values) != is_sharded for source in node.inputs if source in having):
            return False
        axes = {own: self._find_token_axis(v, own, is_sharded) for own, v in having.items()}
        if None in axes.values() or not axes.keys() >= {*node.results}:
            return False
        self.token_axes |= {own: axis for own, axis in axes.items() if axis is not None}
        self.sharded_values |= {*node.results} if is_sharded else set()
        return True

    def _is_chunkable_conversion(self, node: Node, token_value: Value) -> bool:
        """Return whether a layout conversion can be split into token chunks.

        It sums, scatters or gathers the tokens of `token_value`, or fills zeros in place of a partial sum. The token
        axis of its result is stored.
        """
        axis, is_sharded = self.token_axes[token_value], token_value in self.sharded_values
        runs = self.token_ranges.ranges_by_device
        local_range = next(iter(runs[self.token_ranges.device]), (0, 0)) if runs else None
        deals = {
            "reduce_scatter": (axis, runs) == (node.attrs.get("axis"), node.attrs.get("runs")),
            "slice": (axis, local_range) == (node.attrs.get("axis"), _find_static_slice_start_and_length(node.attrs)),
        }
        gathers = node.op == "all_gather" and is_sharded and axis == node.attrs["axis"]
        if gathers or node.op in ("all_reduce", "fill") or (not is_sharded and deals.get(node.op)):
            self.token_axes[node.results[0]] = axis
            if node.op in deals or (is_sharded and not gathers):
                self.sharded_values.add(node.results[0])
            return True
        return False

    def _find_token_axis(self, value: Value, local_value: Value, is_sharded: bool) -> int | None:
        """Find the number of the axis of `local_value` that stands for the tokens and nothing else.

        The result is None if an axis combines tokens with another index, or has only a part of the tokens.

        Args:
            value: The value of the unsharded graph.
            local_value: The value on the device.
            is_sharded: Whether the device has only its shard of the tokens.
        """
        axes = self.factors.axes_of(value)
        at = next((n for n, axis in enumerate(axes) if axis == [[self.token_factor]]), None)
        return (
            at
            if at is not None and local_value.shape[at] == self.token_ranges.count_tokens(is_sharded=is_sharded)
            else None
        )

    def _find_chunked_nodes(self) -> set[Node]:
        """Find the nodes to compute in token chunks: those before a sum over devices, and readers of chunks.

        A reader must treat each token separately. Slices of sharded tokens that chunked nodes read are included.
        """
        first, parted = self._find_nodes_where_chunks_begin(), set[Node]()
        for node in self.graph.nodes:
            if node in self.per_token_nodes and (node in first or any(s.node in parted for s in node.inputs)):
                parted.add(node)
        read = {s.node for node in parted for s in node.inputs}
        return parted | {
            node
            for node in read & self.per_token_nodes
            if node.op == "slice" and node.results[0] in self.sharded_values
        }

    def _find_nodes_where_chunks_begin(self) -> set[Node]:
        """Find the nodes at which chunks begin: from each sum over devices back to the weight matmuls before it."""
        found: set[Node] = set()
        sums = ("all_reduce", "reduce_scatter")
        stack = [n.inputs[0].node for n in self.graph.nodes if n.op in sums and n in self.per_token_nodes]
        while stack:
            if (node := stack.pop()) in self.per_token_nodes and node not in found:
                found.add(node)
                if not any(s.node.op == "weight" for s in node.inputs):
                    stack += [s.node for s in node.inputs]
        return found

    def _build_whole_or_chunk_node(self, node: Node, chunk_number: int | None = None) -> Node:
        """Build the copy of a node for all tokens, or for one chunk; its operands are whole or chunks in the same way.

        Args:
            node: The node of the unsplit graph.
            chunk_number: The number of the chunk; None for all tokens.
        """
        src = [
            None
            if s is None
            else self._join_chunks(s)
            if chunk_number is None
            else self._find_or_slice_chunk(s, chunk_number)
            for s in node.src
        ]
        attrs, name = dict(node.attrs), node.name
        if (sequence := find_collective_sequence_number(node.op, node.attrs)) is not None:
            attrs["sequence"] = self.sequence_numbers[sequence] + (chunk_number or 0)
        if chunk_number is not None:
            attrs |= self._localise_attributes_to_chunk(node, chunk_number)
            kind = ".zero" if node.op == "fill" and node not in self.origins else ""
            name = name and f"{name.removesuffix(kind)}.chunk.{chunk_number}{kind}"
        if attrs == node.attrs and src == [*node.src]:
            return node
        return op_of(node).build_node(src, attrs, name)

    def _localise_attributes_to_chunk(self, node: Node, chunk_number: int) -> Mapping[str, Attr]:
        """Return the attributes of a node that depend on the token count, such as shapes and ranges, for one chunk."""
        result, runs = node.results[0], self.token_ranges.chunk_ranges_by_device[chunk_number]
        if node.op in ("reduce_scatter", "all_gather"):
            return {"runs": runs}
        if node not in self.origins and node.op == "slice":
            start, size = next(iter(runs[self.token_ranges.device]), (0, 0))
            return {"start": start, "stop": start + size}
        localise, axis = op_of(node).localise, self.token_axes[result]
        size = self.token_ranges.count_tokens(is_sharded=result in self.sharded_values, chunk_number=chunk_number)
        shape = (*result.shape[:axis], size, *result.shape[axis + 1 :])
        return {} if localise is None else localise(node.attrs, shape, lambda _, n: n)

    def _find_or_slice_chunk(self, value: Value, chunk_number: int) -> Value:
        """Return one token chunk of a value: the computed chunk, or else a slice of the whole value.

        A value without tokens is returned whole.
        """
        if value in self.chunk_values:
            return self.chunk_values[value][chunk_number]
        if value not in self.token_axes:
            return self.whole_values[value]
        low, high = self.token_ranges.chunk_bounds[chunk_number]
        name = value.node.name and f"{value.node.name}.chunk.{chunk_number}.part"
        return slice_(self.whole_values[value], axis=self.token_axes[value], start=low, stop=high, name=name)

    def _join_chunks(self, value: Value) -> Value:
        """Return a whole value: the computed one, or else its token chunks, concatenated in pairs."""
        if value not in self.whole_values:
            parts = self.chunk_values[value]
            while len(parts) > 1:  # in pairs, for the fewest copies
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [concat(one, two, axis=self.token_axes[value], name=value.node.name) for one, two in pairs]
            self.whole_values[value] = parts[0]
        return self.whole_values[value]


def _find_static_slice_start_and_length(attrs: Attrs) -> tuple[int, int] | None:
    """Find the range of a slice as the pair (first entry, length); None if a bound is known only at run time."""
    start, stop = attrs.get("start"), attrs.get("stop")
    return (start, stop - start) if isinstance(start, int) and isinstance(stop, int) else None
