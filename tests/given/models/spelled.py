"""Small llama models with vocabularies of any kind, from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ASCII = [chr(code) for code in range(33, 127)]
SENTENCEPIECE = ["<unk>", "<s>", *BYTES, "▁", "▁a", "▁yes", "yes", *ASCII, "</s>"]
"""A vocabulary that puts a space before texts."""
SENTENCEPIECE_TYPES = [UNKNOWN, CONTROL, *[BYTE] * 256, *[NORMAL] * 98, CONTROL]


def write_llama(
    path: Path,
    tokens: Sequence[str] = SENTENCEPIECE,
    types: Sequence[int] = SENTENCEPIECE_TYPES,
    *,
    kind: str = "llama",
    rows: int | None = None,
    eos: int | None = None,
    template: str | None = None,
    pooling: int | None = None,
) -> Path:
    """Write a model of one block, width 32 and a context of 128 tokens, with `rows` output rows (one for each token).

    `eos` is the id of the end token, the last one unless given.
    """
    rng, width, inner = np.random.default_rng(0), 32, 64
    writer = GGUFWriter(path, "llama")
    for name, value in (("context_length", 128), ("embedding_length", width), ("feed_forward_length", inner)):
        writer.add_uint32(f"llama.{name}", value)
    for name, value in (("block_count", 1), ("attention.head_count", 2), ("attention.head_count_kv", 1)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    if pooling is not None:
        writer.add_uint32("llama.pooling_type", pooling)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_eos_token_id(len(tokens) - 1 if eos is None else eos)
    if template is not None:
        writer.add_chat_template(template)
    shapes = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width)}
    shapes |= {"attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
    shapes |= {"ffn_down": (width, inner)}
    tensors = {"token_embd": (rows or len(tokens), width), **{f"blk.0.{name}": s for name, s in shapes.items()}}
    for name, shape in tensors.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_other(path: Path, architecture: str, **strings: str) -> Path:
    """Write a GGUF file that is no model: `strings` are keys, with ``_`` for ``.``, and their values."""
    writer = GGUFWriter(path, architecture)
    for key, value in strings.items():
        writer.add_string(key.replace("_", "."), value)
    writer.add_tensor("some.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
