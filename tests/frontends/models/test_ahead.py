"""Multi-token prediction: the block that guesses is a plain layer behind its inputs, and its guesses change no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.drafting import Ahead, OwnDraft
from hocket.frontends.generation.generate import generate
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.models import Batch, Model, Step, load_model
from hocket.frontends.open import open_model
from hocket.frontends.rewinding import take_back
from hocket.frontends.saved_state import load_state, save_state
from hocket.frontends.session import Group, Session

from ...given.models import architectures
from ...given.models.exact import SAME, Run
from ...given.models.goldens import F64, TINY, nmse, path_of
from ...given.models.rewritten import with_block_ahead

EXACT = Group(exact=True)
GREEDY = Sampling(temperature=0.0)
TOKENS = [5, 17, 3, 40, 9, 22, 31]


def source_of(name: str, folder: Path) -> Path:
    return path_of(name) if name == "qwen35" else architectures.written(name, folder)


def alone(model: Model) -> Model:
    """The block that guesses as a model of its own, whose embedding a test replaces."""
    gguf, number, arch = model.gguf, model.hyper.stored, model.architecture
    block, head = f"blk.{number}.", f"blk.{number}.nextn.shared_head_norm.weight"
    tensors = {f"blk.0.{n.removeprefix(block)}": t for n, t in gguf.tensors.items() if n.startswith(block)}
    tensors = {n: t for n, t in tensors.items() if ".nextn." not in n}
    tensors |= {n: t for n, t in gguf.tensors.items() if not n.startswith("blk.")}
    tensors["output_norm.weight"] = gguf.tensors[head]
    tensors.setdefault("output.weight", gguf.tensors["token_embd.weight"])
    keys = {"block_count": 1, "nextn_predict_layers": 0, "full_attention_interval": 1, "leading_dense_block_count": 0}
    metadata = {**gguf.metadata, **{f"{arch}.{key}": value for key, value in keys.items()}}
    return load_model(replace(gguf, tensors=tensors, metadata=metadata))


def rms(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.long(every=5)
@pytest.mark.parametrize("name", ["deepseek2-moe", "glm4moe-moe", "mimo2-moe", "hy_v3-moe", "qwen35"])
def test_the_block_that_guesses_is_a_layer_over_the_token_and_what_was_made_of_the_one_before(
    name: str, tmp_path: Path
) -> None:
    model = with_block_ahead(tmp_path / "ahead.gguf", source_of(name, tmp_path), 1.0).guessing()
    run, count = Run(model), len(TOKENS)
    read, rest = Step(1, count - 2, 16, 16, count - 2, "both"), Step(1, 1, 16, 16, 1, "guess")
    logits = run(read, Batch([TOKENS[:-2]], [0], [(0, i) for i in range(count - 2)]))
    hidden = run.outputs["hidden"]
    seen = [np.zeros_like(hidden[:1]), hidden]
    guessed = []
    for at in (count - 2, count - 1):
        guessed.append(run(rest, Batch([TOKENS[at : at + 1]], [at], seen=seen[-1][-1:])))
        seen.append(run.outputs["hidden"])

    def tensor(tail: str) -> F64:
        return model.gguf.tensor(f"blk.{model.hyper.stored}.nextn.{tail}.weight").dequantise().astype(np.float64)

    table = model.gguf.tensor("token_embd.weight").dequantise().astype(np.float64)
    before = np.concatenate(seen)[:count]
    eps = model.hyper.norm.eps
    # What is handed on is what the output matrix reads; MiMo's block is given the residual before the last norm.
    output = run.weights.get("output.weight", table)
    normed = rms(hidden, run.weights["output_norm.weight"], eps) if name == "mimo2-moe" else hidden
    assert nmse(normed @ output.T, logits) <= SAME
    both = np.concatenate([rms(table[TOKENS], tensor("enorm"), eps), rms(before, tensor("hnorm"), eps)], axis=1)
    joined = np.zeros_like(table)
    joined[:count] = both @ tensor("eh_proj").T
    plain = Run(alone(model), {"token_embd.weight": joined})
    want = plain(Step(1, count, 16, 16, 2), Batch([list(range(count))], [0], [(0, count - 2), (0, count - 1)]))
    assert nmse(np.concatenate(guessed), want) <= SAME


@pytest.mark.long(every=4)
@pytest.mark.parametrize(("name", "devices"), [("qwen35", 2), ("mimo2-moe", 1), ("glm4moe-moe", 2), ("qwen35", 1)])
def test_guesses_of_the_model_change_no_token(name: str, devices: int, tmp_path: Path) -> None:
    group = Group(tuple(f"cpu:{i}" for i in range(devices)), "tensor" if devices > 1 else "auto", exact=True)
    model = with_block_ahead(tmp_path / "ahead.gguf", source_of(name, tmp_path), 30.0)
    plain, guessing = Session(model, on=group, context=64), Session(model.guessing(), on=group, context=64)
    ahead = Ahead(guessing, OwnDraft(guessing), 3)
    want = list(generate(plain, TOKENS, limit=30, sampling=GREEDY))
    assert list(generate(guessing, TOKENS, limit=30, sampling=GREEDY, ahead=ahead)) == want
    assert guessing.lengths == plain.lengths
    assert all(np.array_equal(guessing.store.state(n), plain.store.state(n)) for n in plain.states if "state" in n)
    assert 0 < ahead.accepted.right < ahead.accepted.guessed


@pytest.mark.long
def test_run_guesses_with_the_model_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(with_block_ahead(tmp_path / "ahead.gguf", Path(TINY), 30.0).gguf.path)
    plain = ["run", path, "-p", "Once", "-n", "9", "--temp", "0", "--exact", "-c", "64"]
    assert main(plain) == 0
    want = capsys.readouterr().out
    assert main([*plain, "--draft-max", "2"]) == 0
    said = capsys.readouterr()
    assert said.out == want
    assert " tokens accepted, " in said.err
    with hocket.Model(path, exact=True, context=64, draft_max=2) as model:
        (text,) = model.generate_batch(["Once"], max_tokens=9, temperature=0)
        assert "".join(model.generate("Once", max_tokens=9, temperature=0)) == text
        assert ("Once" + text).strip() == want.strip()
        with pytest.raises(ModelError, match="has no guesses; leave out draft and draft_max, or context_shift"):
            next(model.generate("Once", context_shift=True))
    with pytest.raises(ModelError, match=r"has no block that guesses further tokens \(MTP\)"):
        hocket.Model(TINY, draft_max=2)


def test_a_saved_state_holds_nothing_of_guesses(tmp_path: Path) -> None:
    model = with_block_ahead(tmp_path / "ahead.gguf", path_of("qwen35"), 30.0)
    guessing, plain = Session(model.guessing(), on=EXACT, context=64), Session(model, on=EXACT, context=64)
    guessing.evaluate([TOKENS], reversible=True)
    save_state(guessing, [TOKENS], tmp_path / "state")
    assert load_state(plain, tmp_path / "state") == [TOKENS]
    one = [[TOKENS[0]]]
    assert np.array_equal(plain.evaluate(one)[0], guessing.evaluate(one)[0])


def test_a_model_without_such_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no block that guesses further tokens \(MTP\); name a draft model"):
        open_model(path_of("qwen3")).guessing()
    with pytest.raises(ModelError, match=r"does not run the block .* of qwen4exp; leave out --draft-max, or name"):
        with_block_ahead(tmp_path / "ahead.gguf", architectures.written("qwen4exp-moe", tmp_path), 1.0).guessing()


@pytest.mark.long(every=5)
@pytest.mark.parametrize("name", ["kimi-linear-moe", "mamba2-dense", "lfm2-dense", "minimax-01-moe", "qwen35"])
def test_tokens_are_taken_back_without_reading_any_anew(name: str, tmp_path: Path) -> None:
    model = open_model(source_of(name, tmp_path))
    want, got = (Session(model, on=EXACT, context=64) for _ in range(2))
    for kept in (1, 3, 4):
        want.evaluate([TOKENS[:kept]])
        got.evaluate([TOKENS[:4]], every_position=True, reversible=True)
        ran = got.steps
        take_back(got, kept)
        assert got.steps == ran
        assert got.lengths == want.lengths
        for state in want.states:
            if not want.is_cache(state):
                assert nmse(np.ravel(got.store.state(state))[None], np.ravel(want.store.state(state))[None]) <= 1e-12
    assert nmse(got.evaluate([[9]])[0], want.evaluate([[9]])[0]) <= 1e-12
    with pytest.raises(ModelError, match="there are no 1 tokens of a reversible step"):
        take_back(got, 1)
