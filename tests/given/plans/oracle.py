"""Whether a plan runs right, found out by running it: on memory full of NaN, twice, and failing wherever it can.

The right result comes from the user's graph alone, node by node, without plan, program or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.backends.numpy.backend import NumpyBackend
from hocket.graph import Graph, StepError
from hocket.graph.node import view_constant_array
from hocket.ops import REGISTRY
from hocket.ops.quantisation import dequantise
from hocket.scheduler import Executor, Plan, Store

from ..devices.faulty import FaultyReference, _Faulty
from ..graphs.random_graphs import bindings
from ..waits import WAIT_SECONDS
from .grouped import as_file_bytes

NAN = 0xFF
"""As bytes: NaN in every float type, -1 in every integer type."""
RUNS = 2


class FaultyNumpy(_Faulty, NumpyBackend):
    """The NumPy backend with planted faults: it needs scratch memory."""


def faulty_group(n: int, kind: str = "reference"):
    """Devices that can be told to fail: of the references, of NumPy, or of both in turn (``mixed``)."""
    reference, numpy = FaultyReference(), FaultyNumpy()
    backends = {"reference": [reference], "numpy": [numpy], "mixed": [reference, numpy]}[kind]
    return [(b, b.device(i)) for i in range(n) for b in (backends[i % len(backends)],)]


@dataclass(frozen=True)
class Truth:
    """The results of a graph in several runs over the same inputs: outputs and then states."""

    graph: Graph
    values: Mapping[str, np.ndarray]
    results: tuple[Mapping[str, np.ndarray], ...]


def truth_of(graph: Graph, seed: int) -> Truth:
    values = bindings(graph, np.random.default_rng(seed))
    states = {v.node.name: np.asarray(values[v.node.name], float if v.dtype.is_float else None) for v in graph.states}
    results = []
    for _ in range(RUNS):
        outputs, states = _evaluate_references(graph, values, states)
        results.append({**outputs, **{f"state {name}": array for name, array in states.items()}})
    return Truth(graph, values, tuple(results))


def _evaluate_references(graph: Graph, values: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[dict, dict]:
    """Outputs and new states, by the references of ops in float64."""
    computed: dict[Any, Any] = {}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if node.is_leaf:
                dtype = node.specs[0].dtype
                array = view_constant_array(node) if node.op == "constant" else {**values, **states}[node.name]
                if node.op == "weight":
                    array = as_file_bytes(array, dtype)
                    array = (
                        array
                        if dtype.is_integer
                        else dequantise(np.atleast_1d(array), dtype).reshape(node.specs[0].shape)
                    )
                results = [np.asarray(array, None if dtype.is_integer else float)]
            else:
                results = REGISTRY[node.op].run_reference(
                    [None if s is None else computed[s] for s in node.src], node.attrs
                )
            computed.update(zip(node.results, map(np.array, results), strict=True))
    new = {old.node.name: computed[v] for old, v in graph.updates.items()}
    return {name: computed[v] for name, v in graph.outputs.items()}, {**states, **new}


def run_faults(plan: Plan, truth: Truth, *, failing: int = 4) -> str | None:
    """Return a description of the error when `plan` runs, None if it is right and `failing` steps per device are
    undone.
    """
    try:
        return _run_faults(plan, truth, failing)
    except Exception as why:  # any error of a wrong plan
        return f"{type(why).__name__}: {why}"


def _run_faults(plan: Plan, truth: Truth, failing: int) -> str | None:
    run = _executor(plan, truth)
    feed = {v.node.name: truth.values[v.node.name] for v in truth.graph.inputs}

    def reset() -> None:
        for v in truth.graph.states:
            run.store.state(v.node.name)[...] = truth.values[v.node.name]

    reset()
    for number, expected in enumerate(truth.results):
        _poison(run)
        results = {**run.run(feed), **{f"state {n}": np.array(run.store.state(n)) for n in run.store.states}}
        for name, array in expected.items():
            if why := _differ(results[name], array):
                return f"run {number}: {name} {why}"
    for device_plan in plan.device_plans:
        steps = len(device_plan.program.instructions)
        for at in (
            range(0, steps, max(1, steps // failing)) if failing and hasattr(device_plan.backend, "plan_fault") else ()
        ):
            reset()
            before = _copy_states(run)
            device_plan.backend.plan_fault(device_plan.device, at, late=at % 2 == 0)
            _poison(run)
            try:
                run.run(feed)
                return f"step {at} of {device_plan.device} does not run"
            except StepError as why:
                if "planted" not in str(why):
                    raise
            if _copy_states(run) != before:
                return f"step {at} of {device_plan.device} is not undone"
    return None


def _executor(plan: Plan, truth: Truth) -> Executor:
    store = Store([(device_plan.backend, device_plan.device) for device_plan in plan.device_plans])
    for v in truth.graph.weights:
        name = v.node.name
        store.bind(name, as_file_bytes(truth.values[name], v.dtype), v.spec, plan.leaves[name])
    return Executor(plan, store, timeout=WAIT_SECONDS)


def _poison(run: Executor) -> None:
    for device_plan, buffers in zip(run.plan.device_plans, run._bound_plan._buffers.values(), strict=True):
        for spec, buffer in zip(device_plan.program.buffers, buffers, strict=True):
            if spec.kind == "arena":
                buffer[...] = NAN


def _copy_states(run: Executor) -> list[bytes]:
    """The states as each device holds them, bit by bit."""
    parts = [part for name in run.store.states for part in run.store.state(name).parts.values()]
    return [b"" if part is None else part.memory_view.tobytes() for part in parts]


def _differ(got: Any, expected: Any) -> str | None:
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return f"is {list(got.shape)} and not {list(expected.shape)}"
    if got.dtype.kind in "iu" and expected.dtype.kind in "iu":
        return None if np.array_equal(got, expected) else "differs"
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-6)
    return None if np.allclose(got, expected, rtol=1e-4, atol=1e-4 * scale, equal_nan=True) else "differs"
