"""Which of several ways to plan is taken: the fastest, where memory and devices have their price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...graph.errors import GraphError, PlanError
from ..plan import Plan
from ..sharding.axes import Factor
from ..units import format_bytes, format_seconds
from .fits import shortage

COPIED = 0.1
"""The part of the time that a full copy of weights and states on every device has to save at least."""
JOINED = 0.01
"""The part of the time that twice as many devices have to save at least."""


Judge = Callable[[Plan], tuple[float, str]]
"""Seconds that a plan is predicted to take for what it is wanted for, and how, if its runs follow each other."""


@dataclass(frozen=True)
class Way:
    """A way to plan: in words, on so many devices, what is predicted of it, and what makes the plan.

    Runs may follow each other through so many `stages`; where that was counted on, it `follows`, and `how` says it.
    `held` are the bytes of weights and states on all devices together, `lacking` those that do not fit.  Once there is
    a plan they are its own.  What was `searched` for promises too much, as a search leaves small things out: `off` is
    how many times as long as promised it is taken to be, 0 if nobody knows.  Should all collectives turn out to be
    hidden it still takes `least` seconds.  `cut` is how many devices cut what, all or those of each stage.

    With `refine`, `seconds` is a lower bound of the ways that `refine` returns.  They replace the way, and ways of the
    same kind that have no plan yet.
    """

    kind: str
    devices: int
    seconds: float
    held: float
    lacking: float
    make: Callable[[], Plan]
    plan: Plan | None = None
    searched: bool = False
    stages: int = 1
    how: str = ""
    follows: bool = False
    least: float = 0.0
    off: float = 0.0
    cut: tuple[int, frozenset[Factor]] | None = None
    refine: Callable[[], Iterable[Way]] | None = None

    def promises_like(self, other: Way) -> bool:
        """Whether it has no plan yet, and what it promises is too good where that of another way was.  Of runs that
        follow each other through stages, promises are the better the fewer these are."""
        if other.follows:
            return self.plan is None and self.follows and self.stages >= other.stages
        return self.plan is None and other.searched and self.searched

    def corrected(self, off: float) -> Way:
        """The way, now that one like it was found to take so many times as long as promised, or longer."""
        known = self.off or 1.0
        return replace(self, seconds=self.seconds * off / known, off=off) if off < (self.off or math.inf) else self

    def hiding(self, seconds: float) -> Way:
        """The way as it may be, if it hides as much as another one of so many `seconds`."""
        return replace(self, seconds=min(self.seconds, max(self.least, seconds)))

    def no_faster_than(self, made: Way) -> Way:
        """The way, now that there is the plan of another one.  A run that nothing follows goes through stages in no
        less time than through one of them that has all layers."""
        is_one = made.stages == 1 and made.cut is not None and made.cut == self.cut
        return replace(self, seconds=max(self.seconds, made.seconds)) if is_one and self.is_in_turn else self

    @property
    def is_in_turn(self) -> bool:
        """Whether it promises that stages run one after the other."""
        return self.plan is None and self.stages > 1 and not self.follows

    def made(self, judge: Judge) -> Way:
        """The way with its plan."""
        plan = self.make()
        seconds, how = judge(plan)
        memory = plan.memory()
        held = memory["weight"] + memory["state"]
        return replace(
            self, plan=plan, devices=len(plan.lanes), seconds=seconds, held=held, lacking=shortage(plan), how=how
        )

    def priced(self, once: float) -> float:
        """Seconds with the price of devices and of memory; `once` is what one device alone would hold."""
        if self.devices == 1:
            return self.seconds
        copied = min(1.0, max(0.0, self.held / max(once, 1.0) - 1) / (self.devices - 1))
        return self.seconds / (1 - COPIED * copied) * (1 + JOINED * math.log2(self.devices))

    def told(self) -> str:
        """What it is, and what it costs."""
        about = "" if self.plan is not None else "about "
        short = f", {format_bytes(int(self.lacking))} short" if self.lacking else ""
        devices = f"{self.devices} device{'s' if self.devices > 1 else ''}"
        held = format_bytes(int(self.held))
        kind = f"{self.kind} ({self.how})" if self.how else self.kind
        return f"{kind}, on {devices}: {about}{format_seconds(self.seconds)}, {held} held in all{short}"


def by_cost(plan: Plan) -> tuple[float, str]:
    """A plan judged by one run of it."""
    return plan.cost.total, ""


def best_of(ways: Sequence[Way], once: float, judge: Judge = by_cost) -> Plan:
    """The plan of the way that fits, or lacks least, and costs least; its reasons say what was left aside and why.

    A plan is made only of ways that promise to be the best, where promises are taken for as much too good as that which
    came nearest to the truth was so far.  No search knows what is hidden beside collectives: where a plan hides
    something, others like it may be as fast.  A way whose plan cannot be built is left aside with the reason; the first
    way already has its plan.
    """
    left = list(ways)
    unbuilt: list[str] = []

    alone_bytes = ways[0].held  # of a plan, which may store weights in another type

    def cost(way: Way) -> tuple[float, float]:
        return way.lacking, way.priced(once if way.plan is None else alone_bytes)

    while (best := min(left, key=cost)).plan is None:
        if best.refine is not None:
            left = _replace_refined(left, best, best.refine())
            continue
        try:
            made = left[left.index(best)] = best.made(judge)
        except (PlanError, GraphError) as why:
            left.remove(best)
            unbuilt.append(f"left aside: {best.kind}, on {best.devices} devices; it cannot be built: {why}")
            continue
        if best.seconds > 0:
            off = made.seconds / best.seconds * (best.off or 1.0)
            left = [way.corrected(off) if way.promises_like(best) else way for way in left]
        if made.plan is not None and made.plan.cost.hidden:
            left = [w.hiding(made.seconds) if w.promises_like(best) else w for w in left]
        left = [way.no_faster_than(made) for way in left]
    left = [way for way in left if way.refine is None]
    others = sorted((way for way in left if way is not best), key=cost)
    first = {way.kind: way for way in reversed(others)}.values()
    most = max(way.devices for way in left)
    shown = [way for way in others if way in first or way.devices == most]
    notes = [f"taken: {best.told()}", *(f"left aside: {way.told()}; {_why(way, best)}" for way in shown)]
    notes += [f"left aside: {len(others) - len(shown)} ways like these"] if len(others) > len(shown) else []
    notes = [*notes, *unbuilt] if others or unbuilt else []
    return replace(best.plan, reasons=(*best.plan.reasons, *notes))


def _replace_refined(ways: Sequence[Way], bound: Way, refined: Iterable[Way]) -> list[Way]:
    """Return `ways` with the `refined` ones in place of their `bound` and of like ways that have no plan."""
    known = {(way.kind, way.devices) for way in ways if way.plan is not None}
    fresh = [way for way in refined if (way.kind, way.devices) not in known]
    known = {(way.kind, way.devices) for way in fresh}
    return [*(way for way in ways if way is not bound and (way.kind, way.devices) not in known), *fresh]


def _why(other: Way, best: Way) -> str:
    """Why it was not taken."""
    if other.lacking > best.lacking:
        return "does not fit"
    gain = 1 - other.seconds / best.seconds if best.seconds else 0.0
    if gain < 0:
        return f"{-gain:.1%} slower"
    dear = [f"{other.devices} devices"] if other.devices > best.devices else []
    dear += [f"{format_bytes(int(other.held - best.held))} more"] if other.held > best.held else []
    return f"{gain:.1%} faster, too little for {' and '.join(dear) or 'another way'}"
