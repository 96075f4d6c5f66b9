"""Operands and states of recurrences, as fields of the structs in ``recurrent.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .....graph.dtypes import DType
from .....ops.declaration.attributes import float_attribute
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.launch_builder import LaunchBuilder, LaunchWord
from ...device.driver import KernelSource
from ..elementwise import launch_cast, launch_unary

RECURRENT_HEADER, DELTA_INPUTS_HEADER = "recurrent.cuh", "delta_inputs.cuh"
STATES_SOURCE = KernelSource("states.cu", ("shelter",), before=(RECURRENT_HEADER,))
SHELTER_THREADS = 256


def make_rows_struct_fields(x: Operand, inner: int = 3) -> list[LaunchWord]:
    """Return the fields of the C struct `Rows` for x [..., tokens, heads, elements]: its address and strides.

    Args:
        x: The operand.
        inner: Number of inner axes: 3, or 2 if x has no axis of elements.
    """
    if 0 in x.shape:
        return [x, 0, 0, 0, 0]
    lead = len(x.shape) - inner
    steps = x.strides[lead:] if inner == 3 else (*x.strides[lead:], 0)
    return [x, _compute_merged_stride(x.shape[:lead], x.strides[:lead]), *steps]


def is_vector_aligned(x: Operand) -> bool:
    """Return whether every row of x is contiguous and begins at a multiple of 16 bytes."""
    *outer, elements = x.strides
    even = all(step % 4 == 0 for n, step in zip(x.shape, outer, strict=False) if n > 1)
    return x.address % 16 == 0 and elements == 1 and even


def _compute_merged_stride(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the stride of the one axis into which several axes merge; raise `NoKernelError` if strides forbid it."""
    step, reach = 0, 0
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n == 1:
            continue
        require_supported(reach in (0, stride), "its sequences do not lie at even distances")
        step, reach = step or stride, stride * n
    return step


@dataclass(frozen=True, slots=True)
class StateOperands:
    """The old and new states of a recurrent layer, for all sequences, as operands of kernels.

    A sequence has several snapshots: snapshot s is the state after all tokens but the last s. For sequence n, it is
    row ``slots[n, s]`` of `new`, or row ``n * snapshots + s`` without slots. Kernels write the first
    `stored_snapshots` snapshots.
    """

    sequences: int
    snapshots: int
    stored_snapshots: int
    begin_fields: tuple[LaunchWord, ...]
    new: Operand
    slots: Operand | None
    fault_fields: tuple[LaunchWord, ...]

    def make_fields_without_newer_snapshots(self, snapshot: int = 0) -> list[LaunchWord]:
        """Return the fields of the C struct `States` for a launch that writes snapshot `snapshot` and older ones only.

        In the struct, state ``n * snapshots`` is snapshot `snapshot` of sequence n.
        """
        left = self.snapshots - snapshot
        several = self.snapshots > 1
        if self.slots is None:
            new = self.new.slice_axis(len(self.new.shape) - 4, snapshot, left) if several else self.new
            return [new, 0, self.sequences * self.snapshots]
        slots = self.slots.slice_axis(len(self.slots.shape) - 1, snapshot, left) if several else self.slots
        return [self.new, slots, self.new.shape[0]]

    def make_resume_fields(self, snapshot: int) -> list[LaunchWord]:
        """Return the fields of the C struct `Beginning` for a launch that continues from a stored snapshot."""
        return [*self.make_fields_without_newer_snapshots(snapshot), self.snapshots, 0, 0]


