"""Multi-head latent attention (MLA): a short cached vector per token holds the keys and values of all heads.

DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

import math

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureKeys
from ..family import Family
from ..frame import CACHED, Frame, Sight, Warmth
from ..weights import Weights
from .blocks import Norm, linear, opened, parts, product
from .rope import Rope, divisors, original_context


@dataclass(frozen=True, slots=True)
class Latent:
    """The latent attention of one layer; ``rank`` is the length of the latent vector.

    Heads have ``unrotated_columns`` and ``rotated_columns``. In keys, all heads share the rotated columns.
    """

    norm: Norm
    heads: int
    rank: int
    plain: int
    turning: int
    value_size: int
    scale: float
    rope: Rope | None
    sight: Sight
    original_context: int
    temperature: Warmth
    taps: int = 0

    @property
    def needs(self) -> frozenset[str]:
        return CACHED if self.sight.causal else frozenset({"pos"})

    @classmethod
    def from_keys(
        cls,
        keys: ArchitectureKeys,
        family: Family,
        norm: Norm,
        heads: int,
        rope: Rope | None,
        sight: Sight,
        warmth: Warmth,
    ) -> Latent:
        """Return the latent attention of a layer; layers with a window may have sizes of their own.

        Args:
            keys: The metadata.
            family: The traits of the architecture.
            norm: The norm of latent vectors.
            heads: Number of heads.
            rope: The rotary embedding, or `None`.
            sight: The attention window.
            warmth: The temperature scaling of queries.

        Raises:
            ModelError: A value is missing or invalid.
        """
        sizes = [
            (sight.window and keys.count_or_default(f"attention.{kind}_length_mla_swa", 0))
            or keys.count_or_default(f"attention.{kind}_length_mla", 0)
            or keys.count(f"attention.{kind}_length")
            for kind in ("key", "value")
        ]
        rank = (sight.window and keys.count_or_default("attention.kv_lora_rank_swa", 0)) or keys.count(
            "attention.kv_lora_rank"
        )
        turning = keys.count("rope.dimension_count", 0, least=0)
        if turning > sizes[0]:
            raise keys.error("rope.dimension_count", f"is {turning}; need at most the key length {sizes[0]}")
        scale = _magnified(keys, family, rope) / math.sqrt(sizes[0])
        plain, context = sizes[0] - turning, original_context(keys)
        return cls(norm, heads, rank, plain, turning, sizes[1], scale, rope, sight, context, warmth)

    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value:
        """Return the latent attention of ``x`` f32[B*T, E]: f32[B*T, E]."""
        block = f"blk.{layer}"
        q, _ = self.queries(weights, block, x)
        c, pe = self.latent(weights, frame, block, x)
        if weights.has(f"{block}.attn_k_b.weight"):
            y = self.absorbed(weights, frame, layer, q, c, pe)
        else:
            y = self.expanded(weights, frame, layer, q, c, pe)
        return self.answered(weights, frame, block, x, y)

    def queries(self, weights: Weights, block: str, x: Value) -> tuple[Value, Value]:
        """Return the queries f32[B*T, heads * size] and their source: ``x``, or a shorter vector from ``x``."""
        width = self.heads * (self.plain + self.turning)
        if not weights.has(f"{block}.attn_q_a.weight"):
            return product(weights, f"{block}.attn_q", x, width), x
        rank = weights.shape(f"{block}.attn_q_a.weight")[0]
        short = self.norm(weights, f"{block}.attn_q_a_norm", product(weights, f"{block}.attn_q_a", x, rank))
        return product(weights, f"{block}.attn_q_b", short, width), short

    def latent(self, weights: Weights, frame: Frame, block: str, x: Value) -> tuple[Value, Value | None]:
        """Return the normalised latent vectors f32[B*T, rank], and the rotated key columns f32[B, T, 1, columns]."""
        both = product(weights, f"{block}.attn_kv_a_mqa", x, self.rank + self.turning)
        if not self.turning:
            return self.norm(weights, f"{block}.attn_kv_a_norm", both), None
        c, pe = parts(both, self.rank, self.turning)
        c, pe = self.norm(weights, f"{block}.attn_kv_a_norm", c), frame.split(pe, 1, self.turning)
        if weights.has(f"{block}.attn_k_norm.weight"):
            pe = self.norm(weights, f"{block}.attn_k_norm", pe)
        return c, self.turned(weights, frame, block, pe, name=f"{block}.k_rope")

    def turned(self, weights: Weights, frame: Frame, block: str, x: Value, *, name: str) -> Value:
        """Rotate the last ``rotated_columns`` of ``x`` f32[B, T, heads, n]."""
        if self.rope is None:
            return x
        factors = divisors(weights, frame, self.rope, self.original_context, block)
        return self.rope.rotate(x, frame.pos, factors, name=name, offset=x.shape[-1] - self.turning)

    def absorbed(self, weights: Weights, frame: Frame, layer: int, q: Value, c: Value, pe: Value | None) -> Value:
        """Attend to the latent vectors themselves, f32[B, T, heads, value size].

        There is one key head, and its latent columns are the value.
        """
        block = f"blk.{layer}"
        q, turning = self.looking(weights, frame, block, q)
        q = q if turning is None else ops.concat(q, turning, axis=-1)
        k = frame.split(c, 1, self.rank)
        k = k if pe is None else ops.concat(k, pe, axis=-1)
        if self.sight.causal:
            k = frame.cached(f"cache_k.{layer}", k, sight=self.sight)
        v = k if pe is None else ops.slice_(k, axis=-1, start=0, stop=self.rank)
        y = self.attend(weights, frame, block, q, k, v)
        return self.by_head(weights, frame, f"{block}.attn_v_b", frame.split(y, self.heads, self.rank), self.value_size)

    def looking(self, weights: Weights, frame: Frame, block: str, q: Value) -> tuple[Value, Value | None]:
        """Return the queries as latent vectors f32[B, T, heads, rank], and their rotated columns."""
        q = frame.split(q, self.heads, self.plain + self.turning)
        if not self.turning:
            return self.by_head(weights, frame, f"{block}.attn_k_b", q, self.rank), None
        plain, turning = parts(q, self.plain, self.turning)
        turning = self.turned(weights, frame, block, turning, name=f"{block}.q_rope")
        return self.by_head(weights, frame, f"{block}.attn_k_b", plain, self.rank), turning

    def by_head(self, weights: Weights, frame: Frame, name: str, x: Value, features: int) -> Value:
        """Return ``x`` f32[B, T, heads, n] times one matrix per head: f32[B, T, heads, features]."""
        rows, size = frame.step.rows, x.shape[-1]
        x = ops.permute(ops.reshape(x, shape=(rows, self.heads, size)), axes=(1, 0, 2))
        # A single head has a matrix without the head axis.
        shape = (self.heads, features, size)[self.heads == 1 :]
        matrix = weights(f"{name}.weight", shape)
        matrix = ops.reshape(matrix, shape=(1, *shape)) if self.heads == 1 else matrix
        y = ops.mul_mat(matrix, x, name=name)
        return frame.split(ops.permute(y, axes=(1, 0, 2)), self.heads, features)

    def expanded(self, weights: Weights, frame: Frame, layer: int, q: Value, c: Value, pe: Value | None) -> Value:
        """Attend to keys and values of all heads, which are computed from the latent vectors and cached.

        The result is f32[B, T, heads, value size].
        """
        block = f"blk.{layer}"
        q = frame.split(q, self.heads, self.plain + self.turning)
        q = self.turned(weights, frame, block, q, name=f"{block}.q_rope")
        both = product(weights, f"{block}.attn_kv_b", c, self.heads * (self.plain + self.value_size))
        k, v = parts(frame.split(both, self.heads, self.plain + self.value_size), self.plain, self.value_size)
        if pe is not None:
            k = ops.concat(k, ops.repeat(pe, shape=(*pe.shape[:2], self.heads, self.turning)), axis=-1)
        return self.attend(weights, frame, block, q, *frame.both_cached(layer, k, v, self.sight))

    def attend(self, weights: Weights, frame: Frame, block: str, q: Value, k: Value, v: Value) -> Value:
        q = frame.warmed(q, self.temperature)
        sinks = weights.optional(f"{block}.attn_sinks.weight", (self.heads,))
        return ops.attention(q, k, v, frame.mask(self.sight), sinks, scale=self.scale, name=f"{block}.attn")

    def answered(self, weights: Weights, frame: Frame, block: str, x: Value, y: Value) -> Value:
        """Return the output projection of the heads, f32[B*T, E], after a gate from ``x`` if the file has one."""
        y = opened(weights, frame, block, x, y)
        return linear(weights, f"{block}.attn_output", frame.rows(y), x.shape[-1])


def _magnified(keys: ArchitectureKeys, family: Family, rope: Rope | None) -> float:
    """Return YaRN's factor of the scores: the square of its attention factor."""
    if rope is None or rope.freq_scale == 1.0:
        return 1.0 if rope is None else rope.attn_factor**2
    stretch = math.log(1.0 / rope.freq_scale)
    multiplier = (keys.positive_or_none("rope.scaling.yarn_log_multiplier") or 0.0) * family.log_multiplier
    return (rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + 0.1 * multiplier * stretch)) ** 2
