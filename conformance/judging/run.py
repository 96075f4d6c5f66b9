"""Run one case on one device and judge it: pass, fail, unsupported, or no reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ...backends.base import Backend, Device, Tolerant
from ...graph.errors import GraphError, PlanError
from ...graph.spec import Spec
from ...ops import REGISTRY
from ..trials.case import Case
from ..trials.inputs import NoReference, draw, exact
from ..trials.layouts import Array
from . import composed, zeros
from .build import KEPT, RESULT, Built, build, lane_for
from .compare import Difference, compare
from .guarded import NAN, WILD, Guarded
from .metamorphic import Place, joined, parts_of, result_specs
from .tolerance import F32_EPS, Yardstick

_NO_DIFFERENCE = Difference()


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    NO_REFERENCE = "no reference"
    XFAIL = "xfail"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case; `why` is empty where it passed."""

    case: Case
    outcome: Outcome
    why: str = ""
    difference: Difference = _NO_DIFFERENCE
    seconds: float = 0.0


class _Unsupported(Exception):  # noqa: N818  (an outcome, not an error)
    pass


class _Wrong(Exception):  # noqa: N818  (an outcome, not an error)
    """The backend did something it must not; the message says what."""


def run_case(case: Case, backend: Backend, device: Device) -> Result:
    """Judge `case` on `device`.  What the backend raises is a failure of the case, never of the run."""
    start = time.perf_counter()
    difference = Difference()
    try:
        difference = _checked(case, backend, device)
        outcome, why = (Outcome.FAIL, difference.why) if difference.why else (Outcome.PASS, "")
    except _Unsupported as reason:
        outcome, why = Outcome.UNSUPPORTED, str(reason)
    except (NoReference, NotImplementedError) as reason:
        outcome, why = Outcome.NO_REFERENCE, str(reason) or "the reference is not implemented"
    except _Wrong as reason:
        outcome, why = Outcome.FAIL, str(reason)
    except GraphError:
        raise  # the case itself is illegal: a fault of whoever wrote it
    except Exception as reason:  # a kernel under test may raise anything
        outcome, why = Outcome.FAIL, f"{type(reason).__name__}: {reason}"
    return Result(case, outcome, why, difference, time.perf_counter() - start)


def _checked(case: Case, backend: Backend, device: Device) -> Difference:
    units = draw(case)
    operands = {n: exact(a, case.specs[n]) for n, a in units.items()}
    if case.check == "reference":
        got = execute(case, units, backend, device)
        yardstick = Yardstick(case, operands, _arithmetic(build(case), backend))
        return _compared(case, got, yardstick, [np.ones(w.shape, bool) for w in yardstick.wanted])
    if case.check.startswith(composed.CHECK):
        if why := composed.unsupported(case, backend, device):
            raise _Unsupported(why)
        yardstick = Yardstick(case, operands, 4.0 * _arithmetic(build(case), backend))
        return _compared(case, composed.run(case, operands, backend, device), yardstick, [np.ones((), bool)])
    if case.check.startswith(zeros.CHECK):
        return _zeros(case, units, backend, device)
    parts = parts_of(case)
    if not parts:
        raise GraphError(f"{case} cannot be cut so")
    outputs: list[list[Array]] = []
    for part in parts:
        mine = {n: _read(a, part.reads[n], case.specs[n]) if n in part.reads else a for n, a in units.items()}
        mine |= {n: outputs[-1][r] for n, r in part.carried.items()}
        mine |= {n: np.zeros_like(mine[n]) for n in part.nothing}
        outputs.append(execute(part.case, mine, backend, device))
    yardstick = Yardstick(case, operands, 2.0 * _arithmetic(build(case), backend))
    pieces = joined(case, parts, outputs)
    return _compared(case, [w for w, _ in pieces], yardstick, [m for _, m in pieces])


def _zeros(case: Case, units: Mapping[str, Array], backend: Backend, device: Device) -> Difference:
    """Zeros must give zeros to the bit, and what is not zero what it gives otherwise."""
    units, empty = zeros.zeroed(case, units)
    got = execute(case, units, backend, device)
    if (got[0][empty] != 0).any():
        raise _Wrong(f"zeros in {case.check.removeprefix(f'{zeros.CHECK}-')} give no zeros")
    operands = {n: exact(a, case.specs[n]) for n, a in units.items()}
    yardstick = Yardstick(case, operands, _arithmetic(build(case), backend))
    return _compared(case, got, yardstick, [np.ones(w.shape, bool) for w in yardstick.wanted])