def bind_states_and_prepare_memory(
    launches: LaunchBuilder, call: BoundInstruction, sequences: int, tokens: int, operand: int = 5
) -> StateOperands:
    """Bind the states of a recurrence as operands, and add the launches that prepare the memory of the states.

    - If the new states have another buffer than the old ones, the state pool is copied.
    - If a pool is updated in place, some states are read by one sequence and written by another. They are copied to
      scratch memory first.

    Args:
        launches: Receives the launches.
        call: The instruction. Its second result has the new states.
        sequences: The number of sequences.
        tokens: Tokens of a sequence.
        operand: The index of the state operand. Slots follow it.
    """
    state, new = call.operand(operand), call.dst[1]
    slots_in, slots_out = call.optional_operand(operand + 1), call.optional_operand(operand + 2)
    snapshots = int(float_attribute(call.attrs, "snapshots")) if "snapshots" in call.attrs else 1
    require_supported(state.is_float and state.is_dense and new.is_dense, "states have to be dense and in float32")
    for slots in (slots_in, slots_out):
        require_supported(slots is None or (slots.is_dense and slots.dtype is DType.I32), "slots have to be dense")
    size = math.prod(state.shape[-3:])
    require_supported(size < 2**31, "a state is too large for one launch")
    stored = min(snapshots, max(tokens, 1))
    aside: tuple[LaunchWord, ...] = (0, 0)
    if slots_out is not None:
        assert slots_in is not None
        copies = launches.allocate_scratch((sequences, size)) if sequences > 1 else None
        moved = launches.allocate_scratch((sequences,), DType.I32) if sequences > 1 else None
        if state.address != new.address:
            launch_cast(launches, state, new)
        elif copies is not None and moved is not None:
            aside = copies, moved
            words: list[LaunchWord] = [state, slots_in, state.shape[0], new, slots_out, new.shape[0]]
            words += [copies, moved, sequences, snapshots, stored, size]
            launches.add_launch(STATES_SOURCE["shelter"], sequences, SHELTER_THREADS, words)
    elif snapshots > stored:
        missing = new.slice_axis(len(new.shape) - 4, stored, snapshots - stored)
        launch_unary(launches, "fill", missing, missing, [0.0])
    faults = launches.add_fault_message(
        f"slots number rows from 0 to {state.shape[0] - 1}, and one of them is {{value}}"
    )
    old: list[LaunchWord] = [state, 0, sequences] if slots_in is None else [state, slots_in, state.shape[0]]
    return StateOperands(sequences, snapshots, stored, (*old, 1, *aside), new, slots_out, tuple(faults))


@dataclass(frozen=True, slots=True)
class DeltaRuleOperands:
    """The operands of a gated delta rule and its output.

    `has_tiled_heads` is the order of value heads: if it is false, adjacent value heads share a key head.
    """

    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    out: Operand
    has_tiled_heads: bool

    @property
    def tokens(self) -> int:
        return self.v.shape[-3]

    @property
    def sequences(self) -> int:
        return math.prod(self.v.shape[:-3])

    @property
    def key_size(self) -> int:
        return self.k.shape[-1]

    @property
    def value_size(self) -> int:
        return self.v.shape[-1]

    @property
    def value_heads(self) -> int:
        return self.v.shape[-2]

    @property
    def has_channel_decay(self) -> bool:
        """Whether each key channel has its own decay, instead of one decay per head."""
        return self.g.shape[-1] != 1

    @property
    def adjacent_value_heads_per_key_head(self) -> int:
        """The number of adjacent value heads that share a key head; 0 with tiled heads."""
        return 0 if self.has_tiled_heads else self.value_heads // max(self.k.shape[-2], 1)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.key_size)

    @property
    def is_vector_aligned(self) -> bool:
        """Whether every row of the operands is contiguous and begins at a multiple of 16 bytes."""
        read = (self.q, self.k, self.v, *([self.g] if self.has_channel_decay else []))
        return self.value_size % 4 == 0 and all(is_vector_aligned(x) for x in read)

    def slice_tokens(self, start: int, count: int) -> DeltaRuleOperands:
        """Slice all operands to `count` tokens from token `start` on."""

        def slice_operand(x: Operand, inner: int = 3) -> Operand:
            return x.slice_axis(len(x.shape) - inner, start, count)

        q, k, v, g, out = (slice_operand(x) for x in (self.q, self.k, self.v, self.g, self.out))
        return replace(self, q=q, k=k, v=v, g=g, out=out, beta=slice_operand(self.beta, 2))
