"""Benchmark attention: one token over long contexts as a share of the copy bandwidth, and prompts in FLOP/s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hocket import ops
from hocket.graph import Graph, input, weight

from .harness import BenchmarkDevice, Case, ResultRow


@dataclass(frozen=True)
class AttentionShape:
    """Query heads, key and value heads, and the size of a head."""

    heads: int
    key_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads} heads on {self.key_heads} of {self.size}"


CACHE_DTYPES = ("f32", "f16")
"""Dtypes of the KV cache."""
SHAPES = (AttentionShape(32, 8, 128), AttentionShape(16, 4, 256), AttentionShape(16, 2, 256), AttentionShape(9, 3, 64))
"""Shapes of Llama-3-8B, Qwen3.5-4B, Qwen3-Next and SmolLM2-135M."""


def make_attention_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    shapes = bench.select_size(SHAPES, (AttentionShape(4, 2, 32),))
    kinds = [(shape, kind, "" if kind == "f32" else f", {kind}") for shape in shapes for kind in CACHE_DTYPES]
    for shape, kind, suffix in kinds:
        for tokens in bench.select_size((256, 1024, 4096, 16384, 65536), (40,)):
            yield Case(
                f"{shape}, 1 token on {tokens}{suffix}", partial(measure_attention, bench, shape, 1, tokens, kind)
            )
    for shape, kind, suffix in kinds:
        for tokens in bench.select_size((128, 512, 2048, 8192), (20,)):
            yield Case(
                f"{shape}, {tokens} tokens{suffix}", partial(measure_attention, bench, shape, tokens, tokens, kind)
            )
        if not bench.tiny:
            yield Case(
                f"{shape}, 512 tokens on 8192{suffix}", partial(measure_attention, bench, shape, 512, 8192, kind)
            )


def measure_attention(
    bench: BenchmarkDevice, shape: AttentionShape, tokens: int, cells: int, kind: str
) -> Iterator[ResultRow]:
    """Measure the attention of the last `tokens` tokens of a context; each token attends to all tokens before it.

    For a single token the graph reads as many caches in turn as exceed the cache of the device.
    """
    nbytes = 2 * (4 if kind == "f32" else 2) * cells * shape.key_heads * shape.size
    copies = bench.select_size(max(2, min(32, -(-bench.uncached_bytes // 4 // nbytes))), 2) if tokens == 1 else 1
    pos = input("pos", (1, tokens), "i32")
    mask, inputs = ops.causal_mask(pos, cells=cells), {"pos": np.arange(cells - tokens, cells, dtype=np.int32)[None]}
    weights: dict[str, npt.NDArray[np.generic]] = {}
    results = {"mask": mask}  # an output, so that no later value reuses its memory
    for i in range(copies):
        q = input(f"q{i}", (1, tokens, shape.heads, shape.size))
        k, v = (weight(f"{name}{i}", (1, cells, shape.key_heads, shape.size), kind) for name in "kv")
        results[f"y{i}"] = ops.attention(q, k, v, mask, scale=shape.size**-0.5)
        some = bench.rng.standard_normal(1 << 16, dtype="f4")
        inputs[q.node.name] = np.resize(some, q.shape)
        weights |= {x.node.name: np.resize(some, x.shape).astype(x.dtype.storage) for x in (k, v)}
    _executor, launches = bench.load_and_record(Graph(results), weights, inputs)
    own = [launch for launch in launches if "mask" not in launch.kernel.name]
    seen = tokens * (2 * cells - tokens + 1) / 2
    flops = 4 * shape.heads * shape.size * seen
    row = bench.measure_launches([own], copies).as_row(nbytes if tokens == 1 else 0, flops, bench.copy_bandwidth)
    yield {**row, "launches": len(own) / copies, "kernels": ", ".join(dict.fromkeys(x.kernel.name for x in own))}
