"""The hyperparameters of a folder as metadata pairs of GGUF, as llama.cpp's converter writes them.

GGUF files of llama.cpp have no keys for some properties of transformers. Then hocket writes a key that llama.cpp
ignores: a list ``attention.sliding_window_pattern`` in further architectures, ``norm_topk_prob``,
``attention.scale``, ``swiglu_clamp_exp``, and ``rope.scaling.yarn_truncate``.
"""

from __future__ import annotations

import reprlib

from ...graph.errors import format_count
from .families import DELTA_NET_ARCHITECTURES, EXPERT_ARCHITECTURES, FolderFamily
from .json_files import GGUF_REMEDY, JsonObject
from .linear_attention import read_delta_net_pairs
from .rope_scaling import read_head_size, read_rope_pairs, read_rope_parameters, read_rotated_size
from .write_gguf import Pair

DEFAULT_ROPE_SECTIONS = (11, 11, 10, 0)
"""Rotated pairs for time, height and width if a folder of qwen3_5 states none; texts use one position for all."""
MIN_QUERY_SCALAR = 1e-30
"""The smallest ``query_pre_attn_scalar``; float32 holds the root of its reciprocal."""
GEMMA3_27B_LAYERS = 62
"""Models with this number of layers have another scale of scores in llama.cpp if ``attention.scale`` is missing."""


def read_hyperparameter_pairs(family: FolderFamily, config: JsonObject) -> dict[str, Pair]:
    """Return the hyperparameters of ``config.json`` as metadata pairs of GGUF.

    Raises:
        ModelError: A value is missing, has another type, or is not supported.
    """
    arch, heads = family.architecture, config.require_positive_integer("num_attention_heads")
    pairs: dict[str, Pair] = {
        "block_count": config.require_positive_integer("num_hidden_layers"),
        "context_length": config.require_positive_integer("max_position_embeddings"),
        "embedding_length": config.require_positive_integer("hidden_size"),
    }
    if arch not in EXPERT_ARCHITECTURES or config.get_nonnegative_integer("intermediate_size"):
        pairs["feed_forward_length"] = config.require_positive_integer("intermediate_size")
    pairs["attention.head_count"] = heads
    pairs["attention.head_count_kv"] = config.get_nonnegative_integer("num_key_value_heads", heads) or heads
    pairs |= read_rope_pairs(family, config)
    pairs["attention.layer_norm_rms_epsilon"] = config.get_finite_number("rms_norm_eps", 1e-6)
    if head_size := config.get_nonnegative_integer("head_dim"):
        pairs |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if family.writes_rope_dimensions:
        pairs["vocab_size"] = config.require_positive_integer("vocab_size")
        pairs["rope.dimension_count"] = read_rotated_size(family, config)
    for source, name in (family.scales or {}).items():
        pairs[name] = config.get_finite_number(source, 1.0)
    pairs |= _read_window_pairs(family, config)
    if arch in EXPERT_ARCHITECTURES:
        pairs |= _read_expert_pairs(config)
    if arch in DELTA_NET_ARCHITECTURES:
        pairs |= read_delta_net_pairs(config)
    if arch in ("qwen35", "qwen35moe"):
        sections = read_rope_parameters(config).get_list_or_empty("mrope_section") or [*DEFAULT_ROPE_SECTIONS]
        counts = [n for n in sections if type(n) is int and 0 <= n < 1 << 16]
        if not len(counts) == len(sections) <= len(DEFAULT_ROPE_SECTIONS):
            raise config.make_error(f"mrope_section is {reprlib.repr(sections)}; need at most 4 numbers of pairs")
        pairs["rope.dimension_sections"] = [*counts, 0, 0, 0, 0][: len(DEFAULT_ROPE_SECTIONS)]
    if arch == "gpt-oss":
        pairs |= _read_gpt_oss_pairs(config)
    if arch == "gemma3":
        pairs |= _read_gemma_pairs(config)
    return {f"{arch}.{name}": value for name, value in pairs.items()}


def _read_window_pairs(family: FolderFamily, config: JsonObject) -> dict[str, Pair]:
    """Return the window in tokens and the layers that have it; windows of the whole context are left out."""
    window = config.get_nonnegative_integer("sliding_window") or 0
    if config.get_text("model_type", "").startswith("qwen") and not config.get_boolean("use_sliding_window", False):
        window = 0
    layers, usual = _list_windowed_layers(family, config), {"of 2": 2, "of 6": 6}.get(family.windowed_layers)
    size: dict[str, Pair] = {"attention.sliding_window": window}
    if usual:
        pattern = list(_repeat_windows(usual, len(layers)))
        return (
            size
            if layers == pattern
            else size | {"attention.sliding_window_pattern": _find_window_period_or_list(layers)}
        )
    if 0 < window < config.require_positive_integer("max_position_embeddings") and any(layers):
        return size | {"attention.sliding_window_pattern": layers}
    return size if family.architecture == "phi3" else {}


