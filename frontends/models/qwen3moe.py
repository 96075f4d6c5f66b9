"""Qwen3 MoE: Qwen3 with experts in place of the feed-forward of every block.

Yang et al., Qwen3 technical report, 2025; graph: llama.cpp ``qwen3moe.cpp``.
"""

from __future__ import annotations

from ..gguf import Gguf
from .keys import Keys
from .moe import Experts
from .qwen3 import Hyper
from .qwen3 import build as build


def read(gguf: Gguf) -> Hyper:
    """Hyperparameters from ``qwen3moe.*``; ModelError for a missing or absurd value."""
    keys = Keys(gguf, "qwen3moe")
    return Hyper.from_keys(keys, Experts.from_keys(keys, keys.count("expert_feed_forward_length")))
