"""Memory layouts of operands: an operand is a view of a larger leaf, so that planner and kernels see real strides.

View ops build the operand from the leaf. Arrays have one entry per *unit*: an element, or a whole block of a quantised
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import ops
from ...graph.attrs import Attrs
from ...graph.dtypes import FLOAT_DTYPES, QUANTISED_DTYPES, STATE_DTYPES
from ...graph.node import Value
from ...graph.spec import Spec
from ...ops import Op

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class OperandLayout:
    """The memory layout of an operand as a view of a larger leaf.

    `leaf` is the spec of the leaf. `view` builds the operand from the leaf. `region` returns the entries of the operand
    in an array of the leaf. All entries of the operand along `broadcast_axis` share memory.
    """

    leaf: Spec
    view: Callable[[Value], Value]
    region: Callable[[Array], Array]
    broadcast_axis: int | None = None


def _make_whole_leaf_layout(spec: Spec) -> OperandLayout:
    """Return the layout of an operand that is a whole leaf."""
    return OperandLayout(spec, lambda leaf: leaf, lambda units: units)


def _make_minimally_aligned_layout(spec: Spec) -> OperandLayout:
    """Return a contiguous layout with an offset of one unit: the address is aligned to one element only."""
    block = spec.dtype.block
    leaf = Spec((spec.size + 2 * block,), spec.dtype)

    def view(value: Value) -> Value:
        return ops.reshape(ops.slice_(value, axis=0, start=block, stop=block + spec.size), shape=spec.shape)

    return OperandLayout(leaf, view, lambda units: units[1:-1].reshape(compute_shape_in_units(spec), copy=False))


def _make_gapped_layout(spec: Spec) -> OperandLayout | None:
    """Return a layout with gaps around the rows of an operand.

    There is a gap before the first row and after each row.
    """
    if not spec.shape:
        return None
    block, size = spec.dtype.block, spec.shape[-1]
    leaf = Spec((*spec.shape[:-1], size + 3 * block), spec.dtype)
    units = size // block

    def view(value: Value) -> Value:
        return ops.slice_(value, axis=-1, start=2 * block, stop=2 * block + size)

    return OperandLayout(leaf, view, lambda array: array[..., 2 : 2 + units])


def _make_reversed_axes_layout(spec: Spec) -> OperandLayout | None:
    """Return a layout with the axes in reverse order in memory; None if fewer than two axes can be reversed.

    A last axis of quantisation blocks stays last.
    """
    rank = len(spec.shape)
    block_axes = 1 if spec.dtype.is_quantised else 0
    axes = (*reversed(range(rank - block_axes)), *range(rank - block_axes, rank))
    if sum(spec.shape[a] > 1 for a in range(rank - block_axes)) < 2:
        return None
    leaf = Spec(tuple(spec.shape[a] for a in axes), spec.dtype)
    return OperandLayout(leaf, lambda value: ops.permute(value, axes=axes), lambda units: np.transpose(units, axes))


def _make_layout_repeating_first_long_axis(spec: Spec, distinct_axes: int) -> OperandLayout | None:
    """Return a layout with stride 0 along the first axis longer than 1, or None if the operand cannot have it.

    An axis of quantisation blocks and the last `distinct_axes` axes cannot have stride 0.
    """
    usable = len(spec.shape) - max(distinct_axes, spec.dtype.is_quantised)
    axis = next((a for a in range(usable) if spec.shape[a] > 1), None)
    if axis is None:
        return None
    leaf = Spec((*spec.shape[:axis], 1, *spec.shape[axis + 1 :]), spec.dtype)
    return OperandLayout(leaf, lambda value: ops.broadcast(value, shape=spec.shape), lambda units: units, axis)


def make_overlapping_layouts(spec: Spec) -> tuple[OperandLayout, OperandLayout]:
    """Return layouts of two operands that overlap in one leaf; the second one begins one element after the first."""
    leaf = Spec((spec.size + 1,), spec.dtype)

    def make_layout(start: int) -> OperandLayout:
        def view(value: Value) -> Value:
            return ops.reshape(ops.slice_(value, axis=0, start=start, stop=start + spec.size), shape=spec.shape)

        return OperandLayout(leaf, view, lambda array: array[start : start + spec.size].reshape(spec.shape, copy=False))

    return make_layout(0), make_layout(1)


def find_layout_by_name(spec: Spec, layout: str, distinct_axes: int = 0) -> OperandLayout | None:
    """Return the layout of an operand that has the name `layout` (see `LAYOUTS`); None if the operand cannot have it.

    Args:
        spec: spec of the operand.
        layout: name of the layout.
        distinct_axes: number of last axes within which entries must differ, so that they do not share memory.
    """
    if layout in ("contiguous", "inplace", "twin", "overlap", "state"):
        return _make_whole_leaf_layout(spec)
    if 0 in spec.shape and layout == "broadcast":
        return None
    if layout == "broadcast":
        return _make_layout_repeating_first_long_axis(spec, distinct_axes)
    return {
        "offset": _make_minimally_aligned_layout,
        "sliced": _make_gapped_layout,
        "permuted": _make_reversed_axes_layout,
    }[layout](spec)


def find_layout_or_contiguous(spec: Spec, layout: str, distinct_axes: int = 0) -> OperandLayout:
    """Return the layout with the name `layout`, or the contiguous layout if the operand cannot have it."""
    return find_layout_by_name(spec, layout, distinct_axes) or _make_whole_leaf_layout(spec)


def find_in_place_operand_and_duplicate(op: Op, specs: Mapping[str, Spec], attrs: Attrs) -> tuple[str, str] | None:
    """Find two operands of an elementwise op that may share memory in a test; return their names, or None.

    The first operand can be updated in place. Both have equal specs and equal legal values.
    """
    if any(o.dims for o in op.signature_for(attrs).operands):
        return None
    for _, one in op.inplace_pairs(attrs):
        for other in specs:
            is_equal = other != one and specs.get(one) == specs[other] and op.ranges.get(one) == op.ranges.get(other)
            if is_equal and specs[other].size:
                return one, other
    return None


def list_quantisable_operands(op: Op, attrs: Attrs) -> frozenset[str]:
    """Return the names of the operands that may have any quantised dtype, as weights have."""
    operands = op.signature_for(attrs).operands
    return frozenset(o.name for o in operands if {*o.dtypes} == {*FLOAT_DTYPES, *QUANTISED_DTYPES})


def list_packed_state_operands(op: Op, specs: Mapping[str, Spec], attrs: Attrs) -> frozenset[str]:
    """Return the names of the operands that may be states in quantised blocks, as a KV cache is."""
    if op.is_view:
        return frozenset()
    packed = {n for n, s in specs.items() if s.dtype.is_quantised and s.dtype in STATE_DTYPES and s.size}
    return frozenset(packed - list_quantisable_operands(op, attrs))


def compute_shape_in_units(spec: Spec) -> tuple[int, ...]:
    """Return the shape of an operand counted in units: a last axis of quantised elements is counted in blocks."""
    if not spec.dtype.is_quantised:
        return spec.shape
    return (*spec.shape[:-1], spec.shape[-1] // spec.dtype.block)


def build_leaf_array(units: Array, layout: OperandLayout, filler: Array) -> Array:
    """Return the array of a leaf: `units` in the region of the operand, `filler` in all other entries."""
    leaf = np.empty(compute_shape_in_units(layout.leaf), units.dtype)
    leaf[...] = filler
    if layout.broadcast_axis is not None:
        return np.take(units, [0], axis=layout.broadcast_axis) if math.prod(units.shape) else leaf
    layout.region(leaf)[...] = units
    return leaf
