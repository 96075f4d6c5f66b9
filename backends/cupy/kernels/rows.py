"""Kernels over rows: norms, softmax, sums and argmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ....ops.declaration.attributes import float_attribute
from ....ops.reduction.norms import alibi_slopes
from ...chains import scaled_norm
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..binding.axes import MOST, Axes, axes_of, row_heads
from ..binding.chains import Fused
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Kernel, Source
from .elementwise import as_float

COMPARED = 256
NORMS = ("Rms", "L2", "L2Clamped")
SOURCE = Source(
    "rows.cu",
    (
        *(f"norm_by<{n}>" for n in NORMS),
        *("scaled_norm", "centred_norm", "softmax", "sum_rows", "cumsum", "count_equal", "argmax"),
    ),
    ("columns.cuh",),
)
SOURCES = (SOURCE,)


def row_threads(columns: int) -> int:
    """Return the threads of a block that processes a row of `columns` entries."""
    return min(512, max(32, blocks(columns, 4 * 32) * 32))


def _rows(x: Operand, out: Operand) -> Axes:
    return axes_of(x.shape[:-1], [row_heads(x), row_heads(out)])


def _launch(launches: Launches, kernel: Kernel, x: Operand, out: Operand, value: float, threads: int = 0) -> None:
    """Launch a kernel over `Rows`."""
    axes = _rows(x, out)
    words: list[Word] = [x.shape[-1], x.strides[-1], *axes.words, *axes.walk(0, x), *axes.walk(1, out), float(value)]
    launches.add(kernel, axes.count, threads or row_threads(x.shape[-1]), words)


def _number(call: Bound, name: str) -> float:
    return float(float_attribute(call.attrs, name))


def _rms_norm(launches: Launches, call: Bound) -> None:
    _launch(launches, SOURCE["norm_by<Rms>"], as_float(launches, call.operand(0)), call.out, _number(call, "eps"))


def _launch_scaled(launches: Launches, x: Operand, y: Operand | None, scaled: Bound, norm: Bound, w: Operand) -> None:
    """Launch a norm of x, or of x + y, times w. `norm` reads the sum."""
    out = scaled.out
    total = None if y is None else norm.operand(0)
    need(x.is_float and w.is_float and math.prod(w.shape[:-1]) == 1, "rows are not multiplied by one float vector each")
    need(w.shape[-1:] == x.shape[-1:], "a row is multiplied by one number")
    dense = [o for o in (y, total, out) if o is not None]
    need(all(o.is_float and o.shape == x.shape and o.is_dense for o in dense), "operands differ, or are not dense")
    apart(out, [w], [x, y])
    if total is not None:
        apart(total, [w, out], [x, y])
    heads = [row_heads(o or out) for o in (x, y, total, out)]
    axes = axes_of(x.shape[:-1], heads)
    words: list[Word] = [x.shape[-1], x.strides[-1], w.strides[-1], _number(norm, "eps"), w, *axes.words]
    for k, operand in enumerate((x, y, total, out)):
        words += [0] * (1 + MOST) if operand is None else axes.walk(k, operand)
    launches.add(SOURCE["scaled_norm"], axes.count, row_threads(x.shape[-1]), words)


def _norm_and_factor(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse ``rms_norm(x) * w``."""
    chain = scaled_norm(flow, number)
    norm, scaled = map(flow.call, chain)
    _launch_scaled(launches, norm.operand(0), None, scaled, norm, scaled.operand(1))
    return chain


