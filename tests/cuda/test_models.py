"""Whole models on emulated CUDA devices, within the limits that hold for the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.frontends.open import open_model
from hocket.frontends.session import Group, Session

from ..given.devices.emulation import needs_compiler
from ..given.models.goldens import FLOAT_CACHES, INDEX, golden, limit, nmse, path_of

pytestmark = needs_compiler
GROUPS = {
    "one": Group(("cuda-emulated:0",), **FLOAT_CACHES),
    "two": Group(("cuda-emulated:0", "cuda-emulated:1"), "tensor", **FLOAT_CACHES),
}
STEPS = 3


@pytest.mark.long(every=15)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", INDEX)
def test_a_model_has_the_logits_of_llama_cpp(name, group):
    """A prompt in one batch, then some tokens one by one."""
    tokens, want = golden(name)
    session, many = Session(open_model(path_of(name)), on=group), len(tokens) - STEPS
    parts = [tokens[:many], *([token] for token in tokens[many:])]
    logits = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    for found, wanted in ((logits, want), (logits[many:], want[many:])):
        assert nmse(found.ravel(), wanted.ravel()) <= limit(name)  # the limit is one over all rows
