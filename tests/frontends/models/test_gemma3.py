"""The parts of Gemma 3 that other families lack: GeGLU, windows with their own rotation, capped logits."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.frontends.models import load_model

from ...given.models.exact import SAME, STEP, ExactRun, compute_logits_in_one_batch, open_with_metadata
from ...given.models.goldens import FIXTURES, INDEX, golden, nmse, open_fixture


def test_a_gated_unit_of_gemma_is_the_one_with_tanh() -> None:
    """llama.cpp has its GELU from a table of f16, so that its logits do not tell tanh from erf."""
    tokens = golden("gemma3")[0]
    want = np.load(FIXTURES / "gemma3" / "logits_f64.npy").astype(np.float64)
    assert (
        nmse(compute_logits_in_one_batch(ExactRun(load_model(open_fixture("gemma3"))), tokens), want)
        <= INDEX["gemma3"]["tol_f32_vs_f64"]
    )


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, [16, 16, 16, 16, 16, 0]),
        ({"attention__sliding_window_pattern": 2}, [16, 0, 16, 0, 16, 0]),
        ({"attention__sliding_window": None}, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_layers_with_a_window_turn_at_a_base_of_their_own(keys: dict[str, object], windows: list[int]) -> None:
    graph = load_model(open_with_metadata("gemma3", rope__freq_base_swa=5e3, **keys)).graph(STEP)
    masks = [n.src[3].node.attrs["window"] for n in graph.nodes if n.op == "attention"]
    turns = [(n.attrs["base"], n.attrs["freq_scale"]) for n in graph.nodes if n.op == "rope" and "q_rope" in n.name]
    assert masks == windows
    assert turns == [(5e3, 1.0) if window else (1e6, 0.125) for window in windows]


def test_logits_of_gemma_may_be_capped() -> None:
    tokens = golden("gemma3")[0][:6]
    free = compute_logits_in_one_batch(ExactRun(load_model(open_fixture("gemma3"))), tokens)
    capped = compute_logits_in_one_batch(
        ExactRun(load_model(open_with_metadata("gemma3", final_logit_softcapping=2.0))), tokens
    )
    assert nmse(capped, 2.0 * np.tanh(free / 2.0)) <= SAME
    assert np.abs(free).max() > 2.0
