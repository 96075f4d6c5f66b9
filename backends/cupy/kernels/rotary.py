"""Rotary position embedding, and sines of timesteps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....ops.attributes import number
from ....ops.rotary import frequencies, planes
from ....ops.views import ints_of
from ...operands import Bound, Operand
from ..axes import axes_of, row_heads
from ..driver import Source
from ..launches import Binding, Launches, Word, blocks, need
from .elementwise import MOST_ELEMENTS, THREADS, as_float
from .moves import launch_copy

SOURCE = Source("rotary.cu", ("rope", "timesteps"))
SOURCES = (SOURCE,)


def _rope(launches: Launches, call: Bound) -> None:
    """One position for each token."""
    half = int(number(call.attrs, "n_dims")) // 2
    inverse, magnitude = frequencies(half, call.attrs)
    _launch(launches, call, call.operand(1), 0, np.zeros(half, np.int32), inverse, magnitude)


def _rope_multi(launches: Launches, call: Bound) -> None:
    """Four positions for each token, of which every pair has its own."""
    n_dims, mode, positions = int(number(call.attrs, "n_dims")), str(call.attrs["mode"]), call.operand(1)
    plane, index = planes(n_dims if mode == "vision" else n_dims // 2, ints_of(call.attrs, "sections"), mode)
    inverse, magnitude = frequencies(n_dims // 2, call.attrs, index)
    tensor = positions.tensor
    strides = tensor.strides[:-2] + tensor.strides[-1:]
    of_tokens = replace(positions, tensor=replace(tensor, shape=tensor.shape[:-2] + tensor.shape[-1:], strides=strides))
    _launch(launches, call, of_tokens, tensor.strides[-2], plane.astype(np.int32), inverse, magnitude)


def _launch(
    launches: Launches,
    call: Bound,
    positions: Operand,
    position_step: int,
    plane: npt.NDArray[np.int32],
    inverse: npt.NDArray[np.float64],
    magnitude: float,
) -> None:
    x, out, factors = as_float(launches, call.operand(0)), call.out, call.optional(2)
    need(positions.dtype is DType.I32, f"positions of type {positions.dtype} are missing")
    factors = None if factors is None else as_float(launches, factors)
    pairs, offset = len(inverse), int(number(call.attrs, "offset"))
    _copy_others(launches, x, out, offset, 2 * pairs)
    if not pairs:
        return
    neighbours = call.attrs["mode"] == "normal"
    tensor = positions.tensor
    of_rows = replace(positions, tensor=replace(tensor, shape=(*tensor.shape, 1), strides=(*tensor.strides, 0)))
    axes = axes_of(x.shape[:-1], [row_heads(x), row_heads(out), of_rows])
    count = axes.count * pairs
    need(count < MOST_ELEMENTS, f"{count} pairs are too many for one launch")
    words: list[Word] = [
        count,
        pairs,
        offset,
        2 if neighbours else 1,
        1 if neighbours else pairs,
        x.strides[-1],
        out.strides[-1],
    ]
    words += [position_step, magnitude, launches.constant(inverse), launches.constant(plane)]
    words += [0, 0] if factors is None else [factors, factors.strides[-1]]
    words += [*axes.words, *axes.walk(0, x), *axes.walk(1, out), *axes.walk(2, call.operand(1))]
    launches.add(SOURCE["rope"], blocks(count, THREADS), THREADS, words)


def _copy_others(launches: Launches, x: Operand, out: Operand, offset: int, turned: int) -> None:
    """The entries of each row that do not turn, unless they are there already."""
    axis, columns = len(x.shape) - 1, x.shape[-1]
    if x.address == out.address:
        return
    for start, end in ((0, offset), (offset + turned, columns)):
        if start < end:
            launch_copy(launches, x.part(axis, start, end - start), out.part(axis, start, end - start))


def _timesteps(launches: Launches, call: Bound) -> None:
    x, width, period = as_float(launches, call.operand(0)), *(int(number(call.attrs, n)) for n in ("dim", "max_period"))
    half = width // 2
    inverse = np.exp(-math.log(period) * np.arange(max(1, half)) / max(1, half))
    axes = axes_of(x.shape, [x])
    count = axes.count * width
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[Word] = [count, width, half, launches.constant(inverse), *axes.words, *axes.walk(0, x), call.out]
    launches.add(SOURCE["timesteps"], blocks(count, THREADS), THREADS, words)


BINDINGS: Mapping[str, Binding] = {"rope": _rope, "rope_multi": _rope_multi, "timestep_embedding": _timesteps}
