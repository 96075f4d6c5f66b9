"""Plans of graphs that repeat themselves, made from a short graph that has few of the runs.

The devices' shares come again after some runs, so that what a device does in a run is one of a few kinds of steps.
Each kind is laid out, emitted and lowered once, and proven once (`verifier.repeating`); the lanes of the long graph
are made of those of the short one when somebody looks at them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ...backends.abilities import can_group_overlap
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, RepeatedRuns, ShortenedGraph, shorten_graph, split_numbered_name
from ...ops import op_of
from ..layout import Layout
from ..lowering.lane import Devices, Lane, lanes_from, lanes_of
from ..lowering.unfold import kinds_of_steps
from ..machines.hardware import Hardware
from ..plan import ShardedFactors
from ..sharding.assign import ShardingAssignment
from ..sharding.axes import Factor
from ..sharding.chunks import OverlapChunks, find_token_factor, partition_in_chunks
from ..sharding.emit import PartitionedGraphs, partition_graph
from ..sharding.factors import Factors
from ..sharding.pins import NO_PINS, find_unsupported
from ..sharding.rows import SequenceParallelOptions
from ..sharding.search import assign_shard_ranges, factors_from_description
from ..sharding.shares import ShardRanges

WORTH = 2_000
"""Nodes of all devices that a short graph has to save: making and proving so many takes a second or two."""
KINDS, UNEVEN = (1, 2, 4, 8), 0.02
"""Of how many kinds runs may be: as few as give each device what it is to have up to this part of it, or the most."""


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """What a plan has of a graph that repeats itself: lanes, and how leaves and outputs lie on them.

    Where sums over devices have enough tokens, ``in_chunks(chunks)`` is the same with them in chunks, or None if that
    cannot be repeated.
    """

    lanes: tuple[Lane, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    in_chunks: Callable[[OverlapChunks], Repeated | None] | None = None


def repeated(
    graph: Graph,
    repeats: RepeatedRuns | None,
    group: Devices,
    cuts: ShardedFactors,
    proportions: Sequence[float],
    hardware: Hardware,
    lies: Mapping[str, Layout] | None = None,
) -> Repeated | None:
    """`graph` with these runs, cut over the devices as `cuts` says, by every leaf that has a factor, where weights and
    states that lie already stay so; None where a short graph saves too little, or devices do not do the same in all
    runs."""
    kept = {} if lies is None else {v.node.name: lies.get(v.node.name) for v in (*graph.weights, *graph.states)}
    if repeats is None or repeats.count * repeats.length * len(group) < WORTH:
        return None
    for runs in (repeats, repeats.drop_first()):  # before the first, nothing may have been summed yet
        once = shorten_graph(graph, runs, 1)
        if once is None or (own := _shortened(once, cuts)) is None:
            continue
        first = _Cut(once, group, hardware, cuts, proportions, own)
        cut = first.of_kinds(min(_kinds_needed(first), runs.count - 1))
        made = None if cut is None else _laid_out(cut)
        if made is not None and all(made.leaves[name] == layout for name, layout in kept.items()):
            return made
    return None


class _Cut:
    """A short graph, and what is cut of it for so many devices."""

    def __init__(
        self,
        of: ShortenedGraph,
        group: Devices,
        hardware: Hardware,
        cuts: ShardedFactors,
        proportions: Sequence[float],
        own: ShardedFactors,
    ) -> None:
        self.of, self.group, self.hardware = of, group, hardware
        self.cuts, self.proportions, self.own = cuts, proportions, own
        self.factors = Factors(of.short_graph)
        self.chosen = factors_from_description(of.short_graph, self.factors, own)

    @cached_property
    def shares(self) -> ShardRanges:
        return assign_shard_ranges(self.of.short_graph, self.factors, self.own, self.proportions)

    def of_kinds(self, times: int) -> _Cut | None:
        """The same with so many kinds of runs."""
        return (
            self
            if times == self.of.short_count
            else self._over(shorten_graph(self.of.deep_graph, self.of.deep_repetitions, times))
        )

    def _over(self, of: ShortenedGraph | None) -> _Cut | None:
        """The same cuts of another short graph."""
        own = None if of is None else _shortened(of, self.cuts)
        if of is None or own is None:
            return None
        return _Cut(of, self.group, self.hardware, self.cuts, self.proportions, own)

    @property
    def kinds(self) -> int:
        """How many kinds of devices there are, by their shares."""
        shares = (self.shares.ranges_of(factor) for factor in self.chosen)
        return len({*zip(*([high - low for low, high in share] for share in shares), strict=True)}) or 1

    @cached_property
    def laying(self) -> SequenceParallelOptions:
        return SequenceParallelOptions(
            self.of.short_graph, self.factors, self.chosen, NO_PINS, len(self.group), self.hardware
        )

    @property
    def plain(self) -> ShardingAssignment:
        return self.laying.replicated_assignment

    def emitted(self, laid: ShardingAssignment) -> PartitionedGraphs:
        return partition_graph(self.of.short_graph, self.factors, laid, self.shares)

    def repeated(self, sharded: PartitionedGraphs) -> Repeated | None:
        """The long graph; None if devices cannot run the short one, or its runs cannot be repeated."""
        of = self.of
        if find_unsupported(sharded.graphs, sharded.source_nodes, self.group):
            return None
        lanes = lanes_of(sharded.graphs, self.group, of)
        if not all(_is_repeatable(lane, of) for lane in {id(lane.program): lane for lane in lanes}.values()):
            return None
        leaves = {
            of.name_in_repetition(name, run, kind): layout
            for run, kind in of.repetitions_with_kind
            for name, layout in sharded.leaves.items()
            if of.kind_of_name(name) == kind
        }
        return Repeated(lanes_from(lanes, of), leaves, sharded.outputs)

    def in_chunks(self, chunks: OverlapChunks) -> Repeated | None:
        """The same with sums over devices in chunks of tokens.  The last run is as those behind it: there sums may be
        of a few tokens only.  Before the first nothing may have been dealt yet."""
        inner = self.of.deep_repetitions.drop_last()
        for runs in (inner, inner.drop_first()):
            cut = (
                self._over(shorten_graph(self.of.deep_graph, runs, self.of.short_count))
                if runs.count >= self.of.short_count
                else None
            )
            if cut is None or (tokens := find_token_factor(cut.plain, cut.factors)) is None:
                return None
            laid: ShardingAssignment | None = cut.plain
            if chunks.required_saving_seconds is not None:
                part = len(cut.of.short_graph.nodes) / len(cut.of.deep_graph.nodes)
                laid = cut.laying.shard_if_saving(tokens, chunks.required_saving_seconds * part)
            if laid is None:
                return None
            if _carries_alike(cut.of, laid):
                sharded = partition_in_chunks(
                    cut.of.short_graph, cut.factors, laid, cut.shares, tokens, chunks.chunk_count
                )
                return None if sharded is None else cut.repeated(sharded)
        return None


def _laid_out(cut: _Cut) -> Repeated | None:
    """The plan of the short graph, and what follows from it for the long one."""
    of, group = cut.of, cut.group
    if (of.deep_repetitions.count - of.short_count) * of.deep_repetitions.length * cut.kinds < WORTH:
        return None
    laid = cut.laying.choose_fastest()
    made = cut.repeated(cut.emitted(laid)) if _carries_alike(of, laid) else None
    if made is None or not can_group_overlap(group) or find_token_factor(cut.plain, cut.factors) is None:
        return made
    return replace(made, in_chunks=cut.in_chunks)


def _shortened(of: ShortenedGraph, cuts: ShardedFactors) -> ShardedFactors | None:
    """What is cut of the short graph; None if runs are not cut alike."""
    number = {node.name: at for at, node in enumerate(of.deep_nodes) if node.is_leaf}
    by_run: dict[int, set[tuple[str, int, int, int]]] = defaultdict(set)
    for name, axis, segment, factor in cuts:
        run = of.deep_repetitions.repetition_of(number[name])
        kind = run if run == PREAMBLE else of.short_count if run == of.deep_repetitions.count else 0
        by_run[run].add((str(number[name] - (run - kind) * of.deep_repetitions.length), axis, segment, factor))
    inner = by_run[0]
    if any(by_run[run] != inner for run in range(of.deep_repetitions.count)):
        return None
    again = [
        (str(int(name) + kind * of.deep_repetitions.length), axis, segment, factor)
        for kind in range(of.short_count)
        for name, axis, segment, factor in inner
    ]
    return frozenset([*by_run[PREAMBLE], *by_run[of.deep_repetitions.count], *again])


def _kinds_needed(once: _Cut) -> int:
    """Of how many kinds runs are to be, so that rounding evens out over them."""
    inner = frozenset(cut for cut in once.own if once.of.kind_of_name(cut[0]) == 0)
    sizes = [factor.size for factor in factors_from_description(once.of.short_graph, once.factors, inner)]
    shares = ShardRanges(once.proportions)
    dealt: dict[int, list[int]] = {size: [0] * len(once.proportions) for size in sizes}
    for times in range(1, KINDS[-1] + 1):
        for size in sizes:
            dealt[size] = [
                n + high - low for n, (low, high) in zip(dealt[size], shares.ranges_of(Factor(size)), strict=True)
            ]
        wanted = {size: [times * sizes.count(size) * size * p for p in shares.proportions] for size in sizes}
        pairs = (pair for size in sizes for pair in zip(dealt[size], wanted[size], strict=True))
        if times in KINDS and all(abs(has - ideal) <= UNEVEN * ideal for has, ideal in pairs):
            return times
    return KINDS[-1]


def _carries_alike(of: ShortenedGraph, laid: ShardingAssignment) -> bool:
    """Whether what runs carry is in the same state on the devices before all runs, and behind each."""
    firsts = [of.short_repetitions.first_node_of(run) for run in range(PREAMBLE, of.short_count)]
    carried = [[of.short_nodes[first + place] for first in firsts] for place in of.deep_repetitions.carried_positions]
    return all(
        len({tuple(map(laid.produced_layouts.__getitem__, node.results)) for node in nodes}) == 1 for nodes in carried
    )


def _is_repeatable(lane: Lane, of: ShortenedGraph) -> bool:
    """Whether runs of the steps of a device may follow each other in any order: each kind comes by itself and in turn,
    what it reads of the one before lies in the same place in all, and nothing is done for all runs at the end."""
    kinds = kinds_of_steps(lane.graph, lane.program, of)
    copies = any(
        i.index < 0 and at not in lane.program.save_positions for at, i in enumerate(lane.program.instructions)
    )
    if kinds != sorted(kinds) or {*kinds} != {*range(PREAMBLE, of.short_count + 1)} or copies:
        return False
    if lane.graph.outputs.keys() != of.short_graph.outputs.keys():
        return False
    lies = {lane.graph.nodes[i.index]: i.dst for i in lane.program.instructions if i.index >= 0}
    places: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    run_of = of.kind_by_node(lane.graph)
    for base in _read_later(lane.graph, run_of):
        if base.node in lies:
            number, ending = split_numbered_name(base.node.name)
            place = number - of.short_repetitions.first_node_of(run_of[base.node])
            places[place, ending, base.index].add(lies[base.node][base.index].offset)
    return all(len(found) == 1 for found in places.values())


def _read_later(graph: Graph, run_of: Mapping[Node, int]) -> Iterator[Value]:
    """Values that a run reads of the one before it, each as what has its memory."""
    for node in graph.nodes:
        for source in node.inputs:
            base = _base(source)
            if run_of[base.node] == run_of[node] - 1:
                yield base


def _base(value: Value) -> Value:
    node: Node = value.node
    while not node.is_leaf and op_of(node).is_view:
        value = node.inputs[0]
        node = value.node
    return value
