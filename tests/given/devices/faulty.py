"""Backends that fail where they are told to, and plans of models that run on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from hocket.backends.base import Device, run_calls
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.frontends.gguf import open_gguf
from hocket.frontends.models import Step, load_model
from hocket.graph import Spec, StepError
from hocket.scheduler import Executor, Store, plan_for_group

from ..models.goldens import path_of, tokens_of
from ..waits import WAIT_SECONDS


class PlantedError(Exception):
    """The error of an instruction with a planted fault."""


def raise_planted_error() -> None:
    raise PlantedError("planted")


class _Faulty:
    """A backend that compiles each instruction by itself and runs planted faults.

    `plan_fault` plants an action before an instruction runs or after it has written its result. The action runs once,
    so that the rollback of the step does not fail, too.
    """

    where: tuple[str, int] | None = None
    late = False
    what: Callable[[], None] = staticmethod(raise_planted_error)

    def plan_fault(
        self, device: Device, number: int, *, late: bool, what: Callable[[], None] = raise_planted_error
    ) -> None:
        self.where, self.late, self.what = (str(device), number), late, what

    def with_threads(self, threads):
        return self

    def compile(self, program, buffers, on, comm):
        single = [dataclasses.replace(program, instructions=(i,), undo=()) for i in program.instructions]
        steps = [super(_Faulty, self).compile(p, buffers, on, comm) for p in single]
        calls = [(number, partial(self._run, (str(on), number), step)) for number, step in enumerate(steps)]
        return lambda: run_calls(program, on, calls)

    def _run(self, here: tuple[str, int], step: Callable[[], None]) -> None:
        if self.where != here:
            step()
            return
        self.where = None
        if self.late:
            step()
        self.what()
        if not self.late:
            step()


class FaultyCpu(_Faulty, CpuBackend):
    """The CPU backend with planted faults."""


class FaultyReference(_Faulty, ReferenceBackend):
    """The reference backend with planted faults."""


@dataclasses.dataclass
class FaultyRun:
    """A plan that runs on a faulty backend, with states that hold something and an input for one step."""

    backend: Any
    run: Executor
    feed: dict[str, Any]
    states: dict[str, Any]

    def reset(self) -> None:
        for name, array in self.states.items():
            self.run.store.state(name)[...] = array

    def copy_states(self) -> dict[str, bytes]:
        """The states as each device holds them, bit by bit."""
        store = self.run.store
        parts = {name: store.state(name).parts for name in store.states}
        return {f"{n} of {d}": p.memory_view.tobytes() for n, all_ in parts.items() for d, p in all_.items()}

    def outputs(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.run.run(self.feed).items()}


def _random_state(state: Any, rng: np.random.Generator) -> Any:
    return rng.standard_normal(state.shape).astype(state.dtype.storage if state.dtype.is_integer else np.float32)


def make_faulty_run(backend: Any, plan: Any, store: Store, feed: dict[str, Any], rng: np.random.Generator) -> FaultyRun:
    run = Executor(plan, store, timeout=WAIT_SECONDS)
    random_states = {v.node.name: _random_state(v, rng) for v in plan.graph.states}
    broken = FaultyRun(backend, run, feed, random_states)
    broken.reset()
    return broken


def make_faulty_model_run(name: str, devices: int, mode: str, tokens: int) -> FaultyRun:
    """One step of a model: `tokens` new ones behind five that were there, in a plan for one more."""
    from hocket.frontends.models import Batch

    model = load_model(open_gguf(path_of(name)))
    step = Step(1, tokens + (tokens > 1), 16, 16, 1)
    backend = FaultyCpu()
    group = [(backend, backend.device(i)) for i in range(devices)]
    plan = plan_for_group(model.graph(step), group, split_mode=mode)
    store = Store(group)
    for weight in plan.graph.weights:
        tensor = model.gguf.tensors[weight.node.name]
        store.bind(
            weight.node.name, tensor.stored_elements, Spec(tensor.shape, tensor.dtype), plan.leaves[weight.node.name]
        )
    known = tokens_of(name)
    feed = model.inputs(step, Batch([known[5 : 5 + tokens]], [5]))
    return make_faulty_run(backend, plan, store, dict(feed), np.random.default_rng(1))


def fail_everywhere(bench: FaultyRun) -> int:
    """Let every instruction of every device fail, every other after it has written; returns how many did."""
    before, fails = bench.copy_states(), 0
    outputs = bench.outputs()
    after = bench.copy_states()
    for device_plan in bench.run.plan.device_plans:
        for number, i in enumerate(device_plan.program.instructions):
            bench.reset()
            bench.backend.plan_fault(device_plan.device, number, late=number % 2 == 0)
            with pytest.raises(StepError) as caught:
                bench.run.run(bench.feed)
            assert str(caught.value) == f"%{i.node} on {device_plan.device}: PlantedError: planted"
            assert (caught.value.node, caught.value.device) == (i.node, str(device_plan.device))
            assert caught.value.finished_instructions == number
            assert bench.copy_states() == before
            fails += 1
            assert bench.outputs() == outputs
            assert bench.copy_states() == after
    return fails
