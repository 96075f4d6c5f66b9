"""Read hyperparameters, layer by layer, from the traits of a family, the metadata and the tensors of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Protocol

from ..errors import ModelError
from ..gguf.hyperparameter_keys import ArchitectureKeys
from .family import Family, Windows
from .frame import Sight, Warmth
from .hyper import Hyper, Layer, Mixer, StreamTraits
from .layers.attention import Attention, Passing
from .layers.blocks import GATE_CUTOFF, Norm, Unit
from .layers.compressed import Blocks, Compressed
from .layers.delta import DeltaNet, KimiDelta
from .layers.latent import Latent
from .layers.lightning import Lightning, ShortConvolution
from .layers.mamba import Mamba, Mamba2, Plamo2
from .layers.moe import Experts
from .layers.ngrams import Ngrams
from .layers.rope import Rope, original_context, style
from .layers.rwkv import Rwkv6, Rwkv7
from .picture_tokens import find_picture_tokens


class Recurrent(Protocol):
    """A class of mixers that a family has in some layers."""

    @classmethod
    def from_keys(cls, keys: ArchitectureKeys, family: Family, layer: int) -> Mixer: ...


RECURRENT: Mapping[str, type[Recurrent]] = MappingProxyType(
    {
        "convolution": ShortConvolution,
        "delta": DeltaNet,
        "kimi": KimiDelta,
        "lightning": Lightning,
        "mamba": Mamba,
        "mamba2": Mamba2,
        "plamo2": Plamo2,
        "rwkv6": Rwkv6,
        "rwkv7": Rwkv7,
    }
)


def read_hyper(keys: ArchitectureKeys, family: Family) -> Hyper:
    """Return the hyperparameters from ``keys``; raise `ModelError` if a value is missing or invalid."""
    if family.causal and family.attends and not keys.flag("attention.causal", True):
        if family.mixer == "compressed":
            raise keys.error("attention.causal", "is false; blocks of tokens need causal attention")
        family = replace(family, runs="at once")
    family = family.with_post_norms() if family.swin_norm and keys.flag("swin_norm", False) else family
    count, width = layers_run(keys), keys.count("embedding_length")
    reader = Reader(keys, family, count, width)
    repeats = keys.count_or_default(family.repeats, 1) if family.repeats else 1
    span, cycles, source = reader.span(), keys.count_or_default("hrm.l_cycles", 1), {}
    if repeats > 1:
        source = {i: i % count for i in range(count * repeats)}
    if family.residuals == "cycles":
        need = span * (cycles + 1) * keys.count("hrm.h_cycles", count // (span * (cycles + 1)))
        if count != need:
            raise keys.error("hrm.h_cycles", f"and the other cycles need {need} blocks; block_count is {count}")
        source = {i: i % span + span * ((i // span) % (cycles + 1) == cycles) for i in range(count)}
    blocks = tuple(reader.layer(source.get(i, i), i) for i in range(count * repeats))
    return Hyper(
        family=family,
        context_length=keys.count("context_length"),
        vocabulary_size=keys.vocabulary_rows(),
        width=width,
        norm=reader.norm,
        blocks=blocks,
        blocks_of=blocks_of_tokens(blocks),
        ngrams=Ngrams.from_keys(keys, count),
        windows=rolling(dict(enumerate(blocks))),
        streams=reader.streams(),
        attended=math.prod(keys.count(f"attention.indexer.{name}") for name in family.sparse.split())
        if family.sparse
        else 0,
        span=span,
        cycles=cycles,
        stored=count,
        source=MappingProxyType(source),
        embedding=reader.factor("embedding_scale", family.embedding),
        residual=reader.factor("residual_scale", family.residual),
        logits=reader.logits(),
        hidden_tokens=find_picture_tokens(keys) if family.picture_tokens else (),
        softcap=0.0 if family.softcap is None else keys.positive_or_none("final_logit_softcapping") or family.softcap,
    )


def rolling(blocks: Mapping[int, Layer]) -> dict[int, int]:
    """Return for each block with a cache the number of tokens after which a cell is never read again."""
    cached = Attention | Latent | Compressed
    return {i: m.sight.rolling for i, block in blocks.items() for m in block.mixers if isinstance(m, cached)}


def blocks_of_tokens(blocks: Iterable[Layer]) -> tuple[Blocks, ...]:
    ratios = {m.blocks.ratio for block in blocks for m in block.mixers if isinstance(m, Compressed) and m.blocks}
    return tuple(map(Blocks, sorted(ratios)))


def can_look_ahead(family: Family) -> bool:
    """Return whether hocket runs the MTP blocks of a family: attention, and a residual stream of a known kind."""
    plain = family.residuals in ("", "streams", "gated streams") and not family.repeats
    return family.causal and plain and family.attends


def read_ahead(keys: ArchitectureKeys, hyper: Hyper) -> Hyper:
    """Return ``hyper`` with the MTP blocks; raise `ModelError` if the file has none that hocket runs."""
    tensors, first = keys.gguf.tensors, hyper.stored
    numbers = list(takewhile(lambda i: f"blk.{i}.nextn.eh_proj.weight" in tensors, range(first, keys.block_count())))
    if not numbers:
        raise no_guesses(keys, "has no block that guesses further tokens (MTP)")
    if not can_look_ahead(hyper.family):
        raise no_guesses(keys, f"hocket does not run the blocks of {keys.architecture} that guess further tokens (MTP)")
    family = replace(hyper.family, recurrent="", rotated="all")
    if family.mixer == "single":
        family = replace(family, mixer="attention", ffn_norm="post_attention_norm")
    reader = Reader(keys, family, numbers[-1] + 1, hyper.width)
    blocks = {i: reader.layer(i, i) for i in numbers}
    if any(mixer.taps for block in blocks.values() for mixer in block.mixers):
        raise no_guesses(keys, "a block that guesses further tokens (MTP) keeps what cannot be taken back")
    streams = hyper.streams.count if any(name.startswith(f"blk.{first}.hc_") for name in tensors) else 1
    ahead = replace(
        hyper,
        family=family,
        blocks=tuple(blocks.values()),
        blocks_of=blocks_of_tokens(blocks.values()),
        ngrams=None,
        windows=rolling(blocks),
        handed=hyper.width * streams,
    )
    return replace(hyper, ahead=ahead)


def no_guesses(keys: ArchitectureKeys, why: str) -> ModelError:
    return ModelError(f"{keys.gguf.path}: {why}; name a draft model with draft=FILE, or leave out draft_max=N")


def layers_run(keys: ArchitectureKeys) -> int:
    """Return the number of blocks without the MTP blocks at the end, which the block count includes."""
    blocks, extra = keys.block_count(), keys.count("nextn_predict_layers", 0, least=0)
    if extra >= blocks:
        raise keys.error("nextn_predict_layers", f"is {extra}; need fewer than block_count {blocks}")
    return blocks - extra


class Reader:
    """Reads the first ``count`` layers of one model."""

    def __init__(self, keys: ArchitectureKeys, family: Family, count: int, width: int) -> None:
        self.keys, self.family, self.count, self.width = keys, family, count, width
        self.own = layers_run(keys)
        self.heads = keys.per_block_counts("attention.head_count", count, None if family.attends else 0)
        kv_key = "attention.head_count_kv"
        self.kv_heads = keys.per_block_counts(kv_key, count) if keys.has(kv_key) else self.heads
        centred = family.norm == "layer" or (
            family.norm == "either" and not keys.positive_or_none("attention.layer_norm_rms_epsilon")
        )
        # Nemotron-H names the eps of its RMS norms like the eps of a layer norm.
        is_centred = centred or not keys.has("attention.layer_norm_rms_epsilon")
        eps = "layer_norm_epsilon" if is_centred else "layer_norm_rms_epsilon"
        self.norm = Norm(keys.eps(f"attention.{eps}"), centred, family.bare)
        self.windows = self._windows()
        self.is_recurrent = self._recurrent()
        self._ropes: dict[bool, Rope] = {}

    @property
    def unit(self) -> Unit:
        linear = self.keys.positive_or_none("activation.situ_linear_beta") or 0.0
        beta = self.keys.positive("activation.situ_beta", 1.0) if self.family.unit == "situ" else 1.0
        kind = self.family.unit
        if kind == "gelu erf":
            kind = {"gelu": kind, "silu": "silu"}[self.keys.choice("hidden_activation", "gelu", ("gelu", "silu"))]
        return Unit(kind, first="gate first" in self.family.mixture, beta=beta, linear=linear)

    def make_unit(self, i: int) -> Unit:
        """Return the activation of the FFN of block i."""
        xielu = self.keys.xielu(self.count)[i] if self.family.unit == "xielu" else ()
        limit = self.keys.per_block_limits("swiglu_clamp_shexp", self.count)[i]
        return replace(self.unit, limit=limit, gate_cutoff=GATE_CUTOFF * (i < self.family.sparse_gates), xielu=xielu)

    def span(self) -> int:
        if self.family.residuals == "shifting":
            return self.keys.count_or_default("rescale_every_n_layers", self.count + 1)
        keys = {"banked": "attn_res.block_size", "cycles": "hrm.layers_per_stack"}
        return self.keys.count(keys[self.family.residuals]) if self.family.residuals in keys else 1

    def streams(self) -> StreamTraits:
        keys = self.keys
        return StreamTraits(
            keys.count_or_default("hyper_connection.count", 1),
            keys.positive_or_none("hyper_connection.epsilon") or 0.0,
            keys.count_or_default("hyper_connection.sinkhorn_iterations", 1),
            keys.positive_or_none("hyper_connection.magnitude") or 1.0,
        )

    def factor(self, key: str, default: float | str | None) -> float:
        if default is None:
            return 1.0
        if isinstance(default, str):
            default = {"width": math.sqrt(self.width), "layers": 1.4 / math.sqrt(self.count), "key": 1.0}[default]
        return self.keys.positive_or_none(key) or default

    def logits(self) -> float:
        if not self.family.logits:
            return 1.0
        default = 256.0 / self.width if self.family.logit_default == "width" else self.family.logit_default or 1.0
        scale = self.keys.positive_or_none("logit_scale") or default
        assert isinstance(scale, float)
        return scale if self.family.logits == "times" else 1.0 / scale

    def _windows(self) -> tuple[int, ...]:
        """Return the attention window of each layer in tokens, its own token included; 0 for full attention."""
        traits, keys = self.family.windows, self.keys
        if traits is None or (traits.least_layers and self.count != traits.least_layers):
            return (0,) * self.count
        given = keys.count("attention.sliding_window", traits.default, least=0)
        window = (given and traits.size) or given
        return tuple(window if local else 0 for local in self._pattern(traits))

    def _pattern(self, traits: Windows) -> tuple[bool, ...]:
        name, keys = "attention.sliding_window_pattern", self.keys
        if keys.is_list(name):
            return keys.per_block_flags(name, self.count)
        period = keys.count(name, traits.period, least=0 if traits.period == 0 else 1)
        whole = 0 if traits.whole_first else period - 1
        return tuple(i < self.own and (not period or i % period != whole) for i in range(self.count))

    def layer(self, stored: int, i: int) -> Layer:
        """Return the hyperparameters of block i, which has the matrices of the block ``stored``."""
        block, tensors = f"blk.{stored}", self.keys.gguf.tensors
        dense = any(f"{block}.ffn_{name}.weight" in tensors for name in ("down", "up"))
        experts = None
        has_experts = any(f"{block}.ffn_{name}.weight" in tensors for name in ("gate_inp", "down_exps"))
        if has_experts and self.routes(stored):
            experts = Experts.from_keys(self.keys, self.family, stored, self.count, self.unit, self.norm)
            dense = bool(self.family.beside) and dense
        if self.family.mixer == "single":  # a block is a mixer or an FFN
            mixers = () if dense or experts else self.mixers(stored)
        else:
            mixers = self.mixers(stored)
        parallel = {
            "yes": True,
            "key": self.keys.flag("use_parallel_residual", False),
            "absent": f"{block}.{self.family.ffn_norm}.weight" not in tensors,
        }.get(self.family.parallel, False)
        return Layer(
            mixers,
            experts,
            dense,
            dense or has_experts,
            parallel,
            f"{block}.{self.family.ffn_norm}.weight" in tensors and self.family.mixer != "single",
            self.make_unit(stored),
            self.unit.kind == "half gelu" or (self.unit.kind == "gelu" and f"{block}.ffn_gate.weight" not in tensors),
        )

    def routes(self, i: int) -> bool:
        """Return whether a block with experts uses them; otherwise llama.cpp applies its activation only."""
        step = self.keys.count_or_default("interleave_moe_layer_step", 1) if self.family.interleaved else 1
        return self.family.mixture != "unread" and (i + 1) % step == 0

    def mixers(self, i: int) -> tuple[Mixer, ...]:
        if self.family.recurrent_where == "both":
            return (self.attention(i), self.recurrent(i))
        if self.is_recurrent[i]:
            return (self.recurrent(i),)
        if not self.heads[i] and self.family.headless:
            return ()
        if not self.heads[i]:
            raise self.keys.error("attention.head_count", "is 0; need at least 1")
        if not self.kv_heads[i] and self.family.headless:
            return (Passing(),)
        if not self.kv_heads[i]:
            raise self.keys.error("attention.head_count_kv", "is 0; need at least 1")
        return (self.attention(i),)

    def _recurrent(self) -> tuple[bool, ...]:
        """Return for each layer whether its mixer is recurrent."""
        family, keys = self.family, self.keys
        if not family.recurrent:
            return (False,) * self.count
        if family.recurrent_where == "all":
            return (True,) * self.count
        if family.recurrent_where == "kv":
            return tuple(n == 0 for n in self.kv_heads)
        if keys.is_list("attention.recurrent_layers"):
            return keys.per_block_flags("attention.recurrent_layers", self.count)
        interval = keys.count("full_attention_interval", family.interval)
        return tuple((i + 1) % interval != 0 for i in range(self.count))

    def recurrent(self, i: int) -> Mixer:
        return RECURRENT[self.family.recurrent].from_keys(self.keys, self.family, i)

    def latent(self, i: int) -> Latent:
        keys, family, window = self.keys, self.family, self.windows[i]
        rope = self.rope(i, keys.count_or_default("rope.dimension_count", 1)) if family.rope != "none" else None
        options = self.make_attention_window(window), self.temperature(rope)
        return Latent.from_keys(keys, family, self.norm, self.heads[i], rope, *options)

    def compressed(self, i: int) -> Compressed:
        keys = self.keys
        rope, window = Rope.from_keys(keys, self.family.rope, keys.count("attention.key_length")), self.windows[i]
        return Compressed.from_keys(keys, self.norm, self.heads[i], rope, window, i)

    def make_attention_window(self, window: int, chunked: bool = False, distances: bool = False) -> Sight:
        return Sight(window, chunked, distances, self.family.causal, self.family.runs == "encoder")

    def attention(self, i: int) -> Attention | Latent | Compressed:
        if self.family.mixer == "latent":
            return self.latent(i)
        if self.family.mixer == "compressed":
            return self.compressed(i)
        keys, family, heads, window = self.keys, self.family, self.heads[i], self.windows[i]
        key_size, value_size = self.head_sizes(i)
        if heads % self.kv_heads[i]:
            raise keys.error("attention.head_count_kv", f"is {self.kv_heads[i]}; need a divisor of head_count {heads}")
        rope, cap = self.rope(i, key_size), family.score_cap
        chunked = bool(window) and family.windows is not None and family.windows.chunked
        return Attention(
            family=family,
            norm=self.norm,
            heads=heads,
            kv_heads=self.kv_heads[i],
            key_size=key_size,
            value_size=value_size,
            scale=self.scale(heads, key_size, rope),
            sight=self.make_attention_window(window, chunked, bool(self.alibi)),
            rope=rope,
            factors=not (window and family.whole_factors),
            original_context=original_context(keys),
            head_norm=self.norm if family.head_norm_eps is None else Norm(family.head_norm_eps, centred=True),
            qk_norm="maybe" if self.is_maverick else family.qk_norm,
            cap=0.0 if cap is None else keys.positive_or_none("attn_logit_softcapping") or cap,
            clamp=keys.positive_or_none("attention.clamp_kqv") or 0.0,
            alibi=self.alibi,
            value_scale=keys.positive_or_none("attention.value_scale") or 1.0,
            source=self.shared(i),
            temperature=self.temperature(rope),
        )

    @property
    def is_maverick(self) -> bool:
        """Whether this is Llama 4 with 128 experts, which has no norms of q and k; no metadata key says so."""
        return self.family.qk_norm == "bare rotated" and self.keys.count("expert_count", 0, least=0) == 128

    def shared(self, i: int) -> int | None:
        """Return the last layer with a cache of the same kind as layer i; `None` if layer i has its own cache."""
        own = self.family.cache_layers or self.count - self.keys.count("attention.shared_kv_layers", 0, least=0)
        if i < own:
            return None
        kind = [j for j in range(own) if bool(self.windows[j]) == bool(self.windows[i])]
        if not kind:
            raise self.keys.error("attention.shared_kv_layers", f"leaves no layer whose cache layer {i} could read")
        return kind[-1]

    @property
    def alibi(self) -> float:
        if self.family.rotated == "of 32":
            return self.family.alibi if self.count == 40 else 0.0
        return self.keys.positive_or_none("attention.max_alibi_bias") or self.family.alibi

    def head_sizes(self, i: int) -> tuple[int, int]:
        """Return the head sizes of keys and values, by default ``width / heads``."""
        keys, local = self.keys, "_swa" if self.windows[i] else ""
        most = max(self.heads)
        sizes = []
        for kind in ("key", "value"):
            default = keys.count_or_default(f"attention.{kind}_length", self.width // most)
            sizes.append(keys.count_or_default(f"attention.{kind}_length{local}", default))
        if not keys.has("attention.key_length") and self.width % most:
            raise keys.error("attention.head_count", f"is {most}; need a divisor of embedding_length {self.width}")
        return sizes[0], sizes[1]

    def scale(self, heads: int, key_size: int, rope: Rope | None) -> float:
        if given := self.keys.positive_or_none("attention.scale"):
            return given
        if self.family.scale == "output":
            return self.keys.positive_or_none("attention.output_scale") or 0.08838834764831845
        if self.count == self.family.scale_of:
            key_size = self.width // heads
        rotated = rope.n_dims if rope else key_size
        return {
            "head": 1.0 / math.sqrt(key_size),
            "rotated": 1.0 / math.sqrt(rotated),
            "inverse": 1.0 / key_size,
            "one": 1.0,
        }[self.family.scale]

    def temperature(self, rope: Rope | None) -> Warmth:
        family, keys = self.family, self.keys
        if family.temperature is None or (family.rotated.startswith("every") and rope is not None):
            return None
        floor, factor, offset = family.temperature
        if floor < 0:
            floor = keys.count_or_default("attention.temperature_length", 0)
        factor = factor or keys.positive_or_none("attention.temperature_scale") or 0.0
        return (floor or original_context(keys), factor, offset) if factor else None

    def rope(self, i: int, key_size: int) -> Rope | None:
        if self.family.rope == "none" or not self.rotates(i):
            return None
        local = bool(self.windows[i])
        if local not in self._ropes:
            self._ropes[local] = self._rope(local, key_size)
        return self._ropes[local]

    def _rope(self, local: bool, key_size: int) -> Rope:
        family, keys = self.family, self.keys
        dimensions = (
            "rope.dimension_count_swa" if local and keys.has("rope.dimension_count_swa") else "rope.dimension_count"
        )
        rope = Rope.from_keys(keys, style(keys, family.rope), key_size, dimensions, family.log_multiplier)
        if family.alpha and (alpha := keys.positive_or_none("rope.scaling.alpha")):
            rope = replace(rope, base=rope.base * alpha ** (key_size / (key_size - 2)))
        if not local:
            return rope.with_half_columns(keys) if family.half_rotation else rope
        assert family.windows is not None
        base = Rope.base_from(keys, "rope.freq_base_swa", family.windows.base or rope.base)
        return replace(rope, base=base) if family.windows.scaled else Rope(rope.n_dims, rope.mode, base)

    def rotates(self, i: int) -> bool:
        """Return whether layer i has RoPE."""
        keys, window = self.keys, self.windows[i]
        lead = keys.count("leading_dense_block_count", 0, least=0)
        given = {"finetuned": "rope.scaling.finetuned", "pattern": "attention.rope_pattern"}.get(self.family.rotated)
        if given:
            return not keys.has(given) or keys.per_block_flags(given, self.count)[i]
        return {
            "all": True,
            "of 32": self.count == 32,
            "window": bool(window),
            "window|plain": bool(window) or not any(self.windows),
            "window|dense": bool(window) or i < lead,
            "every 4": (i + 1) % 4 != 0,
            "every 4 first": not any(self.windows) or i % 4 != 0,
        }[self.family.rotated]
