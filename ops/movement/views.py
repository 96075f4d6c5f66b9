"""View ops, which move no element. Lowering applies the reference to a strided dummy array and stores the strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.errors import format_count
from ...graph.spec import Spec
from ..declaration.axis_links import AxisLink, link_first_operand_axes_to_result, link_reshaped_axes
from ..declaration.op import Array, OperandSpecs, op
from ..declaration.samples import expand_template
from ..declaration.shape_rules import axis_attribute, first_spec, integer_attribute, integers_attribute
from ..declaration.signature import SignatureMismatch


def _infer_reshape(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec, shape = first_spec(specs), integers_attribute(attrs, "shape")
    if math.prod(shape) != spec.size:
        raise SignatureMismatch(
            f"shape {list(shape)} holds {format_count(math.prod(shape), 'element')}, x holds {spec.size}"
        )
    return Spec(shape, spec.dtype)


@op(
    "x[...]: any -> [...]",
    view=lambda x, *, shape: np.reshape(x, shape, copy=False),
    linear=("x",),
    infer=_infer_reshape,
    links=lambda specs, attrs: link_reshaped_axes(first_spec(specs).shape, integers_attribute(attrs, "shape")),
    localise=lambda attrs, shape, count: {"shape": shape},
    samples=("x=f32[6,4], shape=(2,3,4)", "x=f16[2,3,4], shape=(24,)", "x=i32[5,0], shape=(0,7)", "x=f32[1], shape=()"),
    errors=(
        ("x=f32[6,4], shape=(5,5)", "shape [5, 5] holds 25 elements, x holds 24"),
        ("x=f32[6]", "shape is missing"),
    ),
    compare="exact",
    infinite=("x",),
)
def reshape(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Give the same elements another shape, in row-major order. ggml: ``RESHAPE``."""
    return x.reshape(shape)


