"""Tiny models of architectures that llama.cpp's own suite lacks: fixtures of `architectures`, written anew by

    python -m hocket.tests.given.models.later_models PROGRAM [NAMES]

PROGRAM is ``llama_logits.cpp`` with llama.cpp b11434: it computes the goldens, logits or hidden rows of encoders.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from .architectures import add_key, pack_file, weights, write_file

SEED, VOCABULARY, WIDTH, HEADS, HEAD, INNER, EXPERT, TOKENS = 45, 96, 64, 4, 16, 80, 48, 24
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
GROUPED = {"attention.head_count": HEADS, "attention.head_count_kv": 2}
ENCODER = {"attention.causal": False, "pooling_type": 1}
STEP_HEADS, STEP_GROUPS = (HEADS, 6, 6, HEADS), (2, 3, 3, 2)
ALTUP, RANK, SHORT = 4, 64, 256
"""Streams, rank of thin matrices and length of short vectors of Gemma 3n, which llama.cpp has as constants."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names of tensors, and their shapes as GGUF has them: the fan-in first."""


def end_shapes(*, output: bool = True, norm: str = "output_norm") -> Shapes:
    yield "token_embd.weight", (WIDTH, VOCABULARY)
    yield f"{norm}.weight", (WIDTH,)
    if output:
        yield "output.weight", (WIDTH, VOCABULARY)


def attention_shapes(block: str, heads: int = HEADS, groups: int = 2, *, each: bool = False) -> Shapes:
    """Matrices of attention, with a norm of each query and key head if ``each``."""
    yield f"{block}.attn_norm.weight", (WIDTH,)
    for kind, count in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{block}.attn_{kind}.weight", (WIDTH, count * HEAD)
    if each:
        yield from ((f"{block}.attn_{kind}_norm.weight", (HEAD,)) for kind in "qk")
    yield f"{block}.attn_output.weight", (heads * HEAD, WIDTH)
    yield f"{block}.ffn_norm.weight", (WIDTH,)


def dense_shapes(block: str, *, gate: bool = True, inner: int = INNER, suffix: str = "") -> Shapes:
    if gate:
        yield f"{block}.ffn_gate{suffix}.weight", (WIDTH, inner)
    yield f"{block}.ffn_up{suffix}.weight", (WIDTH, inner)
    yield f"{block}.ffn_down{suffix}.weight", (inner, WIDTH)


def expert_shapes(block: str) -> Shapes:
    yield f"{block}.ffn_gate_inp.weight", (WIDTH, 6)
    yield f"{block}.exp_probs_b.bias", (6,)
    for kind in ("gate", "up"):
        yield f"{block}.ffn_{kind}_exps.weight", (WIDTH, EXPERT, 6)
    yield f"{block}.ffn_down_exps.weight", (EXPERT, WIDTH, 6)
    yield from dense_shapes(block, inner=EXPERT, suffix="_shexp")


