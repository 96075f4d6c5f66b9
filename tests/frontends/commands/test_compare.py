"""``hocket compare``: divergences against their definition, and the refusal of models that do not belong together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hocket.cli import main
from hocket.frontends.commands.compare import compute_kl_divergence_per_row
from hocket.frontends.gguf import open_gguf

from ...given.commands import Capture
from ...given.models.goldens import TINY, TINY_GOLDENS
from ...given.models.spelled import write_llama


def compare(capsys: Capture, first: object, second: object, text: object, *words: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["compare", str(first), str(second), "-f", str(text), "-c", "64", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((TINY_GOLDENS / "heldout.txt").read_text()[:2000])
    return path


def test_the_divergence_is_the_mean_of_its_definition():
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((130, 9)).astype(np.float32) * 3 for _ in range(2))
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (first, second))
    want = [sum(a * math.log(a / b) for a, b in zip(row, other, strict=True)) for row, other in zip(p, q, strict=True)]
    assert compute_kl_divergence_per_row(first, second) == pytest.approx(want, rel=1e-9)
    assert not compute_kl_divergence_per_row(first, first).any()
    # Large logits neither overflow nor lose the difference.
    assert compute_kl_divergence_per_row(first + 1e4, first).max() < 1e-2


@pytest.mark.long
def test_a_model_equals_itself_and_its_perplexity_is_the_one_of_the_command(text, capsys):
    row = compare(capsys, TINY, TINY, text)
    assert (row["kl_divergence"], row["max_kl_divergence"], row["same_top_token"]) == (0, 0, 1)
    assert main(["perplexity", TINY, str(text), "-c", "64", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert row["perplexity_a"] == row["perplexity_b"] == score["perplexity"]
    assert (row["chunks"], row["positions"]) == (score["chunks"], score["scored"])


@pytest.mark.long
def test_fewer_bits_diverge_more(text, tmp_path, capsys):
    rows = []
    for name in ("q5_1", "q4_0"):
        out = tmp_path / f"{name}.gguf"
        assert main(["quantize", str(TINY), str(out), name, "--allow-requantize", "--pure", "-t", "1"]) == 0
        rows.append(compare(capsys, TINY, out, text, "--exact"))
    assert 0 < rows[0]["kl_divergence"] < rows[1]["kl_divergence"] < 0.5
    assert 0.5 < rows[1]["same_top_token"] < rows[0]["same_top_token"] < 1
    assert all(row["kl_divergence_error"] < row["kl_divergence"] < row["max_kl_divergence"] for row in rows)


def test_the_report_is_four_lines(text, capsys):
    assert main(["compare", str(TINY), str(TINY), "-f", str(text), "-c", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["KL divergence of B from A", "same top token", "perplexity"]


def test_models_with_other_tokens_are_refused(text, tmp_path, capsys):
    other = write_llama(tmp_path / "other.gguf")
    assert main(["compare", str(TINY), str(other), "-f", str(text), "-c", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    count = len(open_gguf(other).strings("tokenizer.ggml.tokens"))
    assert f"other.gguf: has other tokens than {TINY}, {count} and " in line
    assert line.endswith("; compare files of one model")