def _infer_permute(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec, axes = first_spec(specs), integers_attribute(attrs, "axes")
    if sorted(axes) != list(range(len(spec.shape))):
        raise SignatureMismatch(
            f"axes {list(axes)} are no permutation of the {format_count(len(spec.shape), 'axis', 'axes')} of {spec}"
        )
    return Spec(tuple(spec.shape[a] for a in axes), spec.dtype)


@op(
    "x[...]: any -> [...]",
    view=True,
    linear=("x",),
    infer=_infer_permute,
    links=lambda specs, attrs: link_first_operand_axes_to_result(
        {a: i for i, a in enumerate(integers_attribute(attrs, "axes"))}
    ),
    samples=("x=f32[2,3,4], axes=(1,0,2)", "x=f16[2,3,4,5], axes=(3,1,0,2)", "x=i32[7], axes=(0,)"),
    errors=(("x=f32[2,3], axes=(0,0)", "no permutation"), ("x=f32[2,3], axes=(1,)", "no permutation of the 2 axes")),
    compare="exact",
    infinite=("x",),
)
def permute(x: Array, *, axes: tuple[int, ...]) -> Array:
    """Permute the axes: axis i of the result is axis ``axes[i]`` of `x`. ggml: ``PERMUTE``.

    ggml counts axes from the last.
    """
    return np.transpose(x, axes)


@op(
    "x[..., m, n]: any -> [..., n, m]",
    view=True,
    linear=("x",),
    samples=("x=f32[2,3]", "x=f16[4,5,6]", "x=f32[0,3]"),
    errors=(("x=f32[5]", "needs at least 2"), ("x=q8_0[33,64]", "the last axis must be a multiple")),
    compare="exact",
    infinite=("x",),
)
def transpose(x: Array) -> Array:
    """Exchange the last two axes. ggml: ``TRANSPOSE``."""
    return np.swapaxes(x, -1, -2)


def _infer_slice(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec = first_spec(specs)
    axis, start, stop = (
        axis_attribute(attrs, spec),
        integer_attribute(attrs, "start"),
        integer_attribute(attrs, "stop"),
    )
    if not 0 <= start <= stop <= spec.shape[axis]:
        raise SignatureMismatch(
            f"start {start} to stop {stop} does not lie within the "
            f"{format_count(spec.shape[axis], 'entry', 'entries')} of axis {axis}"
        )
    if spec.dtype.is_quantised and axis == len(spec.shape) - 1 and start % spec.dtype.block:
        raise SignatureMismatch(
            f"start is {start}, inside a block of {spec}; it must be a multiple of {spec.dtype.block}"
        )
    return Spec((*spec.shape[:axis], stop - start, *spec.shape[axis + 1 :]), spec.dtype)


def _slice_links(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    axis = axis_attribute(attrs, first_spec(specs))
    start = integer_attribute(attrs, "start")
    return tuple(AxisLink(0, (i,), (i,), start if i == axis else 0) for i in range(len(first_spec(specs).shape)))


def _localise_slice(attrs: Attrs, shape: tuple[int, ...], count: Callable[[int, int], int]) -> Mapping[str, Attr]:
    axis = integer_attribute(attrs, "axis") % len(shape)
    return {
        **attrs,
        "start": count(axis, integer_attribute(attrs, "start")),
        "stop": count(axis, integer_attribute(attrs, "stop")),
    }


@op(
    "x[...]: any -> [...]",
    view=True,
    linear=("x",),
    infer=_infer_slice,
    links=_slice_links,
    localise=_localise_slice,
    samples=(
        *expand_template(
            "x=f32[5,6,7], axis={axis}, start={start}, stop={stop}", axis=(0, 1, -1), start=(0, 2), stop=(2, 5)
        ),
        "x=q8_0[6,64], axis=0, start=1, stop=3",
    ),
    errors=(
        ("x=f32[5,6], axis=0, start=3, stop=9", "does not lie within the 5 entries"),
        ("x=f32[5,6], axis=2, start=0, stop=1", "has rank 2"),
        ("x=q8_0[6,64], axis=1, start=0, stop=16", "multiple"),
        ("x=q8_0[6,64], axis=1, start=16, stop=48", "inside a block"),
    ),
    compare="exact",
    infinite=("x",),
)
def slice_(x: Array, *, axis: int, start: int, stop: int) -> Array:
    """Take the entries from `start` to before `stop` of one axis. ggml: ``VIEW``, which counts bytes."""
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, stop),)]


def _infer_broadcast(specs: OperandSpecs, attrs: Attrs) -> Spec:
    spec, shape = first_spec(specs), integers_attribute(attrs, "shape")
    old = (1,) * (len(shape) - len(spec.shape)) + spec.shape
    if len(old) != len(shape) or any(a not in (1, b) for a, b in zip(old, shape, strict=True)):
        raise SignatureMismatch(f"{spec} cannot be broadcast to {list(shape)}; only axes of size 1 grow")
    return Spec(shape, spec.dtype)


def _broadcast_links(specs: OperandSpecs, attrs: Attrs) -> tuple[AxisLink, ...]:
    shape, target = first_spec(specs).shape, integers_attribute(attrs, "shape")
    extra = len(target) - len(shape)
    return link_first_operand_axes_to_result({i: i + extra for i, n in enumerate(shape) if n == target[i + extra]})


@op(
    "x[...]: any -> [...]",
    view=True,
    linear=("x",),
    infer=_infer_broadcast,
    links=_broadcast_links,
    localise=lambda attrs, shape, count: {"shape": shape},
    samples=("x=f32[3,1,4], shape=(3,5,4)", "x=f16[4], shape=(2,3,4)", "x=f32[], shape=(2,2)"),
    errors=(
        ("x=f32[3,2,4], shape=(3,4,4)", "only axes of size 1 grow"),
        ("x=f32[3,1,4], shape=(5,4)", "cannot be broadcast to [5, 4]"),
    ),
    compare="exact",
    infinite=("x",),
)
def broadcast(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Repeat axes of size 1 and new leading axes to `shape` without a copy. ggml: implied by stride 0."""
    return np.broadcast_to(x, shape)
