"""Collectives of a device group, as ops. On a group of one device, each is the identity on its operand.

They are nodes of the graph of one device. `sequence` numbers the collectives of a group: all devices call them in this
order, and a difference is an error, not a hang.
"""

from __future__ import annotations

import numpy as np

from ..graph.attrs import Attr, Attrs
from ..graph.dtypes import DType
from ..graph.errors import format_count
from ..graph.spec import Spec
from .declaration.op import Array, OperandSpecs, op
from .declaration.shape_rules import axis_attribute
from .declaration.signature import SignatureMismatch

DeviceIndexRanges = tuple[tuple[tuple[int, int], ...], ...]
"""For each device, the index ranges that it has of an axis, each as (offset, length)."""


@op(
    "x[...]: number -> [...]",
    linear=("x",),
    inplace="x",
    samples=("x=f32[3,4], sequence=0", "x=i64[3], sequence=0", "x=f32[0], sequence=1"),
    errors=(("x=q8_0[32], sequence=0", "x is q8_0"), ("x=f32[3]", "sequence is missing")),
    signed_zeros=False,
)
def all_reduce(x: Array, *, sequence: int) -> Array:
    """Sum `x` over all devices of the group; each device gets the sum with the same bits. MPI: ``Allreduce``.

    MPI Forum, 1994.
    """
    return np.array(x)


def _infer_all_gather(specs: OperandSpecs, attrs: Attrs) -> Spec:
    x = specs[0]
    assert x is not None
    axis, runs = axis_attribute(attrs, x), cast_to_index_ranges(attrs["runs"])
    if x.shape[axis] not in (shares := [sum(n for _, n in device) for device in runs]):
        raise SignatureMismatch(
            f"axis {axis} of x holds {format_count(x.shape[axis], 'entry', 'entries')}, the devices have {shares}"
        )
    return Spec((*x.shape[:axis], _find_largest_index_range_end(runs), *x.shape[axis + 1 :]), x.dtype)


def _find_largest_index_range_end(runs: DeviceIndexRanges) -> int:
    """Return the length of a sharded axis: the largest end of an index range of any device."""
    return max((offset + n for device in runs for offset, n in device), default=0)


def narrow_to_integer(value: Attr) -> int:
    """Return an attribute that is known to be an integer, as an int for type checkers."""
    assert isinstance(value, int)
    return value


def cast_to_index_ranges(value: Attr) -> DeviceIndexRanges:
    """Return an attribute that is known to be index ranges of devices, with this type for type checkers.

    `normalise_attribute` has checked it.
    """
    return value  # type: ignore[return-value]  # `normalise_attribute` checks the type


@op(
    "x[...]: number -> [...]",
    infer=_infer_all_gather,
    links=lambda specs, attrs: (),
    samples=("x=f32[3,4], axis=1, runs=(((0,4),),), sequence=0",),
    errors=(("x=f32[3], axis=0, runs=(((0,3),),)", "sequence is missing"), ("x=f32[3], axis=0, sequence=0", "runs is")),
)
def all_gather(x: Array, *, axis: int, runs: tuple[tuple[tuple[int, ...], ...], ...], sequence: int) -> Array:
    """Join the shards of all devices along `axis`, so that each device gets the complete value. MPI: ``Allgatherv``.

    ``runs[d]`` are the index ranges (offset, length) of device d along the axis. MPI Forum, 1994.
    """
    return np.array(x)


