"""Write models of large shapes with random weights in seconds: a header, and some random rows repeated.

Tokens must stay as different as in a real model, because equal tokens would all go to the same experts. Therefore:

- No two tensors begin with the same row. If "up" and "gate" were equal, a gated unit would give only positive numbers,
  and all tokens would share their mean.
- Weights have a mean of zero (see `make_random_rows`).
- Attention attends to few tokens, because the mean of many tokens is the same for all of them.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q

from hocket.benchmarks.write_models import make_random_rows
from hocket.frontends.gguf import open_gguf

from .harness import NothingToMeasure

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.given.models.large_headers import qwen_80b, write_header

sys.path.pop(0)

RANDOM_ROW_COUNT = 4099
"""The number of rows of 1024 weights that are drawn for a dtype and repeated; prime, so that experts differ too."""
QUERY_NORM = 4.0
"""The norm of queries, which sets the spread of attention scores."""
QWEN3_NEXT_LAYERS, QWEN3_NEXT_ALL_LAYERS = 8, 48
"""Layers of Qwen3-Next-80B-A3B in the short model, and in the whole one."""
DISK_RESERVE_BYTES, DEVICE_RESERVE_BYTES = 1 << 30, 4 << 30
"""Bytes that stay free on the disk, and on the device for caches, buffers and kernels."""


@dataclass(frozen=True)
class Qwen35Size:
    """The sizes of a Qwen3.5 model."""

    layers: int
    width: int
    ffn_width: int
    vocabulary_size: int
    heads: tuple[int, int]
    """Query heads; key and value heads."""
    delta_heads: tuple[int, int]
    """Key heads; value heads."""


SIZE_4B = Qwen35Size(32, 2560, 9216, 248320, (16, 4), (16, 32))
SIZE_TINY = Qwen35Size(4, 256, 256, 64, (2, 1), (1, 2))


def write_qwen35_header(path: Path, of: Qwen35Size) -> str:
    """Write the header of a Qwen3.5 model: matrices in Q4_K, token embeddings in Q6_K."""
    width, inner, size, state = of.width, of.ffn_width, 256, 128
    (heads, kv_heads), (keys, values) = of.heads, of.delta_heads
    numbers = {
        **{"block_count": of.layers, "context_length": 32768, "embedding_length": width, "feed_forward_length": inner},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads, "vocab_size": of.vocabulary_size},
        **{"attention.key_length": size, "attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]},
        **{"ssm.conv_kernel": 4, "ssm.inner_size": values * state, "ssm.state_size": state},
        **{"ssm.time_step_rank": values, "ssm.group_count": keys, "full_attention_interval": 4},
    }
    channels = (2 * keys + values) * state
    always = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    recurrent = {
        "attn_qkv": (channels, width),
        "attn_gate": (values * state, width),
        "ssm_out": (width, values * state),
    }
    attention = {
        **{"attn_q": (2 * heads * size, width), "attn_k": (kv_heads * size, width)},
        **{"attn_v": (kv_heads * size, width), "attn_output": (width, heads * size)},
    }
    vectors = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
    of_recurrent = {"ssm_conv1d.weight": (channels, 4), "ssm_dt.bias": (values,), "ssm_a": (values,)}
    of_recurrent |= {"ssm_beta.weight": (values, width), "ssm_alpha.weight": (values, width)}
    of_recurrent |= {"ssm_norm.weight": (state,)}
    of_attention = {"attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,)}
    tensors = {"token_embd.weight": ((of.vocabulary_size, width), Q.Q6_K), "output_norm.weight": ((width,), Q.F32)}
    for i in range(of.layers):
        attends = i % 4 == 3
        matrices, small = (attention, of_attention) if attends else (recurrent, of_recurrent)
        tensors |= {f"blk.{i}.{name}.weight": (shape, Q.Q4_K) for name, shape in (always | matrices).items()}
        tensors |= {f"blk.{i}.{name}": (shape, Q.F32) for name, shape in (vectors | small).items()}
    return write_header(path, "qwen35", numbers, tensors)


def write_qwen35_4b(folder: Path) -> Path:
    return fill_with_random_weights(Path(write_qwen35_header(folder / "qwen3.5-4b-random.gguf", SIZE_4B)))


def write_qwen35_tiny(folder: Path) -> Path:
    return fill_with_random_weights(Path(write_qwen35_header(folder / "qwen3.5-tiny-random.gguf", SIZE_TINY)))


def write_qwen3_next(folder: Path, layers: int = QWEN3_NEXT_LAYERS, device_bytes: int | None = None) -> Path:
    """Write the first `layers` layers of Qwen3-Next-80B-A3B in Q4_0.

    Args:
        folder: Where to write.
        layers: The number of layers; the whole model of 48 layers has 45 GB.
        device_bytes: The memory of the device, if it is known.

    Raises:
        NothingToMeasure: The file would not fit on the disk, or its weights on the device.
    """
    path = folder / f"qwen3-next-{layers}-layers-random.gguf"
    write_qwen3_next_header(path, layers)
    try:
        require_space_for_weights(path, device_bytes)
    except NothingToMeasure:
        path.unlink()
        raise
    return fill_with_random_weights(path)


def write_qwen3_next_header(path: Path, layers: int = QWEN3_NEXT_LAYERS) -> str:
    """Write the header of the first `layers` layers of Qwen3-Next-80B-A3B."""
    return str(qwen_80b(path, layers))


def require_space_for_weights(path: Path, device_bytes: int | None) -> None:
    """Raise `NothingToMeasure` unless the weights of a header fit on the disk and on the device."""
    needed = sum(tensor.nbytes for tensor in open_gguf(path, header_only=True).tensors.values())
    free = shutil.disk_usage(path.parent).free - DISK_RESERVE_BYTES
    if needed > free:
        raise NothingToMeasure(f"the weights have {needed / 1e9:.1f} GB; {path.parent} has {max(free, 0) / 1e9:.1f}")
    if device_bytes is not None and needed > device_bytes - DEVICE_RESERVE_BYTES:
        raise NothingToMeasure(f"the weights have {needed / 1e9:.1f} GB; the device has {device_bytes / 1e9:.1f}")


def fill_with_random_weights(path: Path) -> Path:
    """Write weights after a header: norms are 1 or `QUERY_NORM`, decays negative, others small and random."""
    rng, rows_by_dtype = np.random.default_rng(5), {}
    with path.open("r+b") as file:
        for name, tensor in open_gguf(path, header_only=True).tensors.items():
            file.seek(tensor.offset)
            if "norm" in name:
                file.write(np.full(tensor.shape, QUERY_NORM if "attn_q_norm" in name else 1.0, np.float32))
            elif name.endswith("ssm_a"):
                file.write(-rng.uniform(0.5, 2.0, tensor.shape).astype(np.float32))
            else:
                if tensor.dtype not in rows_by_dtype:
                    rows_by_dtype[tensor.dtype] = memoryview(
                        make_random_rows(tensor.dtype, RANDOM_ROW_COUNT, 1024, rng).tobytes()
                    )
                row_bytes, left = rows_by_dtype[tensor.dtype], tensor.nbytes
                start = len(row_bytes) // RANDOM_ROW_COUNT * int(rng.integers(RANDOM_ROW_COUNT))
                while left > 0:
                    left -= file.write(row_bytes[start:][:left])
                    start = 0
    return path
