"""Reads the hyperparameters of a model, layer by layer, from family traits, metadata and tensors of a file."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType

from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.hyperparameter_keys import ArchitectureMetadata
from .hyperparameters import (
    HyperConnectionTraits,
    Hyperparameters,
    Layer,
    TokenMixer,
    collect_token_blocks,
    compute_window_of_each_cached_block,
)
from .inputs.attention_window import AttentionWindow, TemperatureScaling
from .inputs.family import AttentionWindowPattern, FamilyTraits
from .layers.attention import Attention, MatrixInsteadOfAttention
from .layers.compressed_attention import CompressedAttention
from .layers.feed_forward import GATE_CUTOFF, Activation, Norm
from .layers.latent_attention import LatentAttention
from .layers.moe import ExpertLayerHyperparameters
from .layers.ngram_embedding import NgramEmbedding
from .layers.rope import Rope, choose_normal_or_neox_rope, read_original_context_length
from .picture_tokens import find_picture_token_ranges
from .recurrent_mixers import RECURRENT_MIXERS


def read_hyperparameters(keys: ArchitectureMetadata, family: FamilyTraits) -> Hyperparameters:
    """Read the hyperparameters of a model. Raise `ModelError` if a value is missing or invalid."""
    if family.is_causal and family.uses_attention and not keys.read_flag("attention.causal", True):
        if family.mixer == "compressed":
            raise keys.make_key_error("attention.causal", "is false; blocks of tokens need causal attention")
        family = replace(family, run_mode="at once")
    family = family.with_post_norms() if family.swin_norm and keys.read_flag("swin_norm", False) else family
    count, width = count_layers_without_mtp(keys), keys.read_count("embedding_length")
    reader = HyperparameterReader(keys, family, count, width)
    repeats = keys.read_count_or_default(family.repeat_key, 1) if family.repeat_key else 1
    span, cycles, source = reader.read_block_span(), keys.read_count_or_default("hrm.l_cycles", 1), {}
    if repeats > 1:
        source = {i: i % count for i in range(count * repeats)}
    if family.residuals == "cycles":
        need = span * (cycles + 1) * keys.read_count("hrm.h_cycles", count // (span * (cycles + 1)))
        if count != need:
            raise keys.make_key_error(
                "hrm.h_cycles", f"and the other cycles need {format_count(need, 'block')}; block_count is {count}"
            )
        source = {i: i % span + span * ((i // span) % (cycles + 1) == cycles) for i in range(count)}
    blocks = tuple(reader.read_layer(source.get(i, i), i) for i in range(count * repeats))
    return Hyperparameters(
        family=family,
        context_length=keys.read_count("context_length"),
        vocabulary_size=keys.count_token_embedding_rows(),
        width=width,
        norm=reader.norm,
        blocks=blocks,
        blocks_of=collect_token_blocks(blocks),
        ngrams=NgramEmbedding.from_keys(keys, count),
        windows=compute_window_of_each_cached_block(dict(enumerate(blocks))),
        streams=HyperConnectionTraits.from_keys(keys),
        selected_tokens=math.prod(keys.read_count(f"attention.indexer.{name}") for name in family.sparse_keys.split())
        if family.sparse_keys
        else 0,
        span=span,
        cycles=cycles,
        stored_blocks=count,
        source=MappingProxyType(source),
        embedding=reader.read_scale_factor("embedding_scale", family.embedding),
        residual=reader.read_scale_factor("residual_scale", family.residual),
        logits=reader.read_logit_factor(),
        hidden_tokens=find_picture_token_ranges(keys) if family.picture_tokens else (),
        softcap=0.0
        if family.softcap is None
        else keys.read_positive_zero_as_none("final_logit_softcapping") or family.softcap,
    )


def can_run_mtp(family: FamilyTraits) -> bool:
    """Return whether hocket can run the MTP blocks of a family: they need attention and a known residual stream."""
    plain = family.residuals in ("", "streams", "gated streams") and not family.repeat_key
    return family.is_causal and plain and family.uses_attention


def add_mtp_hyperparameters(keys: ArchitectureMetadata, hyper: Hyperparameters) -> Hyperparameters:
    """Add the hyperparameters of the MTP blocks. Raise `ModelError` if the file has none that hocket can run."""
    tensors, first = keys.gguf.tensors, hyper.stored_blocks
    numbers = list(
        takewhile(
            lambda i: f"blk.{i}.nextn.eh_proj.weight" in tensors,
            range(first, keys.read_block_count_limited_by_tensor_count()),
        )
    )
    if not numbers:
        raise mtp_error(keys, "has no block that guesses further tokens (MTP)")
    if not can_run_mtp(hyper.family):
        raise mtp_error(keys, f"hocket does not run the blocks of {keys.architecture} that guess further tokens (MTP)")
    family = replace(hyper.family, recurrent="", rotated_layers="all")
    if family.mixer == "single":
        family = replace(family, mixer="attention", ffn_norm="post_attention_norm")
    reader = HyperparameterReader(keys, family, numbers[-1] + 1, hyper.width)
    blocks = {i: reader.read_layer(i, i) for i in numbers}
    if any(mixer.taps for block in blocks.values() for mixer in block.mixers):
        raise mtp_error(keys, "a block that guesses further tokens (MTP) keeps what cannot be taken back")
    streams = hyper.streams.count if any(name.startswith(f"blk.{first}.hc_") for name in tensors) else 1
    ahead = replace(
        hyper,
        family=family,
        blocks=tuple(blocks.values()),
        blocks_of=collect_token_blocks(blocks.values()),
        ngrams=None,
        windows=compute_window_of_each_cached_block(blocks),
        draft_columns=hyper.width * streams,
    )
    return replace(hyper, mtp_blocks=ahead)


def mtp_error(keys: ArchitectureMetadata, why: str) -> ModelError:
    return ModelError(f"{keys.gguf.path}: {why}; name a draft model with draft=FILE, or leave out draft_max=N")


def count_layers_without_mtp(keys: ArchitectureMetadata) -> int:
    """Return the number of layers without the MTP blocks, which ``block_count`` includes at the end."""
    blocks = keys.read_block_count_limited_by_tensor_count()
    extra = keys.read_count("nextn_predict_layers", 0, minimum=0)
    if extra >= blocks:
        raise keys.make_key_error("nextn_predict_layers", f"is {extra}; need fewer than block_count {blocks}")
    return blocks - extra


class HyperparameterReader:
    """Reads the hyperparameters of the first ``count`` layers of a model, one layer at a time."""

    def __init__(self, keys: ArchitectureMetadata, family: FamilyTraits, count: int, width: int) -> None:
        self.keys, self.family, self.count, self.width = keys, family, count, width
        self.run_layer_count = count_layers_without_mtp(keys)
        self.heads = keys.read_per_block_counts("attention.head_count", count, None if family.uses_attention else 0)
        kv_key = "attention.head_count_kv"
        self.kv_heads = keys.read_per_block_counts(kv_key, count) if keys.has(kv_key) else self.heads
        centred = family.norm == "layer" or (
            family.norm == "either" and not keys.read_positive_zero_as_none("attention.layer_norm_rms_epsilon")
        )
        # Nemotron-H names the eps of its RMS norms like the eps of a layer norm.
        is_centred = centred or not keys.has("attention.layer_norm_rms_epsilon")
        eps = "layer_norm_epsilon" if is_centred else "layer_norm_rms_epsilon"
        self.norm = Norm(keys.read_required_epsilon(f"attention.{eps}"), centred, family.norms_without_weight)
        self.windows = self._read_window_sizes()
        self.is_recurrent = self._read_recurrent_layers()
        self._ropes: dict[bool, Rope] = {}

    @property
    def unit(self) -> Activation:
        linear = self.keys.read_positive_zero_as_none("activation.situ_linear_beta") or 0.0
        beta = self.keys.read_positive_float32("activation.situ_beta", 1.0) if self.family.activation == "situ" else 1.0
        kind = self.family.activation
        if kind == "gelu erf":
            kind = {"gelu": kind, "silu": "silu"}[self.keys.read_choice("hidden_activation", "gelu", ("gelu", "silu"))]
        return Activation(kind, first="gate first" in self.family.special_routing, beta=beta, linear=linear)

    def make_layer_activation(self, i: int) -> Activation:
        """Return the activation of the FFN of block i."""
        xielu = self.keys.read_xielu_parameters(self.count)[i] if self.family.activation == "xielu" else ()
        limit = self.keys.read_per_block_limits_or_zero("swiglu_clamp_shexp", self.count)[i]
        return replace(self.unit, limit=limit, gate_cutoff=GATE_CUTOFF * (i < self.family.sparse_gates), xielu=xielu)

    def read_block_span(self) -> int:
        if self.family.residuals == "shifting":
            return self.keys.read_count_or_default("rescale_every_n_layers", self.count + 1)
        keys = {"banked": "attn_res.block_size", "cycles": "hrm.layers_per_stack"}
        return self.keys.read_count(keys[self.family.residuals]) if self.family.residuals in keys else 1

    def read_scale_factor(self, key: str, default: float | str | None) -> float:
        if default is None:
            return 1.0
        if isinstance(default, str):
            default = {"width": math.sqrt(self.width), "layers": 1.4 / math.sqrt(self.count), "key": 1.0}[default]
        return self.keys.read_positive_zero_as_none(key) or default

    def read_logit_factor(self) -> float:
        if not self.family.logits:
            return 1.0
        default = 256.0 / self.width if self.family.logit_default == "width" else self.family.logit_default or 1.0
        scale = self.keys.read_positive_zero_as_none("logit_scale") or default
        assert isinstance(scale, float)
        return scale if self.family.logits == "times" else 1.0 / scale

    def _read_window_sizes(self) -> tuple[int, ...]:
        """Read the attention window of each layer in tokens, its own token included; 0 for full attention."""
        traits, keys = self.family.windows, self.keys
        if traits is None and keys.is_list("attention.sliding_window_pattern"):  # as hocket converts folders
            traits = AttentionWindowPattern()
        if traits is None or (traits.required_layers and self.count != traits.required_layers):
            return (0,) * self.count
        declared_window = keys.read_count("attention.sliding_window", traits.default, minimum=0)
        window = (declared_window and traits.size) or declared_window
        return tuple(window if local else 0 for local in self._read_window_pattern(traits))

    def _read_window_pattern(self, traits: AttentionWindowPattern) -> tuple[bool, ...]:
        name, keys = "attention.sliding_window_pattern", self.keys
        if keys.is_list(name):
            return keys.read_per_block_flags(name, self.count)
        period = keys.read_count(name, traits.period, minimum=0 if traits.period == 0 else 1)
        whole = 0 if traits.is_global_first else period - 1
        return tuple(i < self.run_layer_count and (not period or i % period != whole) for i in range(self.count))

    def read_layer(self, weight_block: int, i: int) -> Layer:
        """Read the hyperparameters of block i.

        The file has the matrices of block i under the number ``weight_block``, which differs if blocks are run more
        than once.
        """
        block, tensors = f"blk.{weight_block}", self.keys.gguf.tensors
        dense = any(f"{block}.ffn_{name}.weight" in tensors for name in ("down", "up"))
        experts = None
        has_experts = any(f"{block}.ffn_{name}.weight" in tensors for name in ("gate_inp", "down_exps"))
        if has_experts and self.uses_experts(weight_block):
            experts = ExpertLayerHyperparameters.from_keys(
                self.keys, self.family, weight_block, self.count, self.unit, self.norm
            )
            dense = bool(self.family.parallel_dense_ffn) and dense
        if self.family.mixer == "single":  # a block is a mixer or an FFN
            mixers = () if dense or experts else self.make_mixers(weight_block)
        else:
            mixers = self.make_mixers(weight_block)
        parallel = {
            "yes": True,
            "key": self.keys.read_flag("use_parallel_residual", False),
            "absent": f"{block}.{self.family.ffn_norm}.weight" not in tensors,
        }.get(self.family.parallel, False)
        return Layer(
            mixers,
            experts,
            dense,
            dense or has_experts,
            parallel,
            f"{block}.{self.family.ffn_norm}.weight" in tensors and self.family.mixer != "single",
            self.make_layer_activation(weight_block),
            self.unit.kind == "half gelu" or (self.unit.kind == "gelu" and f"{block}.ffn_gate.weight" not in tensors),
        )

    def uses_experts(self, i: int) -> bool:
        """Return whether block i computes its FFN by experts.

        As in llama.cpp, the other blocks of a model with experts apply only the activation.
        """
        step = (
            self.keys.read_count_or_default("interleave_moe_layer_step", 1)
            if self.family.has_interleaved_experts
            else 1
        )
        return self.family.special_routing != "unread" and (i + 1) % step == 0

    def make_mixers(self, i: int) -> tuple[TokenMixer, ...]:
        if self.family.recurrent_where == "both":
            return (self.make_attention(i), self.make_recurrent_mixer(i))
        if self.is_recurrent[i]:
            return (self.make_recurrent_mixer(i),)
        if not self.heads[i] and self.family.allows_headless_layers:
            return ()
        if not self.heads[i]:
            raise self.keys.make_key_error("attention.head_count", "is 0; need at least 1")
        if not self.kv_heads[i] and self.family.allows_headless_layers:
            return (MatrixInsteadOfAttention(),)
        if not self.kv_heads[i]:
            raise self.keys.make_key_error("attention.head_count_kv", "is 0; need at least 1")
        return (self.make_attention(i),)

    def _read_recurrent_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether its mixer is recurrent, such as Mamba, instead of attention."""
        family, keys = self.family, self.keys
        if not family.recurrent:
            return (False,) * self.count
        if family.recurrent_where == "all":
            return (True,) * self.count
        if family.recurrent_where == "kv":
            return tuple(n == 0 for n in self.kv_heads)
        if keys.is_list("attention.recurrent_layers"):
            return keys.read_per_block_flags("attention.recurrent_layers", self.count)
        interval = keys.read_count("full_attention_interval", family.interval)
        return tuple((i + 1) % interval != 0 for i in range(self.count))

    def make_recurrent_mixer(self, i: int) -> TokenMixer:
        return RECURRENT_MIXERS[self.family.recurrent].from_keys(self.keys, self.family, i)

    def make_latent_attention(self, i: int) -> LatentAttention:
        keys, family, window = self.keys, self.family, self.windows[i]
        rope = (
            self.layer_rope(i, keys.read_count_or_default("rope.dimension_count", 1)) if family.rope != "none" else None
        )
        options = self.make_attention_window(window), self.read_temperature_scaling(rope)
        return LatentAttention.from_keys(keys, family, self.norm, self.heads[i], rope, *options)

    def make_compressed_attention(self, i: int) -> CompressedAttention:
        keys = self.keys
        rope, window = Rope.from_keys(keys, self.family.rope, keys.read_count("attention.key_length")), self.windows[i]
        return CompressedAttention.from_keys(keys, self.norm, self.heads[i], rope, window, i)

    def make_attention_window(self, window: int, chunked: bool = False, distances: bool = False) -> AttentionWindow:
        return AttentionWindow(window, chunked, distances, self.family.is_causal, self.family.run_mode == "encoder")

    def make_attention(self, i: int) -> Attention | LatentAttention | CompressedAttention:
        if self.family.mixer == "latent":
            return self.make_latent_attention(i)
        if self.family.mixer == "compressed":
            return self.make_compressed_attention(i)
        keys, family, heads, window = self.keys, self.family, self.heads[i], self.windows[i]
        key_size, value_size = self.read_head_sizes(i)
        if heads % self.kv_heads[i]:
            raise keys.make_key_error(
                "attention.head_count_kv", f"is {self.kv_heads[i]}; need a divisor of head_count {heads}"
            )
        rope, cap = self.layer_rope(i, key_size), family.score_cap
        chunked = bool(window) and family.windows is not None and family.windows.is_chunked
        return Attention(
            family=family,
            norm=self.norm,
            heads=heads,
            kv_heads=self.kv_heads[i],
            key_size=key_size,
            value_size=value_size,
            scale=self.compute_score_scale(heads, key_size, rope),
            attention_window=self.make_attention_window(window, chunked, bool(self.max_alibi_bias)),
            rope=rope,
            factors=not (window and family.factors_in_global_layers_only),
            original_context=read_original_context_length(keys),
            head_norm=self.norm if family.head_norm_eps is None else Norm(family.head_norm_eps, is_centred=True),
            qk_norm="maybe" if self.is_llama4_maverick else family.qk_norm,
            cap=0.0 if cap is None else keys.read_positive_zero_as_none("attn_logit_softcapping") or cap,
            clamp=keys.read_positive_zero_as_none("attention.clamp_kqv") or 0.0,
            alibi=self.max_alibi_bias,
            value_scale=keys.read_positive_zero_as_none("attention.value_scale") or 1.0,
            source=self.find_cache_source_layer(i),
            temperature=self.read_temperature_scaling(rope),
        )

    @property
    def is_llama4_maverick(self) -> bool:
        """Whether this is Llama 4 Maverick, which has no norms of q and k.

        No key of the file says so; the model is recognised by its 128 experts.
        """
        return self.family.qk_norm == "bare rotated" and self.keys.read_count("expert_count", 0, minimum=0) == 128

    def find_cache_source_layer(self, i: int) -> int | None:
        """Return the layer with the KV cache that layer i reads, or `None` if layer i has its own cache."""
        own = self.family.cache_layers or self.count - self.keys.read_count("attention.shared_kv_layers", 0, minimum=0)
        if i < own:
            return None
        kind = [j for j in range(own) if bool(self.windows[j]) == bool(self.windows[i])]
        if not kind:
            raise self.keys.make_key_error(
                "attention.shared_kv_layers", f"leaves no layer whose cache layer {i} could read"
            )
        return kind[-1]

    @property
    def max_alibi_bias(self) -> float:
        if self.family.rotated_layers == "of 32":
            return self.family.alibi if self.count == 40 else 0.0
        return self.keys.read_positive_zero_as_none("attention.max_alibi_bias") or self.family.alibi

    def read_head_sizes(self, i: int) -> tuple[int, int]:
        """Read the head sizes of keys and values in layer i, by default ``width / heads``."""
        keys, local = self.keys, "_swa" if self.windows[i] else ""
        max_heads = max(self.heads)
        sizes = []
        for kind in ("key", "value"):
            default = keys.read_count_or_default(f"attention.{kind}_length", self.width // max_heads)
            sizes.append(keys.read_count_or_default(f"attention.{kind}_length{local}", default))
        if not keys.has("attention.key_length") and self.width % max_heads:
            raise keys.make_key_error(
                "attention.head_count", f"is {max_heads}; need a divisor of embedding_length {self.width}"
            )
        return sizes[0], sizes[1]

    def compute_score_scale(self, heads: int, key_size: int, rope: Rope | None) -> float:
        if scale := self.keys.read_positive_zero_as_none("attention.scale"):
            return scale
        if self.family.scale == "output":
            return self.keys.read_positive_zero_as_none("attention.output_scale") or 0.08838834764831845
        if self.count == self.family.scale_of:
            key_size = self.width // heads
        rotated = rope.n_dims if rope else key_size
        return {
            "head": 1.0 / math.sqrt(key_size),
            "rotated": 1.0 / math.sqrt(rotated),
            "inverse": 1.0 / key_size,
            "one": 1.0,
        }[self.family.scale]

    def read_temperature_scaling(self, rope: Rope | None) -> TemperatureScaling:
        family, keys = self.family, self.keys
        if family.temperature is None or (family.rotated_layers.startswith("every") and rope is not None):
            return None
        floor, factor, offset = family.temperature
        if floor < 0:
            floor = keys.read_count_or_default("attention.temperature_length", 0)
        factor = factor or keys.read_positive_zero_as_none("attention.temperature_scale") or 0.0
        return (floor or read_original_context_length(keys), factor, offset) if factor else None

    def layer_rope(self, i: int, key_size: int) -> Rope | None:
        if self.family.rope == "none" or not self.uses_rope(i):
            return None
        local = bool(self.windows[i])
        if local not in self._ropes:
            self._ropes[local] = self._read_rope(local, key_size)
        return self._ropes[local]

    def _read_rope(self, local: bool, key_size: int) -> Rope:
        family, keys = self.family, self.keys
        dimensions = (
            "rope.dimension_count_swa" if local and keys.has("rope.dimension_count_swa") else "rope.dimension_count"
        )
        rope = Rope.from_keys(
            keys, choose_normal_or_neox_rope(keys, family.rope), key_size, dimensions, family.log_multiplier
        )
        if family.alpha and (alpha := keys.read_positive_zero_as_none("rope.scaling.alpha")):
            rope = replace(rope, base=rope.base * alpha ** (key_size / (key_size - 2)))
        if not local:
            return rope.with_half_as_many_rotated_columns(keys) if family.half_rotation else rope
        windows = family.windows or AttentionWindowPattern()
        base = Rope.read_frequency_base_above_1(keys, "rope.freq_base_swa", windows.base or rope.base)
        return replace(rope, base=base) if windows.uses_rope_scaling else Rope(rope.n_dims, rope.mode, base)

    def uses_rope(self, i: int) -> bool:
        """Return whether layer i has RoPE."""
        keys, window = self.keys, self.windows[i]
        lead = keys.read_count("leading_dense_block_count", 0, minimum=0)
        key_name = {"finetuned": "rope.scaling.finetuned", "pattern": "attention.rope_pattern"}.get(
            self.family.rotated_layers
        )
        if key_name:
            return not keys.has(key_name) or keys.read_per_block_flags(key_name, self.count)[i]
        return {
            "all": True,
            "of 32": self.count == 32,
            "window": bool(window),
            "window|plain": bool(window) or not any(self.windows),
            "window|dense": bool(window) or i < lead,
            "every 4": (i + 1) % 4 != 0,
            "every 4 first": not any(self.windows) or i % 4 != 0,
        }[self.family.rotated_layers]
