"""Layouts: an operand as a view of a larger leaf, made by view ops, so that planner and kernel see real strides.

Arrays here have one entry per *unit*: an element, or a whole block of a quantised type, whose elements cannot be
told apart in memory.
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
from ...graph.node import Value
from ...graph.spec import Spec
from ...ops import Op

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """How an operand lies in its leaf: the leaf's spec, the view as graph nodes, the view as an array.

    `tied` is the axis along which all entries of the operand are the same memory, if any.
    """

    leaf: Spec
    view: Callable[[Value], Value]
    region: Callable[[Array], Array]
    tied: int | None = None


def _whole(spec: Spec) -> Placed:
    return Placed(spec, lambda leaf: leaf, lambda units: units)


def _offset(spec: Spec) -> Placed:
    """Dense, but one unit after the start: an address that is only aligned to the element."""
    block = spec.dtype.block
    leaf = Spec((spec.size + 2 * block,), spec.dtype)

    def view(value: Value) -> Value:
        return ops.reshape(ops.slice_(value, axis=0, start=block, stop=block + spec.size), shape=spec.shape)

    return Placed(leaf, view, lambda units: units[1:-1].reshape(unit_shape(spec), copy=False))


def _sliced(spec: Spec) -> Placed | None:
    """Gaps after every row, and before the first."""
    if not spec.shape:
        return None
    block, size = spec.dtype.block, spec.shape[-1]
    leaf = Spec((*spec.shape[:-1], size + 3 * block), spec.dtype)
    units = size // block

    def view(value: Value) -> Value:
        return ops.slice_(value, axis=-1, start=2 * block, stop=2 * block + size)

    return Placed(leaf, view, lambda array: array[..., 2 : 2 + units])


def _permuted(spec: Spec) -> Placed | None:
    """Axes in reverse order in memory; the last one stays where it holds blocks."""
    rank = len(spec.shape)
    kept = 1 if spec.dtype.is_quantised else 0
    axes = (*reversed(range(rank - kept)), *range(rank - kept, rank))
    if sum(spec.shape[a] > 1 for a in range(rank - kept)) < 2:
        return None
    leaf = Spec(tuple(spec.shape[a] for a in axes), spec.dtype)
    return Placed(leaf, lambda value: ops.permute(value, axes=axes), lambda units: np.transpose(units, axes))


def _broadcast(spec: Spec, distinct: int) -> Placed | None:
    """Stride 0 along one axis: the first that is longer than 1 (not one of blocks, or of `distinct` numbers)."""
    usable = len(spec.shape) - max(distinct, spec.dtype.is_quantised)
    axis = next((a for a in range(usable) if spec.shape[a] > 1), None)
    if axis is None:
        return None
    leaf = Spec((*spec.shape[:axis], 1, *spec.shape[axis + 1 :]), spec.dtype)
    return Placed(leaf, lambda value: ops.broadcast(value, shape=spec.shape), lambda units: units, axis)


def placed(spec: Spec, layout: str, distinct: int = 0) -> Placed | None:
    """The operand under `layout`, or None where it has no such layout; over the last `distinct` axes its entries must
    differ."""
    if layout in ("contiguous", "inplace", "twin"):
        return _whole(spec)
    if 0 in spec.shape and layout == "broadcast":
        return None
    if layout == "broadcast":
        return _broadcast(spec, distinct)
    return {"offset": _offset, "sliced": _sliced, "permuted": _permuted}[layout](spec)


def place(spec: Spec, layout: str, distinct: int = 0) -> Placed:
    """`placed`, contiguous where the operand has no such layout."""
    return placed(spec, layout, distinct) or _whole(spec)


def twins(op: Op, specs: Mapping[str, Spec], attrs: Attrs) -> tuple[str, str] | None:
    """An in-place operand and another that may be the very same value: of an elementwise op, alike in all respects."""
    if any(o.dims for o in op.signature_for(attrs).operands):
        return None
    for _, one in op.inplace_pairs(attrs):
        for other in specs:
            alike = other != one and specs.get(one) == specs[other] and op.ranges.get(one) == op.ranges.get(other)
            if alike and specs[other].size:
                return one, other
    return None


def unit_shape(spec: Spec) -> tuple[int, ...]:
    """The shape of an array with one entry per unit."""
    if not spec.dtype.is_quantised:
        return spec.shape
    return (*spec.shape[:-1], spec.shape[-1] // spec.dtype.block)


def embed(units: Array, placed: Placed, filler: Array) -> Array:
    """The leaf's array: `units` where the operand lies, `filler` (one unit) everywhere else."""
    leaf = np.empty(unit_shape(placed.leaf), units.dtype)
    leaf[...] = filler
    if placed.tied is not None:
        return np.take(units, [0], axis=placed.tied) if math.prod(units.shape) else leaf
    placed.region(leaf)[...] = units
    return leaf
