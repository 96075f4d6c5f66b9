"""The argument words of loops over rows: the rows of a shape, and the address and strides of each operand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ....fusion.operand_views import Box
from ....fusion.operands import Operand, compute_broadcast_strides
from .row_kernel_passes import HEADER_WORDS, OPERAND_WORDS

ELEMENT_STRIDE_WORDS = slice(HEADER_WORDS + OPERAND_WORDS - 1, None, OPERAND_WORDS)
"""The words of a walk that hold the bytes from element to element of each operand."""
MAX_ROW_ELEMENTS = 2048
"""Largest length of the rows into which a longer run is cut, so that threads have rows to share."""


def make_row_loop_args(
    shape: Sequence[int],
    operands: Sequence[Operand],
    *,
    whole_rows: bool = False,
    apart: bool = False,
    boxes: Sequence[Box] = (),
) -> list[int] | None:
    """Make the loop arguments of a kernel over rows: row length, row counts, and each operand's address and strides.

    The result is None if a loop over rows and three outer axes cannot express the strides.

    Args:
        shape: The shape to which operands broadcast.
        operands: The operands, the result included.
        whole_rows: Whether a row is the last axis. Otherwise adjacent axes merge if all operands allow it.
        apart: Whether the elements of a row may be strided.
        boxes: Parts of the shape, such as the ranges of a concatenation. Their first and end indices along the four
            axes are the last words.
    """
    if any(n not in (1, m) for o in operands for n, m in zip(reversed(o.shape), reversed(shape), strict=False)):
        return None  # a repeated operand
    strides = [compute_broadcast_strides(o, shape) for o in operands]
    ends = [[box[axis] for box in boxes] for axis in range(len(shape))]
    axes = [(n, steps, end) for n, end, *steps in zip(shape, ends, *strides, strict=True) if n != 1]
    no_end = [(0, 1)] * len(boxes)
    row = (shape[-1], [s[-1] for s in strides], ends[-1]) if shape else (1, [0] * len(operands), no_end)
    last = [row] if whole_rows else []
    if whole_rows and axes and shape[-1] != 1:
        axes.pop()
    merged = [*axes[:1]]
    for n, steps, end in axes[1:]:
        m, outer_steps, outer_end = merged[-1]
        if all(was == n * now for was, now in zip(outer_steps, steps, strict=True)) and all(e == (0, n) for e in end):
            merged[-1] = (m * n, steps, [(low * n, high * n) for low, high in outer_end])
        else:
            merged.append((n, steps, end))
    if not whole_rows:
        last = [merged.pop() if merged else (1, [1] * len(operands), no_end)]
    n, steps, end = last[0]
    if not apart and any(s not in (0, 1) for s in steps) and n > 1:
        return None
    if not merged and not whole_rows and n > MAX_ROW_ELEMENTS and not boxes:
        row_elements = max(p for p in range(1, MAX_ROW_ELEMENTS + 1) if n % p == 0)
        merged, n = [(n // row_elements, [s * row_elements for s in steps], no_end)], row_elements
    if len(merged) > 3:
        return None
    while len(merged) < 3:
        merged.insert(0, (1, [0] * len(operands), no_end))
    walk = [n, *(axis[0] for axis in merged)]
    for k, operand in enumerate(operands):
        step = 4 * steps[k] if n > 1 else 4
        walk += [operand.address, *(4 * axis_steps[k] for _, axis_steps, _ in merged), step]
    for bounds in zip(*(axis_end for _, _, axis_end in merged), end, strict=True):
        walk += chain.from_iterable(bounds)
    return walk