def llama_embed(blocks: range) -> Shapes:
    yield from end_shapes()
    yield "rope_freqs.weight", (HEAD // 2,)
    for block in (f"blk.{i}" for i in blocks):
        yield from attention_shapes(block)
        yield from dense_shapes(block)


def neo_bert(blocks: range) -> Shapes:
    yield from end_shapes(output=False, norm="enc.output_norm")
    for block in (f"blk.{i}" for i in blocks):
        yield f"{block}.attn_norm.weight", (WIDTH,)
        yield f"{block}.attn_qkv.weight", (WIDTH, 3 * WIDTH)
        yield f"{block}.attn_output.weight", (WIDTH, WIDTH)
        yield f"{block}.ffn_norm.weight", (WIDTH,)
        yield f"{block}.ffn_up.weight", (WIDTH, 2 * INNER)
        yield f"{block}.ffn_down.weight", (INNER, WIDTH)


def apertus(blocks: range) -> Shapes:
    yield from end_shapes()
    yield "rope_freqs.weight", (HEAD // 2,)
    for block in (f"blk.{i}" for i in blocks):
        yield from attention_shapes(block, each=True)
        yield from dense_shapes(block, gate=False)


def bitnet(blocks: range) -> Shapes:
    yield from end_shapes(output=False)
    for block in (f"blk.{i}" for i in blocks):
        yield from attention_shapes(block)
        yield from dense_shapes(block)
        yield f"{block}.attn_sub_norm.weight", (WIDTH,)
        yield f"{block}.ffn_sub_norm.weight", (INNER,)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            yield f"{block}.{name}.scale", (1,)


def plm(blocks: range) -> Shapes:
    """Heads with 12 columns that do not turn and 4 that do, values of 10, latent vectors of 24."""
    yield from end_shapes(output=False)
    for block in (f"blk.{i}" for i in blocks):
        yield f"{block}.attn_norm.weight", (WIDTH,)
        yield f"{block}.attn_q.weight", (WIDTH, HEADS * 16)
        yield f"{block}.attn_kv_a_mqa.weight", (WIDTH, 24 + 4)
        yield f"{block}.attn_kv_a_norm.weight", (24,)
        yield f"{block}.attn_kv_b.weight", (24, HEADS * (12 + 10))
        yield f"{block}.attn_output.weight", (HEADS * 10, WIDTH)
        yield f"{block}.ffn_norm.weight", (WIDTH,)
        yield from dense_shapes(block, gate=False)


def step35(blocks: range) -> Shapes:
    yield from end_shapes()
    yield "rope_freqs.weight", (HEAD // 2,)
    for i, heads, groups in zip(blocks, STEP_HEADS, STEP_GROUPS, strict=True):
        block = f"blk.{i}"
        yield from attention_shapes(block, heads, groups, each=True)
        yield f"{block}.attn_gate.weight", (WIDTH, heads)
        yield from (dense_shapes(block) if i == 0 else expert_shapes(block))


def deepseek2_ocr(blocks: range) -> Shapes:
    yield from end_shapes()
    for block in (f"blk.{i}" for i in blocks):
        yield from attention_shapes(block, groups=HEADS)
        yield from (dense_shapes(block) if block == "blk.0" else expert_shapes(block))


def gemma3n(blocks: range) -> Shapes:
    yield from end_shapes(output=False)
    yield "altup_proj.weight", (WIDTH, WIDTH, ALTUP - 1)
    yield "altup_unembd_proj.weight", (WIDTH, WIDTH, ALTUP - 1)
    yield "per_layer_token_embd.weight", (SHORT * len(blocks), VOCABULARY)
    yield "per_layer_model_proj.weight", (WIDTH, SHORT * len(blocks))
    yield "per_layer_proj_norm.weight", (SHORT,)
    for block in (f"blk.{i}" for i in blocks):
        yield from attention_shapes(block, each=True)
        yield from dense_shapes(block)
        for name in ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm", "altup_router_norm"):
            yield f"{block}.{name}.weight", (WIDTH,)
        yield f"{block}.inp_gate.weight", (WIDTH, SHORT)
        yield f"{block}.proj.weight", (SHORT, WIDTH)
        yield f"{block}.altup_correct_coef.weight", (ALTUP, ALTUP)
        yield f"{block}.altup_correct_scale.weight", (WIDTH,)
        yield f"{block}.altup_predict_coef.weight", (ALTUP, ALTUP * ALTUP)
        yield f"{block}.altup_router.weight", (WIDTH, ALTUP)
        yield f"{block}.laurel_l.weight", (WIDTH, RANK)
        yield f"{block}.laurel_r.weight", (RANK, WIDTH)


@dataclass(frozen=True)
class Tiny:
    """Keys without the architecture before them, unless they begin with a dot, and the tensors of all blocks."""

    blocks: int
    keys: Mapping[str, object]
    tensors: Callable[[range], Shapes]
    encoder: bool = False


def make_gemma3n(blocks: int) -> Tiny:
    """Build a Gemma 3n; llama.cpp lets blocks from the 20th on read the caches of the 18th and the 19th."""
    keys = {
        **RMS,
        **GROUPED,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [i % 5 != 4 for i in range(blocks)],
        "attention.shared_kv_layers": max(0, blocks - 20),
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 300.0,
        "altup.active_idx": 0,
        "altup.num_inputs": ALTUP,
        "embedding_length_per_layer_input": SHORT,
        "activation_sparsity_scale": [1.6448533535003662] * 10 + [float("-inf")] * 15,
    }
    return Tiny(blocks, keys, gemma3n)


MODELS: Mapping[str, Tiny] = {
    "llama-embed-encoder": Tiny(2, {**RMS, **GROUPED, **ENCODER}, llama_embed, encoder=True),
    "neo-bert-encoder": Tiny(
        2, {**RMS, "attention.head_count": HEADS, **ENCODER, "rope.freq_base": 500.0}, neo_bert, encoder=True
    ),
    "apertus-dense": Tiny(
        3,
        {
            **RMS,
            **GROUPED,
            ".xielu.alpha_n": [0.8, -0.3, 0.1],
            ".xielu.alpha_p": [0.7, 0.2, -1.0],
            ".xielu.beta": [0.5, 0.4, 0.7],
            ".xielu.eps": [-1e-6, -0.1, -1e-6],
        },
        apertus,
    ),
    "bitnet-dense": Tiny(2, {**RMS, **GROUPED, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, bitnet),
    "plm-dense": Tiny(
        2,
        {
            **RMS,
            "attention.head_count": HEADS,
            "attention.key_length": 16,
            "attention.value_length": 10,
            "attention.kv_lora_rank": 24,
            "rope.dimension_count": 4,
        },
        plm,
    ),
    "step35-moe": Tiny(
        4,
        {
            **RMS,
            "attention.head_count": list(STEP_HEADS),
            "attention.head_count_kv": list(STEP_GROUPS),
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [False, True, True, False],
            "rope.dimension_count": HEAD,
            "rope.freq_base": 5000.0,
            "rope.freq_base_swa": 300.0,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT,
            "expert_shared_feed_forward_length": EXPERT,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "swiglu_clamp_exp": [0.0, 0.0, 0.3, 0.2],
            "swiglu_clamp_shexp": [0.5, 0.0, 0.4, 0.0],
        },
        step35,
    ),
    "deepseek2-ocr-moe": Tiny(
        3,
        {
            **RMS,
            "attention.head_count": HEADS,
            "attention.head_count_kv": HEADS,
            "attention.sliding_window": 8,
            "rope.dimension_count": 0,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.5,
        },
        deepseek2_ocr,
    ),
    "gemma3n-dense": make_gemma3n(6),
    "computed_gelu/gemma3n-dense": make_gemma3n(25),
}
"""Name and model.  The second Gemma 3n has blocks without caches.

llama.cpp rounds a GELU to half precision, and the rounding grows over many sparse blocks.  Therefore the golden of this
model is from llama.cpp without ``GGML_GELU_FP16``, which computes the function.
"""


def write_fixture(name: str, program: str) -> None:
    """Write the fixture ``name`` with the rows that ``program`` computes."""
    tiny, architecture = MODELS[name], Path(name).name.rsplit("-", 1)[0]
    writer = gguf.GGUFWriter(None, architecture)
    keys = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": tiny.blocks,
        "feed_forward_length": INNER,
        "vocab_size": VOCABULARY,
        **tiny.keys,
        ".tokenizer.ggml.model": "none",
    }
    for key, value in keys.items():
        add_key(writer, key[1:] if key.startswith(".") else f"{architecture}.{key}", value)
    for tensor, shape in tiny.tensors(range(tiny.blocks)):
        writer.add_tensor(tensor, weights(tensor, shape, SEED).reshape(shape[::-1]))
    tokens = np.random.RandomState(SEED).randint(1, VOCABULARY, TOKENS).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path, input_path, row_path = (Path(folder) / part for part in ("model.gguf", "tokens", "rows"))
        write_file(writer, path)
        tokens.tofile(input_path)
        subprocess.run([program, path, input_path, row_path, *(["hidden"] if tiny.encoder else [])], check=True)
        rows = np.fromfile(row_path, np.float32).reshape(TOKENS, -1)
        pack_file(name, path, tokens, rows, SEED)
    sys.stdout.write(f"{name} {np.sqrt(np.square(rows.astype(np.float64)).mean()):.3f}\n")


if __name__ == "__main__":
    for one in sys.argv[2:] or MODELS:
        write_fixture(one, sys.argv[1])
