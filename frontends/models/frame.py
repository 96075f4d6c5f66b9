"""The inputs and states of one graph while a family builds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial, reduce

from ... import ops
from ...graph import DType, Graph, Value, input, state
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..step import Ring, Step


@dataclass(frozen=True, slots=True)
class Sight:
    """Which cells a token sees: all before it and its own, of the last ``window`` or, ``chunked``, of its own chunk of
    so many alone unless that is 0; with ``distances`` the mask holds how far they are, for ALiBi.  Unless ``causal`` it
    sees the tokens behind it, too: all of them, or ``centred`` half of ``window`` on either side."""

    window: int = 0
    chunked: bool = False
    distances: bool = False
    causal: bool = True
    centred: bool = False

    @property
    def rolling(self) -> int:
        """Tokens behind which a cell is never seen again; 0 if there is no such number."""
        return self.window if self.causal and not self.chunked and not self.distances else 0


Warmth = tuple[int, float, float] | None
"""Floor, factor and offset of the temperature of queries, see `Frame.warmed`; None for 1."""
ALL = Sight()
HIDDEN = -1e38
"""What is added to the scores of cells that are not seen: their share is 0."""
CACHED = frozenset({"pos", "slot"})
"""Inputs of mixers that attend to a cache."""
RECURRENT = frozenset({"valid", "conv_rows"})
"""Inputs of mixers that convolve and carry a state."""
SNAPSHOTS, WINDOWS = ".snapshots", ".windows"
"""``NAME.T`` and this name a state that holds NAME as it was behind each of T tokens: [B, T, ...], the last first, or
[B, kept+T, c], rows of which it was."""


class Frame:
    """Inputs, shared values and state updates of the graph for one `Step`.

    Linear layers see the tokens of all sequences as rows [B*T, width]; attention and recurrence see [B, T, ...].
    A graph holds only those inputs that its outputs depend on.  ``steered`` is given the number of each block and the
    residual behind it, and returns the residual that goes on.
    """

    def __init__(
        self, step: Step, *, taps: int = 0, steered: Callable[[int, Value], Value] = lambda block, x: x
    ) -> None:
        self.step, self.steered = step, steered
        self.taps = taps
        self.tokens = input("tokens", (step.rows,), DType.I32)
        self.pos = input("pos", (step.sequences, step.tokens), DType.I32)
        self.slot = input("slot", (step.rows,), DType.I32)
        self.out_ids = input("out_ids", (step.outputs,), DType.I32)
        self.valid = input("valid", (step.sequences, step.tokens, 1))
        self.last = input("last", (step.sequences, step.tokens), DType.I32)
        self._masks: dict[tuple[Sight, Value | None], Value] = {}
        self.left: dict[str, Value] = {}
        """What layers leave for later ones: all cells of their caches, and whatever else has a name."""
        self._fed: dict[str, Value] = {}
        self._updates: dict[Value, Value] = {}

    def mask(self, sight: Sight = ALL, biases: Value | None = None) -> Value:
        """f32[B, T, cells]: which cells each token may see, or tokens unless it is causal; with ``biases`` f32[buckets,
        heads] also what each head adds for a distance, f32[B, heads, T, T]."""
        key = sight, biases
        if key not in self._masks:
            mask = self._mask(sight) if sight.causal else self._open_mask(sight)
            self._masks[key] = mask if biases is None else self._biased(mask, biases)
        return self._masks[key]

    def _open_mask(self, sight: Sight) -> Value:
        """f32[B, T, T]: a token sees all of its text, or half a window of it on either side.  A window or a chunk
        that is not centred hides earlier tokens only."""
        count, half = self.step.tokens, sight.window // 2
        mask = ops.causal_mask(self.last, cells=count, name="mask")
        if sight.window and sight.centred:
            end = ops.cast(ops.scale(ops.cast(self.pos, dtype=DType.F32), scale=1.0, bias=half), dtype=DType.I32)
            mask = ops.add(mask, ops.causal_mask(end, cells=count, window=2 * half + 1), name="window_mask")
        elif 0 < sight.window < count:
            mask = self._hidden_before(self._first_seen(sight), mask)
        return ops.sub(mask, ops.abs_(self.distances), name="distances") if sight.distances else mask

    def _first_seen(self, sight: Sight) -> Value:
        """Half a position before the first one that a token sees, f32[B, T, 1]."""
        if not sight.chunked:
            return ops.scale(self.positions, scale=1.0, bias=0.5 - sight.window)
        chunk = ops.floor(ops.scale(self.positions, scale=1.0 / sight.window, bias=0.5 / sight.window))
        return ops.scale(chunk, scale=float(sight.window), bias=-0.5)

    def _hidden_before(self, first: Value, mask: Value) -> Value:
        """``mask`` f32[B, T, n] with minus infinity for the cells before ``first`` f32[B, T, 1]."""
        numbers = ops.arange(start=0.0, stop=float(mask.shape[-1]))
        ahead = ops.sub(ops.add(ops.fill(mask, value=0.0), numbers), first)
        return ops.add(mask, ops.log(ops.step(ahead)), name="first_mask")

    @cached_property
    def distances(self) -> Value:
        """How far each token of a text lies behind another: f32[B, T, T]."""
        count = self.step.tokens
        numbers = ops.repeat(ops.arange(start=0.0, stop=float(count)), shape=(*self.pos.shape, count))
        return ops.sub(numbers, self.positions)

    def _biased(self, mask: Value, table: Value) -> Value:
        """``mask`` plus the entry of ``table`` for each distance: half of the buckets are for tokens ahead, and of each
        half the first are for one distance each, the others for more and more, up to 128.  Raffel et al., T5, 2020."""
        (buckets, heads), (sequences, count) = table.shape, self.pos.shape
        near, far = buckets // 4, buckets // 2 - buckets // 4
        ahead = ops.arange(start=1.0 - count, stop=float(count))
        size = ops.abs_(ahead)
        octaves = ops.log(ops.scale(ops.clamp(size, min=near, max=math.inf), scale=1.0 / near))
        # A little more, since powers of the ratio begin a bucket.
        number = ops.floor(ops.scale(octaves, scale=far / math.log(128.0 / near), bias=1e-4))
        number = ops.add(ops.clamp(size, min=0.0, max=near), ops.clamp(number, min=0.0, max=far - 1.0))
        number = ops.add(number, ops.scale(ops.step(ahead), scale=float(buckets // 2)))
        biases = ops.get_rows(table, ops.cast(number, dtype=DType.I32), name="biases")
        where = ops.cast(ops.scale(self.distances, scale=1.0, bias=count - 1.0), dtype=DType.I32)
        biases = ops.get_rows(biases, ops.reshape(where, shape=(where.spec.size,)))
        biases = ops.transpose(ops.reshape(biases, shape=(sequences, count * count, heads)))
        biases = ops.reshape(biases, shape=(sequences, heads, count, count))
        return ops.add(biases, ops.reshape(mask, shape=(sequences, 1, count, count)), name="biased_mask")

    def _mask(self, sight: Sight) -> Value:
        cells, window = self.step.cells, 0 if sight.chunked else sight.window
        if 0 < (ring := self.step.ring(sight.rolling)) < cells:
            return self._ring_mask(ring, window)
        mask = ops.causal_mask(self.pos, cells=cells, window=window, name="window_mask" if window else "mask")
        if sight.chunked and cells > sight.window:
            mask = self._hidden_before(self._first_seen(sight), mask)
        if sight.distances:
            mask = ops.sub(ops.add(mask, self.numbers), self.positions, name="distances")
        return mask

    def _ring_mask(self, ring: int, window: int) -> Value:
        """f32[B, T, ring]: 0 where a cell, written in turn with the others, holds one of the last tokens."""
        places = ops.repeat(self.positions, shape=(*self.pos.shape, ring))
        ahead = ops.sub(places, ops.arange(start=0.0, stop=float(ring)))
        turns = ops.floor(ops.scale(ahead, scale=1.0 / ring, bias=0.5 / ring))
        back = ops.sub(ahead, ops.scale(turns, scale=float(ring)))  # tokens since the cell was written
        late = ops.step(ops.scale(back, scale=1.0, bias=0.5 - window))
        never = ops.step(ops.sub(ops.scale(back, scale=1.0, bias=-0.5), places))
        return ops.scale(ops.add(late, never), scale=HIDDEN, name="ring_mask")

    @cached_property
    def numbers(self) -> Value:
        """The numbers of the cells, f32[cells]."""
        return ops.arange(start=0.0, stop=float(self.step.cells))

    @cached_property
    def positions(self) -> Value:
        """The positions of the tokens as numbers, f32[B, T, 1]."""
        return ops.reshape(ops.cast(self.pos, dtype=DType.F32), shape=(*self.pos.shape, 1))

    @cached_property
    def backwards(self) -> Value:
        """The negative positions, which turn back: i32[B, T]."""
        return ops.cast(ops.scale(ops.cast(self.pos, dtype=DType.F32), scale=-1.0), dtype=DType.I32)

    def quotient(self, ratio: int, offset: float) -> Value:
        """``(pos + offset) // ratio`` of each token as a number, f32[B, T]; half a position keeps the quotient off the
        integers."""
        pos = ops.cast(self.pos, dtype=DType.F32)
        return ops.floor(ops.scale(pos, scale=1.0 / ratio, bias=(offset + 0.5) / ratio))

    def within(self, ratio: int) -> Value:
        """Which of the ``ratio`` tokens of its block each token is: i32[B*T]."""
        pos, start = ops.cast(self.pos, dtype=DType.F32), ops.scale(self.quotient(ratio, 0.0), scale=float(ratio))
        return ops.reshape(ops.cast(ops.sub(pos, start), dtype=DType.I32), shape=(self.step.rows,))

    def complete(self, ratio: int) -> Value:
        """f32[B, T, blocks]: which blocks of ``ratio`` tokens end no later than each token."""
        last = ops.cast(ops.scale(self.quotient(ratio, 1.0), scale=1.0, bias=-1.0), dtype=DType.I32)
        return ops.causal_mask(last, cells=-(-self.step.cells // ratio), name=f"block_mask.{ratio}")

    def warmed(self, q: Value, temperature: Warmth) -> Value:
        """``q`` f32[B,T,heads,size] times ``1 + factor ln(1 + (pos + offset) // floor)`` of each token."""
        if temperature is None:
            return q
        floor, factor, offset = temperature
        if self.step.cells + offset <= floor:  # it is 1 for all
            return q
        warmth = ops.scale(
            ops.log(ops.scale(self.quotient(floor, offset), scale=1.0, bias=1.0)), scale=factor, bias=1.0
        )
        return ops.mul(q, ops.reshape(warmth, shape=(*self.pos.shape, 1, 1)))

    @cached_property
    def each_token(self) -> Value:
        """f32[B, T, 1, 1], 0 for padding."""
        return ops.reshape(self.valid, shape=(*self.pos.shape, 1, 1))

    @property
    def conv_rows(self) -> Value:
        return self.fed("conv_rows", self.step.sequences, self.taps - 1)

    def fed(self, name: str, *shape: int) -> Value:
        """The input i32[shape] of that name, one for all that ask for it."""
        return self._fed.setdefault(name, input(name, shape, DType.I32))

    def split(self, x: Value, *shape: int) -> Value:
        """Rows [B*T, n] as [B, T, *shape]."""
        return ops.reshape(x, shape=(self.step.sequences, self.step.tokens, *shape))

    def rows(self, x: Value) -> Value:
        """[B, T, ...] as rows [B*T, n]."""
        return ops.reshape(x, shape=(self.step.rows, x.spec.size // self.step.rows))

    def wanted(self, x: Value) -> Value:
        """The rows of ``x`` f32[B*T, n] whose logits are asked for, f32[outputs, n]; all where a guess follows."""
        return self.chosen(x) if self.step.gives in ("logits", "hidden") else x

    def chosen(self, x: Value) -> Value:
        return ops.get_rows(x, self.out_ids, name="wanted")

    def cached(
        self,
        name: str,
        new: Value,
        slot: Value | None = None,
        *,
        ratio: int = 1,
        sight: Sight = ALL,
        dtype: DType | None = None,
    ) -> Value:
        """Write ``new`` f32[B,T,heads,size] into the cache ``name`` and read all cells [B, cells, heads, size].

        The state is [B*context + 1, heads*size] of `dtype`, which is that of keys unless given; the last row takes what
        padding writes and is never read.  A cache may have a cell for ``ratio`` tokens each; ``slot`` then says which
        cells are written.  What is out of ``sight`` may be overwritten.
        """
        step, dtype = self.step, dtype or self.step.keys
        sequences, count, heads, size = new.shape
        if size % dtype.block:
            what = f"{name}: heads of {size} numbers are no whole blocks of {dtype}, which have {dtype.block}"
            raise ModelError(f"{what}; use cache_type_{'v' if '_v.' in name else 'k'}='f16'")
        context, cells = -(-step.context // ratio), -(-step.cells // ratio)
        if ring := step.ring(sight.rolling):
            context, cells = ring, min(ring, cells)
            slot = self.fed(Ring(sight.rolling).name, step.rows)
        old = state(name, (sequences * context + 1, heads * size), dtype)
        rows = ops.reshape(new, shape=(sequences * count, heads * size))
        cache = ops.set_rows(old, rows, self.slot if slot is None else slot, name=f"{name}.new")
        self._updates[old] = cache
        known = ops.slice_(cache, axis=0, start=0, stop=sequences * context)
        known = ops.reshape(known, shape=(sequences, context, heads * size))
        known = ops.slice_(known, axis=1, start=0, stop=cells)
        self.left[name] = ops.reshape(known, shape=(sequences, cells, heads, size))
        return self.left[name]

    def both_cached(self, layer: int, k: Value, v: Value, sight: Sight) -> tuple[Value, Value]:
        """Keys and values of a layer, written and read as `cached` does; as they are where all tokens come at once."""
        if not sight.causal:
            self.left |= {f"cache_k.{layer}": k, f"cache_v.{layer}": v}
            return k, v
        keys = self.cached(f"cache_k.{layer}", k, sight=sight)
        return keys, self.cached(f"cache_v.{layer}", v, sight=sight, dtype=self.step.values)

    def preceded(self, name: str, new: Value, kept: int) -> Value:
        """``new`` f32[B,T,c] behind the last ``kept`` rows of earlier runs: f32[B, kept+T, c].

        The state ``name`` f32[B, kept, c] becomes the last rows before the padding, which conv_rows names.
        """
        old = state(name, (self.step.sequences, kept, new.shape[-1]))
        both, rows = ops.concat(old, new, axis=1), self.conv_rows
        if kept != self.taps - 1:
            rows = ops.slice_(rows, axis=1, start=0, stop=kept)
        self._updates[old] = ops.get_rows(both, rows, name=f"{name}.new")
        if self.step.reversible:
            self._updates[state(f"{name}.{self.step.tokens}{WINDOWS}", both.shape)] = both
        return both

    def state(self, name: str, *shape: int) -> Value:
        """A state f32[B, *shape]; `update` says what it becomes."""
        return state(name, (self.step.sequences, *shape))

    @property
    def snapshots(self) -> int:
        """How many states an op that carries one is to give back."""
        return self.step.tokens if self.step.reversible else 1

    def update(self, old: Value, new: Value) -> None:
        """A state becomes ``new`` f32[B, ...], or the first of its `snapshots` f32[B, snapshots, ...], which are kept
        too."""
        if self.snapshots > 1:
            self._updates[state(f"{old.node.name}.{self.snapshots}{SNAPSHOTS}", new.shape)] = new
            new = ops.reshape(ops.slice_(new, axis=1, start=0, stop=1), shape=old.shape)
        self._updates[old] = new

    def carried(self, rule: Callable[..., tuple[Value, Value]], operands: tuple[Value, ...], old: Value) -> Value:
        """What a recurrence makes of ``operands`` [B, T, ...] and a state, which is updated; token by token where
        snapshots are asked for, since the op itself gives none."""
        if self.snapshots == 1:
            y, new = rule(*operands, old)
            self.update(old, new)
            return y
        kept, answers, new = [], [], old
        for t in range(self.step.tokens):
            y, new = rule(*(ops.slice_(x, axis=1, start=t, stop=t + 1) for x in operands), new)
            answers.append(y)
            kept.append(ops.reshape(new, shape=(new.shape[0], 1, *new.shape[1:])))
        self.update(old, reduce(partial(ops.concat, axis=1), reversed(kept)))
        return reduce(partial(ops.concat, axis=1), answers)

    def graph(self, outputs: Mapping[str, Value]) -> Graph:
        """The finished graph: ``outputs``, and all states that changed."""
        return Graph(outputs, self._updates)
