"""Collectives: what a device says to its group.  Alone, a group of one, each is the identity on its operand.

They are nodes of one device's graph; `sequence` numbers the meetings of a group, so that all devices meet in one order
and a mix-up is noticed instead of hanging.
"""

from __future__ import annotations

import numpy as np

from ..graph.attrs import Attr, Attrs
from ..graph.dtypes import DType
from ..graph.spec import Spec
from .declaring.op import Array, Specs, op
from .declaring.signature import Mismatch
from .views import axis_of

Runs = tuple[tuple[tuple[int, int], ...], ...]


@op(
    "x[...]: number -> [...]",
    linear=("x",),
    inplace="x",
    samples=("x=f32[3,4], sequence=0", "x=i64[3], sequence=0", "x=f32[0], sequence=1"),
    errors=(("x=q8_0[32], sequence=0", "x is q8_0"), ("x=f32[3]", "sequence is missing")),
    signed_zeros=False,
)
def all_reduce(x: Array, *, sequence: int) -> Array:
    """The sum of `x` over all devices of the group, the same bits on each.  MPI (MPI Forum, 1994): ``Allreduce``."""
    return np.array(x)


def _gathered(specs: Specs, attrs: Attrs) -> Spec:
    x = specs[0]
    assert x is not None
    axis, runs = axis_of(attrs, x), runs_of(attrs["runs"])
    if x.shape[axis] not in (shares := [sum(n for _, n in device) for device in runs]):
        raise Mismatch(f"axis {axis} of x holds {x.shape[axis]} entries, the devices have {shares}")
    return Spec((*x.shape[:axis], _extent(runs), *x.shape[axis + 1 :]), x.dtype)


def _extent(runs: Runs) -> int:
    """The length of the whole axis."""
    return max((offset + n for device in runs for offset, n in device), default=0)


def int_attr(value: Attr) -> int:
    assert isinstance(value, int)
    return value


def runs_of(value: Attr) -> Runs:
    return value  # type: ignore[return-value]  # settled() checked its kind


@op(
    "x[...]: number -> [...]",
    infer=_gathered,
    links=lambda specs, attrs: (),
    samples=("x=f32[3,4], axis=1, runs=(((0,4),),), sequence=0",),
    errors=(("x=f32[3], axis=0, runs=(((0,3),),)", "sequence is missing"), ("x=f32[3], axis=0, sequence=0", "runs is")),
)
def all_gather(x: Array, *, axis: int, runs: tuple[tuple[tuple[int, ...], ...], ...], sequence: int) -> Array:
    """The whole of a value that is cut along `axis`; ``runs[d]`` are the (offset, length) that device d has.

    MPI (MPI Forum, 1994): ``Allgatherv``.
    """
    return np.array(x)


def _scattered(specs: Specs, attrs: Attrs) -> Spec:
    x = specs[0]
    assert x is not None
    axis, length = axis_of(attrs, x), sum(n for _, n in own_runs(attrs))
    if x.shape[axis] != _extent(runs_of(attrs["runs"])):
        raise Mismatch(f"axis {axis} of x holds {x.shape[axis]} entries, the runs {_extent(runs_of(attrs['runs']))}")
    return Spec((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)


def own_runs(attrs: Attrs) -> tuple[tuple[int, int], ...]:
    """The runs of the device itself."""
    runs, rank = runs_of(attrs["runs"]), int_attr(attrs["rank"])
    if not 0 <= rank < len(runs):
        raise Mismatch(f"rank is {rank}, but runs are given for {len(runs)} devices")
    return runs[rank]


@op(
    "x[...] -> [...]",
    linear=("x",),
    infer=_scattered,
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
    """The device's own entries along `axis` of the sum of `x` over all devices; device d keeps ``runs[d]``.

    MPI (MPI Forum, 1994): ``Reduce_scatter``.
    """
    return np.array(x)


def _exchanged(specs: Specs, attrs: Attrs) -> Spec:
    whole = _gathered(specs, {**attrs, "axis": attrs["old_axis"], "runs": attrs["old_runs"]})
    return _scattered((whole,), attrs)


@op(
    "x[...]: number -> [...]",
    infer=_exchanged,
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
    """A value that was cut along `old_axis` into `old_runs`, cut along `axis` into `runs` instead.

    MPI (MPI Forum, 1994): ``Alltoallv``.
    """
    return np.array(x)


@op(
    "x[...]: any -> [...]",
    inplace="x",
    samples=("x=f32[3,4], to=1, sequence=0", "x=i32[3], to=0, sequence=1"),
    errors=(("x=f32[3], to=1", "sequence is missing"), ("x=f32[3], sequence=1", "to is missing")),
)
def send(x: Array, *, to: int, sequence: int) -> Array:
    """`x`, which device `to` of the group receives under the same `sequence`.  MPI (MPI Forum, 1994): ``Isend``."""
    return np.array(x)


def _received(specs: Specs, attrs: Attrs) -> Spec:
    dtype, shape = attrs["dtype"], attrs["shape"]
    assert isinstance(dtype, DType)
    return Spec(shape, dtype)  # type: ignore[arg-type]  # settled() checked its kind


@op(
    "-> [...]",
    infer=_received,
    links=lambda specs, attrs: (),
    samples=("shape=(2,3), dtype=f32, source=0, sequence=0",),
    errors=(
        ("shape=(2,3), dtype=f32, source=0", "sequence is missing"),
        ("shape=3, dtype=f32, source=0, sequence=0", "shape is 3"),
    ),
)
def receive(*, shape: tuple[int, ...], dtype: DType, source: int, sequence: int) -> Array:
    """What device `source` sends under `sequence`; zeros where nobody sends.  MPI (MPI Forum, 1994): ``Recv``."""
    return np.zeros(shape)


COLLECTIVES = frozenset(o.name for o in (all_reduce, all_gather, reduce_scatter, all_to_all, send, receive))
"""The ops in which devices meet; in every program they come in the order of their `sequence`."""
LETTERS = frozenset(o.name for o in (send, receive))
"""Those in which one device writes to another; in all others a whole team meets."""


def sequence_of(op_name: str, attrs: Attrs) -> int | None:
    """The number of a meeting; None for an op that runs alone."""
    return int_attr(attrs["sequence"]) if op_name in COLLECTIVES else None