def _read(units: Array, place: Place, spec: Spec) -> Array:
    """Some entries of an axis of an operand; along an axis of blocks they are whole blocks."""
    axis, entries = place
    block = spec.dtype.block if axis == len(spec.shape) - 1 else 1
    return np.take(units, entries[::block] // block, axis=axis)


def _compared(case: Case, got: list[Array], yardstick: Yardstick, made: list[Array]) -> Difference:
    """The worst of the results; elements that were not made are not judged."""
    specs = result_specs(case)
    budgets = yardstick.budgets(specs)
    worst = Difference()
    for i, (g, want, budget, spec, mask) in enumerate(zip(got, yardstick.wanted, budgets, specs, made, strict=True)):
        difference = compare(np.where(mask, g, want), want, budget, spec, case.declared)
        if difference.why:
            return replace(difference, why=f"result {i}: {difference.why}" if len(specs) > 1 else difference.why)
        if difference.nmse >= worst.nmse:
            worst = difference
    return worst


def _arithmetic(built: Built, backend: Backend) -> float:
    """The relative error of one operation: float32's, unless the backend declares a coarser one for the node."""
    coarse = backend.tolerance(built.node) if isinstance(backend, Tolerant) else None
    return max(F32_EPS, coarse or 0.0)


def supported(built: Built, backend: Backend, device: Device) -> str:
    """Why the backend cannot run the node of a case; empty if it can."""
    support = backend.supports(built.node, device)
    return "" if support.ok else support.why or "no reason given"


def execute(case: Case, units: Mapping[str, Array], backend: Backend, device: Device) -> list[Array]:
    """The results of `case` on a device, from the second of three runs, as float64 or integers.

    The first run has other inputs, and leaves its scratch behind; the third finds other garbage everywhere, and must
    give the same bits.  Raises when memory was touched that is not the op's to write.
    """
    built = build(case)
    if why := supported(built, backend, device):
        raise _Unsupported(why)
    try:
        lane = lane_for(built.graph, backend, device)
    except PlanError as reason:
        raise _Wrong(f"PlanError: {reason}") from None
    for node in lane.graph.nodes:  # copies that the planner put in for layouts the kernel cannot read
        if not node.is_leaf and not REGISTRY[node.op].is_view and not backend.supports(node, device).ok:
            raise _Unsupported(f"its layout needs {node!r}, which is not supported")
    leaves = built.leaves(units, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guarded = Guarded(lane, built.stored_weights(leaves))
        inputs = {n: a for n, a in leaves.items() if n not in built.weights}
        decoys = built.leaves({n: _reversed(a) if n in inputs else a for n, a in units.items()}, np.nan)
        return _three_runs(case, built, guarded, inputs, decoys)


def _reversed(units: Array) -> Array:
    """The same numbers in another order, so that they are legal and different."""
    return np.ascontiguousarray(units.reshape(-1)[::-1]).reshape(units.shape)


def _three_runs(
    case: Case, built: Built, guarded: Guarded, inputs: Mapping[str, Array], decoys: Mapping[str, Array]
) -> list[Array]:
    guarded.poison(NAN)
    guarded.bind(decoys)
    _replay(guarded, "the first run")
    guarded.poison_results(NAN)
    guarded.bind(inputs)
    _untouched(built, guarded, "the run")
    first = guarded.outputs()
    guarded.poison(WILD)
    guarded.bind(inputs)
    _untouched(built, guarded, "the replay")
    again = guarded.outputs()
    names = [n for n in first if n.startswith(RESULT)]
    if any(first[n].tobytes() != again[n].tobytes() for n in names):
        raise _Wrong("the replay of the same inputs over other leftovers gives other bits")
    numbers = guarded.decoded({n: first[n] for n in names})
    return [numbers[n] for n in names]


def _untouched(built: Built, guarded: Guarded, when: str) -> None:
    """Replay, and see that guard zones and operands are what they were."""
    before = guarded.leaf_bytes(guarded.arena_bytes())
    _replay(guarded, when)
    after = guarded.leaf_bytes(guarded.arena_bytes())
    for name, held in before.items():
        if f"{KEPT}{name}" in guarded.program.outputs and after[name] != held:
            raise _Wrong(f"{when} changed its operand {name}")


def _replay(guarded: Guarded, when: str) -> None:
    guarded.replay()
    if stray := guarded.strays(guarded.arena_bytes()):
        raise _Wrong(f"in {when}, {stray}")


def really_aliases(case: Case, backend: Backend, device: Device) -> bool:
    """Whether the planner gave some result of an in-place case the memory of its operand."""
    program = lane_for(build(case).graph, backend, device).program
    pairs = case.declared.inplace_in(case.settled)
    places = {f"{RESULT}{r}": n for r, n in pairs if n in program.inputs}
    return any(
        (program.outputs[r].buffer, program.outputs[r].offset) == (program.inputs[n].buffer, program.inputs[n].offset)
        for r, n in places.items()
    )
