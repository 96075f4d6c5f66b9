"""Gated units such as SwiGLU, of two operands or of the halves of one, quantised at once for packed products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from .....ops.registry import REGISTRY
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel
from ...simd.vectors import LANES
from ...steps.partition import compute_thread_range
from ...steps.step_table import InstructionBinder, StepTableBuilder, ThreadWork
from ..packed.activation_quantisation import ThreadResultTarget, quantise_row_to_targets
from ..packed.format_table import BLOCK_COLUMNS
from ..vector.elementwise import (
    add_expression_step,
    load_lanes,
    make_row_args,
    store_lanes,
)
from ..vector.lower_expressions import make_lane_function
from ..vector.row_loops import ELEMENT_STRIDE_WORDS, make_row_loop_args
from .packed_matmul import find_result_read_forms

GATED = {
    name: make_lane_function(declared.build, 2)
    for name in ("swiglu", "reglu", "geglu", "geglu_quick", "geglu_erf")
    if (declared := REGISTRY[name].expression)
}
"""The gated units without attributes, as functions of 16 lanes: gate and up."""
ARGS = make_row_args("x z y", "between rounding[*]")
"""Gate, up and result; bytes from thread to thread of the result; `ThreadResultTarget.rounding_words`."""
ROUNDING_WORD = ARGS.first_word_index("rounding")
"""First word of `ThreadResultTarget.rounding_words`."""


@cache
def make_quantising_gated_unit_kernel(kind: str) -> Kernel:
    """Make the kernel of a gated unit, ``y = unit(x, z)``, which also quantises y."""
    function = GATED[kind]

    def body(a, thread, threads):
        n = ARGS.columns(a)
        lo, hi = compute_thread_range(ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, z, y = ARGS.x(a, i), ARGS.z(a, i), ARGS.y(a, i) + thread * ARGS.between(a)
            for c in range(0, n, LANES):
                store_lanes(y, c, n, function(load_lanes(x, c, n, 4), load_lanes(z, c, n, 4)))
            quantise_row_to_targets(a, ROUNDING_WORD, i, y, n)
        return 0

    return Kernel(f"gated_units.combine.{kind}", body)


def split_gated_unit_operands(call: BoundInstruction) -> tuple[str, Operand, Operand]:
    """Return the three parts of a gated unit: its kind, its gate operand, and its other operand (up)."""
    if call.op != "glu":
        return call.op, call.operand(0), call.operand(1)
    x, axis, n = call.operand(0), len(call.out.shape) - 1, call.out.shape[-1]
    halves = x.slice_axis(axis, 0, n), x.slice_axis(axis, n, n)
    first, second = halves[::-1] if call.attrs["swapped"] else halves
    return str(call.attrs["kind"]), first, second


def _bind_and_quantise_gated_unit(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a gated unit, which also quantises its result for packed matmuls.

    Return False if no kernel can compute it.
    """
    kind, *sources = split_gated_unit_operands(call)
    if kind in GATED and _add_quantised_gated_unit(steps, call):
        return True
    declared = REGISTRY[call.op].expression
    return declared is not None and add_expression_step(
        steps, declared.trace([True, True], call.attrs), sources, call.out, call.attrs
    )


def _add_quantised_gated_unit(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a gated unit that also quantises its result; return False if a plain gated unit is better.

    A plain one is better if all readers use float32, or if a separate quantisation step is faster. If an earlier step
    gave each thread some columns of the operands, each thread continues with these. Otherwise threads share the rows.
    """
    (kind, *sources), y, consumers = split_gated_unit_operands(call), call.out, find_result_read_forms(steps, call)
    if not consumers.quantised_tensors or any(o.shape != y.shape for o in sources):
        return False
    bounds = steps.find_column_bounds_written_since_barrier(sources)
    shares_columns = bounds is None and steps.threads > 1 and consumers.rows == 1
    splits_block = bounds is not None and (bounds[-1] != consumers.columns or any(b % BLOCK_COLUMNS for b in bounds))
    if shares_columns or splits_block or _make_gated_unit_thread_work(sources, ThreadResultTarget(y, [y])) is None:
        return False
    records = consumers.make_quantised_row_memory_per_thread(steps, shared=True)
    targets = consumers.make_target_per_thread(steps, records, bounds or [0, consumers.columns])
    axis, shares = len(y.shape) - 1, list[ThreadWork | None]()
    for to, (first, last) in zip(targets, pairwise(bounds or [0, consumers.columns]), strict=True):
        some = [o.slice_axis(axis, first, last - first) for o in sources]
        shares.append(None if to is None else _make_gated_unit_thread_work(some, to))
    if bounds is None and (whole := shares[0]) is not None:
        moved = 3 * y.tensor.spec.nbytes
        steps.add(
            make_quantising_gated_unit_kernel(kind), whole.words, reads=whole.reads, writes=whole.writes, nbytes=moved
        )
    elif bounds is not None:
        steps.add_by_columns(make_quantising_gated_unit_kernel(kind), shares, [y], bounds)
    consumers.register_quantised_rows(steps, records)
    return True


def _make_gated_unit_thread_work(sources: Sequence[Operand], to: ThreadResultTarget) -> ThreadWork | None:
    """Make the argument words and accesses of one thread for the gated unit kernel.

    The result is None if the kernel cannot loop over the operands.
    """
    operands = [*sources, to.float_rows]
    walk = (
        make_row_loop_args(to.float_rows.shape, operands, whole_rows=True)
        if all(o.is_float for o in operands)
        else None
    )
    if walk is None or walk[ELEMENT_STRIDE_WORDS] != [4, 4, 4]:
        return None
    return ThreadWork(ARGS(walk=walk, between=to.thread_stride_bytes, rounding=to.rounding_words), sources, to.writes)


GATED_OPS = ("glu", *GATED)
BINDINGS: Mapping[str, InstructionBinder] = dict.fromkeys(GATED_OPS, _bind_and_quantise_gated_unit)
