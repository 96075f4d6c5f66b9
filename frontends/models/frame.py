"""The inputs and states of one graph while a family builds it."""

from __future__ import annotations

from functools import cached_property

from ... import ops
from ...graph import DType, Graph, Value, input, state
from .step import Step


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
        self._masks: dict[int, Value] = {}
        self._updates: dict[Value, Value] = {}

    def mask(self, window: int = 0) -> Value:
        """f32[B, T, cells]: which cells each token may see, of the last ``window`` unless that is 0."""
        if window not in self._masks:
            name = "window_mask" if window else "mask"
            self._masks[window] = ops.causal_mask(self.pos, cells=self.step.cells, window=window, name=name)
        return self._masks[window]

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
        return ops.reshape(cells, shape=(step.sequences, step.cells, heads, size))

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
