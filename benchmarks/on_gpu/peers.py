"""What others do on the same device in the same run, where they are installed: PyTorch, flash-linear-attention."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from . import delta_net
from .bench import Bench, Case, LeftOut, Row

KEY_HEADS, HEADS, SIZE = 16, 32, 128


def cases(bench: Bench) -> Iterator[Case]:
    yield Case("versions", _versions)
    yield Case("PyTorch, copy of 1 GiB", partial(_copy, bench))
    yield Case("PyTorch, product 8192³ in bfloat16", partial(_product, bench))
    for tokens in bench.choose((512, 2048, 4096, 8192, 16384, 32768), (65,)):
        yield Case(f"flash-linear-attention, {tokens} tokens", partial(_prefill, bench, 1, tokens))
    yield Case("flash-linear-attention, 4 × 8192 tokens", partial(_prefill, bench, 4, bench.choose(8192, 65)))
    for batch in bench.choose((1, 8, 32, 64, 256), (1,)):
        yield Case(f"flash-linear-attention, 1 token, batch {batch}", partial(_decode, bench, batch))
    for tokens in bench.choose((512, 2048, 8192), (20,)):
        yield Case(f"PyTorch, attention of {tokens} tokens", partial(_attention, bench, tokens))


def _versions() -> Iterator[Row]:
    for name in ("torch", "triton", "flash-linear-attention", "fla-core", "flashinfer-python"):
        try:
            yield {"package": name, "version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            yield {"package": name, "version": "not installed"}


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise LeftOut("PyTorch is not installed") from None
    if not torch.cuda.is_available():
        raise LeftOut("PyTorch sees no CUDA device")
    return torch


def _rules(bench: Bench) -> tuple[Any, Any, Any]:
    torch = _torch()
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as why:
        raise LeftOut(f"flash-linear-attention is not installed ({why})") from None
    return torch, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def _seconds(bench: Bench, torch: Any, work: Callable[[], object], each: int = 1) -> float:
    """Median seconds on the device, after three runs to warm up; captured in a graph where there are several."""
    for _ in range(3):
        work()
    run: Callable[[], object] = work
    torch.cuda.synchronize()
    if each > 1:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(each):
                work()
        run = graph.replay
        run()
    repeats = bench.choose(30, 2)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3 / each


def _copy(bench: Bench) -> Iterator[Row]:
    torch = _torch()
    x = torch.randn(bench.enough // 4, device="cuda")
    into = torch.empty_like(x)
    yield {"GB/s": 2 * bench.enough / _seconds(bench, torch, lambda: into.copy_(x)) / 1e9}
    yield {"GB/s": bench.copy_bandwidth / 1e9, "by": "the driver"}


def _product(bench: Bench) -> Iterator[Row]:
    torch, n = _torch(), bench.choose(8192, 64)
    x, w = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield {"TFLOP/s": 2 * n**3 / _seconds(bench, torch, lambda: x @ w) / 1e12}


def _operands(bench: Bench, torch: Any, batch: int, tokens: int) -> dict[str, Any]:
    """As a model has them: bfloat16, normalised keys, decays and states in float32."""

    def unit(heads: int) -> Any:
        x = torch.randn(batch, tokens, heads, SIZE, device="cuda")
        return torch.nn.functional.normalize(x, dim=-1).to(torch.bfloat16)

    decay = -0.05 * torch.rand(batch, tokens, HEADS, device="cuda")
    return {
        **{"q": unit(KEY_HEADS), "k": unit(KEY_HEADS), "g": decay},
        "v": torch.randn(batch, tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16),
        "beta": torch.rand(batch, tokens, HEADS, device="cuda", dtype=torch.bfloat16),
        "initial_state": torch.randn(batch, HEADS, SIZE, SIZE, device="cuda"),
    }


def _theirs(bench: Bench, torch: Any, rule: Any, batch: int, tokens: int, each: int = 1) -> float:
    given = _operands(bench, torch, batch, tokens)
    with torch.no_grad():
        return _seconds(bench, torch, lambda: rule(**given, output_final_state=True), each)


def _prefill(bench: Bench, batch: int, tokens: int) -> Iterator[Row]:
    """Theirs with bfloat16 operands, ours with float32 ones and bfloat16 products (fast), or pairs of these (exact)."""
    torch, chunked, _ = _rules(bench)
    theirs = _theirs(bench, torch, chunked, batch, tokens)
    torch.cuda.empty_cache()
    p = delta_net.problem(bench, delta_net.Shape(KEY_HEADS, HEADS, SIZE), batch, tokens)
    row: Row = {"theirs µs": theirs * 1e6}
    for name, exact in (("fast", False), ("exact", True)):
        ours = bench.time_launches([delta_net.chunks(bench, p, p.state, exact)]).seconds
        row |= {f"{name} µs": ours * 1e6, f"{name}: theirs / ours": theirs / ours}
    yield row


def _decode(bench: Bench, batch: int) -> Iterator[Row]:
    """In graphs of 8 on one state, with which theirs keeps its last one in memory of its own."""
    torch, _, recurrent = _rules(bench)
    theirs = _theirs(bench, torch, recurrent, batch, 1, 8)
    p = delta_net.problem(bench, delta_net.Shape(KEY_HEADS, HEADS, SIZE), batch, 1)
    ours = bench.time_launches([delta_net.steps(bench, p, p.state) * 8], 8).seconds
    yield {"theirs µs": theirs * 1e6, "ours µs": ours * 1e6, "theirs / ours": theirs / ours}


def _attention(bench: Bench, tokens: int) -> Iterator[Row]:
    """32 heads on 8 of 128, causal, in bfloat16; ours stands in the part on attention."""
    torch = _torch()
    q = torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    taken = _seconds(bench, torch, lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
    yield {"µs": taken * 1e6, "TFLOP/s": 4 * 32 * 128 * tokens * (tokens + 1) / 2 / taken / 1e12}
