"""A plan run in one thread with random turns of its devices, so that deadlocks and early reads cannot hide.

Each instruction is compiled by itself with the backend's own kernels. A collective only posts its request; it is done
once all devices have posted theirs. Arenas are filled with NaN (or noise) before every run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hocket.scheduler import Plan, Store
from hocket.scheduler.runtime.state_view import assemble_value

Wish = tuple[str, int, tuple[Any, ...]]


class DeadlockError(Exception):
    """Every device that is not done waits for another."""


class InterleavedComm:
    """The `Comm` of one device: it records the request and returns at once."""

    def __init__(self, rank: int, size: int, messages: dict[tuple[int, int, int], Any]) -> None:
        self.rank, self.size, self.messages = rank, size, messages
        self.wish: Wish | None = None

    def all_reduce(self, source, into, scratch, sequence):
        self.wish = ("all_reduce", sequence, (source, into))

    def all_gather(self, source, into, parts, sequence):
        self.wish = ("all_gather", sequence, (source, into, parts))

    def reduce_scatter(self, source, into, parts, sequence):
        self.wish = ("reduce_scatter", sequence, (source, into, parts))

    def send(self, source, to, sequence):
        self.messages[self.rank, to, sequence] = source

    def receive(self, into, source, sequence):
        self.wish = ("receive", sequence, (into, source))


class InterleavedPlan:
    """A plan with its memory; `run` is one run with the devices' turns drawn from a seed."""

    def __init__(self, plan: Plan, bind: Callable[[Store], None]) -> None:
        self.plan = plan
        self.store = Store([(device_plan.backend, device_plan.device) for device_plan in plan.device_plans])
        bind(self.store)
        self.buffers = list(self.store.buffers(plan).values())
        self.messages: dict[tuple[int, int, int], Any] = {}
        self.talks = [InterleavedComm(d, len(plan.device_plans), self.messages) for d in range(len(plan.device_plans))]
        self.steps = []
        for device_plan, buffers, talk in zip(plan.device_plans, self.buffers, self.talks, strict=True):
            programs = [
                dataclasses.replace(device_plan.program, instructions=(i,)) for i in device_plan.program.instructions
            ]
            self.steps.append([device_plan.backend.compile(p, buffers, device_plan.device, talk) for p in programs])

    def run(self, inputs: Mapping[str, Any], seed: int, poison: int | None = 0xFF) -> dict[str, Any]:
        """Outputs by name.  `poison` fills fresh memory; None means noise.  Raises `DeadlockError`."""
        dice = random.Random(seed)
        for device_plan, buffers in zip(self.plan.device_plans, self.buffers, strict=True):
            arena = buffers[0]
            arena[...] = np.random.default_rng(seed).integers(0, 256, arena.size) if poison is None else poison
            for name, tensor in device_plan.program.inputs.items():
                device_plan.backend.view(buffers[tensor.buffer], tensor)[...] = inputs[name]
        at = [0] * len(self.steps)
        while any(i < len(steps) for i, steps in zip(at, self.steps, strict=True)):
            able = [d for d, steps in enumerate(self.steps) if at[d] < len(steps) and self.talks[d].wish is None]
            if able:
                device = dice.choice(able)
                self.steps[device][at[device]]()
                at[device] += self.talks[device].wish is None
            self._grant(at, moved=bool(able))
        self.messages.clear()
        return self._outputs()

    def _grant(self, at: list[int], moved: bool) -> None:
        """Do all possible requests: a message that has arrived, a collective that all devices have reached."""
        granted = False
        for device, talk in enumerate(self.talks):
            if talk.wish is not None and talk.wish[0] == "receive":
                into, source = talk.wish[2]
                key = (source, device, talk.wish[1])
                if key in self.messages:
                    np.copyto(into, self.messages[key])
                    talk.wish, granted = None, True
                    at[device] += 1
        wishes = [t.wish for t in self.talks]
        if all(w is not None and w[0] != "receive" for w in wishes):
            assert len({w[:2] for w in wishes}) == 1, f"devices meet at {[w[:2] for w in wishes]}"
            self._run_collective(wishes)
            granted = True
            for device, talk in enumerate(self.talks):
                talk.wish = None
                at[device] += 1
        if not granted and not moved:
            raise DeadlockError(f"devices stand at steps {at} and wait")

    @staticmethod
    def _run_collective(wishes: list[Any]) -> None:
        kind, sources = wishes[0][0], [np.array(w[2][0]) for w in wishes]
        for _, _, (_, into, *rest) in wishes:
            if kind == "all_reduce":
                np.copyto(into, sum(sources[1:], sources[0]))
            elif kind == "reduce_scatter":
                for target, origin in rest[0]:
                    into[target] = sum((s[origin] for s in sources[1:]), sources[0][origin])
            else:
                for source, pairs in zip(sources, rest[0], strict=True):
                    for target, origin in pairs:
                        into[target] = source[origin]

    def _outputs(self) -> dict[str, Any]:
        views = [
            {name: device_plan.backend.view(buffers[t.buffer], t) for name, t in device_plan.program.outputs.items()}
            for device_plan, buffers in zip(self.plan.device_plans, self.buffers, strict=True)
        ]
        return {
            name: assemble_value(
                v.shape,
                self.plan.outputs[name],
                {device: own[name] for device, own in enumerate(views) if name in own},
                self.store.between,
            )
            for name, v in self.plan.graph.outputs.items()
        }
