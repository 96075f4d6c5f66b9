"""What weights are laid out for: prompts and steps of several sequences, whose runs may follow each other through the
devices of a layout.

A layout is judged by all of this together, as the weights lie once: of two layouts one may be better for prompts and
the other for the tokens behind them, and layers on several devices are fast only where these are kept busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..graph.graph import Graph
from .auto import Way
from .hardware import Hardware
from .microbatches import counts_of, dealing
from .plan import Plan
from .sharding.cost import Costs
from .succession import followed, gain, seconds_in_turn

GAIN = 1.1
"""How many times as fast parts of a prompt have to be predicted to be that follow each other."""
PlanOf = Callable[[int, int], Plan]
"""The plan of a run in which each of so many sequences gets so many tokens."""


@dataclass(frozen=True, slots=True)
class Use:
    """So many sequences, each of which reads a prompt of so many tokens and gets `new` ones.

    ``graph_of(sequences, tokens)`` is the graph of a run in which each of so many gets so many tokens, and
    ``part_of(tokens, stages)`` says how many tokens of a prompt are read together where parts follow each other through
    so many stages.
    """

    graph_of: Callable[[int, int], Graph]
    part_of: Callable[[int, int], int]
    sequences: int = 1
    prompt: int = 0
    new: int = 1

    def __str__(self) -> str:
        """``16 sequences, each of a prompt of 512 tokens and 128 steps``."""
        prompt = f"a prompt of {self.prompt} tokens" if self.prompt else ""
        steps = f"{self.new} step{'s' if self.new > 1 else ''}" if self.new else ""
        each = " and ".join(filter(None, (prompt, steps)))
        return f"{self.sequences} sequences, each of {each}" if self.sequences > 1 else each

    @property
    def evened(self) -> Graph:
        """The graph for which devices that follow each other are to take equally long."""
        return self.graph_of(1, self.prompt) if self.prompt else self.graph_of(self.sequences, 1)

    def judged(self, plan_of: PlanOf) -> tuple[float, str]:
        """Seconds that all of it takes by plans of one layout, and how runs follow each other in them, if they do."""
        seconds, how = 0.0, []
        if self.new:
            dealt = dealing(self.sequences, lambda n: plan_of(n, 1))
            seconds += self.new * dealt.seconds
            how += [f"in {len(dealt.sizes)} micro-batches"] if len(dealt.sizes) > 1 else []
        if self.prompt:
            read, parts = self._read(plan_of)
            seconds += self.sequences * read
            how += [f"prompts in {parts} parts"] if parts > 1 else []
        return seconds, ", ".join(how)

    def _read(self, plan_of: PlanOf) -> tuple[float, int]:
        """Seconds of one prompt, and in how many parts it is read."""
        whole = plan_of(1, self.prompt)
        stages = followed(whole)
        size = self.part_of(self.prompt, stages)
        if stages == 1 or size >= self.prompt or gain(part := plan_of(1, size)) < GAIN:
            return whole.cost.total, 1
        parts = -(-self.prompt // size)
        return seconds_in_turn(part, parts), parts


class Promises:
    """What a use takes at least by layouts that are not planned yet, by what nodes take on one device."""

    def __init__(self, use: Use, hardware: Hardware) -> None:
        self.use, self.hardware = use, hardware
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, speed: float, way: Way) -> float:
        """Where a step of all sequences is `speed` times as fast as on one device; the prompt is read by all devices as
        if nothing were lost."""
        use, total = self.use, 0.0
        if use.new:
            one = self._alone(use.sequences, 1)
            counts = counts_of(use.sequences, way.stages)
            followed = (n * self._alone(-(-use.sequences // n), 1) / way.stages for n in counts)
            total += use.new * min([one, *followed]) / speed
        return total + (use.sequences * self._alone(1, use.prompt) / way.devices if use.prompt else 0.0)

    def _alone(self, sequences: int, tokens: int) -> float:
        """On one device."""
        if (sequences, tokens) not in self._known:
            costs = Costs(self.use.graph_of(sequences, tokens), 1, self.hardware)
            self._known[sequences, tokens] = sum(self.hardware.compute(*done) for done in costs.work.values())
        return self._known[sequences, tokens]
