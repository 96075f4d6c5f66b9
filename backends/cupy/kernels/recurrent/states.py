"""Operands and states of recurrences, as fields of the structs in ``recurrent.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .....graph.dtypes import DType
from .....ops.declaration.attributes import float_attribute
from ....base import contiguous_strides
from ....operands import Bound, Operand, need
from ...binding.launches import Launches, Word
from ...device.driver import Source
from ..elementwise import launch_cast, launch_unary

RECURRENT = "recurrent.cuh"
STATES = Source("states.cu", ("shelter",), before=(RECURRENT,))
SHELTER_THREADS = 256


def rows(x: Operand, inner: int = 3) -> list[Word]:
    """Return the fields of `Rows` for x [..., tokens, heads, elements]; with `inner` 2, x has no last axis."""
    if 0 in x.shape:
        return [x, 0, 0, 0, 0]
    lead = len(x.shape) - inner
    steps = x.strides[lead:] if inner == 3 else (*x.strides[lead:], 0)
    return [x, _even(x.shape[:lead], x.strides[:lead]), *steps]


def is_dense(x: Operand) -> bool:
    """Return whether the elements are contiguous; strides of axes with one entry do not count."""
    wanted = contiguous_strides(x.shape)
    return 0 in x.shape or all(n == 1 or a == b for n, a, b in zip(x.shape, x.strides, wanted, strict=True))


def has_quads(x: Operand) -> bool:
    """Return whether every row is contiguous and begins at a multiple of 16 bytes."""
    *outer, elements = x.strides
    even = all(step % 4 == 0 for n, step in zip(x.shape, outer, strict=False) if n > 1)
    return x.address % 16 == 0 and elements == 1 and even


def _even(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the stride of several axes that are merged into one."""
    step, reach = 0, 0
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n == 1:
            continue
        need(reach in (0, stride), "its sequences do not lie at even distances")
        step, reach = step or stride, stride * n
    return step


@dataclass(frozen=True, slots=True)
class Carried:
    """The states of sequences: where each begins, and which snapshots are kept.

    Snapshot s of sequence n is row ``slots[n, s]`` of `new`, or row ``n * snapshots + s``. The first `stored_snapshots`
    are written.
    """

    sequences: int
    snapshots: int
    stored: int
    begin: tuple[Word, ...]
    new: Operand
    slots: Operand | None
    faults: tuple[Word, ...]

    def kept(self, snapshot: int = 0) -> list[Word]:
        """Return the fields of `States` from snapshot `snapshot` on.

        Its state ``n * snapshots`` is this snapshot of sequence n; newer snapshots in front of it are left out.
        """
        left = self.snapshots - snapshot
        several = self.snapshots > 1
        if self.slots is None:
            new = self.new.part(len(self.new.shape) - 4, snapshot, left) if several else self.new
            return [new, 0, self.sequences * self.snapshots]
        slots = self.slots.part(len(self.slots.shape) - 1, snapshot, left) if several else self.slots
        return [self.new, slots, self.new.shape[0]]

    def after(self, snapshot: int) -> list[Word]:
        """Return the fields of `Beginning` to continue from a snapshot."""
        return [*self.kept(snapshot), self.snapshots, 0, 0]


def carry(launches: Launches, call: Bound, sequences: int, tokens: int, operand: int = 5) -> Carried:
    """Bind the states of a recurrence and append the launches that prepare them.

    A pool that becomes another buffer is copied. In a pool with in-place updates, states that one sequence reads and
    another writes are copied aside.

    Args:
        launches: Receives the launches.
        call: The instruction. Its second result has the new states.
        sequences: The number of sequences.
        tokens: Tokens of a sequence.
        operand: The number of the state operand. Slots follow it.
    """
    state, new = call.operand(operand), call.dst[1]
    slots_in, slots_out = call.optional(operand + 1), call.optional(operand + 2)
    snapshots = int(float_attribute(call.attrs, "snapshots")) if "snapshots" in call.attrs else 1
    need(state.is_float and is_dense(state) and is_dense(new), "states have to be dense and in float32")
    for slots in (slots_in, slots_out):
        need(slots is None or (is_dense(slots) and slots.dtype is DType.I32), "slots have to be dense")
    size = math.prod(state.shape[-3:])
    need(size < 2**31, "a state is too large for one launch")
    stored = min(snapshots, max(tokens, 1))
    aside: tuple[Word, ...] = (0, 0)
    if slots_out is not None:
        assert slots_in is not None
        copies = launches.scratch((sequences, size)) if sequences > 1 else None
        moved = launches.scratch((sequences,), DType.I32) if sequences > 1 else None
        if state.address != new.address:
            launch_cast(launches, state, new)
        elif copies is not None and moved is not None:
            aside = copies, moved
            words: list[Word] = [state, slots_in, state.shape[0], new, slots_out, new.shape[0]]
            words += [copies, moved, sequences, snapshots, stored, size]
            launches.add(STATES["shelter"], sequences, SHELTER_THREADS, words)
    elif snapshots > stored:
        missing = new.part(len(new.shape) - 4, stored, snapshots - stored)
        launch_unary(launches, "fill", missing, missing, [0.0])
    faults = launches.fault(f"slots number rows from 0 to {state.shape[0] - 1}, and one of them is {{value}}")
    old: list[Word] = [state, 0, sequences] if slots_in is None else [state, slots_in, state.shape[0]]
    return Carried(sequences, snapshots, stored, (*old, 1, *aside), new, slots_out, tuple(faults))
