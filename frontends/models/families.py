"""The family table: one row of traits for each architecture, with the traits that differ from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from .family import Family, Windows

LOCAL, QUARTER, FOREIGN = Windows(), Windows(period=4), Windows(base=10000.0, scaled=False)
FIRST = Windows(period=4, whole_first=True)
LLAMA = Family(rope="normal")
LAYER_NORM = Family(norm="layer")
GPT2 = Family(norm="layer", rope="none", unit="gelu")
SCORED = Family(gating="key sigmoid", normalised=None)
QWEN = Family()
QWEN3 = Family(qk_norm="before")
GRANITE = Family(rope="normal", rotated="finetuned", residual="key", embedding="key", logits="over")
COHERE = Family(norm="layer", rope="normal", ffn_norm="", parallel="yes", logits="times")
COHERE2 = replace(COHERE, rotated="window", windows=QUARTER, scaled=True)
SANDWICH = Family(attn_post="post_attention_norm", ffn_post="post_ffw_norm", qk_norm="before")
GEMMA2 = replace(SANDWICH, embedding="width", unit="gelu", softcap=0.0)
BERT = Family(
    runs="encoder",
    norm="layer",
    embedding_norm="token_embd_norm",
    output_norm="",
    residuals="normed sums",
    rope="none",
    unit="gelu erf",
)
T5 = Family(runs="encoder", stack="enc.", rope="none", scale="one", unit="gelu or relu")
LATENT = Family(rope="normal", mixer="latent", gating="key", normalised=None)
INDEXER = ("indexer*",)
CHOOSING = replace(LATENT, spare=INDEXER, sparse="top_k")
OF_RWKV = Family(rope="none", recurrent="rwkv6", recurrent_where="all")
RWKV = replace(OF_RWKV, norm="layer", ffn_norm="attn_norm_2", embedding_norm="token_embd_norm", residuals="shifting")
FIRST_VALUES = ("time_mix_v?.weight",)
NO_FACTORS = "rope_freqs.weight"
NO_OUTPUT_BIAS = ("attn_output.bias",)
NO_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
DENSE = ("ffn_gate.*", "ffn_up.*", "ffn_down.*")
QWEN35 = replace(
    QWEN3,
    ffn_norm="post_attention_norm",
    gated_queries=True,
    recurrent="delta",
    recurrent_where="interval",
    scaled=True,
)
KIMI_UNREAD = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "ssm_*.scale")
KIMI = Family(
    rope="none", mixer="latent", recurrent="kimi", gating="key", normalised=None, ignores=(*KIMI_UNREAD, "attn_*.scale")
)
BOUNDED = replace(KIMI, bounded_decay=-1.0)
NEMOTRON = Family(rope="none", recurrent="mamba2", mixer="single", unit="relu2", scaled=True, guess_norm="layer")
UNSCALED_DELTA = ("attn_qkv.scale", "attn_gate.scale", "ssm_*.scale", "ssm_in.weight")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # ------------------------------------------------------------------------------------ LLaMA and its kin
        "llama": replace(LLAMA, scaled=True),
        "llama-embed": replace(LLAMA, scaled=True, runs="encoder", ignores=("output.weight",)),
        "mistral3": replace(LLAMA, scaled=True, temperature=(0, 0.0, 0.0)),
        "nanbeige": replace(LLAMA, scaled=True, repeats="num_loops"),
        "minicpm": Family(rope="normal", embedding=12.0, residual="layers", logits="over", logit_default="width"),
        "deci": replace(LLAMA, headless=True),
        "arcee": replace(LLAMA, unit="relu2"),
        "apertus": Family(qk_norm="before", unit="xielu", ignores=("attn_?_norm.bias",)),
        "bitnet": Family(scaled=True),
        "chameleon": Family(rope="normal", qk_norm="before", head_norm_eps=1e-5, swin_norm=True, picture_tokens=True),
        "llama4": replace(
            LLAMA,
            windows=Windows(period=4, size=8192, default=8192, chunked=True),
            rotated="every 4",
            qk_norm="bare rotated",
            temperature=(8192, 0.1, 1.0),
            gating="sigmoid",
            normalised=False,
            mixture="weighted input",
        ),
        "internlm2": Family(rope="normal"),
        "xverse": Family(rope="normal"),
        "baichuan": Family(rope="normal", rotated="of 32", alibi=8.0),
        "chatglm": Family(rope="normal"),
        "cogvlm": Family(rope="neox", ignores=("attn_qkv.scale", "vis_*", NO_FACTORS)),
        "smollm3": Family(rope="normal", rotated="every 4"),
        "maincoder": Family(rope="normal", qk_norm="after"),
        "pangu-embedded": Family(ignores=(NO_FACTORS,)),
        "seed_oss": Family(ffn_norm="post_attention_norm"),
        "arctic": Family(rope="normal", beside="residual"),
        "refact": Family(
            rope="none", alibi=8.0, ignores=NO_BIASES, spare=("ffn_*_exps.*", "ffn_gate_inp.*"), mixture="unread"
        ),
        "exaone": Family(),
        "exaone4": replace(
            SANDWICH,
            attn_norm="",
            ffn_norm="",
            rotated="window|plain",
            windows=Windows(period=4, default=4096, least_layers=64),
        ),
        "exaone-moe": Family(qk_norm="before", rotated="window", windows=QUARTER, gating="key", normalised=None),
        "ernie4_5": Family(rope="normal", ignores=NO_OUTPUT_BIAS),
        "ernie4_5-moe": Family(
            rope="normal",
            ignores=NO_OUTPUT_BIAS,
            interleaved=True,
            spare=("ffn_*_exps.*", "ffn_*_shexp.*", "ffn_gate_inp.*", "exp_probs_b.*"),
        ),
        "paddleocr": Family(),
        "hunyuan-dense": Family(rope="neox|mrope", qk_norm="after", alpha=True),
        "hunyuan_vl": Family(rope="neox|mrope", qk_norm="after", alpha=True),
        "hunyuan-moe": Family(qk_norm="after"),
        "olmo": Family(rope="normal", norm="layer", bare=True),
        "olmo2": replace(SANDWICH, attn_norm="", ffn_norm="", windows=Windows(period=4, scaled=False)),
        "olmoe": Family(qk_norm="before", normalised=False),
        "openelm": Family(qk_norm="before", ignores=("attn_qkv.scale",)),
        "orion": LAYER_NORM,
        "plamo": Family(ffn_norm="", parallel="yes"),
        "plamo3": replace(SANDWICH, windows=Windows(period=8, base=10000.0, scaled=False), ignores=("attn_qkv.scale",)),
        "spark2_5": Family(unit="half gelu", windows=LOCAL),
        "talkie": Family(
            bare=True,
            embedding_norm="bare",
            qk_norm="bare",
            logits="times",
            residuals="skip",
            scaled=True,
            ignores=("ffn_gate.scale", "ffn_up.scale"),
        ),
        "muse-glimmer": replace(
            SANDWICH,
            rope="normal",
            embedding_norm="bare",
            post_eps=1e-8,
            rotated="window",
            windows=QUARTER,
            logits="times",
            softcap=0.0,
        ),
        # ------------------------------------------------------------------------------------------- Qwen and kin
        "qwen": QWEN,
        "qwen2": QWEN,
        "qwen2vl": Family(ignores=("output.bias",)),
        "qwen2moe": Family(normalised=False, shared_gate=True),
        "qwen3": replace(QWEN3, scaled=True),
        "qwen3moe": replace(QWEN3, scaled=True),
        "qwen3vl": QWEN3,
        "qwen3vlmoe": QWEN3,
        "qwen3tts": QWEN3,
        "dream": Family(runs="at once", ignores=("output.bias",)),
        "llada": Family(rope="normal", runs="at once", ignores=(*NO_BIASES, NO_FACTORS)),
        "llada-moe": Family(qk_norm="before", runs="at once", normalised=False),
        "rnd1": Family(qk_norm="before", runs="at once"),
        "qwen3next": replace(QWEN35, shared_gate=True, ignores=UNSCALED_DELTA),
        "qwen35": QWEN35,
        "qwen35moe": replace(QWEN35, shared_gate=True),
        "maple": Family(qk_norm="before", rotated="window", windows=LOCAL, mixture="gate first"),
        "mellum": Family(qk_norm="before", windows=QUARTER, scaled=True),
        # ----------------------------------------------------------------------------------------------- experts
        "bailingmoe": Family(rope="normal", scale="rotated", normalised=None),
        "bailingmoe2": Family(qk_norm="before", gating="key", normalised=None),
        "deepseek": Family(rope="normal", normalised=False),
        "deepseek2-ocr": Family(gating="key", normalised=None),
        "dots1": Family(qk_norm="before", gating="key", normalised=None),
        "glm4moe": replace(SCORED, ffn_norm="post_attention_norm", ignores=NO_OUTPUT_BIAS),
        "gpt-oss": Family(
            ffn_norm="post_attention_norm", windows=Windows(period=2), unit="oai", gating="chosen", normalised=False
        ),
        "grok": Family(
            attn_post="attn_output_norm",
            ffn_post="layer_output_norm",
            embedding=78.38367176906169,
            logits="times",
            logit_default=0.5773502691896257,
            softcap=0.0,
            score_cap=30.0,
            scale="output",
            unit="gelu",
            beside="mean",
        ),
        "grovemoe": Family(qk_norm="before", mixture="chunks"),
        "hy_v3": replace(SCORED, qk_norm="before", scaled=True, spare=DENSE),
        "laguna": replace(SCORED, qk_norm="before", gate="softplus", windows=replace(FIRST, scaled=False)),
        "afmoe": replace(
            SANDWICH, embedding="width", rotated="every 4", windows=QUARTER, gating="key sigmoid", normalised=None
        ),
        "mimo2": Family(
            hands_on="residual",
            windows=FOREIGN,
            gating="sigmoid",
            spare=DENSE,
            ignores=("attn_qkv.scale", "attn_q.scale", "attn_k.scale", "attn_v.scale", "attn_*.bias"),
        ),
        "step35": Family(
            half_rotation=True,
            whole_factors=True,
            hands_on="residual",
            windows=FOREIGN,
            gating="key sigmoid",
            normalised=None,
        ),
        "minimax-m2": Family(qk_norm="before", gating="key"),
        "smallthinker": Family(
            rotated="every 4 first",
            windows=replace(FIRST, size=4096),
            unit="relu",
            gating="key",
            mixture="early router",
        ),
        "dbrx": Family(norm="layer", ffn_norm="attn_output_norm"),
        # --------------------------------------------------------------------------------------------- layer norm
        "bloom": replace(GPT2, embedding_norm="token_embd_norm", alibi=8.0),
        "gpt2": GPT2,
        "starcoder": GPT2,
        "mpt": replace(GPT2, ignores=("attn_k_norm.*", "attn_q_norm.*")),
        "jais": Family(norm="layer", rope="none", scale="inverse"),
        "jais2": Family(norm="layer", unit="relu2"),
        "codeshell": Family(norm="layer", unit="gelu"),
        "starcoder2": Family(norm="layer", unit="gelu"),
        "pockettts": Family(norm="layer", rope="normal", unit="gelu"),
        "nemotron": Family(norm="layer", unit="relu2"),
        "falcon": Family(norm="layer", ffn_norm="", parallel="yes", unit="gelu"),
        "gptj": Family(norm="layer", rope="normal", ffn_norm="", parallel="yes", unit="gelu tanh"),
        "gptneox": Family(norm="layer", parallel="key", unit="gelu"),
        "phi2": Family(norm="layer", ffn_norm="", parallel="yes", unit="gelu"),
        "phi3": Family(),
        "phimoe": Family(),
        "stablelm": Family(norm="layer", parallel="absent"),
        "command-r": COHERE,
        "cohere2": COHERE2,
        "cohere2moe": replace(
            COHERE2,
            norm="either",
            rotated="window|dense",
            windows=FIRST,
            gating="key sigmoid",
            normalised=None,
            mixture="halved",
        ),
        # -------------------------------------------------------------------------------------- Gemma, GLM, Granite
        "gemma": Family(embedding="width", unit="gelu"),
        "gemma2": replace(
            GEMMA2, qk_norm="maybe", windows=Windows(period=2, default=4096), softcap=30.0, score_cap=50.0, scale_of=46
        ),
        "gemma3": replace(GEMMA2, windows=Windows(period=6, base=10000.0, scaled=False), scale_of=62),
        "gemma3n": replace(
            GEMMA2,
            value_norm=True,
            scale="one",
            windows=Windows(period=5, base=10000.0, scaled=False),
            cache_layers=20,
            softcap=30.0,
            sparse_gates=10,
            residuals="alternating",
            unit="half gelu",
            spare=("attn_k.*", "attn_v.*", "attn_k_norm.*"),
        ),
        "glm4": replace(SANDWICH, rope="normal|mrope", qk_norm="maybe"),
        "granite": GRANITE,
        "granitemoe": replace(GRANITE, rotated="all"),
        "granite_swa": replace(GRANITE, rotated="pattern", windows=LOCAL),
        # ---------------------------------------------------------------------------------------------- encoders
        "bert": BERT,
        "nomic-bert": replace(BERT, rope="neox", unit="silu"),
        "nomic-bert-moe": replace(BERT, rope="neox", normalised=False),
        "jina-bert-v2": replace(BERT, alibi=8.0),
        "jina-bert-v3": replace(BERT, rope="neox"),
        "modern-bert": Family(
            runs="encoder",
            norm="layer",
            embedding_norm="token_embd_norm",
            attn_norm="attn_norm?",
            unit="gelu erf",
            windows=Windows(period=3, whole_first=True, base=10000.0, scaled=False),
        ),
        "eurobert": Family(runs="encoder"),
        "neo-bert": Family(runs="encoder", rope="normal", output_norm="enc.output_norm"),
        "gemma-embedding": replace(
            GEMMA2, softcap=None, windows=Windows(period=6, base=10000.0, scaled=False), runs="encoder"
        ),
        "t5": T5,
        "t5encoder": T5,
        # --------------------------------------------------------------------------------------------- recurrent
        "mamba": Family(rope="none", recurrent="mamba", recurrent_where="all"),
        "mamba2": Family(rope="none", recurrent="mamba2", recurrent_where="all"),
        "jamba": Family(rope="none", recurrent="mamba", normalised=False),
        "falcon-h1": Family(recurrent="mamba2", recurrent_where="both", ignores=(*NO_OUTPUT_BIAS, NO_FACTORS)),
        "plamo2": replace(SANDWICH, recurrent="plamo2", ignores=("attn_qkv.scale", "ssm_*.scale")),
        "rwkv6": RWKV,
        "rwkv7": replace(RWKV, recurrent="rwkv7", spare=FIRST_VALUES),
        "rwkv6qwen2": OF_RWKV,
        "arwkv7": replace(OF_RWKV, recurrent="rwkv7", spare=FIRST_VALUES),
        "minimax-01": Family(
            residual="key",
            residual_after_norm=True,
            recurrent="lightning",
            recurrent_where="interval",
            interval=8,
            spare=("attn_output.scale", "attn_qkv.scale"),
        ),
        "lfm2": Family(
            output_norm="token_embd_norm", qk_norm="before", recurrent="convolution", windows=Windows(period=0)
        ),
        "lfm2moe": Family(output_norm="token_embd_norm", qk_norm="before", recurrent="convolution", gating="key"),
        "kimi-linear": replace(
            KIMI, normalised=True, ignores=(*KIMI_UNREAD, "attn_[qkv].scale"), spare=("attn_output.scale",)
        ),
        "bailingmoe3": replace(KIMI, rope="normal|mrope", bounded_decay=1.0),
        "deepseek2": replace(LATENT, log_multiplier=10.0, temperature=(-1, 0.0, 0.0)),
        "mistral4": replace(LATENT, log_multiplier=10.0, temperature=(-1, 0.0, 0.0)),
        "plm": Family(mixer="latent", rope="normal", unit="relu2"),
        "minicpm3": Family(mixer="latent", embedding=12.0, residual="layers", logits="over", logit_default="width"),
        "gemma4": replace(
            GEMMA2,
            value_norm=True,
            scale="one",
            whole_factors=True,
            windows=FOREIGN,
            beside="normed",
            residuals="per layer",
            scaled=True,
        ),
        "kimi-k3": replace(BOUNDED, residuals="banked", unit="situ", spare=("attn_res_score.weight",)),
        "hy_v4": replace(CHOOSING, residuals="streams", mixture="gate first", ignores=("attn_*.scale",)),
        "glm5-next": replace(
            BOUNDED,
            l2_eps=1e-6,
            residuals="streams",
            gating="key sigmoid",
            mixture="gate first",
            spare=INDEXER,
            sparse="top_k",
        ),
        "deepseek32": replace(CHOOSING, log_multiplier=10.0, scaled=True),
        "glm-dsa": replace(CHOOSING, gating="key sigmoid", scaled=True),
        "dots3note": replace(CHOOSING, windows=Windows(base=10000.0), scaled=True, ignores=("attn_gate.scale",)),
        "minimax-m3": Family(
            qk_norm="before", unit="oai", gating="key", normalised=None, spare=INDEXER, sparse="top_k block_size"
        ),
        "deepseek4": replace(
            CHOOSING,
            mixer="compressed",
            residuals="streams",
            mixture="gate first, one limit",
            windows=Windows(period=0),
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
            spare=INDEXER,
            sparse="top_k",
        ),
        "hrm_text": Family(bare=True, output_norm="", residuals="cycles", embedding="key"),
        "granitehybrid": replace(GRANITE, recurrent="mamba2"),
        "nemotron_h": NEMOTRON,
        "nemotron_h_moe": replace(NEMOTRON, gating="sigmoid", normalised=None),
    }
)
"""The traits of every architecture, by ``general.architecture``."""
