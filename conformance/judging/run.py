"""Run one case on one device and judge it: pass, fail, unsupported, or no reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ...backends.abilities import Tolerant
from ...backends.base import Backend, Device
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


SLACK: Mapping[str, float] = {"reference": 1.0, zeros.CHECK: 1.0, composed.CHECK: 4.0}
"""How much more error than one op's a check allows, by how its name begins; twice where parts are computed alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A case with its operands: as `draw` gives them, and the numbers that they stand for."""

    case: Case
    units: Mapping[str, Array]
    operands: Mapping[str, Array]

    def yardstick(self, backend: Backend) -> Yardstick:
        """What the case must give, and how near to it is near enough on that backend."""
        slack = next((s for check, s in SLACK.items() if self.case.check.startswith(check)), 2.0)
        return Yardstick(self.case, self.operands, slack * _arithmetic(build(self.case), backend))

    def results(self, backend: Backend, device: Device) -> tuple[list[Array], list[Array]]:
        """What the device gives for the case, and of every result which elements it gives."""
        case = self.case
        if case.check.startswith(composed.CHECK):
            if why := composed.unsupported(case, backend, device):
                raise _Unsupported(why)
            results = composed.run(case, self.operands, backend, device)
        elif case.check == "reference" or case.check.startswith(zeros.CHECK):
            results = execute(case, self.units, backend, device)
        else:
            pieces = _in_parts(case, self.units, backend, device)
            return [w for w, _ in pieces], [m for _, m in pieces]
        return results, [np.ones(r.shape, bool) for r in results]


def trial_of(case: Case) -> Trial:
    """A case with the operands that it runs with.  Raises `NoReference`."""
    units = draw(case)
    if case.check.startswith(zeros.CHECK):
        units, _ = zeros.zeroed(case, units)
    return Trial(case, units, {n: exact(a, case.specs[n]) for n, a in units.items()})


def _in_parts(case: Case, units: Mapping[str, Array], backend: Backend, device: Device) -> list[tuple[Array, Array]]:
    """The results of the parts into which the check cuts a case, put together."""
    parts = parts_of(case)
    if not parts:
        raise GraphError(f"{case} cannot be cut so")
    outputs: list[list[Array]] = []
    for part in parts:
        mine = {n: _read(a, part.reads[n], case.specs[n]) if n in part.reads else a for n, a in units.items()}
        mine |= {n: outputs[-1][r] for n, r in part.carried.items()}
        mine |= {n: np.zeros_like(mine[n]) for n in part.nothing}
        outputs.append(execute(part.case, mine, backend, device))
    return joined(case, parts, outputs)


def _checked(case: Case, backend: Backend, device: Device) -> Difference:
    trial = trial_of(case)
    got, made = trial.results(backend, device)
    if case.check.startswith(zeros.CHECK) and (got[0][zeros.zeroed(case, trial.units)[1]] != 0).any():
        raise _Wrong(f"zeros in {case.check.removeprefix(f'{zeros.CHECK}-')} give no zeros")
    return _compared(case, got, trial.yardstick(backend), made)


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
        difference = compare(
            np.where(mask, g, want),
            want,
            budget,
            spec,
            case.declared,
            signed_zeros=case.signed_zeros,
            any_infinity=case.any_infinity,
        )
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
    """Why the backend cannot run the node of a case; empty if it can.

    No backend is asked to run a view: the planner turns it into strides, and a run of the case shows whether it does.
    """
    if built.case.declared.is_view:
        return ""
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
    pairs = case.declared.inplace_pairs(case.settled)
    places = {f"{RESULT}{r}": n for r, n in pairs if n in program.inputs}
    return any(
        (program.outputs[r].buffer, program.outputs[r].offset) == (program.inputs[n].buffer, program.inputs[n].offset)
        for r, n in places.items()
    )
