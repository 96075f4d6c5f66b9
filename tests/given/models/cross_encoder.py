"""A small cross-encoder with random weights, which scores pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
from gguf import GGUFWriter

from hocket.frontends.inference.pooling import RANK_POOLING

from .architectures import add_key, write_file

BERT_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
CROSS_ENCODER_KEYS = {
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 40,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-12,
    "attention.causal": False,
    "pooling_type": RANK_POOLING,
}
HEAD_NAMES = {"bert.pooler.dense": "cls", "classifier": "cls.output"}


def write_cross_encoder(path: Path, metadata: Mapping[str, object] = MappingProxyType({}), tokens: int = 96) -> Any:
    """Write a cross-encoder of transformers with `tokens` tokens and more metadata as a model file, and return it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        **BERT_SIZES,
        vocab_size=tokens,
        max_position_embeddings=64,
        num_hidden_layers=2,
        type_vocab_size=2,
        num_labels=1,
    )
    config._attn_implementation = "eager"
    model = transformers.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    writer = GGUFWriter(None, "bert")
    writer.add_block_count(2)
    for key, value in CROSS_ENCODER_KEYS.items():
        add_key(writer, f"bert.{key}", value)
    for key, value in metadata.items():
        add_key(writer, key, value)
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        title = f"{HEAD_NAMES[stem]}.{kind}" if stem in HEAD_NAMES else known.get_name(name, (".weight", ".bias"))
        if title is None:  # transformers names the encoder `bert`
            title = known.get_name(name.removeprefix("bert."), (".weight", ".bias"))
        writer.add_tensor(title, parameter.detach().numpy())
    write_file(writer, path)
    return model


def write_modern_ranker(path: Path, pooling: str, tokens: int = 96) -> Any:
    """Write a ModernBERT of transformers with a rank head as a model file, and return it.

    Args:
        path: The file.
        pooling: ``mean`` or ``cls``: the rows that the head reads.
        tokens: Size of the vocabulary.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    config = transformers.ModernBertConfig(
        **BERT_SIZES,
        vocab_size=tokens,
        max_position_embeddings=64,
        num_hidden_layers=2,
        local_attention=8,
        layer_types=None,
        pad_token_id=0,
        num_labels=1,
        classifier_pooling=pooling,
    )
    config._attn_implementation = "eager"
    model = transformers.ModernBertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MODERN_BERT, 2)
    writer = GGUFWriter(None, "modern-bert")
    writer.add_block_count(2)
    keys = {
        **{key: value for key, value in CROSS_ENCODER_KEYS.items() if not key.endswith("epsilon")},
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 160000.0,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 3,
    }
    if pooling == "cls":
        keys["classifier.pooling_type"] = 2
    for key, value in keys.items():
        add_key(writer, f"modern-bert.{key}", value)
    names = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        title = f"{names[stem]}.{kind}" if stem in names else known.get_name(name, (".weight", ".bias"))
        if title is None:  # transformers names the encoder `model`
            title = known.get_name(name.removeprefix("model."), (".weight", ".bias"))
        writer.add_tensor(title, parameter.detach().numpy())
    write_file(writer, path)
    return model