def _infer_reduce_scatter(specs: OperandSpecs, attrs: Attrs) -> Spec:
    x = specs[0]
    assert x is not None
    axis, length = axis_attribute(attrs, x), sum(n for _, n in own_index_ranges(attrs))
    sharded_length = _find_largest_index_range_end(cast_to_index_ranges(attrs["runs"]))
    if x.shape[axis] != sharded_length:
        raise SignatureMismatch(
            f"axis {axis} of x holds {format_count(x.shape[axis], 'entry', 'entries')}, the runs {sharded_length}"
        )
    return Spec((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)


def own_index_ranges(attrs: Attrs) -> tuple[tuple[int, int], ...]:
    """Return the index ranges (offset, length) of the axis that this device has: the entry `rank` of attribute `runs`.

    Raises:
        SignatureMismatch: `runs` has no such device.
    """
    runs, rank = cast_to_index_ranges(attrs["runs"]), narrow_to_integer(attrs["rank"])
    if not 0 <= rank < len(runs):
        raise SignatureMismatch(f"rank is {rank}, but runs are given for {format_count(len(runs), 'device')}")
    return runs[rank]


@op(
    "x[...] -> [...]",
    linear=("x",),
    infer=_infer_reduce_scatter,
    links=lambda specs, attrs: (),
    samples=("x=f32[3,4], axis=1, runs=(((0,4),),), rank=0, sequence=0",),
    errors=(
        ("x=f32[3], axis=0, runs=(((0,3),),), rank=1, sequence=0", "rank is 1"),
        ("x=f32[3], axis=0, runs=(((0,3),),), rank=0", "sequence is missing"),
    ),
    signed_zeros=False,
)
def reduce_scatter(
    x: Array, *, axis: int, runs: tuple[tuple[tuple[int, ...], ...], ...], rank: int, sequence: int
) -> Array:
    """Sum `x` over all devices, and return this device's shard of the sum along `axis`. MPI: ``Reduce_scatter``.

    ``runs[d]`` are the index ranges (offset, length) of device d. `rank` is the number of this device in the group. MPI
    Forum, 1994.
    """
    return np.array(x)


def _infer_all_to_all(specs: OperandSpecs, attrs: Attrs) -> Spec:
    whole = _infer_all_gather(specs, {**attrs, "axis": attrs["old_axis"], "runs": attrs["old_runs"]})
    return _infer_reduce_scatter((whole,), attrs)


@op(
    "x[...]: number -> [...]",
    infer=_infer_all_to_all,
    links=lambda specs, attrs: (),
    samples=("x=f32[3,4], old_axis=0, old_runs=(((0,3),),), axis=1, runs=(((0,4),),), rank=0, sequence=0",),
    errors=(
        ("x=f32[3], old_axis=0, old_runs=(((0,3),),), axis=0, runs=(((0,3),),), rank=2, sequence=0", "rank is 2"),
        ("x=f32[3], old_axis=0, old_runs=(((0,3),),), axis=0, runs=(((0,3),),), rank=0", "sequence is missing"),
    ),
)
def all_to_all(
    x: Array,
    *,
    old_axis: int,
    old_runs: tuple[tuple[tuple[int, ...], ...], ...],
    axis: int,
    runs: tuple[tuple[tuple[int, ...], ...], ...],
    rank: int,
    sequence: int,
) -> Array:
    """Change the sharded axis of a value: each device gives its shard along `old_axis` and gets its shard along `axis`.

    ``old_runs[d]`` and ``runs[d]`` are the index ranges (offset, length) of device d along these axes. `rank` is the
    number of this device in the group. MPI (MPI Forum, 1994): ``Alltoallv``.
    """
    return np.array(x)


@op(
    "x[...]: any -> [...]",
    inplace="x",
    samples=("x=f32[3,4], to=1, sequence=0", "x=i32[3], to=0, sequence=1"),
    errors=(("x=f32[3], to=1", "sequence is missing"), ("x=f32[3], sequence=1", "to is missing")),
)
def send(x: Array, *, to: int, sequence: int) -> Array:
    """Send `x` to device `to` of the group, which receives it under the same `sequence`.

    MPI (MPI Forum, 1994): ``Isend``.
    """
    return np.array(x)


def _infer_receive(specs: OperandSpecs, attrs: Attrs) -> Spec:
    dtype, shape = attrs["dtype"], attrs["shape"]
    assert isinstance(dtype, DType)
    return Spec(shape, dtype)  # type: ignore[arg-type]  # `normalise_attribute` checks the type


@op(
    "-> [...]",
    infer=_infer_receive,
    links=lambda specs, attrs: (),
    samples=("shape=(2,3), dtype=f32, source=0, sequence=0",),
    errors=(
        ("shape=(2,3), dtype=f32, source=0", "sequence is missing"),
        ("shape=3, dtype=f32, source=0, sequence=0", "shape is 3"),
    ),
)
def receive(*, shape: tuple[int, ...], dtype: DType, source: int, sequence: int) -> Array:
    """Receive a value of this shape and dtype from device `source`, which sends it with the same number `sequence`.

    A reference run has no sender, so the result is zeros. MPI (MPI Forum, 1994): ``Recv``.
    """
    return np.zeros(shape)


COLLECTIVES = frozenset(o.name for o in (all_reduce, all_gather, reduce_scatter, all_to_all, send, receive))
"""Names of all ops of this module; a program has them in the order of their `sequence`."""
POINT_TO_POINT_OPS = frozenset(o.name for o in (send, receive))
"""Names of collectives between two devices; all others need the whole group."""


def find_collective_sequence_number(op_name: str, attrs: Attrs) -> int | None:
    """Return the sequence number of a collective within its device group, or None for other ops."""
    return narrow_to_integer(attrs["sequence"]) if op_name in COLLECTIVES else None
