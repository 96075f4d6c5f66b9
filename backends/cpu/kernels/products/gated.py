"""Gated units of two operands or of the halves of one operand, quantised at once for packed products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from ....operands import Bound, Operand
from ...compiler import Kernel
from ...simd.vectors import LANES
from ...steps import Binding, Share, Steps
from ..functions import GATED
from ..packing import share
from ..rows import ELEMENTS, add_binary, lanes, put, row_words, rows_of
from .formats import COLUMNS
from .products import wanted_of
from .rounding import Target, round_row

ARGS = row_words("x z y", "between rounding[*]")
"""Gate, up and result; bytes from thread to thread of the result; `QuantisedTarget.rounding_words`."""
ROUNDING = ARGS.start("rounding")
"""First word of `QuantisedTarget.rounding_words`."""


@cache
def gated(kind: str) -> Kernel:
    """Make the kernel ``y = unit(x, z)``, which also quantises y."""
    function = GATED[kind]

    def body(a, thread, threads):
        n = ARGS.columns(a)
        lo, hi = share(ARGS.rows(a), thread, threads)
        for i in range(lo, hi):
            x, z, y = ARGS.x(a, i), ARGS.z(a, i), ARGS.y(a, i) + thread * ARGS.between(a)
            for c in range(0, n, LANES):
                put(y, c, n, function(lanes(x, c, n, 4), lanes(z, c, n, 4)))
            round_row(a, ROUNDING, i, y, n)
        return 0

    return Kernel(f"gated.gated.{kind}", body)


def operands_of(call: Bound) -> tuple[str, Operand, Operand]:
    """Return the kind, the gate and the other operand of a gated unit."""
    if call.op != "glu":
        return call.op, call.operand(0), call.operand(1)
    x, axis, n = call.operand(0), len(call.out.shape) - 1, call.out.shape[-1]
    halves = x.part(axis, 0, n), x.part(axis, n, n)
    first, second = halves[::-1] if call.attrs["swapped"] else halves
    return str(call.attrs["kind"]), first, second


def _unit(steps: Steps, call: Bound) -> bool:
    """Add a gated unit, quantised if packed products read it; False if no kernel can compute it."""
    kind, gate, up = operands_of(call)
    return kind in GATED and (_rounded(steps, call) or add_binary(steps, kind, gate, up, call.out))


def _rounded(steps: Steps, call: Bound) -> bool:
    """Add a gated unit that quantises its result; return False if a separate step is better or all readers use float32.

    Each thread computes the columns that it has of the operands. If it has none, threads share the rows.
    """
    (kind, *sources), y, wanted = operands_of(call), call.out, wanted_of(steps, call)
    if not wanted.rounded or any(o.shape != y.shape for o in sources):
        return False
    bounds = steps.columns_of(sources)
    shares_columns = bounds is None and steps.threads > 1 and wanted.rows == 1
    cut = bounds is not None and (bounds[-1] != wanted.columns or any(b % COLUMNS for b in bounds))
    if shares_columns or cut or _share(sources, Target(y, [y])) is None:
        return False
    records = wanted.records(steps, shared=True)
    targets = wanted.targets(steps, records, bounds or [0, wanted.columns])
    axis, shares = len(y.shape) - 1, list[Share | None]()
    for to, (first, last) in zip(targets, pairwise(bounds or [0, wanted.columns]), strict=True):
        some = [o.part(axis, first, last - first) for o in sources]
        shares.append(None if to is None else _share(some, to))
    if bounds is None and (whole := shares[0]) is not None:
        moved = 3 * y.tensor.spec.nbytes
        steps.add(gated(kind), whole.words, reads=whole.reads, writes=whole.writes, nbytes=moved)
    elif bounds is not None:
        steps.deal_columns(gated(kind), shares, y, bounds)
    wanted.remember(steps, records)
    return True


def _share(sources: Sequence[Operand], to: Target) -> Share | None:
    """Make the words of the gated kernel; None if it cannot walk the operands."""
    operands = [*sources, to.floats]
    walk = rows_of(to.floats.shape, operands, whole_rows=True) if all(o.is_float for o in operands) else None
    if walk is None or walk[ELEMENTS] != [4, 4, 4]:
        return None
    return Share(ARGS(walk=walk, between=to.between, rounding=to.rounding), sources, to.writes)


UNITS = ("glu", *GATED)
BINDINGS: Mapping[str, Binding] = dict.fromkeys(UNITS, _unit)
