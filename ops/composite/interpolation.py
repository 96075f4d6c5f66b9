"""Interpolation: axes get another length, by copies of their entries or by products with interpolation matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from ...graph.errors import GraphError
from ...graph.node import Value
from ...graph.validation import BOOL, TEXT, validate_arguments
from ..matrix.matmul import mul_mat
from ..movement.rows import get_rows
from ..movement.views import broadcast, permute, reshape
from .window_settings import ANY_VALUE, AXIS_SIZES, make_shared_constant

Matrix = npt.NDArray[np.float64]
INTERPOLATION_MODES = ("nearest", "linear", "cubic")
"""The modes of `interpolate`."""


@validate_arguments(GraphError, x=ANY_VALUE, shape=AXIS_SIZES, mode=TEXT, align_corners=BOOL, antialias=BOOL)
def interpolate(
    x: Value, *, shape: Sequence[int], mode: str = "nearest", align_corners: bool = False, antialias: bool = False
) -> Value:
    """Resize the axes of `x` by interpolation. ggml: ``UPSCALE``.

    ggml interpolates along the last two axes only, and takes the nearest entries along others: two calls here.

    Args:
        x: values of f32.
        shape: sizes of all axes of the result.
        mode: ``nearest``, which takes entry ``i * old // new``; ``linear``; or ``cubic`` (Keys, 1981) with the
            coefficient -0.75.
        align_corners: whether the first and last entries stay in place; else the outer edges do. Not for ``nearest``.
        antialias: whether the kernel of ``linear`` grows with the distance of new entries, if that is above 1.

    Returns:
        f32 of this shape.

    Raises:
        GraphError: shape or settings do not fit.
    """
    if mode not in INTERPOLATION_MODES:
        raise GraphError(f"interpolate: mode is {mode!r:.60}; one of {', '.join(INTERPOLATION_MODES)}")
    if len(shape) != len(x.shape) or min((*shape, *x.shape), default=1) < 1:
        raise GraphError(f"interpolate: shape {list(shape)} does not fit {x.spec}; both need the same axes, none empty")
    if (align_corners and mode == "nearest") or (antialias and mode != "linear"):
        raise GraphError(f"interpolate: {mode} has no {'align_corners' if align_corners else 'antialias'}")
    for axis, new in enumerate(shape):
        old, before, after = x.shape[axis], x.shape[:axis], x.shape[axis + 1 :]
        if new == old:
            continue
        rows = reshape(x, shape=(prod(before), old, prod(after)))
        if mode == "nearest":
            resized = _take_nearest_entries(rows, new)
        else:
            matrix = make_shared_constant(
                build_interpolation_matrix(old, new, mode, align_corners, antialias=antialias)
            )
            product = mul_mat(matrix, permute(rows, axes=(0, 2, 1)))
            resized = permute(product, axes=(0, 2, 1))
        x = reshape(resized, shape=(*before, new, *after))
    return x


def _take_nearest_entries(x: Value, new: int) -> Value:
    """Return `x` [a, old, b] as [a, new, b] by copies of its entries."""
    a, old, b = x.shape
    if new % old == 0:
        return broadcast(reshape(x, shape=(a, old, 1, b)), shape=(a, old, new // old, b))
    ids = make_shared_constant((np.arange(new) * old // new).astype(np.int32))
    rows = get_rows(reshape(permute(x, axes=(1, 0, 2)), shape=(old, a * b)), ids)
    return permute(reshape(rows, shape=(new, a, b)), axes=(1, 0, 2))


def build_interpolation_matrix(
    old: int, new: int, mode: str, align_corners: bool = False, scale: float | None = None, antialias: bool = False
) -> Matrix:
    """Build the matrix [new, old] that makes `new` entries from `old` entries.

    Args:
        old: number of old entries.
        new: number of new entries.
        mode: ``nearest``, ``nearest-exact``, ``linear`` or ``cubic``.
        align_corners: whether the first and last entries stay in place.
        scale: ratio of new to old entries, if it differs from ``new / old``.
        antialias: whether the kernel of ``linear`` grows with the distance of new entries, if that is above 1.
    """
    step = 1 / scale if scale else old / new
    if align_corners:
        step = (old - 1) / (new - 1) if new > 1 else 0.0
    i = np.arange(new, dtype=np.float64)
    if mode.startswith("nearest"):
        matrix = np.zeros((new, old))
        at = (i + 0.5 if mode == "nearest-exact" else i) * step
        matrix[np.arange(new), np.minimum(np.floor(at).astype(int), old - 1)] = 1
        return matrix
    at = i * step if align_corners else (i + 0.5) * step - 0.5
    if antialias:
        width = max(1.0, step)
        matrix = np.maximum(1 - np.abs(np.arange(old) - at[:, None]) / width, 0)
        return matrix / matrix.sum(1, keepdims=True)
    return _build_neighbour_matrix(old, np.maximum(at, 0) if mode == "linear" and not align_corners else at, mode)


def _build_neighbour_matrix(old: int, at: Matrix, mode: str) -> Matrix:
    """Build the matrix that interpolates at positions from the two or four entries around each of them.

    Entries outside of the axis are equal to the nearest entry.
    """
    matrix = np.zeros((len(at), old))
    first = np.floor(at).astype(int)
    rest = at - first
    taps = (
        [(0, 1 - rest), (1, rest)]
        if mode == "linear"
        else list(zip((-1, 0, 1, 2), _compute_cubic_weights(rest), strict=True))
    )
    for offset, weight in taps:
        np.add.at(matrix, (np.arange(len(at)), np.clip(first + offset, 0, old - 1)), weight)
    return matrix


def _compute_cubic_weights(t: Matrix, a: float = -0.75) -> list[Matrix]:
    """Return the weights of the four neighbours of a point in cubic interpolation (Keys, 1981).

    Args:
        t: distance of the point from the second neighbour.
        a: coefficient of the cubic kernel.
    """

    def inner_weight(u: Matrix) -> Matrix:
        return ((a + 2) * u - (a + 3)) * u * u + 1

    def outer_weight(u: Matrix) -> Matrix:
        return ((a * u - 5 * a) * u + 8 * a) * u - 4 * a

    return [outer_weight(t + 1), inner_weight(t), inner_weight(1 - t), outer_weight(2 - t)]
