"""The model families of Hugging Face folders: hyperparameters and tensor names as llama.cpp's converter has them."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping

from ...graph.lazy_dataclass import dataclass
from .json_files import JsonObject
from .linear_attention import read_delta_net_pairs
from .write_gguf import Pair

LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Module names inside a layer, and their names inside a block of GGUF."""
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
QWEN_DELTA_BLOCK = LLAMA_BLOCK | HEAD_NORMS | {"post_attention_layernorm": "post_attention_norm"}
DELTA_NET_ARCHITECTURES = ("qwen3next", "qwen35")
EXPERT_ARCHITECTURES = ("qwen3moe", "qwen3next")
"""Architectures with each matrix of each expert as a tensor of its own in the folder."""
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
DEFAULT_ROPE_SECTIONS = (11, 11, 10, 0)
"""Rotated pairs for time, height and width if a folder of qwen3_5 states none; texts use one position for all."""
SKIPPED_NAME = re.compile(r".*\.rotary_emb\.inv_freq|mtp\..*")
EXPERT_NAME = re.compile(r"model\.layers\.(\d{1,5})\.mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj\.weight")
LAYER_NAME = re.compile(r"model\.layers\.(\d{1,5})\.(.+)\.(weight|bias)")
SINKS_NAME = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.sinks")


