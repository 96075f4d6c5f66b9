"""The predicted time of one run of a graph over equal devices, for an assignment of factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import op_of
from ...ops.movement.sharded_tables import estimate_busiest_count
from ..machines.hardware import KEPT, Counts, Estimate, Hardware, home_of
from .assign import Assignment, Conversion
from .early import find_early_sums
from .states import Cut


class Costs:
    """Predicts the time of one run over equal devices, for any number of assignments of one graph.

    `node_multiplicity` is the number of original nodes of each node, if more than one.
    """

    def __init__(self, graph: Graph, devices: int, hardware: Hardware, times: Mapping[Node, int] | None = None) -> None:
        self.devices, self.hardware, self.times = devices, hardware, times or {}
        counts = Counts()
        self.work = {n: counts.of(n) for n in graph.nodes if not n.is_leaf and not op_of(n).is_view}
        self.stored = [n.results[0] for n in graph.nodes if n.op in ("weight", "state")]
        self._places = {node: at for at, node in enumerate((*self.work, *(v.node for v in self.stored)))}
        self._known: dict[int, tuple[Assignment, list[float]]] = {}
        self._met: dict[tuple[str, int], float] = {}

    def estimate(self, assignment: Assignment) -> Estimate:
        """Return the predicted time of one run, in which sums are taken early where that costs no more."""
        times, compute = self.times, sum(self._each(assignment)[: len(self.work)])
        sent = [c for c in assignment.conversions if not c.is_free]
        seconds, count = sum(map(self._all_times, sent)), sum(times.get(c.value.node, 1) for c in sent)
        for one, sums in find_early_sums(assignment, self._all_times):
            seconds -= sum(map(self._all_times, sums)) - self._all_times(one)
            count -= sum(times.get(c.value.node, 1) for c in sums) - times.get(one.value.node, 1)
        return Estimate(compute, seconds, count)

    def _all_times(self, conversion: Conversion) -> float:
        """Return the seconds of a collective, times the multiplicity of its node."""
        return self.times.get(conversion.value.node, 1) * self.conversion_time(conversion)

    def held(self, assignment: Assignment) -> float:
        """Return the bytes of weights and states on the device that has most of them."""
        return sum(self._each(assignment)[len(self.work) :])

    def _each(self, assignment: Assignment) -> list[float]:
        """Return the seconds of each node, then the bytes of each weight and state.

        Costs of nodes that are as in the base assignment are taken from there.
        """
        base = assignment.base
        if base is None:
            return [self._of(node, assignment) for node in self._places]
        if id(base) not in self._known:
            self._known[id(base)] = base, self._each(base)
        each = list(self._known[id(base)][1])
        for node in assignment.fresh:
            if (at := self._places.get(node)) is not None:
                each[at] = self._of(node, assignment)
        return each

    def _of(self, node: Node, assignment: Assignment) -> float:
        """Return the seconds of a node, or the bytes of a weight or state on the device that has most of it."""
        if not node.is_leaf:
            return self.times.get(node, 1) * self.node_time(node, assignment)
        made = assignment.made[node.results[0]]
        size = made.factor.size if isinstance(made, Cut) else 0
        share = -(-size // self.devices) / size if size else 1.0
        return self.times.get(node, 1) * node.specs[0].nbytes * share

    def node_time(self, node: Node, assignment: Assignment) -> float:
        """Return the seconds of `node` on the busiest device."""
        work = self.work[node]
        by = assignment.by[node]
        if isinstance(by, Cut):
            size = by.factor.size
            own = -(-size // self.devices)
            share = most = own / size if size else 1.0
            if (ids := assignment.dealt.get(node)) is not None and ids.spec.size:
                entries = ids.spec.size
                busy = estimate_busiest_count(entries, own, size)
                share, most = busy / entries, min(own, busy) / min(size, entries)
            wants, made = assignment.wants[node], assignment.made
            read = [v for v, w in zip(node.inputs, wants, strict=True) if not isinstance(w, Cut)]
            uncut = read + [v for v in node.results if not isinstance(made[v], Cut)]
            nbytes = _shared(work.nbytes, uncut, most)
            kept = _shared(work.kept, [v for v in read if home_of(v).op in KEPT], most)
            work = work._replace(flops=work.flops * share, nbytes=nbytes, kept=kept)
        return self.hardware.compute(*work)

    def conversion_time(self, conversion: Conversion) -> float:
        """Return the seconds of the collective of a conversion."""
        if conversion.is_free or self.devices == 1:
            return 0.0
        met = collective_of(conversion)
        if met not in self._met:
            self._met[met] = self.hardware.collective(*met, range(self.devices)).seconds
        return self._met[met]


def collective_of(conversion: Conversion) -> tuple[str, int]:
    """Return the op of the collective that determines the time of a conversion, and the bytes of the whole value."""
    is_all_reduce = conversion.before.is_owed and not isinstance(conversion.after, Cut)
    return "all_reduce" if is_all_reduce else "all_gather", conversion.value.spec.nbytes


def _shared(nbytes: float, uncut: Iterable[Value], share: float) -> float:
    """Return the bytes of a device that has `share` of all values except the whole ones in `uncut`."""
    whole = min(nbytes, sum(v.spec.nbytes for v in uncut))
    return whole + (nbytes - whole) * share
