"""The inputs and states of one graph while a family builds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ... import ops
from ...graph import DType, Graph, Value, input, state
from .step import Step


@dataclass(frozen=True, slots=True)
class Sight:
    """Which cells a token sees: all before it and its own, of the last ``window`` or, ``chunked``, of its own chunk of
    so many alone unless that is 0; with ``distances`` the mask holds how far they are, for ALiBi; unless ``causal``
    all cells of its sequence."""

    window: int = 0
    chunked: bool = False
    distances: bool = False
    causal: bool = True


ALL = Sight()
CACHED = frozenset({"pos", "slot"})
"""Inputs of mixers that attend to a cache."""
RECURRENT = frozenset({"valid", "conv_rows"})
"""Inputs of mixers that convolve and carry a state."""


class Frame:
    """Inputs, shared values and state updates of the graph for one `Step`.

    Linear layers see the tokens of all sequences as rows [B*T, width]; attention and recurrence see [B, T, ...].
    A graph holds only those inputs that its outputs depend on.
    """

    def __init__(self, step: Step, *, taps: int = 0) -> None:
        self.step = step
        self.taps = taps
        self.tokens = input("tokens", (step.rows,), DType.I32)
        self.pos = input("pos", (step.sequences, step.tokens), DType.I32)
        self.slot = input("slot", (step.rows,), DType.I32)
        self.out_ids = input("out_ids", (step.outputs,), DType.I32)
        self.valid = input("valid", (step.sequences, step.tokens, 1))
        self.last = input("last", (step.sequences, step.tokens), DType.I32)
        self._masks: dict[Sight, Value] = {}
        self._cells: dict[str, Value] = {}
        self._updates: dict[Value, Value] = {}

    def mask(self, sight: Sight = ALL) -> Value:
        """f32[B, T, cells]: which cells each token may see."""
        if sight not in self._masks:
            self._masks[sight] = self._mask(sight)
        return self._masks[sight]

    def _mask(self, sight: Sight) -> Value:
        cells, window = self.step.cells, 0 if sight.chunked else sight.window
        pos = self.pos if sight.causal else self.last
        mask = ops.causal_mask(pos, cells=cells, window=window, name="window_mask" if window else "mask")
        if sight.chunked and cells > sight.window:
            chunk = ops.floor(ops.scale(self.positions, scale=1.0 / sight.window, bias=0.5 / sight.window))
            first = ops.scale(chunk, scale=float(sight.window), bias=-0.5)
            ahead = ops.sub(ops.add(ops.fill(mask, value=0.0), self.numbers), first)
            mask = ops.add(mask, ops.log(ops.step(ahead)), name="chunk_mask")
        if sight.distances:
            mask = ops.sub(ops.add(mask, self.numbers), self.positions, name="distances")
        return mask

    @cached_property
    def numbers(self) -> Value:
        """The numbers of the cells, f32[cells]."""
        return ops.arange(start=0.0, stop=float(self.step.cells))

    @cached_property
    def positions(self) -> Value:
        """The positions of the tokens as numbers, f32[B, T, 1]."""
        return ops.reshape(ops.cast(self.pos, dtype=DType.F32), shape=(*self.pos.shape, 1))

    def temperature(self, floor: int, factor: float, offset: float) -> Value | None:
        """``1 + factor ln(1 + (pos + offset) // floor)`` of each token, f32[B, T, 1, 1]; None where it is 1 for all."""
        if self.step.cells + offset <= floor:
            return None
        # Half a position keeps the quotient off the integers.
        whole = ops.floor(ops.scale(self.positions, scale=1.0 / floor, bias=(offset + 0.5) / floor))
        warmth = ops.scale(ops.log(ops.scale(whole, scale=1.0, bias=1.0)), scale=factor, bias=1.0)
        return ops.reshape(warmth, shape=(*self.pos.shape, 1, 1))

    @cached_property
    def conv_rows(self) -> Value:
        return input("conv_rows", (self.step.sequences, self.taps - 1), DType.I32)

    def split(self, x: Value, *shape: int) -> Value:
        """Rows [B*T, n] as [B, T, *shape]."""
        return ops.reshape(x, shape=(self.step.sequences, self.step.tokens, *shape))

    def rows(self, x: Value) -> Value:
        """[B, T, ...] as rows [B*T, n]."""
        return ops.reshape(x, shape=(self.step.rows, x.spec.size // self.step.rows))

    def wanted(self, x: Value) -> Value:
        """The rows of ``x`` f32[B*T, n] whose logits are asked for, f32[outputs, n]."""
        return ops.get_rows(x, self.out_ids, name="wanted")

    def cached(self, name: str, new: Value) -> Value:
        """Write ``new`` f32[B,T,heads,size] into the cache ``name`` and read all cells: f32[B, cells, heads, size].

        The state is f32[B*context + 1, heads*size]; the last row takes what padding writes and is never read.
        """
        step = self.step
        *_, heads, size = new.shape
        old = state(name, (step.sequences * step.context + 1, heads * size))
        cache = ops.set_rows(old, self.rows(new), self.slot, name=f"{name}.new")
        self._updates[old] = cache
        cells = ops.slice_(cache, axis=0, start=0, stop=step.sequences * step.context)
        cells = ops.reshape(cells, shape=(step.sequences, step.context, heads * size))
        cells = ops.slice_(cells, axis=1, start=0, stop=step.cells)
        self._cells[name] = ops.reshape(cells, shape=(step.sequences, step.cells, heads, size))
        return self._cells[name]

    def cells(self, name: str) -> Value:
        """All cells of the cache ``name``, which an earlier layer has written in this graph."""
        return self._cells[name]

    def preceded(self, name: str, new: Value) -> Value:
        """``new`` f32[B,T,c] behind the last rows of earlier runs: f32[B, taps-1+T, c].

        The state ``name`` f32[B, taps-1, c] becomes the last rows before the padding, which conv_rows names.
        """
        old = state(name, (self.step.sequences, self.taps - 1, new.shape[-1]))
        both = ops.concat(old, new, axis=1)
        self._updates[old] = ops.get_rows(both, self.conv_rows, name=f"{name}.new")
        return both

    def state(self, name: str, *shape: int) -> Value:
        """A state f32[B, *shape]; `update` says what it becomes."""
        return state(name, (self.step.sequences, *shape))

    def update(self, old: Value, new: Value) -> None:
        self._updates[old] = new

    def graph(self, logits: Value) -> Graph:
        """The finished graph: ``logits`` f32[outputs, vocabulary] and all states that changed."""
        return Graph({"logits": logits}, self._updates)
