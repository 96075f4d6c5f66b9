"""Attention rows without a finite score: an infinite query makes all scores negative infinity, and the result is 0."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import Graph, input, ops, state

from ..given.devices.emulation import needs_compiler

KEYS, HEADS, KEY_HEADS, SIZE = 70, 4, 2, 64


def compute(device: str, cache: str, inputs: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> np.ndarray:
    tokens = len(inputs["q"])
    q, mask = input("q", (tokens, HEADS, SIZE)), input("mask", (tokens, KEYS))
    k, v = (ops.reshape(state(n, x.shape, cache), shape=(KEYS, KEY_HEADS, SIZE)) for n, x in states.items())
    run = hocket.load(hocket.plan(Graph({"y": ops.attention(q, k, v, mask, scale=0.3)}), device), {})
    for name, numbers in states.items():
        run.store.state(name)[...] = numbers
    return run.run(inputs)["y"]


@needs_compiler
@pytest.mark.parametrize(
    ("device", "cache", "tokens"),
    [
        *[("cuda-emulated:0", cache, tokens) for cache in ("f32", "f16", "q8_0") for tokens in (1, 40)],
        *[("cpu:0", cache, 1) for cache in ("f32", "f16", "q8_0", "q4_0")],
        *[("numpy:0", cache, tokens) for cache in ("f32", "q8_0") for tokens in (1, 40)],
    ],
)
def test_a_row_without_a_finite_score_is_zero(device: str, cache: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    states = {name: np.abs(rng.standard_normal((KEYS, KEY_HEADS * SIZE))) + 0.5 for name in "kv"}
    inputs = {"q": rng.standard_normal((tokens, HEADS, SIZE)).astype(np.float32)}
    inputs["mask"] = np.zeros((tokens, KEYS), np.float32)
    inputs["q"][0, 1, 3] = inputs["q"][-1, 0, 5] = -np.inf
    expected, result = (compute(on, cache, inputs, states) for on in ("reference:0", device))
    assert not np.any(expected[0, 1])
    assert not np.any(result[0, 1])
    assert not np.any(result[-1, 0])
    worst = {"f32": 1e-5, "f16": 1e-2, "q8_0": 2e-2, "q4_0": 0.3}[cache]  # the reference keeps states as float64
    np.testing.assert_allclose(result, expected, atol=worst * np.max(np.abs(expected)))
