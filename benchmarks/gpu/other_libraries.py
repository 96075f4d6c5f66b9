"""Measure other libraries on the same device in the same run: PyTorch, flash-linear-attention, FlashQLA and FlashInfer.

A library that is not installed is left out. PyTorch comes first, because its products and its attention compile
nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

from . import delta_net
from .attention import SHAPES, AttentionShape
from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow

DELTA_NET_SHAPE, TINY_SHAPE = delta_net.DeltaNetShape(16, 32, 128), delta_net.DeltaNetShape(1, 2, 64)
STEPS_PER_GRAPH = 8
"""The number of decode steps in one graph."""
TORCH_ATTENTION = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
"""The back ends of PyTorch's attention, as its manual names them."""


def make_peer_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    yield Case("versions", _list_versions)
    yield Case("PyTorch, copy of 1 GiB", partial(_measure_torch_copy, bench))
    for shape in bench.select_size(((8192, 8192, 8192), (8192, 18432, 2560), (8192, 2560, 9216)), ((64, 64, 64),)):
        title = "×".join(map(str, shape))
        yield Case(f"PyTorch, product {title} in bfloat16", partial(_measure_torch_matmul, bench, shape))
    for heads, tokens in product(
        bench.select_size((SHAPES[0], SHAPES[1]), (AttentionShape(4, 2, 32),)),
        bench.select_size((512, 2048, 8192), (20,)),
    ):
        yield Case(
            f"PyTorch, attention of {tokens} tokens, {heads}", partial(_measure_torch_attention, bench, heads, tokens)
        )
    for tokens in bench.select_size((512, 2048, 4096, 8192, 16384, 32768), (65,)):
        yield Case(f"flash-linear-attention, {tokens} tokens", partial(_compare_fla_prefill, bench, 1, tokens))
    yield Case(
        "flash-linear-attention, 4 × 8192 tokens", partial(_compare_fla_prefill, bench, 4, bench.select_size(8192, 65))
    )
    for batch, tokens in bench.select_size(((1, 2048), (1, 8192), (1, 32768), (4, 8192)), ((1, 65),)):
        yield Case(f"FlashQLA, {batch} × {tokens} tokens", partial(_compare_flash_qla_prefill, bench, batch, tokens))
    for batch in bench.select_size((1, 8, 32, 64, 256), (1,)):
        yield Case(f"flash-linear-attention, 1 token, batch {batch}", partial(_compare_fla_decode, bench, batch))
        yield Case(f"FlashInfer, 1 token, batch {batch}", partial(_compare_flashinfer_decode, bench, batch))
    for tokens in bench.select_size((512, 2048, 8192, 32768), (65,)):
        yield Case(f"FlashInfer, {tokens} tokens", partial(_compare_flashinfer_prefill, bench, tokens))
    for tokens in bench.select_size((4096, 65536), (40,)):
        yield Case(
            f"FlashInfer, attention of 1 token on {tokens}", partial(_measure_flashinfer_attention, bench, tokens)
        )


