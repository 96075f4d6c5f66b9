"""The family table: one row of traits for each architecture, with the traits that differ from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from .inputs.family import AttentionWindowPattern, FamilyTraits

ALL_LAYERS_WINDOWED, LAST_OF_FOUR_GLOBAL = AttentionWindowPattern(), AttentionWindowPattern(period=4)
WINDOWED_WITH_BASE_10000 = AttentionWindowPattern(base=10000.0, uses_rope_scaling=False)
FIRST_OF_FOUR_GLOBAL = AttentionWindowPattern(period=4, is_global_first=True)
LLAMA = FamilyTraits(rope="normal")
LAYER_NORM = FamilyTraits(norm="layer")
GPT2 = FamilyTraits(norm="layer", rope="none", activation="gelu")
KEY_SIGMOID_ROUTING = FamilyTraits(gating="key sigmoid", normalises_routing=None)
QWEN = FamilyTraits()
QWEN3 = FamilyTraits(qk_norm="before")
GRANITE = FamilyTraits(rope="normal", rotated_layers="finetuned", residual="key", embedding="key", logits="over")
COHERE = FamilyTraits(norm="layer", rope="normal", ffn_norm="", parallel="yes", logits="times")
COHERE2 = replace(COHERE, rotated_layers="window", windows=LAST_OF_FOUR_GLOBAL, has_feed_forward_scale=True)
GEMMA_BASE = FamilyTraits(attn_post="post_attention_norm", ffn_post="post_ffw_norm", qk_norm="before")
GEMMA2 = replace(GEMMA_BASE, embedding="width", activation="gelu", softcap=0.0)
BERT = FamilyTraits(
    run_mode="encoder",
    norm="layer",
    embedding_norm="token_embd_norm",
    output_norm="",
    residuals="normed sums",
    rope="none",
    activation="gelu erf",
)
T5 = FamilyTraits(run_mode="encoder", tensor_prefix="enc.", rope="none", scale="one", activation="gelu or relu")
LATENT_BASE = FamilyTraits(rope="normal", mixer="latent", gating="key", normalises_routing=None)
INDEXER_TENSORS = ("indexer*",)
SPARSE_LATENT = replace(LATENT_BASE, optional_tensors=INDEXER_TENSORS, sparse_keys="top_k")
RWKV_BASE = FamilyTraits(rope="none", recurrent="rwkv6", recurrent_where="all")
RWKV = replace(RWKV_BASE, norm="layer", ffn_norm="attn_norm_2", embedding_norm="token_embd_norm", residuals="shifting")
FIRST_VALUE_TENSORS = ("time_mix_v?.weight",)
ROPE_FACTOR_TENSOR = "rope_freqs.weight"
NO_OUTPUT_BIAS = ("attn_output.bias",)
NO_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
DENSE_FFN_TENSORS = ("ffn_gate.*", "ffn_up.*", "ffn_down.*")
QWEN35 = replace(
    QWEN3,
    ffn_norm="post_attention_norm",
    gated_queries=True,
    recurrent="delta",
    recurrent_where="interval",
    has_feed_forward_scale=True,
)
KIMI_UNREAD = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "ssm_*.scale")
KIMI = FamilyTraits(
    rope="none",
    mixer="latent",
    recurrent="kimi",
    gating="key",
    normalises_routing=None,
    ignores=(*KIMI_UNREAD, "attn_*.scale"),
)
KIMI_BOUNDED_DECAY = replace(KIMI, bounded_decay=-1.0)
NEMOTRON = FamilyTraits(
    rope="none", recurrent="mamba2", mixer="single", activation="relu2", has_feed_forward_scale=True, draft_norm="layer"
)
UNSCALED_DELTA = ("attn_qkv.scale", "attn_gate.scale", "ssm_*.scale", "ssm_in.weight")

FAMILIES: Mapping[str, FamilyTraits] = MappingProxyType(
    {
        # ------------------------------------------------------------------------------------ LLaMA and its kin
        "llama": replace(LLAMA, has_feed_forward_scale=True),
        "llama-embed": replace(LLAMA, has_feed_forward_scale=True, run_mode="encoder", ignores=("output.weight",)),
        "mistral3": replace(LLAMA, has_feed_forward_scale=True, temperature=(0, 0.0, 0.0)),
        "nanbeige": replace(LLAMA, has_feed_forward_scale=True, repeat_key="num_loops"),
        "minicpm": FamilyTraits(rope="normal", embedding=12.0, residual="layers", logits="over", logit_default="width"),
        "deci": replace(LLAMA, allows_headless_layers=True),
        "arcee": replace(LLAMA, activation="relu2"),
        "apertus": FamilyTraits(qk_norm="before", activation="xielu", ignores=("attn_?_norm.bias",)),
        "bitnet": FamilyTraits(has_feed_forward_scale=True),
        "chameleon": FamilyTraits(
            rope="normal", qk_norm="before", head_norm_eps=1e-5, swin_norm=True, picture_tokens=True
        ),
        "llama4": replace(
            LLAMA,
            windows=AttentionWindowPattern(period=4, size=8192, default=8192, is_chunked=True),
            rotated_layers="every 4",
            qk_norm="bare rotated",
            temperature=(8192, 0.1, 1.0),
            gating="sigmoid",
            normalises_routing=False,
            special_routing="weighted input",
        ),
        "internlm2": FamilyTraits(rope="normal"),
        "xverse": FamilyTraits(rope="normal"),
        "baichuan": FamilyTraits(rope="normal", rotated_layers="of 32", alibi=8.0),
        "chatglm": FamilyTraits(rope="normal"),
        "cogvlm": FamilyTraits(rope="neox", ignores=("attn_qkv.scale", "vis_*", ROPE_FACTOR_TENSOR)),
        "smollm3": FamilyTraits(rope="normal", rotated_layers="every 4"),
        "maincoder": FamilyTraits(rope="normal", qk_norm="after"),
        "pangu-embedded": FamilyTraits(ignores=(ROPE_FACTOR_TENSOR,)),
        "seed_oss": FamilyTraits(ffn_norm="post_attention_norm"),
        "arctic": FamilyTraits(rope="normal", parallel_dense_ffn="residual"),
        "refact": FamilyTraits(
            rope="none",
            alibi=8.0,
            ignores=NO_BIASES,
            optional_tensors=("ffn_*_exps.*", "ffn_gate_inp.*"),
            special_routing="unread",
        ),
        "exaone": FamilyTraits(),
        "exaone4": replace(
            GEMMA_BASE,
            attn_norm="",
            ffn_norm="",
            rotated_layers="window|plain",
            windows=AttentionWindowPattern(period=4, default=4096, required_layers=64),
        ),
        "exaone-moe": FamilyTraits(
            qk_norm="before",
            rotated_layers="window",
            windows=LAST_OF_FOUR_GLOBAL,
            gating="key",
            normalises_routing=None,
        ),
        "ernie4_5": FamilyTraits(rope="normal", ignores=NO_OUTPUT_BIAS),
        "ernie4_5-moe": FamilyTraits(
            rope="normal",
            ignores=NO_OUTPUT_BIAS,
            has_interleaved_experts=True,
            optional_tensors=("ffn_*_exps.*", "ffn_*_shexp.*", "ffn_gate_inp.*", "exp_probs_b.*"),
        ),
        "paddleocr": FamilyTraits(),
        "hunyuan-dense": FamilyTraits(rope="neox|mrope", qk_norm="after", alpha=True),
        "hunyuan_vl": FamilyTraits(rope="neox|mrope", qk_norm="after", alpha=True),
        "hunyuan-moe": FamilyTraits(qk_norm="after"),
        "olmo": FamilyTraits(rope="normal", norm="layer", norms_without_weight=True),
        "olmo2": replace(
            GEMMA_BASE, attn_norm="", ffn_norm="", windows=AttentionWindowPattern(period=4, uses_rope_scaling=False)
        ),
        "olmoe": FamilyTraits(qk_norm="before", normalises_routing=False),
        "openelm": FamilyTraits(qk_norm="before", ignores=("attn_qkv.scale",)),
        "orion": LAYER_NORM,
        "plamo": FamilyTraits(ffn_norm="", parallel="yes"),
        "plamo3": replace(
            GEMMA_BASE,
            windows=AttentionWindowPattern(period=8, base=10000.0, uses_rope_scaling=False),
            ignores=("attn_qkv.scale",),
        ),
        "spark2_5": FamilyTraits(activation="half gelu", windows=ALL_LAYERS_WINDOWED),
        "talkie": FamilyTraits(
            norms_without_weight=True,
            embedding_norm="bare",
            qk_norm="bare",
            logits="times",
            residuals="skip",
            has_feed_forward_scale=True,
            ignores=("ffn_gate.scale", "ffn_up.scale"),
        ),
        "muse-glimmer": replace(
            GEMMA_BASE,
            rope="normal",
            embedding_norm="bare",
            post_eps=1e-8,
            rotated_layers="window",
            windows=LAST_OF_FOUR_GLOBAL,
            logits="times",
            softcap=0.0,
        ),
        # ------------------------------------------------------------------------------------------- Qwen and kin
        "qwen": QWEN,
        "qwen2": QWEN,
        "qwen2vl": FamilyTraits(ignores=("output.bias",)),
        "qwen2moe": FamilyTraits(normalises_routing=False, shared_gate=True),
        "qwen3": replace(QWEN3, has_feed_forward_scale=True),
        "qwen3moe": replace(QWEN3, has_feed_forward_scale=True),
        "qwen3vl": QWEN3,
        "qwen3vlmoe": QWEN3,
        "qwen3tts": QWEN3,
        "dream": FamilyTraits(run_mode="at once", ignores=("output.bias",)),
        "llada": FamilyTraits(rope="normal", run_mode="at once", ignores=(*NO_BIASES, ROPE_FACTOR_TENSOR)),
        "llada-moe": FamilyTraits(qk_norm="before", run_mode="at once", normalises_routing=False),
        "rnd1": FamilyTraits(qk_norm="before", run_mode="at once"),
        "qwen3next": replace(QWEN35, shared_gate=True, ignores=UNSCALED_DELTA),
        "qwen35": QWEN35,
        "qwen35moe": replace(QWEN35, shared_gate=True),
        "maple": FamilyTraits(
            qk_norm="before", rotated_layers="window", windows=ALL_LAYERS_WINDOWED, special_routing="gate first"
        ),
        "mellum": FamilyTraits(qk_norm="before", windows=LAST_OF_FOUR_GLOBAL, has_feed_forward_scale=True),
        # ----------------------------------------------------------------------------------------------- experts
        "bailingmoe": FamilyTraits(rope="normal", scale="rotated", normalises_routing=None),
        "bailingmoe2": FamilyTraits(qk_norm="before", gating="key", normalises_routing=None),
        "deepseek": FamilyTraits(rope="normal", normalises_routing=False),
        "deepseek2-ocr": FamilyTraits(gating="key", normalises_routing=None),
        "dots1": FamilyTraits(qk_norm="before", gating="key", normalises_routing=None),
        "glm4moe": replace(KEY_SIGMOID_ROUTING, ffn_norm="post_attention_norm", ignores=NO_OUTPUT_BIAS),
        "gpt-oss": FamilyTraits(
            ffn_norm="post_attention_norm",
            windows=AttentionWindowPattern(period=2),
            activation="oai",
            gating="chosen",
            normalises_routing=False,
        ),
        "grok": FamilyTraits(
            attn_post="attn_output_norm",
            ffn_post="layer_output_norm",
            embedding=78.38367176906169,
            logits="times",
            logit_default=0.5773502691896257,
            softcap=0.0,
            score_cap=30.0,
            scale="output",
            activation="gelu",
            parallel_dense_ffn="mean",
        ),
        "grovemoe": FamilyTraits(qk_norm="before", special_routing="chunks"),
        "hy_v3": replace(
            KEY_SIGMOID_ROUTING, qk_norm="before", has_feed_forward_scale=True, optional_tensors=DENSE_FFN_TENSORS
        ),
        "laguna": replace(
            KEY_SIGMOID_ROUTING,
            qk_norm="before",
            gate="softplus",
            windows=replace(FIRST_OF_FOUR_GLOBAL, uses_rope_scaling=False),
        ),
        "afmoe": replace(
            GEMMA_BASE,
            embedding="width",
            rotated_layers="every 4",
            windows=LAST_OF_FOUR_GLOBAL,
            gating="key sigmoid",
            normalises_routing=None,
        ),
        "mimo2": FamilyTraits(
            draft_input="residual",
            windows=WINDOWED_WITH_BASE_10000,
            gating="sigmoid",
            optional_tensors=DENSE_FFN_TENSORS,
            ignores=("attn_qkv.scale", "attn_q.scale", "attn_k.scale", "attn_v.scale", "attn_*.bias"),
        ),
        "step35": FamilyTraits(
            half_rotation=True,
            factors_in_global_layers_only=True,
            draft_input="residual",
            windows=WINDOWED_WITH_BASE_10000,
            gating="key sigmoid",
            normalises_routing=None,
        ),
        "minimax-m2": FamilyTraits(qk_norm="before", gating="key"),
        "smallthinker": FamilyTraits(
            rotated_layers="every 4 first",
            windows=replace(FIRST_OF_FOUR_GLOBAL, size=4096),
            activation="relu",
            gating="key",
            special_routing="early router",
        ),
        "dbrx": FamilyTraits(norm="layer", ffn_norm="attn_output_norm"),
        # --------------------------------------------------------------------------------------------- layer norm
        "bloom": replace(GPT2, embedding_norm="token_embd_norm", alibi=8.0),
        "gpt2": GPT2,
        "starcoder": GPT2,
        "mpt": replace(GPT2, ignores=("attn_k_norm.*", "attn_q_norm.*")),
        "jais": FamilyTraits(norm="layer", rope="none", scale="inverse"),
        "jais2": FamilyTraits(norm="layer", activation="relu2"),
        "codeshell": FamilyTraits(norm="layer", activation="gelu"),
        "starcoder2": FamilyTraits(norm="layer", activation="gelu"),
        "pockettts": FamilyTraits(norm="layer", rope="normal", activation="gelu"),
        "nemotron": FamilyTraits(norm="layer", activation="relu2"),
        "falcon": FamilyTraits(norm="layer", ffn_norm="", parallel="yes", activation="gelu"),
        "gptj": FamilyTraits(norm="layer", rope="normal", ffn_norm="", parallel="yes", activation="gelu tanh"),
        "gptneox": FamilyTraits(norm="layer", parallel="key", activation="gelu"),
        "phi2": FamilyTraits(norm="layer", ffn_norm="", parallel="yes", activation="gelu"),
        "phi3": FamilyTraits(),
        "phimoe": FamilyTraits(),
        "stablelm": FamilyTraits(norm="layer", parallel="absent"),
        "command-r": COHERE,
        "cohere2": COHERE2,
        "cohere2moe": replace(
            COHERE2,
            norm="either",
            rotated_layers="window|dense",
            windows=FIRST_OF_FOUR_GLOBAL,
            gating="key sigmoid",
            normalises_routing=None,
            special_routing="halved",
        ),
        # -------------------------------------------------------------------------------------- Gemma, GLM, Granite
        "gemma": FamilyTraits(embedding="width", activation="gelu"),
        "gemma2": replace(
            GEMMA2,
            qk_norm="maybe",
            windows=AttentionWindowPattern(period=2, default=4096),
            softcap=30.0,
            score_cap=50.0,
            scale_of=46,
        ),
        "gemma3": replace(
            GEMMA2,
            windows=AttentionWindowPattern(period=6, base=10000.0, uses_rope_scaling=False),
            factors_in_global_layers_only=True,
            scale_of=62,
        ),
        "gemma3n": replace(
            GEMMA2,
            value_norm=True,
            scale="one",
            windows=AttentionWindowPattern(period=5, base=10000.0, uses_rope_scaling=False),
            cache_layers=20,
            softcap=30.0,
            sparse_gates=10,
            residuals="alternating",
            activation="half gelu",
            optional_tensors=("attn_k.*", "attn_v.*", "attn_k_norm.*"),
        ),
        "glm4": replace(GEMMA_BASE, rope="normal|mrope", qk_norm="maybe"),
        "granite": GRANITE,
        "granitemoe": replace(GRANITE, rotated_layers="all"),
        "granite_swa": replace(GRANITE, rotated_layers="pattern", windows=ALL_LAYERS_WINDOWED),
        # ---------------------------------------------------------------------------------------------- encoders
        "bert": BERT,
        "nomic-bert": replace(BERT, rope="neox", activation="silu"),
        "nomic-bert-moe": replace(BERT, rope="neox", normalises_routing=False),
        "jina-bert-v2": replace(BERT, alibi=8.0),
        "jina-bert-v3": replace(BERT, rope="neox"),
        "modern-bert": FamilyTraits(
            run_mode="encoder",
            norm="layer",
            embedding_norm="token_embd_norm",
            attn_norm="attn_norm?",
            activation="gelu erf",
            windows=AttentionWindowPattern(period=3, is_global_first=True, base=10000.0, uses_rope_scaling=False),
        ),
        "eurobert": FamilyTraits(run_mode="encoder"),
        "neo-bert": FamilyTraits(run_mode="encoder", rope="normal", output_norm="enc.output_norm"),
        "gemma-embedding": replace(
            GEMMA2,
            softcap=None,
            windows=AttentionWindowPattern(period=6, base=10000.0, uses_rope_scaling=False),
            run_mode="encoder",
        ),
        "t5": T5,
        "t5encoder": T5,
        # --------------------------------------------------------------------------------------------- recurrent
        "mamba": FamilyTraits(rope="none", recurrent="mamba", recurrent_where="all"),
        "mamba2": FamilyTraits(rope="none", recurrent="mamba2", recurrent_where="all"),
        "jamba": FamilyTraits(rope="none", recurrent="mamba", normalises_routing=False),
        "falcon-h1": FamilyTraits(
            recurrent="mamba2", recurrent_where="both", ignores=(*NO_OUTPUT_BIAS, ROPE_FACTOR_TENSOR)
        ),
        "plamo2": replace(GEMMA_BASE, recurrent="plamo2", ignores=("attn_qkv.scale", "ssm_*.scale")),
        "rwkv6": RWKV,
        "rwkv7": replace(RWKV, recurrent="rwkv7", optional_tensors=FIRST_VALUE_TENSORS),
        "rwkv6qwen2": RWKV_BASE,
        "arwkv7": replace(RWKV_BASE, recurrent="rwkv7", optional_tensors=FIRST_VALUE_TENSORS),
        "minimax-01": FamilyTraits(
            residual="key",
            residual_after_norm=True,
            recurrent="lightning",
            recurrent_where="interval",
            interval=8,
            optional_tensors=("attn_output.scale", "attn_qkv.scale"),
        ),
        "lfm2": FamilyTraits(
            output_norm="token_embd_norm",
            qk_norm="before",
            recurrent="convolution",
            windows=AttentionWindowPattern(period=0),
        ),
        "lfm2moe": FamilyTraits(output_norm="token_embd_norm", qk_norm="before", recurrent="convolution", gating="key"),
        "kimi-linear": replace(
            KIMI,
            normalises_routing=True,
            ignores=(*KIMI_UNREAD, "attn_[qkv].scale"),
            optional_tensors=("attn_output.scale",),
        ),
        "bailingmoe3": replace(KIMI, rope="normal|mrope", bounded_decay=1.0),
        "deepseek2": replace(LATENT_BASE, log_multiplier=10.0, temperature=(-1, 0.0, 0.0)),
        "mistral4": replace(LATENT_BASE, log_multiplier=10.0, temperature=(-1, 0.0, 0.0)),
        "plm": FamilyTraits(mixer="latent", rope="normal", activation="relu2"),
        "minicpm3": FamilyTraits(
            mixer="latent", embedding=12.0, residual="layers", logits="over", logit_default="width"
        ),
        "gemma4": replace(
            GEMMA2,
            value_norm=True,
            scale="one",
            factors_in_global_layers_only=True,
            windows=WINDOWED_WITH_BASE_10000,
            parallel_dense_ffn="normed",
            residuals="per layer",
            has_feed_forward_scale=True,
        ),
        "kimi-k3": replace(
            KIMI_BOUNDED_DECAY, residuals="banked", activation="situ", optional_tensors=("attn_res_score.weight",)
        ),
        "hy_v4": replace(SPARSE_LATENT, residuals="streams", special_routing="gate first", ignores=("attn_*.scale",)),
        "glm5-next": replace(
            KIMI_BOUNDED_DECAY,
            l2_eps=1e-6,
            residuals="streams",
            gating="key sigmoid",
            special_routing="gate first",
            optional_tensors=INDEXER_TENSORS,
            sparse_keys="top_k",
        ),
        "deepseek32": replace(SPARSE_LATENT, log_multiplier=10.0, has_feed_forward_scale=True),
        "glm-dsa": replace(SPARSE_LATENT, gating="key sigmoid", has_feed_forward_scale=True),
        "dots3note": replace(
            SPARSE_LATENT,
            windows=AttentionWindowPattern(base=10000.0),
            has_feed_forward_scale=True,
            ignores=("attn_gate.scale",),
        ),
        "minimax-m3": FamilyTraits(
            qk_norm="before",
            activation="oai",
            gating="key",
            normalises_routing=None,
            optional_tensors=INDEXER_TENSORS,
            sparse_keys="top_k block_size",
        ),
        "deepseek4": replace(
            SPARSE_LATENT,
            mixer="compressed",
            residuals="streams",
            special_routing="gate first, one limit",
            windows=AttentionWindowPattern(period=0),
            ignores=("exp_probs_b_vl.*",),
        ),
        "qwen4exp": replace(
            QWEN35,
            attn_norm="",
            ffn_norm="",
            output_norm="",
            residuals="gated streams",
            delta_gate="sigmoid",
            shared_gate=True,
            ignores=("attn_?.bias",),
            optional_tensors=INDEXER_TENSORS,
            sparse_keys="top_k",
        ),
        "hrm_text": FamilyTraits(norms_without_weight=True, output_norm="", residuals="cycles", embedding="key"),
        "granitehybrid": replace(GRANITE, recurrent="mamba2"),
        "nemotron_h": NEMOTRON,
        "nemotron_h_moe": replace(NEMOTRON, gating="sigmoid", normalises_routing=None),
    }
)
"""The traits of every architecture, by ``general.architecture``."""
