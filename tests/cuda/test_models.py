"""Whole models on emulated CUDA devices, within the limits that hold for the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ..given.devices.emulation import needs_compiler
from ..given.models.goldens import FLOAT_CACHES, INDEX, allowed_nmse, golden, nmse, path_of

pytestmark = needs_compiler
GROUPS = {
    "one": DeviceGroup(devices=("cuda-emulated:0",), **FLOAT_CACHES),
    "two": DeviceGroup(devices=("cuda-emulated:0", "cuda-emulated:1"), split_mode="tensor", **FLOAT_CACHES),
}
STEPS = 3
MAX_TOKENS = 72
"""Tokens of a text: more than tiles of keys and of tokens have (64), and more than the window of gemma3 (16)."""
ON_TWO = ("llama", "llama-moe", "qwen2", "gemma3", "qwen35moe", "qwen3-q4_k_m")
"""Models that run on two devices each day: one of each family; test_chains.py runs more of them."""


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("name", "group"),
    [
        pytest.param(
            name,
            group,
            id=f"{name}-{count}",
            marks=[pytest.mark.nightly(cases=0)] * (count == "two" and name not in ON_TWO),
        )
        for name in INDEX
        for count, group in GROUPS.items()
    ],
)
def test_a_model_has_the_logits_of_llama_cpp(name, group):
    """A prompt in one batch, then some tokens one by one."""
    tokens, want = (values[:MAX_TOKENS] for values in golden(name))
    session, many = Session(open_model(path_of(name)), on=group), len(tokens) - STEPS
    parts = [tokens[:many], *([token] for token in tokens[many:])]
    logits = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    for found, expected in ((logits, want), (logits[many:], want[many:])):
        assert nmse(found.ravel(), expected.ravel()) <= allowed_nmse(name)  # the limit is one over all rows


@pytest.mark.nightly(cases=4)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", [name for name in INDEX if name.startswith("qwen3-")])
def test_an_exact_model_computes_in_float32_throughout(name):
    """Check that it computes as NumPy does for any weight dtype.

    By default activations of quantised weights are rounded.
    """
    tokens = golden(name)[0][:20]

    def logits(device, exact):
        session = Session(
            open_model(path_of(name)), on=DeviceGroup(devices=(device,), exact=exact, **FLOAT_CACHES), context=32
        )
        parts = [tokens[:-STEPS], *([token] for token in tokens[-STEPS:])]
        return np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])

    expected = logits("numpy:0", True)
    off = {exact: nmse(logits("cuda-emulated:0", exact).ravel(), expected.ravel()) for exact in (True, False)}
    assert off[True] < 1e-11 < off[False]
