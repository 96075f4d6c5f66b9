"""Converters of ONNX's recurrent ops RNN, GRU and LSTM, which are unrolled into one subgraph per time step.

For each direction:

1. One matrix product computes the gate inputs of all time steps.
2. Each step adds the product of the previous state and the recurrent weight, and applies the activations.
3. The results of all steps are stacked; the last states are results too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ... import ops
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import matmul, shapes
from ..tensors.tensor import Tensor, constant_tensor
from .op_calls import OpConverter, require_constant

MAX_UNROLLED_STEPS = 1 << 10
"""Largest number of time steps that are unrolled."""

Activation: TypeAlias = Callable[[Tensor], Tensor]
"""An element-wise function of one tensor."""

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "sigmoid": lambda x: arith.apply_unary_op(ops.sigmoid, x),
        "tanh": lambda x: arith.apply_unary_op(ops.tanh, x),
        "relu": lambda x: arith.apply_unary_op(ops.relu, x),
        "softplus": lambda x: arith.apply_unary_op(ops.softplus, x),
        "softsign": lambda x: arith.div(x, arith.add(arith.absolute(x), 1.0)),
    }
)
"""Activations without parameters, by ONNX name in lower case."""


@dataclass(frozen=True, slots=True)
class RecurrentCell:
    """The weights and settings of a recurrent op such as ``LSTM``, for one direction; all time steps share them.

    `recurrent_weight` is [gates × hidden, hidden]. `integer_settings` has the integer attributes of the op.
    """

    recurrent_weight: Tensor
    recurrent_bias: Tensor | None
    peepholes: Tensor | None
    activations: Sequence[Activation]
    integer_settings: Mapping[str, int]

    def project_state(self, h: Tensor, gates: slice = slice(None)) -> Tensor:
        """Multiply a state by the recurrent weights of the selected gates and add the bias: [batch, gates × hidden]."""
        size = h.shape[-1]
        first, last, _ = gates.indices(self.recurrent_weight.shape[0] // size)
        weight, bias = (
            x if x is None else shapes.slice_range(x, 0, first * size, last * size)
            for x in (self.recurrent_weight, self.recurrent_bias)
        )
        assert weight is not None
        return matmul.linear(h, weight, bias)

    def add_peephole(self, x: Tensor, number: int, c: Tensor) -> Tensor:
        """Return `x` plus the peephole term of gate `number`: the peephole weight times the cell state `c`."""
        if self.peepholes is None:
            return x
        size = c.shape[-1]
        return arith.add(x, arith.mul(c, shapes.slice_range(self.peepholes, 0, number * size, (number + 1) * size)))


StepFunction: TypeAlias = Callable[[RecurrentCell, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
"""A function of a cell, the gate inputs of one step and the states; it returns the next states, the result first."""


def _compute_rnn_step(cell: RecurrentCell, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute one time step of a simple RNN: the activation of the sum of gate inputs and projected state."""
    return (cell.activations[0](arith.add(x, cell.project_state(states[0]))),)


