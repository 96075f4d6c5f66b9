"""Hugging Face folders of a tiny model, and the logits of small models."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
"""The sizes of small models of `transformers`."""
TOKENS = [(7 * i * i + 3 * i + 5) % 160 for i in range(24)]
"""Token ids; their logits are compared."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
LAYER_SHAPES = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (8, 8),
    "self_attn.v_proj": (8, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}
SHAPES = {"model.embed_tokens.weight": (400, 8), "model.norm.weight": (8,)} | {
    f"model.layers.0.{name}.weight": shape for name, shape in LAYER_SHAPES.items()
}


def write_folder(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    entries: dict[str, Any] | None = None,
    header: bytes | None = None,
) -> Path:
    """Write a folder with bfloat16 weights 0 to 250 in turn; `entries` replaces header entries."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    table: dict[str, Any] = {}
    end = 0
    for name, shape in SHAPES.items():
        size = 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    table |= entries or {}
    text = json.dumps(table).encode() if header is None else header
    data = ((np.arange(end // 2, dtype=np.float32) % 251).view(np.uint32) >> 16).astype("<u2")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())
    return folder


def compute_worst_nmse(result: np.ndarray, golden: np.ndarray) -> float:
    """Return the largest NMSE of any row of logits."""
    assert result.shape == golden.shape
    return float((((result - golden) ** 2).sum(-1) / (golden**2).sum(-1)).max())


def compute_logits(path: Path) -> np.ndarray:
    """Return the logits of `TOKENS` in float32."""
    session = Session(open_model(path), on=DeviceGroup(exact=True), context=64)
    return session.evaluate([TOKENS], every_position=True)[0]
