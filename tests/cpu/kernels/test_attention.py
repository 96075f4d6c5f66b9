"""Attention on the CPU backend: all variants against the definition in float64, few tokens and many, on any threads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu import target_cpu
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.kernels.attention.bind_attention import MIN_PREFILL_TOKENS
from hocket.ops import REGISTRY

VARIANTS = {
    "causal": {},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "alibi": {"max_bias": 8.0},
    "a mask each": {"mask_heads": "each"},
    "masks tiled": {"mask_heads": "tiled", "max_bias": 8.0},
    "window": {"window": 20},
    "no mask": {"mask": False},
    "no mask, sinks and softcap": {"mask": False, "sinks": True, "softcap": 1.5},
    "rows masked entirely": {"hidden": True},
    "rows masked entirely, sinks": {"hidden": True, "sinks": True},
}
ERROR = 4e-6
"""The float32 error of averaged values of size 1."""
TERMS_ERROR = 2.0**-15
"""The error of weights in two terms, for values of size 4 or less."""
TILED = ("f16", "bf16", "q4_0")
"""Caches that tiles multiply, where a processor has them."""


def close(
    tokens: int,
    heads: tuple[int, int],
    keys: int,
    sizes: tuple[int, int],
    threads: int = 1,
    *,
    batch: int = 2,
    mask: bool = True,
    window: int = 0,
    hidden: bool = False,
    sinks: bool = False,
    mask_heads: str = "one",
    softcap: float = 0.0,
    max_bias: float = 0.0,
    cache: str = "f32",
    apart: bool = False,
    error: float = ERROR,
) -> bool:
    """Whether compiled kernels alone compute attention of the last `tokens` of `keys` positions, twice the same."""
    rng = np.random.default_rng(tokens + keys)
    many, shared = heads
    shapes = {
        "q": (batch, tokens, many, sizes[0]),
        "k": (batch, keys, shared, sizes[0]),
        "v": (batch, keys, shared, sizes[1]),
    }
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if mask:
        distance = np.arange(keys - tokens, keys)[:, None] - np.arange(keys)
        seen = (distance >= 0) & (distance < (window or keys))
        own = {"one": (), "each": (many,), "tiled": (2,)}[mask_heads]
        values = rng.standard_normal((batch, *own, tokens, keys)) if own or max_bias else 0.0
        inputs["mask"] = np.where(np.broadcast_to(seen, (batch, *own, tokens, keys)), values, -np.inf).astype(
            np.float32
        )
        if hidden:
            inputs["mask"][..., [0, tokens - 1], :] = -np.inf
    if sinks:
        inputs["sinks"] = rng.standard_normal(many).astype(np.float32)
    attrs = {"scale": max(1, sizes[0]) ** -0.5, "softcap": softcap, "max_bias": max_bias, "mask_heads": mask_heads}
    cache_inputs = {name: inputs.pop(name) for name in ("k", "v")} if cache != "f32" else {}
    leaves = [
        _rows(name, cache_inputs[name].shape, cache)
        if name in cache_inputs
        else _head_by_head(name, inputs[name].shape)
        if apart and name in ("k", "v")
        else hocket.input(name, inputs[name].shape)
        if name in inputs
        else None
        for name in ("q", "k", "v", "mask", "sinks")
    ]
    backend = CpuBackend(threads)
    graph = hocket.Graph({"y": ops.attention(*leaves, **attrs)})
    run = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), {})
    for name, rows in cache_inputs.items():
        run.store.state(name)[...] = rows.reshape(run.store.state(name).shape)
        cache_inputs[name] = np.array(run.store.state(name)).reshape(rows.shape)
    bound = {name: x.swapaxes(1, 2) if apart and name in ("k", "v") else x for name, x in inputs.items()}
    found, again = (run.run(bound)["y"] for _ in range(2))
    known = {**inputs, **cache_inputs}
    exact = [known[name].astype(np.float64) if name in known else None for name in ("q", "k", "v", "mask", "sinks")]
    kernels = {step.kernel for step in run.time_kernels()[0]}
    assert "NumPy" not in kernels
    if cache in TILED and tokens >= MIN_PREFILL_TOKENS and target_cpu.find_native_or_emulated_amx():
        assert f"amx_attention.attend.{cache}.{cache}" in kernels
    return (
        np.array_equal(found, again) and np.abs(found - REGISTRY["attention"].reference(*exact, **attrs)).max() < error
    )


def _rows(name: str, shape: tuple[int, ...], dtype: str) -> hocket.Value:
    """A state of rows, seen as keys or values."""
    batch, keys, heads, size = shape
    return ops.reshape(hocket.state(name, (batch * keys, heads * size), dtype), shape=shape)


def _head_by_head(name: str, shape: tuple[int, ...]) -> hocket.Value:
    """An input in which all keys or values of a head lie together, seen as rows of all heads."""
    batch, keys, heads, size = shape
    return ops.permute(hocket.input(name, (batch, heads, keys, size)), axes=(0, 2, 1, 3))


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_compiled_and_agrees_with_its_definition(variant, tokens, threads):
    assert close(tokens, (6, 2), 300, (40, 24), threads, **VARIANTS[variant])


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (128, 128), (20, 7), (1, 1), (100, 72), (96, 130), (0, 16)])
@pytest.mark.parametrize("tokens", [1, 3, 15, 16, 33, 70])
def test_heads_of_any_size_are_compiled(tokens, sizes):
    assert close(tokens, (4, 4), tokens, sizes)
    assert close(tokens, (6, 2), tokens + 13, sizes, 2)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 1), (22, 2), (71, 1)])
def test_any_number_of_heads_shares_a_key_head(heads):
    assert all(close(tokens, heads, 70, (16, 16), 2) for tokens in (1, 2, 20))


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("keys", [64, 511, 512, 1000, 5001])
def test_threads_share_the_keys_of_a_long_cache(keys, threads):
    assert close(1, (4, 1), keys, (64, 64), threads, batch=1, sinks=True)
    assert close(3, (3, 3), keys, (64, 64), threads, batch=1, window=keys // 2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("cache_inputs", [{"cache": "f32"}, {"cache": "f16"}, {"apart": True}])
def test_groups_of_heads_walk_through_a_long_cache_all_or_some_or_alone(cache_inputs, threads):
    assert close(2, (8, 4), 1500, (64, 40), threads, batch=1, **cache_inputs)


def test_tokens_far_into_a_cache_skip_what_a_window_hides():
    assert close(64, (6, 2), 3000, (64, 64), 2, window=500)


@pytest.mark.parametrize("tokens", [1, 20])
def test_no_keys_at_all_give_zeros(tokens):
    assert close(tokens, (6, 2), 0, (16, 16), mask=False, sinks=True)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("cache", TILED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_reads_caches_of_fewer_bits(variant, cache):
    """Check caches of fewer bits, by tiles where the processor has them: partial blocks, invisible tiles, several
    units.
    """
    settings = {**VARIANTS[variant], "cache": cache, "error": TERMS_ERROR}
    assert close(40, (6, 2), 300, (32, 32) if cache == "q4_0" else (40, 24), 2, **settings)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (128, 128), (20, 7), (1, 1), (100, 72), (96, 130), (0, 16)])
@pytest.mark.parametrize("tokens", [16, 33, 200])
def test_heads_of_any_size_read_caches_of_fewer_bits(tokens, sizes):
    assert close(tokens, (6, 2), tokens + 13, sizes, 2, cache="f16", error=TERMS_ERROR)


@pytest.mark.parametrize("name", ["q", "v"])
def test_no_number_makes_no_number(name):
    """NaN in a query or a value reaches the tokens that see it."""
    tokens, size = 40, 32
    rows = {n: np.ones((tokens, size), np.float32) for n in ("q", "k", "v")}
    rows[name][7] = np.nan
    k, v = (ops.reshape(hocket.state(n, (tokens, size), "f16"), shape=(tokens, 1, size)) for n in ("k", "v"))
    y = ops.attention(hocket.input("q", (tokens, 1, size)), k, v, scale=1.0)
    run = hocket.load(hocket.plan(hocket.Graph({"y": y}), "cpu:0"), {})
    for n in ("k", "v"):
        run.store.state(n)[...] = rows[n]
    lost = np.isnan(run.run({"q": rows["q"][:, None]})["y"]).all((1, 2))
    assert lost.tolist() == [name == "v" or t == 7 for t in range(tokens)]


@pytest.mark.long
@pytest.mark.parametrize("cache", ["f16", *(pytest.param(n, marks=pytest.mark.nightly(cases=0)) for n in TILED[1:])])
def test_tiles_that_are_emulated_attend(cache):
    """The tests above where a processor has no tiles: as if it had them."""
    variants = ("causal", "masks tiled", "rows masked entirely, sinks")
    tests = [f"test_every_variant_reads_caches_of_fewer_bits[{variant}-{cache}]" for variant in variants]
    if cache == "f16":
        tests += ["test_heads_of_any_size_read_caches_of_fewer_bits[33-sizes6]", "test_no_number_makes_no_number[v]"]
    words = ["-m", "pytest", "-n", "0", *(f"{__file__}::{test}" for test in tests)]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "HOCKET_AMX": "emulated"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(tests)} passed" in done.stdout