def _compute_gru_step(cell: RecurrentCell, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute one GRU time step; the gates are update, reset and new, in this order."""
    (h,), (gate, last) = states, cell.activations
    of_update, of_reset, of_new = shapes.split(x, h.shape[-1], 1)
    if cell.integer_settings["linear_before_reset"]:
        update, reset, seen = shapes.split(cell.project_state(h), h.shape[-1], 1)
        update, reset = gate(arith.add(of_update, update)), gate(arith.add(of_reset, reset))
        seen = arith.mul(reset, seen)
    else:
        update, reset = shapes.split(cell.project_state(h, slice(2)), h.shape[-1], 1)
        update, reset = gate(arith.add(of_update, update)), gate(arith.add(of_reset, reset))
        seen = cell.project_state(arith.mul(reset, h), slice(2, 3))
    new = last(arith.add(of_new, seen))
    return (arith.add(new, arith.mul(update, arith.sub(h, new))),)


def _compute_lstm_step(cell: RecurrentCell, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute one LSTM time step; the gates are input, output, forget and cell, in this order."""
    h, c = states
    gate, middle, last = cell.activations
    into, out, keep, new = shapes.split(arith.add(x, cell.project_state(h)), c.shape[-1], 1)
    taken = gate(cell.add_peephole(into, 0, c))
    forget_gate = (
        arith.sub(1.0, taken) if cell.integer_settings["input_forget"] else gate(cell.add_peephole(keep, 2, c))
    )
    c = arith.add(arith.mul(forget_gate, c), arith.mul(taken, middle(new)))
    return arith.mul(gate(cell.add_peephole(out, 1, c)), last(c)), c


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def make_recurrence_converter(step: StepFunction, names: Sequence[str], settings: Sequence[str] = ()) -> OpConverter:
    """Make the converter of a recurrent op from the function of one time step.

    Args:
        step: The function of one time step.
        names: The default activations of the gates.
        settings: The integer attributes of this op, except for the attributes of all recurrent ops.
    """

    def row(
        x: Tensor,
        weight: Tensor,
        before: Tensor,
        bias: Tensor | None = None,
        lengths: Tensor | None = None,
        *more: Tensor | None,
        direction: str = "forward",
        activations: Sequence[Any] | None = None,
        hidden_size: int | None = None,
        layout: int = 0,
        clip: float | None = None,
        **attributes: Any,
    ) -> tuple[Tensor, ...]:
        if direction not in _DIRECTIONS:
            raise ModelError(f"direction {direction!r}; need one of {', '.join(_DIRECTIONS)}")
        backward_flags, size = _DIRECTIONS[direction], before.shape[-1]
        chosen = _select_gate_activations(activations or [*names] * len(backward_flags), attributes, clip)
        unknown = sorted(set(attributes) - set(settings))
        if unknown or len(chosen) != len(names) * len(backward_flags) or (hidden_size or size) != size:
            raise ModelError(f"settings {unknown}, {len(chosen)} activations, {hidden_size} hidden; not of this op")
        count = 2 if step is _compute_lstm_step else 1
        initial_states, peepholes = (*more, None, None)[:count], more[count] if len(more) > count else None
        firsts = [x if x is None or not layout else _swap_batch_and_time(x) for x in initial_states]
        x = _swap_batch_and_time(x) if layout else x
        length, batch = x.shape[:2]
        if lengths is not None and (require_constant(lengths) != length).any():
            raise ModelError("sequences that end early; hocket has those of one length")
        if not 0 < length <= MAX_UNROLLED_STEPS:
            raise ModelError(f"{length} steps; hocket writes out {MAX_UNROLLED_STEPS} at most")
        ends: list[list[Tensor]] = []
        rows: list[list[Tensor]] = []
        for direction_index, is_backward in enumerate(backward_flags):
            of_x, of_h = (
                (None, None)
                if bias is None
                else shapes.split(_select_direction(bias, direction_index), bias.shape[1] // 2, 0)
            )
            own = chosen[direction_index * len(names) : (direction_index + 1) * len(names)]
            flags = {name: int(attributes.get(name, 0)) for name in settings}
            cell = RecurrentCell(
                _select_direction(before, direction_index),
                of_h,
                None if peepholes is None else _select_direction(peepholes, direction_index),
                own,
                flags,
            )
            gates = shapes.unbind(matmul.linear(x, _select_direction(weight, direction_index), of_x), 0)
            zeros = constant_tensor(np.zeros((batch, size), np.float32))
            states = [zeros if first is None else _select_direction(first, direction_index) for first in firsts]
            steps = list(_unroll_steps(step, cell, gates[::-1] if is_backward else gates, states))
            rows.append([states[0] for states in (steps[::-1] if is_backward else steps)])
            ends.append(list(steps[-1]))
        every = shapes.stack([shapes.stack(list(at)) for at in zip(*rows, strict=True)])
        last = [shapes.stack(list(of)) for of in zip(*ends, strict=True)]
        if layout:
            return shapes.permute(every, (2, 0, 1, 3)), *map(_swap_batch_and_time, last)
        return every, *last

    return row


def _unroll_steps(
    step: StepFunction, cell: RecurrentCell, gates: Sequence[Tensor], states: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Run a recurrence over all time steps, and yield the states after each step.

    Args:
        step: Computes one time step.
        cell: The weights and settings.
        gates: The gate inputs of each time step.
        states: The states before the first step.
    """
    for x in gates:
        states = step(cell, x, states)
        yield tuple(states)


def _select_gate_activations(names: Sequence[Any], attributes: dict[str, Any], clip: float | None) -> list[Activation]:
    """Return the activations of all gates; `clip` limits their inputs to the range ``-clip`` to ``clip``.

    Raises:
        ModelError: An activation is not in `ACTIVATIONS`.
    """
    own = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    if unknown := [name for name in own if name.lower() not in ACTIVATIONS]:
        raise ModelError(f"activation {unknown[0]}; hocket has {', '.join(ACTIVATIONS)} here")
    for name in ("activation_alpha", "activation_beta"):
        attributes.pop(name, None)  # these activations have no parameters
    chosen = [ACTIVATIONS[name.lower()] for name in own]
    return [_with_clipped_input(f, float(clip)) for f in chosen] if clip else chosen


def _with_clipped_input(activation: Activation, bound: float) -> Activation:
    """Return an activation that clips its input to the range ``-bound`` to ``bound`` first."""
    return lambda x: activation(arith.clamp(x, -bound, bound))


def _select_direction(x: Tensor, direction_index: int) -> Tensor:
    """Return the part of `x` for one direction (forward or backward), which is an index of the first axis."""
    return shapes.select(x, 0, direction_index)


def _swap_batch_and_time(x: Tensor) -> Tensor:
    """Swap the batch axis and the time axis, which are the first two."""
    return shapes.transpose(x, 0, 1)


rnn = make_recurrence_converter(_compute_rnn_step, ("Tanh",))
gru = make_recurrence_converter(_compute_gru_step, ("Sigmoid", "Tanh"), ("linear_before_reset",))
lstm = make_recurrence_converter(_compute_lstm_step, ("Sigmoid", "Tanh", "Tanh"), ("input_forget",))
