"""The metadata keys that llama.cpp and the ``gguf`` package define, and how hocket uses each of them.

A key is read, ignored because it has no influence on results, or accepted only with its default. A file with another
value is refused, since hocket does not compute its effect. ``{arch}`` stands for the architecture.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import make_module_getattr
from ..gguf.hyperparameter_keys import ArchitectureMetadata
from ..gguf.metadata import LazyMetadataArray

READ, IGNORED, DEFAULT_ONLY = "read", "ignored", "default only"


@dataclass(frozen=True, slots=True)
class MetadataKeyUse:
    """How hocket uses a metadata key.

    - ``use``: ``read``, ``ignored``, or ``default only`` for a key that may have only the accepted values.
    - ``reason``: why.
    - ``accepted``: the accepted values.
    """

    use: str
    reason: str
    accepted: tuple[object, ...] = ()


TENSOR_SIZES = "no influence on results: the shapes of tensors say it"
INFORMATION = "no influence on results: information for people"
REFUSED_ARCHITECTURE = "read for an architecture that hocket refuses by name"
VISION = "no influence on results of text"
KEYS_BY_PURPOSE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model sizes": (
            READ,
            "{arch}.context_length {arch}.embedding_length {arch}.block_count {arch}.embedding_length_per_layer_input "
            "{arch}.attention.head_count {arch}.attention.head_count_kv {arch}.attention.key_length "
            "{arch}.attention.value_length {arch}.attention.key_length_swa {arch}.attention.value_length_swa "
            "{arch}.attention.key_length_mla {arch}.attention.value_length_mla {arch}.attention.key_length_mla_swa "
            "{arch}.attention.value_length_mla_swa {arch}.attention.kv_lora_rank {arch}.attention.kv_lora_rank_swa "
            "{arch}.attention.output_group_count {arch}.attention.shared_kv_layers",
        ),
        "experts": (
            READ,
            "{arch}.leading_dense_block_count {arch}.expert_count {arch}.expert_used_count {arch}.expert_group_count "
            "{arch}.expert_group_used_count {arch}.expert_weights_scale {arch}.expert_weights_norm "
            "{arch}.norm_topk_prob {arch}.expert_gating_func {arch}.expert_group_scale {arch}.experts_per_group "
            "{arch}.interleave_moe_layer_step {arch}.swiglu_clamp_exp {arch}.swiglu_clamp_shexp "
            "{arch}.hidden_activation {arch}.activation.situ_beta {arch}.activation.situ_linear_beta xielu.alpha_p "
            "xielu.alpha_n xielu.beta xielu.eps",
        ),
        "residuals, norms and logits": (
            READ,
            "{arch}.use_parallel_residual {arch}.logit_scale {arch}.final_logit_softcapping {arch}.residual_scale "
            "{arch}.embedding_scale {arch}.attention.layer_norm_epsilon {arch}.attention.layer_norm_rms_epsilon "
            "{arch}.rescale_every_n_layers {arch}.attn_res.block_size {arch}.hrm.l_cycles {arch}.hrm.h_cycles "
            "{arch}.hrm.layers_per_stack {arch}.hyper_connection.count {arch}.hyper_connection.epsilon "
            "{arch}.hyper_connection.sinkhorn_iterations {arch}.hyper_connection.magnitude {arch}.num_loops "
            "{arch}.swin_norm",
        ),
        "attention": (
            READ,
            "{arch}.attention.causal {arch}.attention.max_alibi_bias {arch}.attention.clamp_kqv {arch}.attention.scale "
            "{arch}.attention.output_scale {arch}.attention.value_scale {arch}.attn_logit_softcapping "
            "{arch}.attention.temperature_length {arch}.attention.temperature_scale {arch}.attention.sliding_window "
            "{arch}.attention.sliding_window_pattern {arch}.attention.rope_pattern {arch}.attention.compress_ratios "
            "{arch}.attention.compress_rope_freq_base {arch}.attention.indexer.top_k "
            "{arch}.attention.indexer.block_size {arch}.full_attention_interval {arch}.attention.recurrent_layers",
        ),
        "rotation": (
            READ,
            "{arch}.rope.dimension_count {arch}.rope.dimension_count_swa {arch}.rope.dimension_sections "
            "{arch}.rope.freq_base {arch}.rope.freq_base_swa {arch}.rope.scale_linear {arch}.rope.scaling.type "
            "{arch}.rope.scaling.factor {arch}.rope.scaling.alpha {arch}.rope.scaling.attn_factor "
            "{arch}.rope.scaling.original_context_length {arch}.rope.scaling.finetuned "
            "{arch}.rope.scaling.yarn_log_multiplier {arch}.rope.scaling.yarn_ext_factor "
            "{arch}.rope.scaling.yarn_attn_factor {arch}.rope.scaling.yarn_beta_fast "
            "{arch}.rope.scaling.yarn_beta_slow {arch}.rope.scaling.yarn_truncate",
        ),
        "recurrent layers and n-grams": (
            READ,
            "{arch}.ssm.conv_kernel {arch}.ssm.inner_size {arch}.ssm.state_size {arch}.ssm.time_step_rank "
            "{arch}.ssm.group_count {arch}.ssm.dt_b_c_rms {arch}.kda.head_dim {arch}.kda.gate_lower_bound "
            "{arch}.kda.safe_gate "
            "{arch}.wkv.head_size {arch}.shortconv.l_cache {arch}.ple.layers {arch}.ple.ngram_size "
            "{arch}.ple.heads_per_ngram {arch}.ple.layer_multipliers {arch}.ple.head_offsets "
            "{arch}.ple.head_vocab_sizes {arch}.ple.conv_kernel {arch}.ple.eos_token_id",
        ),
        "blocks that guess further tokens": (READ, "{arch}.nextn_predict_layers"),
        "vectors of texts": (READ, "{arch}.pooling_type {arch}.classifier.pooling_type"),
        "the file itself": (
            READ,
            "general.architecture general.alignment general.name general.type split.no split.count split.tensors.count",
        ),
        "tokenizer and chats": (
            READ,
            "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type "
            "tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id "
            "tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id "
            "tokenizer.ggml.seperator_token_id tokenizer.ggml.cls_token_id tokenizer.ggml.add_bos_token "
            "tokenizer.ggml.add_eos_token "
            "tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces "
            "tokenizer.ggml.precompiled_charsmap tokenizer.ggml.normalizer.lowercase "
            "tokenizer.ggml.normalizer.strip_accents tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id "
            "tokenizer.ggml.fim_mid_token_id tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id "
            "tokenizer.ggml.fim_sep_token_id tokenizer.chat_template tokenizer.chat_template.{name}",
        ),
        "LoRA adapters": (READ, "adapter.type adapter.lora.alpha adapter.alora.invocation_tokens"),
        INFORMATION: (
            IGNORED,
            "general.quantization_version general.file_type general.author general.version general.organization "
            "general.finetune general.basename general.description general.quantized_by general.size_label "
            "general.license general.license.name general.license.link general.url general.doi general.uuid "
            "general.repo_url general.source.url general.source.doi general.source.uuid general.source.repo_url "
            "general.source.huggingface.repository general.base_model.count general.base_model.{id}.name "
            "general.base_model.{id}.author general.base_model.{id}.version general.base_model.{id}.organization "
            "general.base_model.{id}.description general.base_model.{id}.url general.base_model.{id}.doi "
            "general.base_model.{id}.uuid general.base_model.{id}.repo_url general.dataset.count "
            "general.dataset.{id}.name general.dataset.{id}.author general.dataset.{id}.version "
            "general.dataset.{id}.organization general.dataset.{id}.description general.dataset.{id}.url "
            "general.dataset.{id}.doi general.dataset.{id}.uuid general.dataset.{id}.repo_url general.tags "
            "general.languages adapter.lora.task_name adapter.lora.prompt_prefix tokenizer.chat_templates "
            "{arch}.classifier.output_labels {arch}.tensor_data_layout",
        ),
        "no influence on logits: flags and arguments choose how tokens are drawn": (
            IGNORED,
            "general.sampling.sequence general.sampling.top_k general.sampling.top_p general.sampling.min_p "
            "general.sampling.xtc_probability general.sampling.xtc_threshold general.sampling.temp "
            "general.sampling.penalty_last_n general.sampling.penalty_repeat general.sampling.mirostat "
            "general.sampling.mirostat_tau general.sampling.mirostat_eta tokenizer.ggml.suppress_tokens "
            "diffusion.shift_logits",
        ),
        TENSOR_SIZES: (
            IGNORED,
            "{arch}.vocab_size {arch}.embedding_length_out {arch}.feed_forward_length "
            "{arch}.expert_feed_forward_length {arch}.expert_shared_feed_forward_length "
            "{arch}.expert_chunk_feed_forward_length {arch}.expert_latent_length {arch}.expert_shared_count "
            "{arch}.moe_every_n_layers {arch}.moe_latent_size {arch}.hash_layer_count {arch}.time_mix_extra_dim "
            "{arch}.time_decay_extra_dim {arch}.attention.q_lora_rank {arch}.attention.output_lora_rank "
            "{arch}.attention.decay_lora_rank {arch}.attention.iclr_lora_rank {arch}.attention.gate_lora_rank "
            "{arch}.attention.value_residual_mix_lora_rank {arch}.attention.relative_buckets_count "
            "{arch}.hyper_connection.low_rank {arch}.altup.num_inputs {arch}.{dense}_feat_in {arch}.{dense}_feat_out "
            "tokenizer.ggml.token_type_count",
        ),
        "no influence on results: the architecture says it": (
            IGNORED,
            "{arch}.token_shift_count {arch}.router_logit_softcapping {arch}.activation_sparsity_scale",
        ),
        "no influence on results: hocket refuses contexts that an indexer would shorten": (
            IGNORED,
            "{arch}.attention.indexer.head_count {arch}.attention.indexer.key_length {arch}.attention.indexer.kpool "
            "{arch}.attention.indexer.kpool_select_tail {arch}.attention.indexer.local_blocks "
            "{arch}.attention.indexer.types",
        ),
        "no influence on results: hocket runs the encoder of T5 alone": (
            IGNORED,
            "{arch}.decoder_start_token_id {arch}.decoder_block_count",
        ),
        "no influence on results: only a pair of texts has a token between its texts": (
            IGNORED,
            "tokenizer.ggml.add_sep_token",
        ),
        VISION: (
            IGNORED,
            "{arch}.n_deepstack_layers {arch}.deepstack_mapping",
        ),
        "no influence on results: no text of a user makes these tokens": (
            IGNORED,
            "tokenizer.ggml.padding_token_id tokenizer.ggml.mask_token_id "
            "tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id",
        ),
        "no influence on results: a second description of the tokenizer, which llama.cpp does not read either": (
            IGNORED,
            "tokenizer.huggingface.json tokenizer.rwkv.world",
        ),
        REFUSED_ARCHITECTURE: (
            IGNORED,
            "{arch}.features_length {arch}.attention.group_norm_epsilon "
            "{arch}.attention.group_norm_groups {arch}.posnet.embedding_length {arch}.posnet.block_count "
            "{arch}.convnext.embedding_length {arch}.convnext.block_count {arch}.target_layers "
            "{arch}.target_hidden_size {arch}.norm_before_residual",
        ),
        "part of a file that is no language model, which hocket refuses by name": (
            IGNORED,
            "imatrix.chunk_count imatrix.chunk_size imatrix.datasets clip.projector_type clip.has_vision_encoder "
            "clip.has_audio_encoder clip.has_llava_projector clip.use_gelu clip.use_silu clip.vision.* clip.audio.*",
        ),
    }
)
"""For each purpose, or reason to ignore keys, the use and the keys."""
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"{arch}.hrm.prefix_lm": (False,), "{arch}.altup.active_idx": (0,)}
)
"""The accepted values of keys with effects that hocket does not compute; other values are refused."""
METADATA_KEYS: Mapping[str, MetadataKeyUse] = MappingProxyType(
    {name: MetadataKeyUse(use, reason) for reason, (use, names) in KEYS_BY_PURPOSE.items() for name in names.split()}
    | {
        name: MetadataKeyUse(DEFAULT_ONLY, "hocket computes these values alone", ok)
        for name, ok in ACCEPTED_VALUES.items()
    }
)
"""Every key by name."""


def require_supported_metadata_values(keys: ArchitectureMetadata) -> None:
    """Raise `ModelError` if the metadata have a value with an effect that hocket does not support."""
    for name, accepted in ACCEPTED_VALUES.items():
        short = name.removeprefix("{arch}.")
        if keys.has(short) and (value := keys.gguf.metadata[f"{keys.architecture}.{short}"]) not in accepted:
            value_text = repr(value) if isinstance(value, LazyMetadataArray) else reprlib.repr(value)
            raise keys.make_key_error(short, f"is {value_text}; hocket computes {', '.join(map(repr, accepted))} alone")


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), KEYS="METADATA_KEYS")
