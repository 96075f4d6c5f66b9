"""Qwen2: LLaMA's blocks with biases on queries, keys and values, and rotated by halves.

Yang et al., Qwen2 technical report, 2024; graph: llama.cpp ``qwen2.cpp``.
"""

from __future__ import annotations

from ..gguf import Gguf
from .keys import Keys
from .llama import Hyper
from .llama import build as build


def read(gguf: Gguf) -> Hyper:
    """Hyperparameters from ``qwen2.*``; ModelError for a missing or absurd value.  Biases are read where there are
    any."""
    return Hyper.from_keys(Keys(gguf, "qwen2"), "neox")
