"""Whole models on the CPU backend, which rounds activations to 8 bits before products with quantised weights."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ...given.models.goldens import DENSE, FLOAT_CACHES, INDEX, MIXTURES, allowed_nmse, golden, nmse, path_of
from ...given.random_rows import nightly_unless

GROUPS = {
    "one": DeviceGroup(threads=1, **FLOAT_CACHES),
    "two threads": DeviceGroup(threads=2, **FLOAT_CACHES),
    "tensor": DeviceGroup(devices=("cpu:0", "cpu:1", "cpu:2"), split_mode="tensor", threads=1, **FLOAT_CACHES),
    "layer": DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="layer", threads=2, **FLOAT_CACHES),
}


FLOATS = (*DENSE, *MIXTURES)
TRIED = {
    *((name, "one") for name in INDEX),
    *((name, group) for name in (*FLOATS, "qwen3-q8_0", "qwen3-q4_k_m") for group in ("two threads", "tensor")),
    *((name, "layer") for name in ("llama", "gemma3", "qwen3next", "qwen3-q4_k_m")),
}
"""Models and groups of each run: every type of weights on one device, and every architecture where it is cut.

Blocks of 32 columns and of 256 are cut, too. A layer is the same on any device. Four models are cut by layers: one has
windows, and one has states.
"""


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("name", "group"), nightly_unless(TRIED, product(INDEX, GROUPS)))
def test_a_model_has_the_logits_of_llama_cpp_up_to_what_8_bits_cost(name, group):
    """In one batch, and half of it token by token."""
    tokens, want = golden(name)
    session = Session(open_model(path_of(name)), on=GROUPS[group])
    batch = session.evaluate([tokens], every_position=True)[0]
    session.reset(0)
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    for logits in (batch, stepped):
        assert nmse(logits, want) <= allowed_nmse(name)
