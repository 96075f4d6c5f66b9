"""Hugging Face folders of a tiny model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

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
