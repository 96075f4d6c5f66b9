"""Models of `transformers` with small random configurations: the class, its configuration and its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .vision_models import make_importable

TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
DENSE = {**TEXT, **HEADS, "intermediate_size": 128}
GROUPED = {**DENSE, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {**GROUPED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
ENCODER = {**DENSE, "type_vocab_size": 2}
PICTURE = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
VISION = {**PICTURE, "num_attention_heads": 4}
SEQ2SEQ = {
    **TEXT,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
DEEPSEEK = {
    **DENSE,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
NEXT = {
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
T5 = {**TEXT, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MAMBA = {**TEXT, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
SPEECH = {
    **DENSE,
    "conv_dim": (32, 32),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
SAM = {"image_size": 64, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SAM |= {"global_attn_indexes": [1], "window_size": 4, "output_channels": 16, "mlp_dim": 64}


def _ids(length: int = 12) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 96, (2, length))}


def _make_masked_inputs(length: int = 12) -> dict[str, Any]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - 4 :] = 0
    return {**_ids(length), "attention_mask": mask}


def _seq2seq() -> dict[str, Any]:
    return {**_ids(10), "decoder_input_ids": torch.randint(3, 96, (2, 6))}


def _picture(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def _both() -> dict[str, Any]:
    return {**_ids(8), **_picture()()}


MODELS: Mapping[str, tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
    "LlamaForCausalLM": (GROUPED, _ids),
    "MistralForCausalLM": ({**GROUPED, "sliding_window": 6}, _ids),
    "Qwen2ForCausalLM": (GROUPED, _make_masked_inputs),
    "Qwen3ForCausalLM": (GROUPED, _ids),
    "Qwen3MoeForCausalLM": (EXPERTS, _ids),
    "Qwen3NextForCausalLM": (NEXT, _ids),
    "MixtralForCausalLM": ({**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, _ids),
    "Gemma2ForCausalLM": ({**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 6}, _ids),
    "Gemma3ForCausalLM": ({**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 6}, _ids),
    "Phi3ForCausalLM": ({**GROUPED, "original_max_position_embeddings": 64}, _ids),
    "PhiForCausalLM": (DENSE, _ids),
    "GPT2LMHeadModel": ({**TEXT, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, _ids),
    "GPTNeoXForCausalLM": (DENSE, _ids),
    "OPTForCausalLM": ({**TEXT, **HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64}, _ids),
    "BloomForCausalLM": ({**TEXT, "hidden_size": 64, "n_layer": 2, "n_head": 4}, _ids),
    "FalconForCausalLM": ({**TEXT, **HEADS, "new_decoder_architecture": True, "num_kv_heads": 2}, _ids),
    "Starcoder2ForCausalLM": (GROUPED, _ids),
    "Olmo2ForCausalLM": (GROUPED, _ids),
    "GraniteForCausalLM": ({**GROUPED, "attention_multiplier": 0.25, "residual_multiplier": 0.5}, _ids),
    "Cohere2ForCausalLM": ({**GROUPED, "sliding_window": 6}, _ids),
    "DeepseekV3ForCausalLM": (DEEPSEEK, _ids),
    "MambaForCausalLM": (MAMBA, _ids),
    "Mamba2ForCausalLM": (MAMBA2, _ids),
    "BertModel": (ENCODER, _make_masked_inputs),
    "RobertaModel": (ENCODER, _make_masked_inputs),
    "ModernBertModel": ({**DENSE, "global_attn_every_n_layers": 2, "local_attention": 8}, _make_masked_inputs),
    "DebertaV2Model": (
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        _make_masked_inputs,
    ),
    "ElectraModel": ({**ENCODER, "embedding_size": 32}, _make_masked_inputs),
    "T5ForConditionalGeneration": (T5, _seq2seq),
    "BartForConditionalGeneration": (SEQ2SEQ, _seq2seq),
    "WhisperForConditionalGeneration": (
        WHISPER,
        lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 96, (2, 6))},
    ),
    "Wav2Vec2Model": (SPEECH, lambda: {"input_values": torch.randn(2, 400)}),
    "ViTModel": (VISION, _picture()),
    "Dinov2Model": ({**VISION, "mlp_ratio": 2}, _picture()),
    "CLIPModel": (
        {"text_config": {**DENSE, "projection_dim": 32}, "vision_config": VISION, "projection_dim": 32},
        _both,
    ),
    "SiglipModel": ({"text_config": {**DENSE, "projection_size": 64}, "vision_config": VISION}, _both),
    "ConvNextModel": ({"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4}, _picture()),
    "SwinModel": (SWIN, _picture()),
    "SegformerForSemanticSegmentation": (SEGFORMER, _picture(64)),
    "DetrForObjectDetection": (
        {
            **{k: v for k, v in SEQ2SEQ.items() if k not in TEXT and k != "decoder_start_token_id"},
            "num_queries": 6,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
        },
        _picture(64),
    ),
    "SamVisionModel": (SAM, _picture(64)),
    "ResNetModel": (RESNET, _picture(64)),
}
"""By class: 42 of them."""

ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
IMAGE_TOKENS = {
    **{"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8},
    **{"latent_channels": 8, "num_embeddings": 8, "resolution": 16},
}
MORE_MODELS: Mapping[str, tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
    "BertForSequenceClassification": ({**ENCODER, "num_labels": 3}, _make_masked_inputs),
    "ChameleonForConditionalGeneration": (
        {**GROUPED, "vocabulary_map": {"<image>": 3}, "vq_config": IMAGE_TOKENS},
        _ids,
    ),
    "EuroBertModel": (GROUPED, _make_masked_inputs),
    "GPTJForCausalLM": ({**TEXT, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}, _ids),
    "Gemma3TextModel": (
        {**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 6, "use_bidirectional_attention": True},
        _ids,
    ),
    "JinaEmbeddingsV3Model": ({**ENCODER, **ROTARY}, _make_masked_inputs),
    "NomicBertModel": ({**ENCODER, **ROTARY, "head_dim": 16}, _make_masked_inputs),
    "T5EncoderModel": ({**T5, "feed_forward_proj": "gated-gelu"}, _ids),
}
"""Classes that other tests of this suite build, too, such as the encoders of `encoders`."""


def make_model(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of that class with weights from a seed, in evaluation, and the keywords it is called with."""
    make_importable()
    import transformers

    transformers.logging.set_verbosity_error()
    settings, arguments = {**MODELS, **MORE_MODELS}[name]
    cls = getattr(transformers, name)
    config = cls.config_class(**settings)
    if name.startswith("Detr"):
        config.backbone_config = transformers.ResNetConfig(**RESNET, out_features=["stage2"])
    for part in (config, *(getattr(config, k, None) for k in ("text_config", "vision_config"))):
        if part is not None and hasattr(part, "_experts_implementation"):
            part._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # parameters of zeros or ones would hide mistakes
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, {**arguments(), **({"use_cache": False} if "use_cache" in forward_names(model) else {})}


def forward_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the model's arguments."""
    import inspect

    return set(inspect.signature(model.forward).parameters)


def export_model(model: torch.nn.Module, arguments: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """The model's program for these arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (), kwargs=dict(arguments), strict=False)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
