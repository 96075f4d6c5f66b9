"""What weights are laid out for: prompts and steps of several sequences, whose runs may follow each other through the
devices of a layout.

A layout is judged by all of this together, as the weights lie once: of two layouts one may be better for prompts and
the other for the tokens behind them, and layers on several devices are fast only where these are kept busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...graph.graph import Graph
from ..machines.hardware import Hardware
from ..plan import Plan
from ..sharding.cost import AssignmentCost
from ..succession import MIN_PIPELINE_SPEEDUP, count_pipeline_stages, estimate_pipeline_speedup
from .auto import Way
from .microbatches import counts_of, dealing
from .parts import Predicted, in_parts

CountsOf = Callable[[int, int], Sequence[int]]
PlanOf = Callable[[int, int], Plan]
"""The plan of a run in which each of so many sequences gets so many tokens."""


@dataclass(frozen=True, slots=True)
class Use:
    """So many sequences, each of which reads a prompt of so many tokens and gets `new` ones.

    ``graph_of(sequences, tokens)`` is the graph of a run in which each of so many gets so many tokens, and `sizes` are
    the numbers of tokens, ascending, that a part of a prompt may have.
    """

    graph_of: Callable[[int, int], Graph]
    sizes: Sequence[int]
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

    def judged(self, plan_of: PlanOf, counts_of: CountsOf = counts_of) -> tuple[float, str]:
        """Seconds that all of it takes by plans of one layout, and how runs follow each other in them, if they do;
        `counts_of` sequences and stages are the numbers of micro-batches to consider."""
        dealt = dealing(self.sequences, lambda n: plan_of(n, 1), counts_of)
        micro_batches = len(dealt.sizes)
        read, parts = self._read(plan_of) if self.prompt else (0.0, 1)
        how = [f"in {micro_batches} micro-batches"] if micro_batches > 1 else []
        how += [f"prompts in {parts} parts"] if parts > 1 else []
        return self.new * dealt.seconds + self.sequences * read, ", ".join(how)

    def _read(self, plan_of: PlanOf) -> tuple[float, int]:
        """Seconds of one prompt, and in how many parts it is read."""
        step = plan_of(self.sequences, 1)
        if count_pipeline_stages(step) > 1 and estimate_pipeline_speedup(step) >= MIN_PIPELINE_SPEEDUP:
            ends = (self.sizes[0], self.sizes[-1])
            predicted = Predicted(lambda tokens, cells: plan_of(1, tokens), ends, (self.prompt, self.prompt))
            parts = in_parts(self.prompt, 0, self.sizes, predicted)
            if len(parts.sizes) > 1:
                return parts.seconds, len(parts.sizes)
        return plan_of(1, self.prompt).cost.total, 1


class Promises:
    """What a use takes by layouts that are not planned yet, rather too little: by what nodes take on one device."""

    def __init__(self, use: Use, hardware: Hardware) -> None:
        self.use, self.hardware = use, hardware
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def about(self, way: Way, alone: float) -> Way:
        """Return the way as it promises to be for the use.

        A step of all sequences takes `alone` seconds on one device.  The devices of a team share all work of a prompt
        except launches.
        """
        use, stages, speed, refine = self.use, way.stages, alone / way.seconds, way.refine
        one = self._alone(use.sequences, 1)
        step = min([one, *(self._step(n, stages) for n in self.counts_of(use.sequences, stages))])
        read = 0.0
        if use.prompt and (stages > 1 or way.cut is not None):
            read = self._read(stages, way.devices // stages)
        elif use.prompt:  # devices that share no node
            read = self._alone(1, use.prompt) / speed
        if stages > 1:  # one may work while the others wait
            read /= max(self.hardware.alone_flops, self.hardware.alone_bandwidth)
        seconds = use.new * step / speed + use.sequences * read
        least = use.new * step / speed * way.least / way.seconds + use.sequences * read
        refined = None if refine is None else lambda: [self.about(one, alone) for one in refine()]
        return replace(way, seconds=seconds, follows=stages > 1, least=least, refine=refined)

    def counts_of(self, sequences: int, stages: int) -> list[int]:
        """The number of micro-batches that promises most, if any is considered."""
        counts = counts_of(sequences, stages)
        return [min(counts, key=lambda n: self._step(n, stages))] if counts else []

    def _step(self, micro_batches: int, stages: int) -> float:
        """Seconds of a step in so many that follow each other through stages of one device."""
        return micro_batches * self._alone(-(-self.use.sequences // micro_batches), 1) / stages

    def _read(self, stages: int, team: int) -> float:
        """Seconds of a prompt, as one or in parts, waiting for the first of these and for the last included."""
        prompt = self.use.prompt
        whole, sizes = self._alone(1, prompt, team), self.use.sizes if stages > 1 else ()
        turns = {size: prompt / size + stages - 1 for size in sizes}
        return min([whole, *(turns[size] * self._alone(1, size, team) / stages for size in sizes)])

    def _alone(self, sequences: int, tokens: int, team: int = 1) -> float:
        """Seconds of a run that so many devices share, each of whom launches all."""
        if (sequences, tokens) not in self._known:
            done = AssignmentCost(self.use.graph_of(sequences, tokens), 1, self.hardware).node_work.values()
            work = sum(self.hardware.compute_seconds(*each, launches=0.0) for each in done)
            self._known[sequences, tokens] = work, len(done) * self.hardware.launch
        work, launches = self._known[sequences, tokens]
        return work / team + launches
