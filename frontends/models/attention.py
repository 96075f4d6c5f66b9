"""Attention over a cache, in all the forms that differ by numbers and by tensors alone.

Vaswani et al., 2017; groups of query heads share a key/value head (Ainslie et al., GQA, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import ops
from ...graph import Value
from .blocks import Norm, linear, parts
from .frame import CACHED, Frame, Sight
from .rope import Rope
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer: ``heads`` queries of ``key_size`` on ``kv_heads`` keys, values of ``value_size``.

    ``sight`` says which cells a token sees, ``rope`` how heads turn (None: not at all).  ``cap`` bounds scores and
    ``clamp`` q, k and v unless 0.  A layer with ``source`` reads the cache of that layer and has none of its own.
    ``temperature`` is (floor, factor, offset): queries are multiplied by
    ``1 + factor ln(1 + (pos + offset) // floor)``.
    """

    norm: Norm
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    sight: Sight
    rope: Rope | None = None
    factors: bool = False
    original_context: int = 0
    qk_norm: str = "maybe"
    cap: float = 0.0
    clamp: float = 0.0
    alibi: float = 0.0
    gate: str = "sigmoid"
    gated_queries: bool = False
    value_scale: float = 1.0
    value_norm: bool = False
    temperature: tuple[int, float, float] | None = None
    source: int | None = None

    @property
    def taps(self) -> int:
        return 0

    @property
    def needs(self) -> frozenset[str]:
        return CACHED

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """f32[B*T, E] to f32[B*T, E]."""
        block, size = f"blk.{layer}", self.key_size
        q, k, v = self.projected(weights, frame, block, x)
        gate = None
        if self.gated_queries:
            gate = ops.slice_(q, axis=-1, start=size, stop=2 * size)
            q = ops.slice_(q, axis=-1, start=0, stop=size)
        if self.value_norm and v is not None:
            v = self.norm.plain(v)
        q = self.turned(weights, frame, f"{block}.attn_q_norm", q, name=f"{block}.q_rope")
        if k is not None:
            k = self.turned(weights, frame, f"{block}.attn_k_norm", k, name=f"{block}.k_rope")
        if self.temperature and (warmth := frame.temperature(*self.temperature)) is not None:
            q = ops.mul(q, warmth)
        if k is not None and v is not None:
            cells = frame.both_cached(layer, k, v, self.sight)
        else:
            cells = frame.cells(f"cache_k.{self.source}"), frame.cells(f"cache_v.{self.source}")
        y = self.attend(weights, frame, block, q, *cells)
        if gate is not None:
            y = ops.mul(y, ops.sigmoid(gate), name=f"{block}.attn_gated")
        return self.answered(weights, frame, block, x, y)

    def projected(
        self, weights: Weights, frame: Frame, block: str, x: Value
    ) -> tuple[Value, Value | None, Value | None]:
        """q, k and v f32[B,T,heads,size]; their matrices may be one tensor, and v may be k.  A layer that has no
        cache of its own has queries alone."""
        shapes = {
            "attn_q": (self.heads, 2 * self.key_size if self.gated_queries else self.key_size),
            "attn_k": (self.kv_heads, self.key_size),
            "attn_v": (self.kv_heads, self.value_size),
        }
        widths = [heads * size for heads, size in shapes.values()]
        if self.source is not None:
            return frame.split(linear(weights, f"{block}.attn_q", x, widths[0]), *shapes["attn_q"]), None, None
        if weights.has(f"{block}.attn_qkv.weight"):
            rows = self.separated(weights, f"{block}.attn_qkv", x, widths)
        elif self.value_norm and not weights.has(f"{block}.attn_v.weight"):
            q, k = (linear(weights, f"{block}.{name}", x, n) for name, n in zip(shapes, widths[:2], strict=False))
            rows = [q, k, k]
        else:
            rows = [linear(weights, f"{block}.{name}", x, n) for name, n in zip(shapes, widths, strict=True)]
        if self.clamp:
            rows = [ops.clamp(row, min=-self.clamp, max=self.clamp) for row in rows]
        q, k, v = (frame.split(row, *shape) for row, shape in zip(rows, shapes.values(), strict=True))
        return q, k, v

    def separated(self, weights: Weights, name: str, x: Value, widths: list[int]) -> list[Value]:
        """q, k and v of one matrix, which may have as many heads for keys as for queries: then the first ones count."""
        rows = weights.shape(f"{name}.weight")[0]
        if rows == sum(widths) or rows != 3 * widths[0]:
            return parts(linear(weights, name, x, sum(widths)), *widths)
        three = parts(linear(weights, name, x, rows), widths[0], widths[0], widths[0])
        return [ops.slice_(y, axis=-1, start=0, stop=n) for y, n in zip(three, widths, strict=True)]

    def turned(self, weights: Weights, frame: Frame, norm: str, x: Value, *, name: str) -> Value:
        """Queries or keys, normalised and rotated in the order of the family."""
        before = self.qk_norm == "before" or (
            self.qk_norm == "maybe" and weights.has(f"{norm.replace('attn_k', 'attn_q')}.weight")
        )
        if before:
            x = self.normed(weights, norm, x)
        if self.rope is not None:
            x = self.rope.rotate(x, frame.pos, self.divisors(weights, frame, norm.partition(".attn")[0]), name=name)
        if self.qk_norm == "after":
            x = self.normed(weights, norm, x)
        if self.qk_norm == "bare" or (self.qk_norm == "bare rotated" and self.rope is not None):
            x = self.norm.plain(x)
            # A factor for each query head, if any.
            factors = weights.optional(f"{norm}.weight", (self.heads, 1))
            x = x if factors is None else ops.mul(x, factors)
        return x

    def normed(self, weights: Weights, name: str, x: Value) -> Value:
        """Each head normalised, or all of them as one row if the weight is as long."""
        heads, size = x.shape[-2:]
        if weights.shape(f"{name}.weight") != (heads * size,) or heads == 1:
            return self.norm(weights, name, x)
        row = ops.reshape(x, shape=(*x.shape[:-2], heads * size))
        return ops.reshape(self.norm(weights, name, row), shape=x.shape)

    def divisors(self, weights: Weights, frame: Frame, block: str) -> Value | None:
        """What divides the speed of each pair: Llama 3.1 has one such vector, LongRoPE one for short contexts and one
        for those longer than the model was made for."""
        if not self.factors or self.rope is None:
            return None
        shape = (self.rope.n_dims // 2,)
        length = "long" if frame.step.context > self.original_context else "short"
        for stem in ("rope_freqs", f"rope_factors_{length}"):
            for name in (f"{stem}.weight", f"{block}.{stem}.weight"):
                if name in weights.gguf.tensors:
                    return weights(name, shape)
        return None

    def attend(self, weights: Weights, frame: Frame, block: str, q: Value, k: Value, v: Value) -> Value:
        """Mixed values f32[B,T,heads,value size]."""
        mask, sinks = frame.mask(self.sight), weights.optional(f"{block}.attn_sinks.weight", (self.heads,))
        return ops.attention(
            *(q, k, v, mask, sinks),
            scale=self.scale,
            softcap=self.cap or 0.0,
            max_bias=self.alibi or 0.0,
            name=f"{block}.attn",
        )

    def answered(self, weights: Weights, frame: Frame, block: str, x: Value, y: Value) -> Value:
        """What heads answer, gated by the token ``x`` if the file has such a gate, projected: f32[B*T, E]."""
        name, width = f"{block}.attn_gate", x.shape[-1]
        if weights.has(f"{name}.weight"):
            columns = weights.shape(f"{name}.weight")[0]
            opening = ops.mul_mat(weights(f"{name}.weight", (columns, width)), x, name=name)
            opening = ops.sigmoid(opening) if self.gate == "sigmoid" else ops.softplus(opening)
            each = columns // self.heads
            y = ops.mul(y, frame.split(opening, self.heads, each), name=f"{block}.attn_gated")
        y = linear(weights, f"{block}.attn_output", frame.rows(y), width)
        return y if self.value_scale == 1.0 else ops.scale(y, scale=self.value_scale)


@dataclass(frozen=True, slots=True)
class Passing:
    """A layer whose attention is a matrix alone: f32[n, E] to f32[n, E]."""

    taps: int = 0
    needs: frozenset[str] = frozenset()

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        return linear(weights, f"blk.{layer}.attn_output", x, x.shape[-1])
