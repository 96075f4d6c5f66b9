"""Kernels of rotary embedding (RoPE) and timestep embedding, and fusions of attention heads.

A head may pass through several instructions, which one block per row computes: RMS norm, multiplication by a vector,
RoPE, and the store into a KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.matrix.rope import compute_frequencies, position_planes
from ...chains import ROPES, changed_state, turned_heads
from ...flow import Flow, apart, lies_as
from ...operands import Bound, Operand, need
from ..binding.axes import MOST, axes_of, row_heads
from ..binding.chains import Fused
from ..binding.launches import Binding, Launches, Word, blocks
from ..device.driver import Source
from .elementwise import CELLS, MOST_ELEMENTS, THREADS, TYPES, as_float
from .moves import launch_copy
from .rows import row_threads

SOURCE = Source(
    "rotary.cu",
    ("rope", *(f"{kernel}<{TYPES[t]}>" for kernel in ("place_head", "place_heads") for t in CELLS), "timesteps"),
    ("cells.cuh",),
)
SOURCES = (SOURCE,)


@dataclass(frozen=True, slots=True)
class Turned:
    """The angles of a RoPE instruction.

    `positions` has the positions of each token, `step` elements apart if a token has several. `plane` selects one of
    them for each pair; `inverse` has the frequencies of the pairs.
    """

    positions: Operand
    step: int
    plane: npt.NDArray[np.int32]
    inverse: npt.NDArray[np.float64]
    magnitude: float

    @classmethod
    def of(cls, call: Bound) -> Turned:
        """Return the angles of a `rope` or `rope_multi` instruction."""
        n_dims, positions = int(float_attribute(call.attrs, "n_dims")), call.operand(1)
        if call.op == "rope":
            inverse, magnitude = compute_frequencies(n_dims // 2, call.attrs)
            return cls(positions, 0, np.zeros(n_dims // 2, np.int32), inverse, magnitude)
        mode = str(call.attrs["mode"])
        plane, index = position_planes(
            n_dims if mode == "vision" else n_dims // 2, integers_attribute(call.attrs, "sections"), mode
        )
        inverse, magnitude = compute_frequencies(n_dims // 2, call.attrs, index)
        tensor = positions.tensor
        strides = tensor.strides[:-2] + tensor.strides[-1:]
        of_tokens = replace(
            positions, tensor=replace(tensor, shape=tensor.shape[:-2] + tensor.shape[-1:], strides=strides)
        )
        return cls(of_tokens, tensor.strides[-2], plane.astype(np.int32), inverse, magnitude)

    def words(self, launches: Launches, call: Bound, factors: Operand | None) -> list[Word]:
        """Return the fields of `Turns`.

        Args:
            launches: Uploads the constants.
            call: The instruction.
            factors: Divisors of the frequencies.
        """
        pairs, neighbours = len(self.inverse), call.attrs["mode"] == "normal"
        words: list[Word] = [
            pairs,
            int(float_attribute(call.attrs, "offset")),
            2 if neighbours else 1,
            1 if neighbours else pairs,
        ]
        words += [self.step, self.magnitude, launches.constant(self.inverse), launches.constant(self.plane)]
        return [*words, *([0, 0] if factors is None else [factors, factors.strides[-1]])]

    @property
    def by_row(self) -> Operand:
        """The positions, repeated for all heads."""
        tensor = self.positions.tensor
        return replace(self.positions, tensor=replace(tensor, shape=(*tensor.shape, 1), strides=(*tensor.strides, 0)))


def _rope(launches: Launches, call: Bound) -> None:
    """Bind RoPE: copy the columns that it does not rotate, then rotate pairs."""
    x, out, factors, turned = as_float(launches, call.operand(0)), call.out, call.optional(2), Turned.of(call)
    need(turned.positions.dtype is DType.I32, f"positions of type {turned.positions.dtype} are missing")
    factors = None if factors is None else as_float(launches, factors)
    pairs, offset = len(turned.inverse), int(float_attribute(call.attrs, "offset"))
    _copy_others(launches, x, out, offset, 2 * pairs)
    if not pairs:
        return
    axes = axes_of(x.shape[:-1], [row_heads(x), row_heads(out), turned.by_row])
    count = axes.count * pairs
    need(count < MOST_ELEMENTS, f"{count} pairs are too many for one launch")
    words: list[Word] = [count, x.strides[-1], out.strides[-1], *turned.words(launches, call, factors)]
    words += [*axes.words, *axes.walk(0, x), *axes.walk(1, out), *axes.walk(2, call.operand(1))]
    launches.add(SOURCE["rope"], blocks(count, THREADS), THREADS, words)


def _copy_others(launches: Launches, x: Operand, out: Operand, offset: int, turned: int) -> None:
    """Copy the columns that RoPE does not rotate, unless the result is in place."""
    axis, columns = len(x.shape) - 1, x.shape[-1]
    if x.address == out.address:
        return
    for start, end in ((0, offset), (offset + turned, columns)):
        if start < end:
            launch_copy(launches, x.part(axis, start, end - start), out.part(axis, start, end - start))


def _timesteps(launches: Launches, call: Bound) -> None:
    x, width, period = (
        as_float(launches, call.operand(0)),
        *(int(float_attribute(call.attrs, n)) for n in ("dim", "max_period")),
    )
    half = width // 2
    inverse = np.exp(-math.log(period) * np.arange(max(1, half)) / max(1, half))
    axes = axes_of(x.shape, [x])
    count = axes.count * width
    need(count < MOST_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[Word] = [count, width, half, launches.constant(inverse), *axes.words, *axes.walk(0, x), call.out]
    launches.add(SOURCE["timesteps"], blocks(count, THREADS), THREADS, words)


# --------------------------------------------------------------------------------------------------------- chains

NO_TURNS: Sequence[Word] = (*[0] * 5, 0.0, *[0] * 4)
MOST_COLUMNS = 8192
"""The most columns of a row that a block keeps in shared memory."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """The numbers of the instructions of a head, as far as they exist."""

    norm: int | None = None
    factor: int | None = None
    rope: int | None = None
    store: int | None = None
    save: int | None = None

    @property
    def numbers(self) -> list[int]:
        """The existing instructions in order."""
        chain = (self.norm, self.factor, self.rope, self.store, self.save)
        return [n for n in chain if n is not None]


def _stored(flow: Flow, number: int) -> tuple[int | None, int | None]:
    """Find the instruction that stores a result in a cache, and the instruction that saves the old row."""
    readers = flow.found(number) or []
    if len(readers) != 1 or flow.call(readers[0]).op != "set_rows" or not flow.makes(number, readers[0], 1):
        return None, None
    return readers[0], _save_of(flow, readers[0])


def _save_of(flow: Flow, store: int) -> int | None:
    """Find the instruction that saves the row that `store` overwrites."""
    save = flow.save(flow.call(store).operand(0), store)
    return save if save is not None and _saves(flow.call(save), flow.call(store)) else None


def _saves(save: Bound, store: Bound) -> bool:
    """Return whether `save` saves the one row that `store` sets. Of several rows, two may be the same."""
    ids, there = store.operand(2), save.optional(1)
    same = there is not None and lies_as(there, ids) and lies_as(save.operand(0), store.operand(0))
    return save.op == "get_rows" and same and ids.tensor.spec.size == 1


@dataclass(frozen=True, slots=True)
class _Placing:
    """A launch for a head pattern, with one block per row of x: the fields of `Head`, and the accessed operands."""

    dtype: DType
    rows: int
    columns: int
    words: Sequence[Word]
    read: Sequence[Operand]
    written: Sequence[Operand]


def _placing(launches: Launches, flow: Flow, chain: _Chain) -> _Placing:
    """Build the launch of a head pattern; raise `NoKernelError` if its operands do not fit the kernel."""
    calls = {name: flow.call(n) for name in _Chain.__slots__ if (n := getattr(chain, name)) is not None}
    last = calls.get("store") or calls["rope"]
    x = (
        calls["norm"].operand(0)
        if "norm" in calls
        else calls["rope"].operand(0)
        if "rope" in calls
        else last.operand(1)
    )
    out, columns = last.out, x.shape[-1]
    need(x.is_float and out.dtype in CELLS and out.is_dense, "heads do not lie densely")
    need(columns <= MOST_COLUMNS, "a row is too long for shared memory")
    heads, ids, saved, fault = 1, None, None, list[Word]([0, 0])
    if chain.store is not None:
        into, ids = last.operand(0), last.operand(2)
        heads = out.shape[-1] // columns
        need(lies_as(into, out) and len(out.shape) == 2 and out.shape[-1] % columns == 0, "the cache is copied")
        need(ids.is_dense and ids.dtype is DType.I32, "rows of the cache are numbered otherwise")
        need(ids.tensor.spec.size * heads == math.prod(x.shape[:-1]), "heads of a token do not fill a row")
        first, launches.number = launches.number, chain.store
        fault = launches.fault(f"id {{value}} names no row of its table, which has {out.shape[-2]}")
        launches.number = first
        saved = calls["save"].out if "save" in calls else None
    else:
        need(out.shape == x.shape, "heads are put elsewhere")
    w, eps = None, 0.0
    if "factor" in calls:
        w, eps = calls["factor"].operand(1), float(float_attribute(calls["norm"].attrs, "eps"))
        need(w.is_float and w.tensor.spec.size == columns == w.shape[-1], "a row is not multiplied by a vector")
    positions, turns = None, list[Word](NO_TURNS)
    if "rope" in calls:
        turned, factors = Turned.of(calls["rope"]), calls["rope"].optional(2)
        need(turned.positions.dtype is DType.I32 and len(turned.inverse), "positions are of another type")
        need(factors is None or factors.is_float, "factors are of another type")
        positions, turns = turned.by_row, turned.words(launches, calls["rope"], factors)
    for result in (out, saved):
        if result is not None:
            apart(result, [w, positions, ids, *([x] if chain.store is not None else [])], [x] * (chain.store is None))
    axes = axes_of(x.shape[:-1], [row_heads(x), *([] if positions is None else [positions])])
    words: list[Word] = [columns, heads, x.strides[-1], 0 if w is None else w.strides[-1], eps, w or 0, *turns]
    words += [*axes.words, *axes.walk(0, x), *([0] * (1 + MOST) if positions is None else axes.walk(1, positions))]
    words += [out, ids or 0, out.shape[-2] if chain.store is not None else 0, saved or 0, *fault]
    read = [o for o in (x, w, positions, ids) if o is not None]
    return _Placing(out.dtype, axes.count, columns, words, read, [o for o in (out, saved) if o is not None])


def _launch_heads(launches: Launches, flow: Flow, chain: _Chain) -> Sequence[int]:
    """Launch a head pattern and return its instructions."""
    made = _placing(launches, flow, chain)
    kernel, threads = SOURCE[f"place_head<{TYPES[made.dtype]}>"], row_threads(made.columns)
    launches.add(kernel, made.rows, threads, made.words, 4 * made.columns)
    return chain.numbers


def _normed(flow: Flow, first: int) -> _Chain:
    """Match ``rms_norm(x) * w``, then RoPE, and perhaps a store."""
    chain = turned_heads(flow, first)
    return _Chain(*chain, *_stored(flow, chain.rope))


def _normed_heads(launches: Launches, flow: Flow, first: int) -> Sequence[int]:
    """Fuse RMS norm, multiplication and RoPE of a head, and a store into a cache if there is one."""
    return _launch_heads(launches, flow, _normed(flow, first))


def _turned_heads(launches: Launches, flow: Flow, first: int) -> Sequence[int]:
    """Fuse RoPE and the store into a cache."""
    store, save = _stored(flow, first)
    need(store is not None, "it goes into no cache")
    return _launch_heads(launches, flow, _Chain(rope=first, store=store, save=save))


def _chain_into(flow: Flow, store: int) -> _Chain:
    """Match the head pattern that ends in a cache store."""
    need(flow.call(store).op == "set_rows", "it is no cache of rows")
    rope, save = flow.maker(store, 1), _save_of(flow, store)
    if flow.call(rope).op not in ROPES:
        return _Chain(store=store, save=save)
    need(_stored(flow, rope) == (store, save), "the rotated head has other readers")
    factor = flow.maker(rope, 0)
    if flow.call(factor).op == "mul" and flow.call(norm := flow.maker(factor, 0)).op == "rms_norm":
        return _normed(flow, norm)
    return _Chain(rope=rope, store=store, save=save)


def _heads_of_attention(launches: Launches, flow: Flow, first: int) -> Sequence[int]:
    """Fuse the query head pattern of an attention and the stores of its keys and values."""
    query = _normed(flow, first) if flow.call(first).op == "rms_norm" else _Chain(rope=first)
    assert query.rope is not None
    attention = flow.reader(query.rope, "attention")
    chains = [query, *(_chain_into(flow, flow.maker(attention, k)) for k in (1, 2))]
    made = [_placing(launches, flow, chain) for chain in chains]
    need(made[0].dtype is DType.F32 and made[1].dtype is made[2].dtype, "caches differ in type")
    for one, other in permutations(made, 2):
        for out in one.written:
            apart(out, [*other.read, *other.written])
    columns, ends = max(m.columns for m in made), [*accumulate(m.rows for m in made)]
    words = [*ends[:2], *(word for m in made for word in m.words)]
    launches.add(SOURCE[f"place_heads<{TYPES[made[1].dtype]}>"], ends[-1], row_threads(columns), words, 4 * columns)
    return [n for chain in chains for n in chain.numbers]


def _stored_row(launches: Launches, flow: Flow, first: int) -> Sequence[int]:
    """Fuse the save of a cache row and its store."""
    save = flow.call(first)
    _, store = changed_state(flow, first, "set_rows")
    need(_saves(save, flow.call(store)), "it saves no single row")
    return _launch_heads(launches, flow, _Chain(store=store, save=first))


FUSED: Mapping[str, Sequence[Fused]] = {
    "rms_norm": (_normed_heads, _heads_of_attention),
    **dict.fromkeys(ROPES, (_turned_heads, _heads_of_attention)),
    "get_rows": (_stored_row,),
}
BINDINGS: Mapping[str, Binding] = {"rope": _rope, "rope_multi": _rope, "timestep_embedding": _timesteps}
