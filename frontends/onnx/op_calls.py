"""Converters of ONNX ops with other inputs or attributes than the functions of `frontends.tensors`.

A converter takes the inputs of a node as `Tensor` (None for an absent one) and its attributes as keywords. Most
converters have the name of their ONNX op. An input that decides a shape must be a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from ... import ops
from ...graph import DType
from ...graph.errors import format_count
from ..errors import ModelError
from ..tensors import arithmetic as arith
from ..tensors import indexing, shapes
from ..tensors.tensor import Tensor, cast, constant_tensor

OpConverter: TypeAlias = Callable[..., Any]
"""A function that converts one node: it takes the inputs and attributes, and returns the results."""
OptionalIntegers: TypeAlias = "Tensor | Sequence[int] | int | None"
"""Integers from an attribute or from an input of a node; None if they are absent."""
MAX_CONSTANT_ENTRIES = 1 << 26
"""Largest number of entries of a constant that an op creates from a shape."""


def as_integers_or_none(x: OptionalIntegers) -> list[int] | None:
    """Return the integers of an attribute or of a constant input as a list, or None if they are absent.

    Raises:
        ModelError: The input depends on the inputs of the model.
    """
    if x is None or isinstance(x, int):
        return None if x is None else [x]
    return [int(n) for n in (require_constant(x).reshape(-1) if isinstance(x, Tensor) else x)]


def require_constant(x: Tensor) -> np.ndarray:
    """Return the array of a constant tensor.

    Raises:
        ModelError: The tensor depends on an input of the model.
    """
    if x.constant is None:
        raise ModelError("a shape or setting depends on an input of the model; fix that input: fixed={name: array}")
    return np.asarray(x.constant)


def as_number_or_default(x: Any, default: Any) -> Any:
    """Return the one number that an attribute or a constant input holds, or `default` if it is absent."""
    if x is None:
        return default
    return require_constant(x).reshape(-1)[0].item() if isinstance(x, Tensor) else x


# ---------------------------------------------------------------------------------------------------- entry by entry


def make_variadic_converter(op: Callable[[Tensor, Tensor], Tensor]) -> OpConverter:
    """Make the converter of an op with any number of operands, such as ``Sum``, from a function of two operands.

    The function is applied from left to right.
    """
    return lambda *xs: reduce(op, xs)


def mean(*xs: Tensor) -> Tensor:
    return arith.div(reduce(arith.add, xs), float(len(xs)))


def div(a: Tensor, b: Tensor) -> Tensor:
    return arith.div(a, b, rounding_mode="trunc" if a.is_integer else None)


def mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return arith.remainder(a, b, rounding_mode="trunc" if fmod else "floor")


def power(a: Tensor, b: Tensor) -> Tensor:
    """Convert ``Pow``: return ``a ** b``; a constant scalar exponent allows cheaper ops."""
    if b.constant is not None and b.constant.size == 1 and b.rank <= a.rank:
        exponent = b.constant.reshape(-1)[0].item()
        return arith.power(a, int(exponent) if float(exponent).is_integer() and abs(exponent) < 5 else float(exponent))
    return arith.power(a, b)


def clip(
    x: Tensor, min_input: Tensor | None = None, max_input: Tensor | None = None, *, min: Any = None, max: Any = None
) -> Any:
    """Convert ``Clip``: clamp to limits that are inputs (newer opsets) or attributes (older ones)."""
    return arith.clamp(x, min_input if min_input is not None else min, max_input if max_input is not None else max)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return arith.apply_unary_op(ops.gelu_erf if approximate == "none" else ops.gelu, x)


def elu(x: Tensor, *, alpha: float = 1.0, gamma: float = 1.0) -> Tensor:
    low = arith.scale_and_shift(arith.apply_unary_op(ops.expm1, arith.clamp(x, max=0.0)), alpha * gamma)
    return arith.where(arith.compare("gt", x, 0.0), arith.scale_and_shift(x, gamma), low)


def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return elu(x, alpha=alpha, gamma=gamma)


def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return arith.clamp(arith.scale_and_shift(arith.as_float(x), alpha, beta), 0.0, 1.0)


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    return arith.where(arith.compare("lt", x, 0), arith.mul(x, slope), x)


def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Convert ``IsInf``: return whether each entry is infinite.

    -inf counts only with `detect_negative`, and +inf only with `detect_positive`.
    """
    above, below = arith.compare("eq", x, math.inf), arith.compare("eq", x, -math.inf)
    chosen = [side for side, is_requested in ((above, detect_positive), (below, detect_negative)) if is_requested]
    return reduce(arith.logical_or, chosen) if chosen else constant_tensor(np.zeros(x.shape, bool))


