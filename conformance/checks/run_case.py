"""Run one case on one device, and compare its results with the reference. The outcome is an `Outcome`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ...backends.base import Backend, Device
from ...backends.capabilities import DeclaresTolerance
from ...graph.dtypes import DType
from ...graph.errors import GraphError, PlanError
from ...graph.spec import Spec
from ...ops import REGISTRY
from ...ops.quantisation import decode_array, encode_array
from ..cases.case import Case
from ..cases.inputs import NoReference, as_reference_array, generate_random_operands
from ..cases.operand_layouts import Array
from . import decomposed, zero_propagation
from .case_graph import (
    LIVE_LEAF_PREFIX,
    RESULT_PREFIX,
    CaseGraph,
    build_case_graph,
    build_verified_device_plan,
    find_unsupported_reason,
)
from .compare_arrays import ArrayDifference, compare_with_reference
from .guarded_memory import NAN, WILD_BYTE, GuardedProgram
from .metamorphic import AxisEntries, infer_result_specs, join_results_with_masks, split_case
from .tolerance import F32_EPS, ErrorBudget, ExpectedResult

_NO_DIFFERENCE = ArrayDifference()


class Outcome(StrEnum):
    """The outcome of a case; ``xfail`` is a failure that a file of expected failures lists."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    NO_REFERENCE = "no reference"
    XFAIL = "xfail"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case, with the difference from the reference; `why` is the reason unless the case passed."""

    case: Case
    outcome: Outcome
    why: str = ""
    difference: ArrayDifference = _NO_DIFFERENCE
    seconds: float = 0.0


class _UnsupportedCase(Exception):  # noqa: N818  (an outcome, not an error)
    """The backend does not support a node of the case; the message is the reason."""

    pass


class _WrongResult(Exception):  # noqa: N818  (an outcome, not an error)
    """The backend computed a wrong result or wrote outside of its results; the message describes the fault."""


def run_case(case: Case, backend: Backend, device: Device) -> Result:
    """Run the check of a case on a device, and return the outcome.

    An exception of the backend is a failure of the case.

    Raises:
        GraphError: the case itself is illegal.
    """
    start = time.perf_counter()
    difference = ArrayDifference()
    try:
        difference = _run_and_compare_with_expected(case, backend, device)
        outcome, why = (Outcome.FAIL, difference.why) if difference.why else (Outcome.PASS, "")
    except _UnsupportedCase as reason:
        outcome, why = Outcome.UNSUPPORTED, str(reason)
    except (NoReference, NotImplementedError) as reason:
        outcome, why = Outcome.NO_REFERENCE, str(reason) or "the reference is not implemented"
    except _WrongResult as reason:
        outcome, why = Outcome.FAIL, str(reason)
    except GraphError:
        raise  # the case itself is illegal
    except Exception as reason:  # a kernel under test may raise anything
        outcome, why = Outcome.FAIL, f"{type(reason).__name__}: {reason}"
    return Result(case, outcome, why, difference, time.perf_counter() - start)


CHECK_TOLERANCE_FACTORS: Mapping[str, float] = {
    "reference": 1.0,
    zero_propagation.CHECK_NAME: 1.0,
    decomposed.CHECK_NAME: 4.0,
}
"""Factors of the error budget by the start of the check name; 2 for other checks, which compute the result in parts."""


@dataclass(frozen=True, slots=True)
class RunnableCase:
    """A case with random operands.

    `units` has them as stored, with one entry per element or per quantised block. `operands` has them as numbers.
    """

    case: Case
    units: Mapping[str, Array]
    operands: Mapping[str, Array]

    def compute_expected_result_by_reference(self, backend: Backend) -> ExpectedResult:
        """Compute the expected results by the reference, with the error budget for this backend."""
        slack = next((s for check, s in CHECK_TOLERANCE_FACTORS.items() if self.case.check.startswith(check)), 2.0)
        return ExpectedResult(
            self.case,
            self.operands,
            slack * _choose_float32_or_backend_rounding_error(build_case_graph(self.case), backend),
        )

    def round_results_in_packed_states(self, results: Sequence[Array], backend: Backend) -> None:
        """Round the numbers that results write into states, in place, if the backend keeps these states in blocks."""
        states = build_case_graph(self.case).states
        for result, name in self.case.op_declaration.inplace_pairs(self.case.attributes_with_defaults):
            spec = self.case.specs.get(name)
            if spec and name in states and backend.storage_spec(spec, "state").dtype is spec.dtype:
                _round_changed_blocks(results[result], self.operands[name], spec.dtype)

    def run_and_make_comparison_masks(self, backend: Backend, device: Device) -> tuple[list[Array], list[Array]]:
        """Run the case on a device as its check needs it; return the results, and a mask for each of them.

        A mask has the elements to compare with the expected result.
        """
        case = self.case
        if case.check.startswith(decomposed.CHECK_NAME):
            if why := find_unsupported_reason(decomposed.build_decomposed_graph(case), backend, device):
                raise _UnsupportedCase(why)
            results = decomposed.run_decomposed(case, self.operands, backend, device)
        elif case.check == "reference" or case.check.startswith(zero_propagation.CHECK_NAME):
            results = run_three_times_guarded(case, self.units, backend, device)
        else:
            shard_results = _run_and_join_parts_with_masks(case, self.units, backend, device)
            return [w for w, _ in shard_results], [m for _, m in shard_results]
        return results, [np.ones(r.shape, bool) for r in results]


def _round_changed_blocks(values: Array, old: Array, dtype: DType) -> None:
    """Round the blocks of `values` that differ from `old` to a quantised dtype, in place."""
    blocks = values.reshape(-1, dtype.block)
    changed = ~(blocks == old.reshape(-1, dtype.block)).all(axis=-1)
    with np.errstate(all="ignore"):
        blocks[changed] = decode_array(encode_array(blocks[changed].astype(np.float32), dtype), dtype)
    values[...] = blocks.reshape(values.shape)


def make_runnable_case_with_random_operands(case: Case) -> RunnableCase:
    """Return a case with its random operands.

    Raises:
        NoReference: the kit has no reference for the case.
    """
    units = generate_random_operands(case)
    if case.check.startswith(zero_propagation.CHECK_NAME):
        units, _ = zero_propagation.zero_entries_and_find_zero_results(case, units)
    return RunnableCase(case, units, {n: as_reference_array(a, case.specs[n]) for n, a in units.items()})


def _run_and_join_parts_with_masks(
    case: Case, units: Mapping[str, Array], backend: Backend, device: Device
) -> list[tuple[Array, Array]]:
    """Run the parts of a case one after the other, for a metamorphic check, and join their results.

    A metamorphic check compares the joined results with the result of the whole case. Each result comes with a mask
    of the elements to compare."""
    parts = split_case(case)
    if not parts:
        raise GraphError(f"{case} cannot be cut so")
    outputs: list[list[Array]] = []
    for part in parts:
        mine = {
            n: _take_axis_entries(a, part.reads[n], case.specs[n]) if n in part.reads else a for n, a in units.items()
        }
        mine |= {n: outputs[-1][r] for n, r in part.carried_results.items()}
        mine |= {n: np.zeros_like(mine[n]) for n in part.zeroed_operands}
        outputs.append(run_three_times_guarded(part.case, mine, backend, device))
    return join_results_with_masks(case, parts, outputs)


def _run_and_compare_with_expected(case: Case, backend: Backend, device: Device) -> ArrayDifference:
    """Run a case on a device, and compare its results with the expected results."""
    runnable_case = make_runnable_case_with_random_operands(case)
    got, masks = runnable_case.run_and_make_comparison_masks(backend, device)
    if (
        case.check.startswith(zero_propagation.CHECK_NAME)
        and (got[0][zero_propagation.zero_entries_and_find_zero_results(case, runnable_case.units)[1]] != 0).any()
    ):
        raise _WrongResult(f"zeros in {case.check.removeprefix(f'{zero_propagation.CHECK_NAME}-')} give no zeros")
    expected = runnable_case.compute_expected_result_by_reference(backend)
    budgets = expected.compute_error_budgets(infer_result_specs(case))
    runnable_case.round_results_in_packed_states(expected.arrays, backend)
    return _compare_results(case, got, expected, budgets, masks)


def _take_axis_entries(units: Array, place: AxisEntries, spec: Spec) -> Array:
    """Return the entries `place` of an operand; along an axis of quantised blocks, the whole blocks."""
    axis, entries = place
    block = spec.dtype.block if axis == len(spec.shape) - 1 else 1
    return np.take(units, entries[::block] // block, axis=axis)


def _compare_results(
    case: Case, got: list[Array], expected: ExpectedResult, budgets: list[ErrorBudget], masks: list[Array]
) -> ArrayDifference:
    """Compare all results within their masks; return the first failure, or else the largest difference."""
    specs = infer_result_specs(case)
    worst = ArrayDifference()
    for i, (g, want, budget, spec, mask) in enumerate(zip(got, expected.arrays, budgets, specs, masks, strict=True)):
        difference = compare_with_reference(
            np.where(mask, replace_permitted_nonfinites_by_reference(case, g, expected, i), want),
            want,
            budget,
            spec,
            case.op_declaration,
            signed_zeros=case.needs_signed_zeros_and_subnormals,
            any_infinity=case.can_exchange_nan_and_infinity,
        )
        if difference.why:
            return replace(difference, why=f"result {i}: {difference.why}" if len(specs) > 1 else difference.why)
        if difference.nmse >= worst.nmse:
            worst = difference
    return worst


def replace_permitted_nonfinites_by_reference(case: Case, got: Array, expected: ExpectedResult, result: int) -> Array:
    """Return a result in which each NaN or infinity that the op permits is replaced by the number of the reference."""
    want = expected.arrays[result]
    if got.dtype.kind != "f" or got.shape != want.shape:
        return got
    is_nan = np.isnan(got) & ~np.isnan(want)
    if case.nan_for_infinity_operands and is_nan.any():
        got = np.where(is_nan & expected.mask_nan_from_infinities(result), want, got)
    is_other = np.isinf(want) & (np.isnan(got) | (got == -want))  # a factor between the two signs is 0: NaN
    if is_other.any():
        got = np.where(is_other & expected.mask_infinities_with_unstable_sign(result), want, got)
    return got


def _choose_float32_or_backend_rounding_error(built: CaseGraph, backend: Backend) -> float:
    """Return the relative error of one operation: the float32 rounding, or a larger error that the backend declares."""
    if not isinstance(backend, DeclaresTolerance):
        return F32_EPS
    return max(F32_EPS, *(backend.tolerance(node) or 0.0 for node in built.graph.nodes if not node.is_leaf))


def run_three_times_guarded(case: Case, units: Mapping[str, Array], backend: Backend, device: Device) -> list[Array]:
    """Run `case` three times on guarded memory, and return the results of the second run as float64 or integers.

    The first run has other inputs and leaves its scratch memory. The third run starts with other garbage in memory and
    must give the same bits. A write outside of the results is a fault.
    """
    built = build_case_graph(case)
    if why := find_unsupported_reason(built.graph, backend, device):
        raise _UnsupportedCase(why)
    try:
        device_plan = build_verified_device_plan(built.graph, backend, device)
    except PlanError as reason:
        raise _WrongResult(f"PlanError: {reason}") from None
    for node in device_plan.graph.nodes:  # copies that the planner put in for layouts the kernel cannot read
        if not node.is_leaf and not REGISTRY[node.op].is_view and not backend.supports(node, device).ok:
            raise _UnsupportedCase(f"its layout needs {node!r}, which is not supported")
    leaves = built.build_leaf_arrays(units, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guarded = GuardedProgram(device_plan, built.encode_weights(leaves))
        inputs = {n: a for n, a in leaves.items() if n not in built.weights}
        decoys = built.build_leaf_arrays(
            {n: _reverse_elements(a) if n in inputs else a for n, a in units.items()}, np.nan
        )
        return _run_thrice_and_return_second_results(case, built, guarded, inputs, decoys)


def _reverse_elements(units: Array) -> Array:
    """Return the elements of an array in reverse order, which are legal values, too, for a run with other inputs."""
    return np.ascontiguousarray(units.reshape(-1)[::-1]).reshape(units.shape)


def _run_thrice_and_return_second_results(
    case: Case, built: CaseGraph, guarded: GuardedProgram, inputs: Mapping[str, Array], decoys: Mapping[str, Array]
) -> list[Array]:
    """Run a bound program three times as `run_three_times_guarded` does, and return the results of the second run."""
    guarded.poison_arena_and_guard_zones(NAN)
    guarded.encode_and_write_inputs(decoys)
    _replay_and_check_guards(guarded, "the first run")
    guarded.poison_results(NAN)
    guarded.encode_and_write_inputs(inputs)
    _replay_and_check_guards_and_operands(built, guarded, "the run")
    first = guarded.copy_outputs()
    guarded.poison_arena_and_guard_zones(WILD_BYTE)
    guarded.encode_and_write_inputs(inputs)
    _replay_and_check_guards_and_operands(built, guarded, "the replay")
    again = guarded.copy_outputs()
    names = [n for n in first if n.startswith(RESULT_PREFIX)]
    if any(first[n].tobytes() != again[n].tobytes() for n in names):
        raise _WrongResult("the replay of the same inputs over other leftovers gives other bits")
    numbers = guarded.decode_outputs({n: first[n] for n in names})
    return [numbers[n] for n in names]


def _replay_and_check_guards_and_operands(built: CaseGraph, guarded: GuardedProgram, when: str) -> None:
    """Replay the program, and raise `_WrongResult` if it changed a guard zone or an operand that is alive."""
    before = guarded.read_program_input_bytes(guarded.copy_guarded_arena_to_host())
    _replay_and_check_guards(guarded, when)
    after = guarded.read_program_input_bytes(guarded.copy_guarded_arena_to_host())
    for name, old_bytes in before.items():
        if f"{LIVE_LEAF_PREFIX}{name}" in guarded.program.outputs and after[name] != old_bytes:
            raise _WrongResult(f"{when} changed its operand {name}")


def _replay_and_check_guards(guarded: GuardedProgram, when: str) -> None:
    """Replay the program once, and raise `_WrongResult` if it wrote to a guard zone."""
    guarded.replay()
    if stray := guarded.find_stray_write(guarded.copy_guarded_arena_to_host()):
        raise _WrongResult(f"in {when}, {stray}")


def has_aliased_result(case: Case, backend: Backend, device: Device) -> bool:
    """Return whether the planner gave a result the memory of its in-place operand."""
    program = build_verified_device_plan(build_case_graph(case).graph, backend, device).program
    pairs = case.op_declaration.inplace_pairs(case.attributes_with_defaults)
    places = {f"{RESULT_PREFIX}{r}": n for r, n in pairs if n in program.inputs}
    return any(
        (program.outputs[r].buffer, program.outputs[r].offset) == (program.inputs[n].buffer, program.inputs[n].offset)
        for r, n in places.items()
    )
