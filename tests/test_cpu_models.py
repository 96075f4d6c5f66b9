"""Whole models on the CPU backend, whose activations are rounded to 8 bits before they meet quantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.open import open_model
from hocket.frontends.session import Group, Session

FIXTURES = Path(__file__).parent / "fixtures"
INDEX = {Path(entry["file"]).parent.name: entry for entry in json.loads((FIXTURES / "index.json").read_text())}
SUPPORTED = sorted(path.parent.name for path in FIXTURES.glob("*/model.gguf"))
GROUPS = {
    "one": Group(threads=1),
    "two threads": Group(threads=2),
    "tensor": Group(("cpu:0", "cpu:1", "cpu:2"), "tensor", threads=1),
    "layer": Group(("cpu:0", "cpu:1"), "layer", threads=2),
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_model_has_the_logits_of_llama_cpp_up_to_what_8_bits_cost(name, group):
    """In one batch, and half of it token by token."""
    folder, entry = FIXTURES / name, INDEX[name]
    tokens, golden = np.load(folder / "tokens.npy").tolist(), np.load(folder / "logits.npy").astype(np.float64)
    session = Session(open_model(folder / "model.gguf"), on=group)
    batch = session.evaluate([tokens], every_position=True)[0]
    session.reset(0)
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    limit = entry["tol_half" if any(t[0] in "QIM" for t in entry["types"]) else "tol_f32"]
    for logits in (batch, stepped):
        assert np.square(logits - golden).sum() / np.square(golden).sum() <= limit
