"""Loading a model takes little more memory than its file has bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

WIDTH, LAYERS = 512, 4
SMALL = (64, 64)
LARGE_SIZES = (16384, 64), (64, 1 << 18)
"""Columns of the feed-forward and tokens: many large matrices, and one that is nearly all of the file."""
MAX_RATIO = 1.25

SCRIPT = """
import os, sys
from hocket.frontends.open_model import open_model
from hocket.frontends.inference.session import Session

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def run(path):
    return Session(open_model(path), context=256).evaluate([[1]])[0].shape

run(sys.argv[1])  # a small model: all that is imported and compiled, and may be compiled only now
before = peak()
run(sys.argv[2])
print((peak() - before) / os.path.getsize(sys.argv[2]))
"""


def write_llama(path: Path, inner: int, words: int) -> None:
    """A llama in Q8_0 with a large feed-forward or a large embedding, every block of it the same."""
    block = np.concatenate([np.array([0.001], np.float16).view(np.uint8), np.arange(32, dtype=np.uint8)])
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": inner,
        "attention.head_count": 8,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)

    def matrix(name: str, rows: int, columns: int) -> None:
        data = np.tile(block, (rows, columns // 32))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.Q8_0)

    matrix("token_embd", words, WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{name}", WIDTH, WIDTH)
        matrix(f"blk.{i}.ffn_gate", inner, WIDTH)
        matrix(f"blk.{i}.ffn_up", inner, WIDTH)
        matrix(f"blk.{i}.ffn_down", WIDTH, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM of /proc/self/status, which only Linux has")
@pytest.mark.parametrize("sizes", LARGE_SIZES, ids=str)
def test_a_quantised_model_takes_no_more_than_a_quarter_more_memory_than_its_file(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """Pages of the file count while they are mapped and read; a second copy of the weights would double the ratio."""
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write_llama(small, *SMALL)
    write_llama(large, *sizes)
    command = [sys.executable, "-c", SCRIPT, str(small), str(large)]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.9 < ratio <= MAX_RATIO
