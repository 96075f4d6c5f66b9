"""Repetition of an operand to the shape of another one, for references: as tiles, or each entry for its neighbours."""

from __future__ import annotations

import numpy as np

from .numpy_functions import Array


def tile_to_shape(b: Array, shape: tuple[int, ...]) -> Array:
    """Repeat `b` as tiles to `shape`, as in a b a b: entry i of an axis is ``b[i % size]``."""
    if b.shape == shape:
        return b
    b = b.reshape((1,) * (len(shape) - b.ndim) + b.shape)
    if all(n in (1, m) for n, m in zip(b.shape, shape, strict=True)):
        return np.broadcast_to(b, shape)
    return np.tile(b, [m // n if n else 0 for n, m in zip(b.shape, shape, strict=True)])


def repeat_leading_axis_entries(w: Array, leading: tuple[int, ...], trailing: int) -> Array:
    """Repeat the entries of the leading axes of `w` in place until these have the shape `leading`: a b becomes a a b b.

    Entry i of a repeated axis is ``w[i // ratio]``. The last `trailing` axes of `w` stay as they are.
    """
    axes = (1,) * (len(leading) - (w.ndim - trailing)) + w.shape[: w.ndim - trailing]
    w = w.reshape(axes + w.shape[w.ndim - trailing :])
    for axis, (n, m) in enumerate(zip(axes, leading, strict=True)):
        if n != m:
            w = np.repeat(w, m // n if n else 0, axis=axis)
    return w