def _list_versions() -> Iterator[ResultRow]:
    """Yield the version of each package."""
    for name in ("torch", "triton", "flash-linear-attention", "fla-core", "flashinfer-python", "flash-qla", "tilelang"):
        try:
            yield {"package": name, "version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            yield {"package": name, "version": "not installed"}


def _import_torch() -> Any:
    """Import PyTorch. Raises `NothingToMeasure` if it is missing or sees no CUDA device."""
    try:
        import torch
    except (ImportError, OSError) as why:  # a library of CUDA that does not load is an error of the system
        raise NothingToMeasure(f"PyTorch is not installed, or does not load ({' '.join(str(why).split())})") from None
    if not torch.cuda.is_available():
        raise NothingToMeasure("PyTorch sees no CUDA device")
    return torch


def _import_names(library: str, module: str, *names: str) -> tuple[Any, ...]:
    """Import functions of a library. Raises `NothingToMeasure` if it is missing, does not load, or lacks a name."""
    try:
        loaded = importlib.import_module(module)
        return tuple(getattr(loaded, name) for name in names)
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as why:  # of another version
        text = " ".join(f"{type(why).__name__}: {why}".split())
        raise NothingToMeasure(f"{library} is not installed, or another version ({text})") from None


def _import_fla_rules(bench: BenchmarkDevice) -> tuple[Any, Any, Any]:
    """Import PyTorch and two functions of flash-linear-attention: the chunked and the recurrent delta rule.

    Raises:
        NothingToMeasure: One of the packages is missing.
    """
    names = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
    chunked, recurrent = _import_names("flash-linear-attention", "fla.ops.gated_delta_rule", *names)
    return _import_torch(), chunked, recurrent


def _measure_torch_seconds(bench: BenchmarkDevice, torch: Any, work: Callable[[], object], each: int = 1) -> float:
    """Return the median seconds of one call on the device, after three calls to warm up.

    Args:
        bench: The device.
        torch: The module PyTorch.
        work: The function that is measured.
        each: The number of calls in one CUDA graph; 1 measures calls without a graph.
    """
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
    repeats = bench.select_size(30, 2)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3 / each


def _measure_torch_copy(bench: BenchmarkDevice) -> Iterator[ResultRow]:
    """Measure a device copy in PyTorch, and the copy of the driver."""
    torch = _import_torch()
    x = torch.randn(bench.uncached_bytes // 4, device="cuda")
    into = torch.empty_like(x)
    yield {"GB/s": 2 * bench.uncached_bytes / _measure_torch_seconds(bench, torch, lambda: into.copy_(x)) / 1e9}
    yield {"GB/s": bench.copy_bandwidth / 1e9, "by": "the driver"}


def _measure_torch_matmul(bench: BenchmarkDevice, shape: tuple[int, int, int]) -> Iterator[ResultRow]:
    """Measure a bfloat16 matmul in PyTorch, which calls cuBLAS; `shape` has the tokens, the rows and the columns."""
    torch, (tokens, rows, columns) = _import_torch(), shape
    x, w = (torch.randn(count, columns, device="cuda", dtype=torch.bfloat16) for count in (tokens, rows))
    taken = _measure_torch_seconds(bench, torch, lambda: x @ w.t())
    yield {"µs": taken * 1e6, "TFLOP/s": 2 * tokens * rows * columns / taken / 1e12}


def _make_operands(bench: BenchmarkDevice, torch: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Create operands as in a model: bfloat16, normalised keys, decays and states in float32."""
    of = bench.select_size(DELTA_NET_SHAPE, TINY_SHAPE)

    def unit(heads: int) -> Any:
        x = torch.randn(batch, tokens, heads, of.size, device="cuda")
        return torch.nn.functional.normalize(x, dim=-1).to(torch.bfloat16)

    decay = -0.05 * torch.rand(batch, tokens, of.heads, device="cuda")
    return {
        **{"q": unit(of.key_heads), "k": unit(of.key_heads), "g": decay},
        "v": torch.randn(batch, tokens, of.heads, of.size, device="cuda", dtype=torch.bfloat16),
        "beta": torch.rand(batch, tokens, of.heads, device="cuda", dtype=torch.bfloat16),
        "initial_state": torch.randn(batch, of.heads, of.size, of.size, device="cuda"),
    }


def _time_peer_rule(bench: BenchmarkDevice, torch: Any, rule: Any, batch: int, tokens: int, each: int = 1) -> float:
    """Return the seconds of a delta rule of another library, for `each` calls in a graph."""
    operands = _make_operands(bench, torch, batch, tokens)
    with torch.no_grad():
        return _measure_torch_seconds(bench, torch, lambda: rule(**operands, output_final_state=True), each)


def _compare_with_own(bench: BenchmarkDevice, theirs: float, batch: int, tokens: int) -> ResultRow:
    """Return a row with the seconds of another library and of hocket.

    Prompts are measured with bfloat16 products (fast) and with pairs of them (exact), single tokens in graphs of
    `STEPS_PER_GRAPH` steps. The operands of hocket are float32.
    """
    p = delta_net.make_problem(bench, bench.select_size(DELTA_NET_SHAPE, TINY_SHAPE), batch, tokens)
    if tokens == 1:
        variants, each = {"ours": delta_net.bind_steps(bench, p, p.state) * STEPS_PER_GRAPH}, STEPS_PER_GRAPH
    else:
        variants, each = (
            {name: delta_net.bind_chunks(bench, p, p.state, name == "exact") for name in ("fast", "exact")},
            1,
        )
    row: ResultRow = {"theirs µs": theirs * 1e6}
    for name, launches in variants.items():
        seconds = bench.measure_launches([launches], each).seconds
        row |= {f"{name} µs": seconds * 1e6, f"{name}: theirs / ours": theirs / seconds}
    return row


def _compare_fla_prefill(bench: BenchmarkDevice, batch: int, tokens: int) -> Iterator[ResultRow]:
    """Compare a prompt with flash-linear-attention, which has bfloat16 operands."""
    torch, chunked, _ = _import_fla_rules(bench)
    theirs = _time_peer_rule(bench, torch, chunked, batch, tokens)
    torch.cuda.empty_cache()
    yield _compare_with_own(bench, theirs, batch, tokens)


def _compare_flash_qla_prefill(bench: BenchmarkDevice, batch: int, tokens: int) -> Iterator[ResultRow]:
    """Compare a prompt with FlashQLA, which has the interface of flash-linear-attention."""
    torch, (rule,) = _import_torch(), _import_names("FlashQLA", "flash_qla", "chunk_gated_delta_rule")
    theirs = _time_peer_rule(bench, torch, rule, batch, tokens)
    torch.cuda.empty_cache()
    yield _compare_with_own(bench, theirs, batch, tokens)


def _compare_fla_decode(bench: BenchmarkDevice, batch: int) -> Iterator[ResultRow]:
    """Compare a decode step with flash-linear-attention, which writes its last state to new memory."""
    torch, _, recurrent = _import_fla_rules(bench)
    yield _compare_with_own(bench, _time_peer_rule(bench, torch, recurrent, batch, 1, STEPS_PER_GRAPH), batch, 1)


def _compare_flashinfer_prefill(bench: BenchmarkDevice, tokens: int) -> Iterator[ResultRow]:
    """Compare a prompt of one sequence with FlashInfer, which takes decays as factors and bfloat16 operands."""
    torch, rule = _import_torch(), _import_names("FlashInfer", "flashinfer.gdn_prefill", "chunk_gated_delta_rule")[0]
    x = _make_operands(bench, torch, 1, tokens)
    x |= {name: x[name][0] for name in ("q", "k", "v", "g", "beta")}
    gates = {"g": x["g"].exp(), "beta": x["beta"].float()}
    more = {"cu_seqlens": torch.tensor([0, tokens], device="cuda"), "output_final_state": True}
    more["initial_state"] = x["initial_state"]
    with torch.no_grad():
        theirs = _measure_torch_seconds(bench, torch, lambda: rule(x["q"], x["k"], x["v"], **gates, **more))
    torch.cuda.empty_cache()
    yield _compare_with_own(bench, theirs, 1, tokens)


def _compare_flashinfer_decode(bench: BenchmarkDevice, batch: int) -> Iterator[ResultRow]:
    """Compare a decode step with FlashInfer, which overwrites its state."""
    torch, name = _import_torch(), "gated_delta_rule_decode_pretranspose"
    (step,) = _import_names("FlashInfer", "flashinfer.gdn_decode", name)
    x = _make_operands(bench, torch, batch, 1)
    heads = bench.select_size(DELTA_NET_SHAPE, TINY_SHAPE).heads
    biases = {name: torch.zeros(heads, device="cuda") for name in ("A_log", "dt_bias")}
    a = torch.randn(batch, 1, heads, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        options = {**biases, "state": x["initial_state"], "a": a, "b": x["beta"], "use_qk_l2norm": False}
        theirs = _measure_torch_seconds(bench, torch, lambda: step(x["q"], x["k"], x["v"], **options), STEPS_PER_GRAPH)
    yield _compare_with_own(bench, theirs, batch, 1)


def _measure_flashinfer_attention(bench: BenchmarkDevice, tokens: int) -> Iterator[ResultRow]:
    """Measure FlashInfer's decode attention: 32 heads on 8 of size 128, in float16.

    The part ``attention`` has the times of hocket.
    """
    torch, attend = _import_torch(), _import_names("FlashInfer", "flashinfer.decode", "single_decode_with_kv_cache")[0]
    q = torch.randn(32, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(tokens, 8, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    taken = _measure_torch_seconds(bench, torch, lambda: attend(q, k, v, kv_layout="NHD"), bench.select_size(8, 2))
    yield {"µs": taken * 1e6, "GB/s": 4 * tokens * 8 * 128 / taken / 1e9}


def _measure_torch_attention(bench: BenchmarkDevice, shape: AttentionShape, tokens: int) -> Iterator[ResultRow]:
    """Measure PyTorch's causal attention in bfloat16, by each of its back ends that accepts the shape.

    The part ``attention`` has the times of hocket.

    Raises:
        NothingToMeasure: No back end accepts the shape.
    """
    torch = _import_torch()
    attention = importlib.import_module("torch.nn.attention")
    q = torch.randn(1, shape.heads, tokens, shape.size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, shape.key_heads, tokens, shape.size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    refusals = []
    for name in TORCH_ATTENTION:
        try:
            with attention.sdpa_kernel(getattr(attention.SDPBackend, name)):
                taken = _measure_torch_seconds(bench, torch, lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
        except RuntimeError as why:  # "No available kernel"
            refusals.append(f"{name}: {' '.join(str(why).split())}")
            continue
        flops = 4 * shape.heads * shape.size * tokens * (tokens + 1) / 2
        yield {"by": name, "µs": taken * 1e6, "TFLOP/s": flops / taken / 1e12}
    if len(refusals) == len(TORCH_ATTENTION):
        raise NothingToMeasure(f"PyTorch has no kernel for the shape: {'; '.join(refusals)}")
