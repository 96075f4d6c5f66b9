"""Qwen3.5 MoE: Qwen3.5 with experts in place of the feed-forward of every block, one of which answers every token.

Graph: llama.cpp ``qwen35moe.cpp``.
"""

from __future__ import annotations

from ..gguf import Gguf
from .keys import Keys
from .moe import Experts
from .qwen35 import Hyper
from .qwen35 import build as build


def read(gguf: Gguf) -> Hyper:
    """Hyperparameters from ``qwen35moe.*``; ModelError for a missing or absurd value."""
    keys = Keys(gguf, "qwen35moe")
    features, shared = keys.count("expert_feed_forward_length"), keys.count("expert_shared_feed_forward_length")
    return Hyper.from_keys(keys, Experts.from_keys(keys, features, shared))