def _list_windowed_layers(family: FolderFamily, config: JsonObject) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    count, rule = config.require_positive_integer("num_hidden_layers"), family.windowed_layers
    kinds = config.get_list_or_empty("layer_types") if rule not in ("", "all") else []
    if kinds:
        if len(kinds) < count or not {*map(str, kinds)} <= {"full_attention", "sliding_attention"}:
            raise config.make_error(
                f"layer_types needs full_attention or sliding_attention for each of {format_count(count, 'layer')}"
            )
        return [kind == "sliding_attention" for kind in kinds[:count]]
    if rule.startswith("of "):
        period = config.get_nonnegative_integer("sliding_window_pattern") or int(rule.removeprefix("of "))
        return list(_repeat_windows(period, count))
    first = {"": count, "all": 0}.get(rule, config.get_nonnegative_integer("max_window_layers", 0) or 0)
    return [i >= first for i in range(count)]


def _repeat_windows(period: int, count: int) -> tuple[bool, ...]:
    return tuple((i + 1) % period != 0 for i in range(count))


def _find_window_period_or_list(layers: list[bool]) -> Pair:
    """Return the period at which layers have no window; without a period, return `layers`, a flag for each layer."""
    period = layers.index(False) + 1 if False in layers else 0
    return period if period and layers == list(_repeat_windows(period, len(layers))) else layers


def read_expert_count(config: JsonObject) -> int:
    """Return the number of experts: ``num_experts``, or ``num_local_experts`` in newer files."""
    return config.get_nonnegative_integer("num_experts") or config.require_positive_integer("num_local_experts")


def _read_expert_pairs(config: JsonObject) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {
        "expert_count": read_expert_count(config),
        "expert_used_count": config.require_positive_integer("num_experts_per_tok"),
        "expert_feed_forward_length": config.require_positive_integer("moe_intermediate_size"),
    }
    if shared := config.get_nonnegative_integer("shared_expert_intermediate_size"):
        pairs["expert_shared_feed_forward_length"] = shared
    if not config.get_boolean("norm_topk_prob", False):
        pairs["norm_topk_prob"] = False
    return pairs


def _read_gpt_oss_pairs(config: JsonObject) -> dict[str, Pair]:
    if config.get_finite_number("swiglu_alpha", 1.702) != 1.702:
        raise config.make_error("swiglu_alpha differs from 1.702", GGUF_REMEDY)
    pairs: dict[str, Pair] = {
        "expert_count": read_expert_count(config),
        "expert_used_count": config.require_positive_integer("num_experts_per_tok"),
        "expert_feed_forward_length": config.require_positive_integer("intermediate_size"),
    }
    if (limit := config.get_finite_number("swiglu_limit", 7.0)) != 7.0:
        pairs["swiglu_clamp_exp"] = [limit] * config.require_positive_integer("num_hidden_layers")
    return pairs


def _read_gemma_pairs(config: JsonObject) -> dict[str, Pair]:
    if config.get_boolean("use_bidirectional_attention", False):
        raise config.make_error("use_bidirectional_attention is true", GGUF_REMEDY)
    head_size = read_head_size(config)
    local = config.get_object_or_empty("rope_parameters").get_object_or_empty("sliding_attention")
    pairs: dict[str, Pair] = {
        "rope.freq_base_swa": local.get_finite_number(
            "rope_theta", config.get_finite_number("rope_local_base_freq", 1e4)
        ),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
    }
    scalar = config.get_finite_number("query_pre_attn_scalar", 256.0)
    if scalar < MIN_QUERY_SCALAR:
        raise config.make_error(f"query_pre_attn_scalar is {scalar:g}; need a positive number")
    if scalar != head_size or config.get_nonnegative_integer("num_hidden_layers") == GEMMA3_27B_LAYERS:
        pairs["attention.scale"] = scalar**-0.5
    if config.pairs.get("final_logit_softcapping"):
        pairs["final_logit_softcapping"] = config.get_finite_number("final_logit_softcapping", 0.0)
    return pairs