def _sum_norm_and_factor(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse ``rms_norm(x + y) * w``, and write the sum too."""
    norm, factor = scaled_norm(flow, flow.any_reader(number, "rms_norm"))
    total, scaled = flow.call(number), flow.call(factor)
    need(len(flow.readers_of(number)) > 1, "the sum has no other reader")
    need(total.operand(0).shape == total.operand(1).shape, "the operands of a sum differ")
    x, y = total.operand(0), total.operand(1)
    if not y.is_dense:
        x, y = y, x
    _launch_scaled(launches, x, y, scaled, flow.call(norm), scaled.operand(1))
    return number, norm, factor


def _l2_norm(launches: Launches, call: Bound) -> None:
    kernel = SOURCE["norm_by<L2Clamped>" if call.attrs["clamp"] else "norm_by<L2>"]
    _launch(launches, kernel, as_float(launches, call.operand(0)), call.out, _number(call, "eps"))


def _norm(launches: Launches, call: Bound) -> None:
    _launch(launches, SOURCE["centred_norm"], as_float(launches, call.operand(0)), call.out, _number(call, "eps"))


def _group_norm(launches: Launches, call: Bound) -> None:
    """Bind a group norm as rows of complete groups of channels, and one row of the smaller last group."""
    x, out = as_float(launches, call.operand(0)), call.out
    need(x.is_dense, "the channels of x are not dense")
    *leading, channels, height, width = x.shape
    run = blocks(channels, int(_number(call, "groups")))
    whole, rest = divmod(channels, run) if run else (0, 0)
    batch, size, area = math.prod(leading), channels * height * width, height * width
    for first, count, length in ((0, whole, run), (whole * run, 1, rest)):
        if not length or not count:
            continue
        parts = [_relaid(o, first * area, (batch, count, length * area), (size, run * area, 1)) for o in (x, out)]
        _launch(launches, SOURCE["centred_norm"], parts[0], parts[1], _number(call, "eps"))


def _relaid(x: Operand, skip: int, shape: Sequence[int], strides: Sequence[int]) -> Operand:
    """Return the elements of `x` from element `skip` on, with another shape."""
    at = skip * x.dtype.storage.itemsize
    tensor = replace(x.tensor, offset=x.tensor.offset + at, shape=tuple(shape), strides=tuple(strides))
    return replace(x, address=x.address + at, tensor=tensor)


def _softmax(launches: Launches, call: Bound) -> None:
    x, mask, sinks, out = as_float(launches, call.operand(0)), call.optional(1), call.optional(2), call.out
    heads, max_bias = x.shape[-3], _number(call, "max_bias")
    operands, steps = [row_heads(x), row_heads(out)], 0
    extra: list[Operand | None] = [None, None, None]
    if mask is not None:
        mask = as_float(launches, mask)
        steps, row = mask.strides[-1], row_heads(mask)
        with_heads = (*row.shape[:-1], 1, row.shape[-1]), (*row.strides[:-1], 0, row.strides[-1])
        extra[0], row = mask, _relaid(row, 0, *with_heads)
        operands.append(row)
        if max_bias > 0.0:
            extra[1] = launches.constant(alibi_slopes(heads, max_bias).astype(np.float32))
    if sinks is not None:
        extra[2] = as_float(launches, sinks)
    one_a_head = [_relaid(e, 0, (heads, 1), (e.strides[0], 0)) for e in extra[1:] if e is not None]
    axes = axes_of(x.shape[:-1], [*operands, *one_a_head])
    words: list[Word] = [x.shape[-1], x.strides[-1], steps, _number(call, "scale"), *axes.words]
    words += [*axes.walk(0, x), *axes.walk(1, out)]
    position = 2
    for operand in extra:
        words += [0] * (1 + MOST) if operand is None else axes.walk(position, operand)
        position += operand is not None
    launches.add(SOURCE["softmax"], axes.count, row_threads(x.shape[-1]), words)


# --------------------------------------------------------------------------------------------------------- sums


def _sum_rows(factor: Callable[[int], float]) -> Binding:
    def bind(launches: Launches, call: Bound) -> None:
        x = as_float(launches, call.operand(0))
        _launch(launches, SOURCE["sum_rows"], x, call.out, factor(x.shape[-1]))

    return bind


def _sum(launches: Launches, call: Bound) -> None:
    """Bind a sum in two steps, over rows and then over their sums, so that many blocks share the work."""
    x, out = as_float(launches, call.operand(0)), call.out
    count = math.prod(x.shape)
    columns = max((n for n in range(1, math.isqrt(count) + 1) if count % n == 0), default=0)
    need(x.is_dense, "x is not dense")
    parts = launches.scratch((max(1, columns),))
    rows = _relaid(x, 0, (columns, count // columns) if columns else (1, 0), (count // columns if columns else 0, 1))
    _launch(launches, SOURCE["sum_rows"], rows, _relaid(parts, 0, (rows.shape[0], 1), (1, 1)), 1.0)
    _launch(
        launches,
        SOURCE["sum_rows"],
        _relaid(parts, 0, (1, rows.shape[0]), (0, 1)),
        _relaid(out, 0, (1, 1), (0, 0)),
        1.0,
    )


def _cumsum(launches: Launches, call: Bound) -> None:
    _launch(launches, SOURCE["cumsum"], as_float(launches, call.operand(0)), call.out, 0.0, threads=32)


def _count_equal(launches: Launches, call: Bound) -> None:
    a, b = call.operand(0), call.operand(1)
    need(a.is_dense and b.is_dense, "the compared operands are not dense")
    launches.add(SOURCE["count_equal"], 1, COMPARED, [math.prod(a.shape), a, b, call.out])


# ------------------------------------------------------------------------------------------------------ largest


def _argmax(launches: Launches, call: Bound) -> None:
    x, out = as_float(launches, call.operand(0)), call.out
    axes = axes_of(x.shape[:-1], [row_heads(x), out])
    words: list[Word] = [x.shape[-1], x.strides[-1], *axes.words, *axes.walk(0, x), *axes.walk(1, out)]
    launches.add(SOURCE["argmax"], axes.count, row_threads(x.shape[-1]), words)


FUSED: Mapping[str, Sequence[Fused]] = {"add": (_sum_norm_and_factor,), "rms_norm": (_norm_and_factor,)}
BINDINGS: Mapping[str, Binding] = {
    "rms_norm": _rms_norm,
    "l2_norm": _l2_norm,
    "norm": _norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
    "sum_rows": _sum_rows(lambda n: 1.0),
    "mean": _sum_rows(lambda n: 1.0 / max(1, n)),
    "sum": _sum,
    "cumsum": _cumsum,
    "count_equal": _count_equal,
    "argmax": _argmax,
}
