"""What would pay if a weight lay elsewhere: a flag ``--place``, the bytes that it saves, and the time that it costs.

Only weights at the ends of a graph are looked at, which are whole on each device: what reads them stands before or
behind all else, so that the plan's own model of cost says what it takes if one device does it alone.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ...graph.graph import assign_names
from ...graph.node import Node, Value
from ...ops import op_of
from ..layout import Replicate
from ..lowering.lane import Lane, first_alike
from ..machines.hardware import Counts, leaf_of
from ..plan import Plan
from ..sharding.pins import closed, wished
from ..stages import Prices
from ..units import nbytes_text, places, time_text
from .layouts import layouts_of

LEAST = 0.01
"""The share of all that a device holds below which nothing is said."""
LONGEST = 80
"""Characters of a pattern."""


@dataclass(frozen=True, slots=True, eq=False)
class Hint:
    """What ``--place`` with this pattern and device would do: `saved` are bytes by device, and `seconds` what a run
    takes more."""

    place: str
    saved: Mapping[str, int]
    seconds: float

    def __str__(self) -> str:
        """``--place 'token_embd=cpu:0' saves 28.7 MiB on cpu:1, costs 762 us a run``."""
        devices: dict[int, list[str]] = defaultdict(list)
        for device, nbytes in self.saved.items():
            devices[nbytes].append(device)
        said = [f"saves {nbytes_text(n)} on {places(where)}" for n, where in devices.items()]
        said.append(f"{'saves' if self.seconds < 0 else 'costs'} {time_text(abs(self.seconds))} a run")
        return f"--place {shlex.quote(self.place)} {', '.join(said)}"


def hints(plan: Plan, layouts: Mapping[Node, str] | None = None) -> dict[str, Hint]:
    """The best hint for each weight that has one, by name: a larger share of a device's bytes is saved than of the time
    of a run is lost.  `layouts` are those of the plan, for who has them."""
    if len(plan.lanes) == 1:
        return {}
    moves = _Moves(plan, layouts_of(plan) if layouts is None else layouts)
    whole = [v.node for v in plan.graph.weights if isinstance(plan.leaves[v.node.name], Replicate)]
    options = {leaf.name: list(moves.of(leaf)) for leaf in whole}
    return {name: min(own, key=lambda hint: hint.seconds) for name, own in options.items() if own}


class _Moves:
    """What it does to a plan if a weight lies on one device alone."""

    def __init__(self, plan: Plan, layouts: Mapping[Node, str]) -> None:
        self.plan, self.layouts, self.counts = plan, layouts, Counts()
        self.called = assign_names(plan.graph)
        self.users = plan.graph.users()
        self.devices = [str(lane.device) for lane in plan.lanes]
        self.held = [max(1, sum(lane.memory().values())) for lane in plan.lanes]
        self.own = [{b.name: b.nbytes for b in lane.program.buffers if b.kind == "weight"} for lane in plan.lanes]
        alike = first_alike(plan.lanes)
        runs = {first: _runs(plan.lanes[first], plan.prices[first]) for first in set(alike)}
        self.runs = [runs[first] for first in alike]

    def of(self, leaf: Node) -> Iterator[Hint]:
        """A hint for each device on which the weight might lie, if that pays."""
        if self._share([leaf]) < LEAST or (pattern := self._pattern(leaf.name)) is None:
            return
        first = self.devices[0]  # on whichever device, it is the same nodes
        moved = closed(self.plan.graph, wished(self.plan.graph, [(pattern, first)], self.devices)).keys()
        elsewhere = self._elsewhere(moved)
        left = [n for n in self.plan.graph.nodes if n in elsewhere and n.op == "weight"]
        for to, device in enumerate(self.devices):
            seconds = self._costs(moved, elsewhere, to)
            if seconds is not None and self._share(left) >= seconds / max(self.plan.cost.total, 1e-12):
                others = (d for d in range(len(self.devices)) if d != to)
                saved = {self.devices[d]: sum(self.own[d].get(n.name, 0) for n in left) for d in others}
                yield Hint(f"{pattern}={device}", saved, seconds)

    def _pattern(self, name: str) -> str | None:
        """A regular expression that finds this name and no other; None where that is too long to be typed."""
        word = re.escape(name)
        pattern = word if sum(name in other for other in self.called.values()) == 1 else f"^{word}$"
        return pattern if len(pattern) <= LONGEST and pattern.isprintable() else None

    def _share(self, leaves: Sequence[Node]) -> float:
        """The part that weights have of all that a device holds, on the device where that is most."""
        return max(
            sum(own.get(n.name, 0) for n in leaves) / held for own, held in zip(self.own, self.held, strict=True)
        )

    def _elsewhere(self, moved: Set[Node]) -> Set[Node]:
        """What others need no more when one device alone computes `moved`: these nodes, and what was whole on each
        device and only these read."""
        ends = {v.node for v in (*self.plan.graph.outputs.values(), *self.plan.graph.updates.values())}
        elsewhere = set(moved)
        for node in reversed(self.plan.graph.nodes):
            readers = [user for v in node.results for user in self.users[v]]
            if self.layouts[node] == "R" and node not in ends and readers and elsewhere.issuperset(readers):
                elsewhere.add(node)
        return elsewhere

    def _costs(self, moved: Set[Node], elsewhere: Set[Node], to: int) -> float | None:
        """What a run takes more at most if one device alone computes `moved` and sends what others read of it, while
        they leave out all that is then computed `elsewhere`.

        None unless each of these nodes rests on inputs and weights alone, or is read by none of the others.
        """
        seconds = 0.0
        fed: set[Node] = set()
        for node in (n for n in self.plan.graph.nodes if n in elsewhere and not n.is_leaf and not op_of(n).is_view):
            sources = {leaf_of(s) for s in node.inputs} - elsewhere
            computed = {n for n in sources if n.op not in ("weight", "input", "constant")}
            if computed or not fed.isdisjoint(leaf_of(s) for s in node.inputs):
                fed.add(node)
            is_read = any(u not in elsewhere for v in node.results for u in self._readers(v))
            if node in moved and ((is_read and node in fed) or any(self.layouts[n] != "R" for n in computed)):
                return None
            name = self.called[node]
            _, launches = self.runs[to].get(name, (0.0, 1.0))
            seconds += self.plan.speeds[to].compute(*self.counts.of(node), launches=launches)
            seconds -= max(own.get(name, (0.0, 1.0))[0] for own in self.runs)
            seconds += self.plan.hardware.meeting(sum(v.spec.nbytes for v in node.results)) if is_read else 0.0
        return seconds

    def _readers(self, value: Value) -> Iterator[Node]:
        """The nodes that compute with a value or with views of it."""
        values = [value]
        for here in values:
            for user in self.users[here]:
                if op_of(user).is_view:
                    values += user.results
                else:
                    yield user


def _runs(lane: Lane, prices: Prices) -> dict[str, tuple[float, float]]:
    """What each node of a device takes, in seconds, and in launches."""
    instructions = lane.program.instructions
    return {i.node: (prices.of(at).seconds, prices.launches[at]) for at, i in enumerate(instructions)}