@dataclass(frozen=True, slots=True)
class FolderFamily:
    """The differences of one family of Hugging Face model folders from the other families."""

    architecture: str
    """Value of ``general.architecture``."""
    block_names: Mapping[str, str]
    permutes_rows: bool = False
    """Whether the rows of Q and K go from halves to pairs, as the rotary embedding of `architecture` needs them."""
    norm_offset: float = 0.0
    """Number that is added to norm weights."""
    activation: str = "silu"
    """Required activation of the feed-forward layers."""
    writes_rope_dimensions: bool = False
    rotary_share: float = 1.0
    """The rotated share of a head, if the folder states none."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "yarn")
    """Supported values of ``rope_type``."""
    scales: Mapping[str, str] | None = None
    """Multipliers in ``config.json``, and their names in GGUF."""


FAMILIES = {
    "llama": FolderFamily(
        "llama",
        LLAMA_BLOCK,
        permutes_rows=True,
        writes_rope_dimensions=True,
        rope_kinds=("default", "linear", "yarn", "llama3"),
    ),
    "mistral": FolderFamily("llama", LLAMA_BLOCK, permutes_rows=True, writes_rope_dimensions=True),
    "qwen2": FolderFamily("qwen2", LLAMA_BLOCK),
    "qwen3": FolderFamily("qwen3", LLAMA_BLOCK | HEAD_NORMS),
    "qwen3_moe": FolderFamily("qwen3moe", LLAMA_BLOCK | HEAD_NORMS | {"mlp.gate": "ffn_gate_inp"}),
    "qwen3_next": FolderFamily(
        "qwen3next",
        QWEN_DELTA_BLOCK
        | {
            "mlp.gate": "ffn_gate_inp",
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
        },
        norm_offset=1.0,
        writes_rope_dimensions=True,
        rotary_share=0.25,
    ),
    "qwen3_5_text": FolderFamily(
        "qwen35", QWEN_DELTA_BLOCK, norm_offset=1.0, writes_rope_dimensions=True, rotary_share=0.25
    ),
    "granite": FolderFamily(
        "granite",
        LLAMA_BLOCK,
        permutes_rows=True,
        writes_rope_dimensions=True,
        scales={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "gemma3_text": FolderFamily(
        "gemma3",
        LLAMA_BLOCK
        | HEAD_NORMS
        | {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        rope_kinds=("default", "linear"),
    ),
    "gpt_oss": FolderFamily(
        "gpt-oss",
        LLAMA_BLOCK | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        rope_kinds=("default", "yarn"),
    ),
    "phi3": FolderFamily(
        "phi3",
        LLAMA_BLOCK | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        writes_rope_dimensions=True,
        rope_kinds=("default",),
    ),
}
"""Families by ``model_type`` of ``config.json``."""


def choose_family(config: JsonObject) -> FolderFamily:
    """Return the family of a model folder from its ``config.json``.

    Raises:
        ModelError: The family is not supported.
    """
    kind = config.get_text("model_type", "")
    if kind not in FAMILIES:
        raise config.make_error(
            f"model_type {reprlib.repr(kind)} is not supported as a folder; need {', '.join(FAMILIES)}, or a GGUF file"
        )
    family = FAMILIES[kind]
    activation = config.get_text("hidden_act", config.get_text("hidden_activation", family.activation))
    if activation != family.activation:
        raise config.make_error(f"hidden_act is {activation[:40]!r}; {kind} needs {family.activation!r}")
    return family


def map_tensor_name(family: FolderFamily, name: str) -> str | None:
    """Translate a tensor name of a Hugging Face folder to GGUF; None if the family has no such tensor."""
    if family.architecture == "gpt-oss" and (match := SINKS_NAME.fullmatch(name)):
        return f"blk.{int(match[1])}.attn_sinks.weight"
    if match := LAYER_NAME.fullmatch(name):
        part = family.block_names.get(match[2])
        return part and f"blk.{int(match[1])}.{part}.{match[3]}"
    stem, _, end = name.rpartition(".")
    return f"{OUTER_NAMES[stem]}.{end}" if stem in OUTER_NAMES and end in ("weight", "bias") else None


def read_rope_parameters(config: JsonObject) -> JsonObject:
    """Return the parameters of the rotary embedding of full attention, with `rope_theta` and `rope_type`.

    Older files have them in ``rope_scaling`` and ``rope_theta``, newer ones in ``rope_parameters``.
    """
    rope = config.get_object_or_empty("rope_parameters")
    if not rope.pairs:
        rope = config.get_object_or_empty("rope_scaling")
    if "full_attention" in rope.pairs:
        rope = rope.get_object_or_empty("full_attention")
    kind = rope.get_text("rope_type", rope.get_text("type", "default"))
    default_theta = 1e6 if config.get_text("model_type", "") == "gemma3_text" else 1e4
    theta = rope.get_finite_number("rope_theta", config.get_finite_number("rope_theta", default_theta))
    return JsonObject(config.path, dict(rope.pairs) | {"rope_type": kind, "rope_theta": theta})


def read_head_size(config: JsonObject) -> int:
    """Return the size of an attention head: ``head_dim``, or the model width divided by the number of heads."""
    size = config.get_nonnegative_integer("head_dim")
    return size or config.require_positive_integer("hidden_size") // config.require_positive_integer(
        "num_attention_heads"
    )


def read_hyperparameter_pairs(family: FolderFamily, config: JsonObject) -> dict[str, Pair]:
    """Return the hyperparameters of ``config.json`` as metadata pairs of GGUF.

    Some architectures have no sliding window in GGUF. For a model with a window, their context is at most the window.
    """
    arch, heads, head_size = (
        family.architecture,
        config.require_positive_integer("num_attention_heads"),
        read_head_size(config),
    )
    pairs: dict[str, Pair] = {
        f"{arch}.block_count": config.require_positive_integer("num_hidden_layers"),
        f"{arch}.context_length": _read_context(family, config),
        f"{arch}.embedding_length": config.require_positive_integer("hidden_size"),
        f"{arch}.feed_forward_length": config.require_positive_integer("intermediate_size"),
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config.get_nonnegative_integer("num_key_value_heads", heads) or heads,
    }
    pairs |= {f"{arch}.{name}": value for name, value in _read_rope_pairs(family, config).items()}
    pairs[f"{arch}.attention.layer_norm_rms_epsilon"] = config.get_finite_number("rms_norm_eps", 1e-6)
    if config.get_nonnegative_integer("head_dim"):
        pairs |= {f"{arch}.attention.key_length": head_size, f"{arch}.attention.value_length": head_size}
    if family.writes_rope_dimensions:
        factor = read_rope_parameters(config).get_finite_number(
            "partial_rotary_factor", config.get_finite_number("partial_rotary_factor", family.rotary_share)
        )
        pairs[f"{arch}.vocab_size"] = config.require_positive_integer("vocab_size")
        pairs[f"{arch}.rope.dimension_count"] = int(head_size * factor)
    for source, name in (family.scales or {}).items():
        pairs[f"{arch}.{name}"] = config.get_finite_number(source, 1.0)
    if arch == "phi3":
        pairs[f"{arch}.attention.sliding_window"] = config.get_nonnegative_integer("sliding_window", 0) or 0
    if arch in EXPERT_ARCHITECTURES:
        pairs |= {f"{arch}.{name}": value for name, value in _read_expert_pairs(config).items()}
    if arch in DELTA_NET_ARCHITECTURES:
        pairs |= {f"{arch}.{name}": value for name, value in read_delta_net_pairs(config).items()}
    if arch == "qwen35":
        sections = read_rope_parameters(config).get_list_or_empty("mrope_section") or DEFAULT_ROPE_SECTIONS
        pairs["qwen35.rope.dimension_sections"] = [int(n) for n in (*sections, 0, 0, 0, 0)[:4] if type(n) is int]
    if arch == "gpt-oss":
        pairs |= _read_gpt_oss_pairs(config)
    if arch == "gemma3":
        pairs |= _read_gemma_pairs(config, head_size)
    return pairs


def _read_context(family: FolderFamily, config: JsonObject) -> int:
    context = config.require_positive_integer("max_position_embeddings")
    window = config.get_nonnegative_integer("sliding_window")
    if not window or family.architecture in ("gemma3", "phi3", "gpt-oss"):
        return context
    uses_window = config.get_boolean("use_sliding_window", config.get_text("model_type", "") == "mistral")
    return min(context, window) if uses_window else context


def _read_rope_pairs(family: FolderFamily, config: JsonObject) -> dict[str, Pair]:
    rope = read_rope_parameters(config)
    kind = rope.get_text("rope_type", "default")
    if kind not in family.rope_kinds:
        raise config.make_error(f"rope_type {kind[:40]!r} is not supported; need {', '.join(family.rope_kinds)}")
    pairs: dict[str, Pair] = {}
    if kind in ("linear", "yarn"):
        pairs |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.get_finite_number("factor", 1.0)}
    if kind == "yarn":
        pairs["rope.scaling.original_context_length"] = rope.get_nonnegative_integer(
            "original_max_position_embeddings"
        ) or config.require_positive_integer("max_position_embeddings")
        for source, name in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if rope.pairs.get(source) is not None:
                pairs[f"rope.scaling.{name}"] = rope.get_finite_number(source, 1.0)
    return pairs | {"rope.freq_base": rope.get_finite_number("rope_theta", 1e4)}


def read_expert_count(config: JsonObject) -> int:
    """Return the number of experts: ``num_experts``, or ``num_local_experts`` in newer files."""
    return config.get_nonnegative_integer("num_experts") or config.require_positive_integer("num_local_experts")


def _read_expert_pairs(config: JsonObject) -> dict[str, Pair]:
    if not config.get_boolean("norm_topk_prob", False):
        raise config.make_error("norm_topk_prob is false; need true")
    if config.get_list_or_empty("mlp_only_layers") or config.get_nonnegative_integer("decoder_sparse_step", 1) != 1:
        raise config.make_error("mlp_only_layers and decoder_sparse_step give layers without experts; need none")
    pairs: dict[str, Pair] = {
        "expert_count": read_expert_count(config),
        "expert_used_count": config.require_positive_integer("num_experts_per_tok"),
        "expert_feed_forward_length": config.require_positive_integer("moe_intermediate_size"),
    }
    if shared := config.get_nonnegative_integer("shared_expert_intermediate_size"):
        pairs["expert_shared_feed_forward_length"] = shared
    return pairs


def _read_gpt_oss_pairs(config: JsonObject) -> dict[str, Pair]:
    layers = config.require_positive_integer("num_hidden_layers")
    need = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if config.get_list_or_empty("layer_types") not in ([], need):
        raise config.make_error("layer_types: every second layer needs full_attention, the others sliding_attention")
    if (config.get_finite_number("swiglu_alpha", 1.702), config.get_finite_number("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise config.make_error("swiglu_alpha and swiglu_limit differ from 1.702 and 7")
    return {
        "gpt-oss.attention.sliding_window": config.require_positive_integer("sliding_window"),
        "gpt-oss.expert_count": read_expert_count(config),
        "gpt-oss.expert_used_count": config.require_positive_integer("num_experts_per_tok"),
        "gpt-oss.expert_feed_forward_length": config.require_positive_integer("intermediate_size"),
    }


def _read_gemma_pairs(config: JsonObject, head_size: int) -> dict[str, Pair]:
    layers = config.require_positive_integer("num_hidden_layers")
    need = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    if (
        config.get_list_or_empty("layer_types") not in ([], need)
        or config.get_nonnegative_integer("sliding_window_pattern", 6) != 6
    ):
        raise config.make_error("layer_types: every sixth layer needs full_attention, the others sliding_attention")
    if (scalar := config.get_finite_number("query_pre_attn_scalar", head_size)) != head_size:
        raise config.make_error(f"query_pre_attn_scalar is {scalar:g}; need head_dim, {head_size}")
    if config.pairs.get("attn_logit_softcapping") or config.get_boolean("use_bidirectional_attention", False):
        raise config.make_error("attn_logit_softcapping and use_bidirectional_attention are not supported")
    local = config.get_object_or_empty("rope_parameters").get_object_or_empty("sliding_attention")
    theta = local.get_finite_number("rope_theta", config.get_finite_number("rope_local_base_freq", 1e4))
    pairs: dict[str, Pair] = {
        "gemma3.rope.freq_base_swa": theta,
        "gemma3.attention.sliding_window": config.require_positive_integer("sliding_window"),
        "gemma3.attention.key_length": head_size,
        "gemma3.attention.value_length": head_size,
    }
    if config.pairs.get("final_logit_softcapping"):
        pairs["gemma3.final_logit_softcapping"] = config.get_finite_number("final_logit_softcapping", 0.0)
    return pairs
