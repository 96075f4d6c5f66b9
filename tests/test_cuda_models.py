"""Whole models on emulated CUDA devices, within the limits that hold for the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.frontends.open import open_model
from hocket.frontends.session import Group, Session

from .emulation import needs_compiler
from .test_cpu_models import FIXTURES, INDEX, SUPPORTED

pytestmark = needs_compiler
GROUPS = {"one": Group(("cuda-emulated:0",)), "two": Group(("cuda-emulated:0", "cuda-emulated:1"), "tensor")}
STEPS = 3


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_model_has_the_logits_of_llama_cpp(name, group):
    """A prompt in one batch, then some tokens one by one."""
    folder, entry = FIXTURES / name, INDEX[name]
    tokens, golden = np.load(folder / "tokens.npy").tolist(), np.load(folder / "logits.npy").astype(np.float64)
    session, many = Session(open_model(folder / "model.gguf"), on=group), len(tokens) - STEPS
    parts = [tokens[:many], *([token] for token in tokens[many:])]
    logits = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    limit = entry["tol_half" if any(t[0] in "QIM" for t in entry["types"]) else "tol_f32"]
    for found, wanted in ((logits, golden), (logits[many:], golden[many:])):
        assert np.square(found - wanted).sum() / np.square(wanted).sum() <= limit
