"""The model families of Hugging Face folders: tensor names as llama.cpp's converter has them, and defaults."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import field

from ...graph.lazy_dataclass import dataclass
from .json_files import GGUF_REMEDY, JsonObject

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
QWEN_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
DELTA_NET_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
EXPERT_ARCHITECTURES = ("qwen3moe", "qwen3next", "qwen35moe")
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LANGUAGE_PREFIX = re.compile(r"^(model\.language_model|language_model\.model)\.")
"""The start of a tensor name of the language model in a model of pictures and texts."""
SKIPPED_NAME = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.[kv]_scale|mtp\..*"
    r"|(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|embed_vision)\..*"
)
"""Tensors that texts do not need: cached frequencies, scales of FP8 caches, MTP layers, and the part for pictures."""
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
    rotary_share: float | None = None
    """The rotated share of a head, if the folder states none; None if heads are always rotated as a whole."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
    """Supported values of ``rope_type``."""
    windowed_layers: str = ""
    """Layers with a sliding window if the folder has no ``layer_types``.

    - ``all``: all layers, also if the folder has ``layer_types``.
    - ``late``: layers from ``max_window_layers`` on.
    - ``of 2``, ``of 6``: all except the last one of 2 or 6 layers.
    - Empty: none.
    """
    scales: Mapping[str, str] | None = None
    """Multipliers in ``config.json``, and their names in GGUF."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that ``config.json`` may leave out, as in transformers, if they differ from the usual ones."""


QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": FolderFamily("llama", LLAMA_BLOCK, permutes_rows=True, writes_rope_dimensions=True),
    "mistral": FolderFamily(
        "llama",
        LLAMA_BLOCK,
        permutes_rows=True,
        writes_rope_dimensions=True,
        windowed_layers="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": FolderFamily("qwen2", LLAMA_BLOCK, windowed_layers="late", defaults=QWEN_WINDOW),
    "qwen3": FolderFamily(
        "qwen3", LLAMA_BLOCK | HEAD_NORMS, windowed_layers="late", defaults=QWEN_WINDOW | {"head_dim": 128}
    ),
    "qwen3_moe": FolderFamily(
        "qwen3moe",
        LLAMA_BLOCK | HEAD_NORMS | QWEN_EXPERTS,
        windowed_layers="all",
        defaults=QWEN_WINDOW | {"num_key_value_heads": 4},
    ),
    "qwen3_next": FolderFamily(
        "qwen3next",
        QWEN_DELTA_BLOCK | QWEN_EXPERTS,
        norm_offset=1.0,
        writes_rope_dimensions=True,
        rotary_share=0.25,
        defaults=DELTA_NET_DEFAULTS | {"num_key_value_heads": 2},
    ),
    "qwen3_5_text": FolderFamily(
        "qwen35",
        QWEN_DELTA_BLOCK,
        norm_offset=1.0,
        writes_rope_dimensions=True,
        rotary_share=0.25,
        defaults=DELTA_NET_DEFAULTS | {"num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": FolderFamily(
        "qwen35moe",
        QWEN_DELTA_BLOCK | QWEN_EXPERTS,
        norm_offset=1.0,
        writes_rope_dimensions=True,
        rotary_share=0.25,
        defaults=DELTA_NET_DEFAULTS | {"num_key_value_heads": 2},
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
        windowed_layers="of 6",
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": FolderFamily(
        "gpt-oss",
        LLAMA_BLOCK | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        windowed_layers="of 2",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
        },
    ),
    "phi3": FolderFamily(
        "phi3",
        LLAMA_BLOCK | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        writes_rope_dimensions=True,
        rotary_share=1.0,
        rope_kinds=("default", "longrope"),
        windowed_layers="all",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
}
"""Families by ``model_type`` of ``config.json``."""
LANGUAGE_PARTS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""By ``model_type`` of a model of pictures and texts: the family of its ``text_config``."""


def read_language_config(config: JsonObject) -> JsonObject:
    """Return the settings of the language model in ``config.json``, with the defaults of its family.

    A model of pictures and texts has them in ``text_config``; its other keys stay if ``text_config`` lacks them.

    Raises:
        ModelError: The family is not supported.
    """
    kind = config.get_text("model_type", "")
    pairs = dict(config.pairs)
    if kind in LANGUAGE_PARTS:
        pairs |= config.get_object_or_empty("text_config").pairs
        if "tie_word_embeddings" in config.pairs:
            pairs["tie_word_embeddings"] = config.pairs["tie_word_embeddings"]
        kind = LANGUAGE_PARTS[kind]
    if kind not in FAMILIES:
        raise config.make_error(
            f"model_type {reprlib.repr(kind)} is not supported as a folder; need {', '.join(FAMILIES)}", GGUF_REMEDY
        )
    return JsonObject(config.path, {**FAMILIES[kind].defaults, **pairs, "model_type": kind})


def choose_family(config: JsonObject) -> FolderFamily:
    """Return the family of a model folder from the settings of its language model.

    Raises:
        ModelError: The activation is not supported.
    """
    kind = config.get_text("model_type", "")
    family = FAMILIES[kind]
    activation = config.get_text("hidden_act", config.get_text("hidden_activation", family.activation))
    if activation != family.activation:
        raise config.make_error(f"hidden_act is {activation[:40]!r}; {kind} needs {family.activation!r}", GGUF_REMEDY)
    return family


def strip_language_prefix(name: str) -> str:
    """Return a tensor name without the prefix of the language model in a model of pictures and texts."""
    return LANGUAGE_PREFIX.sub("model.", name, count=1).removeprefix("language_model.")


def map_tensor_name(family: FolderFamily, name: str) -> str | None:
    """Translate a tensor name of a Hugging Face folder to GGUF; None if the family has no such tensor."""
    if family.architecture == "gpt-oss" and (match := SINKS_NAME.fullmatch(name)):
        return f"blk.{int(match[1])}.attn_sinks.weight"
    if match := LAYER_NAME.fullmatch(name):
        part = family.block_names.get(match[2])
        return part and f"blk.{int(match[1])}.{part}.{match[3]}"
    stem, _, end = name.rpartition(".")
    return f"{OUTER_NAMES[stem]}.{end}" if stem in OUTER_NAMES and end in ("weight", "bias") else None