def dropout(x: Tensor, ratio: Any = None, training: Tensor | None = None, *, seed: int = 0) -> Any:
    if training is not None and as_number_or_default(training, False) and as_number_or_default(ratio, 0.5):
        raise ModelError("dropout by chance, as in training; export the model for inference")
    return x, constant_tensor(np.ones(x.shape, bool))


def keep_triangle(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    """Convert ``Trilu``: keep the upper or lower triangle of the last two axes, shifted by `k` diagonals."""
    keep = (np.triu if upper else np.tril)(np.ones(x.shape[-2:], bool), as_number_or_default(k, 0))
    return arith.masked_fill(x, constant_tensor(~keep), 0)


# ------------------------------------------------------------------------------------------------------------ shapes


def reshape(x: Tensor, shape: Any = None, *, allowzero: int = 0) -> Tensor:
    """Convert ``Reshape``: return `x` with another shape.

    In `shape`, one -1 is inferred from the other sizes. A 0 keeps the size of the axis, unless `allowzero` is set.
    """
    sizes = as_integers_or_none(shape) or []
    if not allowzero:
        if any(n == 0 and i >= x.rank for i, n in enumerate(sizes)):
            raise ModelError(f"shape {sizes} keeps an axis that a tensor of {list(x.shape)} does not have")
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    if sizes.count(-1) > 1 or any(n < -1 for n in sizes):
        raise ModelError(f"shape {sizes}: one entry at most may be left open")
    return shapes.reshape(x, sizes)


def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    at = axis + x.rank if axis < 0 else axis
    return shapes.reshape(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return shapes.permute(x, range(x.rank)[::-1] if perm is None else perm)


def squeeze(x: Tensor, axes_input: OptionalIntegers = None, *, axes: OptionalIntegers = None) -> Tensor:
    """Convert ``Squeeze``: remove axes of size 1; the axes are an input (`axes_input`) or an attribute (`axes`)."""
    return shapes.squeeze(x, as_integers_or_none(axes_input if axes is None else axes))


def unsqueeze(x: Tensor, axes_input: OptionalIntegers = None, *, axes: OptionalIntegers = None) -> Tensor:
    """Convert ``Unsqueeze``: insert axes of size 1; the axes are an input (`axes_input`) or an attribute (`axes`)."""
    new = as_integers_or_none(axes_input if axes is None else axes) or []
    rank = x.rank + len(new)
    if any(not -rank <= a < rank for a in new) or len({a % rank for a in new}) < len(new):
        raise ModelError(f"axes {new} of a tensor that then has {format_count(rank, 'axis', 'axes')}")
    places, own = {a % rank for a in new}, iter(x.shape)
    return shapes.reshape(x, [1 if a in places else next(own) for a in range(rank)])


def concat(*xs: Tensor, axis: int) -> Tensor:
    return shapes.cat(xs, axis)


def split(x: Tensor, sizes: Any = None, *, axis: int = 0, split: Any = None, num_outputs: int) -> Any:
    """Convert ``Split``: split an axis into the given sizes, or into `num_outputs` equal parts.

    The last of the equal parts may be smaller.
    """
    parts = as_integers_or_none(sizes if split is None else split)
    n = x.shape[x.normalise_axis(axis)]
    if parts is None:
        size = -(-n // num_outputs)
        parts = [max(0, min(size, n - i * size)) for i in range(num_outputs)]
    if sum(parts) != n or min(parts, default=0) < 0:
        raise ModelError(f"pieces of {parts} of an axis of {n}")
    return shapes.split(x, parts, axis)


def slice_(
    x: Tensor, starts_input: Any = None, ends_input: Any = None, axes_input: Any = None, steps_input: Any = None, *,
    starts: Any = None, ends: Any = None, axes: Any = None,
) -> Tensor:  # fmt: skip
    """Convert ``Slice``: return a range of each given axis, with steps.

    Bounds and axes are inputs in newer opsets (``*_input``) and attributes in older ones. Steps are always inputs.
    """
    begin = as_integers_or_none(starts_input if starts is None else starts) or []
    end = as_integers_or_none(ends_input if ends is None else ends) or []
    at = as_integers_or_none(axes_input if axes is None else axes) or list(range(len(begin)))
    steps = as_integers_or_none(steps_input) or [1] * len(begin)
    for a, i, j, step in zip(at, begin, end, steps, strict=True):
        n = x.shape[x.normalise_axis(a)]
        if step < 0:  # -1 is the index before the first entry here
            i, j = (max(-1, min(n - 1, p + n if p < 0 else p)) for p in (i, j))
            x = shapes.take_at_constant_indices(x, a, np.arange(i, j, step))
        else:
            x = shapes.slice_(x, a, i, j, step)
    return x


def pad(
    x: Tensor, pads_input: Any = None, fill: Tensor | None = None, axes_input: Any = None, *, pads: Any = None,
    mode: str = "constant", value: float = 0.0,
) -> Tensor:  # fmt: skip
    """Convert ``Pad``: pad axes with a constant or, in other modes, with entries of `x`.

    The pads are an input (newer opsets) or an attribute (older ones).
    """
    flat = as_integers_or_none(pads_input if pads is None else pads) or []
    at = [x.normalise_axis(a) for a in (as_integers_or_none(axes_input) or range(x.rank))]
    if len(flat) != 2 * len(at):
        raise ModelError(
            f"{format_count(len(flat), 'pad')} for {format_count(len(at), 'axis', 'axes')}; need two for each"
        )
    ends = [(0, 0)] * x.rank
    for i, a in enumerate(at):
        ends[a] = (flat[i], flat[i + len(at)])
    if math.prod(n + a + b for n, (a, b) in zip(x.shape, ends, strict=True)) > MAX_CONSTANT_ENTRIES:
        raise ModelError(f"pads of {flat} make more than {MAX_CONSTANT_ENTRIES} entries")
    if mode == "constant":
        return shapes.pad(x, ends, value if fill is None else shapes.reshape(fill, ()))
    return shapes.pad_with_own_entries(x, ends, mode)


def tile(x: Tensor, counts: Tensor) -> Tensor:
    times = as_integers_or_none(counts) or []
    _require_small_shape([n * t for n, t in zip(x.shape, times, strict=True)])
    return shapes.repeat(x, times)


def expand(x: Tensor, shape: Tensor) -> Tensor:
    return shapes.expand(x, np.broadcast_shapes(x.shape, _require_small_shape(as_integers_or_none(shape) or [])))


def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    """Convert ``Shape``: return the sizes of the axes `start` to `end` as a constant."""
    return constant_tensor(np.asarray(x.shape[slice(start, end)], np.int64))


def _require_small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple, after a check of its sizes.

    Raises:
        ModelError: A size is negative, or the shape has more than `MAX_CONSTANT_ENTRIES` entries.
    """
    if any(n < 0 for n in shape) or math.prod(shape) > MAX_CONSTANT_ENTRIES:
        raise ModelError(f"a tensor of {list(shape)}; need at most {MAX_CONSTANT_ENTRIES} entries")
    return tuple(shape)


def constant_of_shape(shape: Tensor, *, value: Any = None) -> Tensor:
    fill = np.zeros((), np.float32) if value is None else np.asarray(value).reshape(())
    return constant_tensor(np.full(_require_small_shape(as_integers_or_none(shape) or []), fill))


def constant(**attributes: Any) -> Tensor:
    """Convert ``Constant``: return the constant tensor in the one attribute ``value*`` that is given."""
    ((kind, value),) = attributes.items()
    whole = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    return constant_tensor(np.asarray(value, whole.get(kind)))


def range_(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = (require_constant(x).reshape(())[()].item() for x in (start, limit, delta))
    if not step or not all(np.isfinite((first, last, step))):
        raise ModelError(f"a range from {first} to {last} by {step}")
    _require_small_shape([max(0, math.ceil((last - first) / step))])
    return constant_tensor(np.arange(first, last, step).astype(require_constant(start).dtype))


def eye_like(x: Tensor, *, dtype: int = 0, k: int = 0) -> Tensor:
    rows, columns = _require_small_shape(x.shape)
    return constant_tensor(np.eye(rows, columns, k=k, dtype=np.float32))


def one_hot(ids: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    """Convert ``OneHot``: along a new axis, return ``values[1]`` at each id and ``values[0]`` elsewhere.

    The new axis has `depth` entries.
    """
    n = int(as_number_or_default(depth, 0))
    _require_small_shape((*ids.shape, n))
    at = axis % (ids.rank + 1)
    places = constant_tensor(np.arange(n).reshape(-1, *(1,) * (ids.rank - at)))
    indices = shapes.unsqueeze(cast(ids, DType.I64), at)
    own = arith.where(arith.compare("lt", indices, 0), arith.add(indices, n), indices)
    off, on = shapes.split(values, 1, 0)
    return arith.where(arith.compare("eq", own, places), on, off)


def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Convert ``SpaceToDepth``: move blocks of `blocksize` × `blocksize` positions into channels.

    x: [batch, channels, height, width].
    """
    n, c, h, w = x.shape
    b = blocksize
    parts = shapes.reshape(x, (n, c, h // b, b, w // b, b))
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return shapes.reshape(shapes.permute(parts, order), (n, c * b * b, h // b, w // b))


def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Convert ``DepthToSpace``: move channels into blocks of `blocksize` × `blocksize` positions.

    x: [batch, channels, height, width].
    """
    n, c, h, w = x.shape
    b, rest = blocksize, c // blocksize**2
    first = mode == "DCR"
    parts = shapes.reshape(x, (n, b, b, rest, h, w) if first else (n, rest, b, b, h, w))
    order = (0, 3, 4, 1, 5, 2) if first else (0, 1, 4, 2, 5, 3)
    return shapes.reshape(shapes.permute(parts, order), (n, rest, h * b, w * b))


# ------------------------------------------------------------------------------------------------- entries by number


def gather(x: Tensor, ids: Tensor, *, axis: int = 0) -> Tensor:
    """Convert ``Gather``: select entries along `axis`; the axes of `ids` replace this axis in the result."""
    at = x.normalise_axis(axis)
    chosen = indexing.index_select(x, at, shapes.reshape(ids, (math.prod(ids.shape),)))
    return shapes.reshape(chosen, (*x.shape[:at], *ids.shape, *x.shape[at + 1 :]))


def gather_elements(x: Tensor, ids: Tensor, *, axis: int = 0) -> Tensor:
    return indexing.gather(x, axis, ids)


def _split_index_tuples(x: Tensor, ids: Tensor, batch: int = 0) -> list[Tensor]:
    """Split the last axis of `ids`, which holds index tuples, into one index tensor for each axis of `x`.

    ``GatherND`` and ``ScatterND`` have such tuples. `batch` leading axes have the same index in `x` and in `ids`.
    """
    ahead = [
        constant_tensor(np.arange(n).reshape(-1, *(1,) * (ids.rank - 2 - a))) for a, n in enumerate(x.shape[:batch])
    ]  # the same index in `x` and in `ids`
    return [*ahead, *shapes.unbind(ids, -1)]


def gather_nd(x: Tensor, ids: Tensor, *, batch_dims: int = 0) -> Tensor:
    return indexing.index(x, _split_index_tuples(x, ids, batch_dims))


_SCATTER_KINDS = {"none": "set", "add": "add", "mul": "mul", "max": "max", "min": "min"}
"""Values of `reduce` in `frontends.tensors.indexing.scatter`, by value of the attribute ``reduction``."""


def scatter_elements(x: Tensor, ids: Tensor, src: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    return indexing.scatter(x, axis, ids, src, _SCATTER_KINDS[reduction])


def scatter_nd(x: Tensor, ids: Tensor, src: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction in ("none", "add"):
        return indexing.index_put(x, _split_index_tuples(x, ids), src, reduction == "add")
    raise ModelError(f"scatter by {reduction!r}; hocket has none and add")
