"""Multi-token prediction: the block that guesses is a plain layer behind its inputs, and its guesses change no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import generate_tokens
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.generation.speculative import MtpDrafter, SpeculativeDecoder
from hocket.frontends.inference.rewind import keep_first_tokens_of_last_step
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import DECODERS, Batch, Model, Step, StepGraphBuilder, load_model
from hocket.frontends.models.decoder import Decoder
from hocket.frontends.open_model import open_model
from hocket.graph import input

from ...given.models import architectures
from ...given.models.exact import SAME, ExactRun
from ...given.models.goldens import F64, TINY, nmse, path_of
from ...given.models.rewritten import with_blocks_ahead

EXACT = DeviceGroup(exact=True)
HAND_ON_RESIDUALS = ("mimo2", "step35")
"""Architectures with blocks that are given the residual before the last norm."""
GREEDY = Sampling(temperature=0.0)
TOKENS = [5, 17, 3, 40, 9, 22, 31]


def source_of(name: str, folder: Path) -> Path:
    return path_of(name) if name == "qwen35" else architectures.write_model(name, folder)


class Guessers:
    """The blocks that guess, each run by itself over whole texts in float64, with nothing of how steps feed them."""

    def __init__(self, model: Model, run: ExactRun) -> None:
        assert model.hyper.mtp_blocks is not None
        self.model, self.run, self.hyper = model, run, model.hyper.mtp_blocks
        self.streams = self.hyper.draft_columns // self.hyper.width
        self.table = self.tensor("token_embd.weight")
        self.output = self.tensor("output.weight") if model.weights.has_used_tensor("output.weight") else self.table

    def tensor(self, name: str) -> F64:
        return self.model.gguf.tensor(name).dequantise().astype(np.float64)

    def normalise(self, name: str, x: F64, *, centred: bool = False) -> F64:
        x = x - x.mean(-1, keepdims=True) if centred else x
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.hyper.norm.eps) * self.tensor(f"{name}.weight")

    def __call__(self, k: int, tokens: list[int], before: F64) -> tuple[F64, F64]:
        """Return the hidden state after block k and its logits, for each token with the hidden state `before` it."""
        count, width, family = len(tokens), self.hyper.width, self.hyper.family
        name = f"blk.{self.model.layer_count_without_mtp + k}.nextn"
        shape = (count, self.streams, width)
        token = np.broadcast_to(self.normalise(f"{name}.enorm", self.table[tokens])[:, None], shape)
        both = np.concatenate([token, self.normalise(f"{name}.hnorm", before.reshape(shape))], axis=-1)
        x = both @ self.tensor(f"{name}.eh_proj.weight").T
        frame = StepGraphBuilder(Step(1, count, 32, 32, count, "both"))
        kind = DECODERS[family.residuals] if self.streams > 1 else Decoder
        decoder = kind(self.hyper, self.model.weights, frame)
        hidden_input = input("given", shape if self.streams > 1 else (count, width))
        behind = decoder.run_block(self.model.layer_count_without_mtp + k, self.hyper.blocks[k], hidden_input)
        graph = frame.build_graph({"behind": behind, "read": decoder.apply_output_norm(behind, name)})
        feeds = self.model.inputs(Step(1, count, 32, 32, 1, "guess"), Batch([tokens], [0]))
        feeds = {leaf.node.name: feeds[leaf.node.name] for leaf in graph.inputs if leaf.node.name != "given"}
        weights = {leaf.node.name: self.tensor(leaf.node.name) for leaf in graph.weights}
        outputs, _ = ops.evaluate(graph, {**weights, **feeds, "given": x.reshape(hidden_input.shape)})
        behind, read = outputs["behind"], outputs["read"]
        if self.streams == 1:
            centred = self.model.architecture == "nemotron_h_moe"
            read = self.normalise(f"{name}.shared_head_norm", behind, centred=centred)
        handed = behind if self.streams > 1 or self.model.architecture in HAND_ON_RESIDUALS else read
        return handed.reshape(count, -1), read @ self.output.T


def later(rows: F64) -> F64:
    """Return the rows before each token, and before one more."""
    return np.concatenate([np.zeros_like(rows[:1]), rows])


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("deepseek2-moe", 1),
        ("glm4moe-moe", 2),
        ("mimo2-moe", 3),
        ("step35-moe", 2),
        ("hy_v3-moe", 1),
        ("qwen35", 1),
        ("deepseek4-moe", 1),
        ("qwen4exp-moe", 1),
        ("glm5-next-moe", 1),
        ("nemotron_h_moe-dense", 1),
        ("hy_v4-moe", 2),
    ],
)
def test_each_block_reads_a_token_with_the_result_of_the_previous_block_for_the_previous_token(
    name: str, blocks: int, tmp_path: Path
) -> None:
    model = with_blocks_ahead(tmp_path / "ahead.gguf", source_of(name, tmp_path), 1.0, blocks).with_mtp_blocks()
    run, count, read = ExactRun(model), len(TOKENS), len(TOKENS) - blocks - 1
    logits = run(Step(1, read, 32, 32, read, "both"), Batch([TOKENS[:read]], [0], [(0, i) for i in range(read)]))
    hidden = run.outputs["hidden"]
    assert hidden.shape == (read, model.draft_input_columns)
    guessed, seen = [], hidden[-1:]
    for at in range(read, count):
        step = Step(1, 1, 32, 32, 1, "guess", draft_block=min(at - read, blocks - 1))
        guessed.append(run(step, Batch([TOKENS[at : at + 1]], [at], draft_inputs=seen)))
        seen = run.outputs["hidden"]
    guessers = Guessers(model, run)
    # The first block reads the operand of the output matrix, with MiMo and Step the residual before the last norm,
    # else all streams.
    rows = hidden[:, : model.draft_input_columns // blocks]
    if guessers.streams == 1:
        what_output_reads = guessers.normalise("output_norm", rows) if model.architecture in HAND_ON_RESIDUALS else rows
        assert nmse(what_output_reads @ guessers.output.T, logits) <= SAME
    want = []
    for k in range(blocks):
        before = later(rows)
        rows, answers = guessers(k, TOKENS[: len(before)], before)
        want.append(answers[-1])
    _, answers = guessers(blocks - 1, TOKENS, np.concatenate([before, rows[-1:]]))
    assert nmse(np.stack(guessed), np.stack([*want, answers[-1]])[:, None]) <= SAME


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "devices", "blocks"),
    [
        ("qwen35", 2, 1),
        ("mimo2-moe", 1, 3),
        ("deepseek4-moe", 2, 1),
        ("glm4moe-moe", 2, 2),
        ("qwen35", 1, 1),
        ("qwen4exp-moe", 2, 1),
        ("glm5-next-moe", 1, 1),
        ("nemotron_h_moe-dense", 2, 1),
        ("mimo2-moe", 3, 2),
    ],
)
def test_drafts_of_the_model_change_no_token(name: str, devices: int, blocks: int, tmp_path: Path) -> None:
    group = DeviceGroup(
        devices=tuple(f"cpu:{i}" for i in range(devices)), split_mode="tensor" if devices > 1 else "auto", exact=True
    )
    model = with_blocks_ahead(tmp_path / "ahead.gguf", source_of(name, tmp_path), 30.0, blocks)
    plain, guessing = Session(model, on=group, context=64), Session(model.with_mtp_blocks(), on=group, context=64)
    ahead = SpeculativeDecoder(guessing, MtpDrafter(guessing), 3)
    want = list(generate_tokens(plain, TOKENS, limit=30, sampling=GREEDY))
    assert list(generate_tokens(guessing, TOKENS, limit=30, sampling=GREEDY, ahead=ahead)) == want
    assert guessing.lengths == plain.lengths
    for state in plain.state_names:
        if "cache" not in state:  # cells behind the end are not read
            assert nmse(np.ravel(guessing.store.state(state))[None], np.ravel(plain.store.state(state))[None]) <= 1e-11
    assert 0 < ahead.counts.accepted_tokens < ahead.counts.drafted_tokens


@pytest.mark.long
def test_run_drafts_with_the_model_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(with_blocks_ahead(tmp_path / "ahead.gguf", Path(TINY), 30.0).gguf.path)
    plain = ["run", path, "-p", "Once", "-n", "9", "--temp", "0", "--exact", "-c", "64"]
    assert main(plain) == 0
    want = capsys.readouterr().out
    assert main([*plain, "--draft-max", "2"]) == 0
    output = capsys.readouterr()
    assert output.out == want
    assert " tokens accepted, " in output.err
    with hocket.Model(path, exact=True, context=64, draft_max=2) as model:
        (text,) = model.generate_batch(["Once"], max_tokens=9, temperature=0)
        assert "".join(model.generate("Once", max_tokens=9, temperature=0)) == text
        assert ("Once" + text).strip() == want.strip()
        with pytest.raises(ModelError, match="has no guesses; leave out draft and draft_max, or context_shift"):
            next(model.generate("Once", context_shift=True))
    with pytest.raises(ModelError, match=r"has no block that guesses further tokens \(MTP\)"):
        hocket.Model(TINY, draft_max=2)


def test_a_saved_state_holds_nothing_of_drafts(tmp_path: Path) -> None:
    model = with_blocks_ahead(tmp_path / "ahead.gguf", path_of("qwen35"), 30.0)
    guessing, plain = Session(model.with_mtp_blocks(), on=EXACT, context=64), Session(model, on=EXACT, context=64)
    guessing.evaluate([TOKENS], reversible=True)
    save_state(guessing, [TOKENS], tmp_path / "state")
    assert load_state(plain, tmp_path / "state") == [TOKENS]
    one = [[TOKENS[0]]]
    assert np.array_equal(plain.evaluate(one)[0], guessing.evaluate(one)[0])


def test_a_model_without_such_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no block that guesses further tokens \(MTP\); name a draft model"):
        open_model(path_of("qwen3")).with_mtp_blocks()
    with pytest.raises(ModelError, match=r"does not run the blocks of kimi-k3 .*; name a draft model with draft=FILE"):
        with_blocks_ahead(
            tmp_path / "ahead.gguf", architectures.write_model("kimi-k3-moe", tmp_path), 1.0
        ).with_mtp_blocks()


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["kimi-linear-moe", "mamba2-dense", "lfm2-dense", "minimax-01-moe", "qwen35"])
def test_tokens_are_taken_back_without_reading_any_anew(name: str, tmp_path: Path) -> None:
    model = open_model(source_of(name, tmp_path))
    want, got = (Session(model, on=EXACT, context=64) for _ in range(2))
    for token_count in (1, 3, 4):
        want.evaluate([TOKENS[:token_count]])
        got.evaluate([TOKENS[:4]], every_position=True, reversible=True)
        ran = got.planned_steps
        keep_first_tokens_of_last_step(got, token_count)
        assert got.planned_steps == ran
        assert got.lengths == want.lengths
        for state in want.state_names:
            if not want.is_per_cell_cache(state):
                assert nmse(np.ravel(got.store.state(state))[None], np.ravel(want.store.state(state))[None]) <= 1e-12
    assert nmse(got.evaluate([[9]])[0], want.evaluate([[9]])[0]) <= 1e-12
    with pytest.raises(ModelError, match="there are no 1 token of a reversible step"):
        keep_first_tokens_of_last_step(got, 1)


def test_a_repeated_stack_has_no_states_of_drafts(tmp_path: Path) -> None:
    gguf = open_model(architectures.write_model("nanbeige-dense", tmp_path)).gguf
    model = load_model(replace(gguf, metadata={**gguf.metadata, "nanbeige.num_loops": 2}))
    assert model.layer_count_without_mtp == 2 * model.hyper.stored_blocks
    session = Session(model, on=EXACT, context=64)
    assert set(session.state_names) == set(session.store.states)


def test_a_block_that_keeps_more_than_a_cache_is_refused(tmp_path: Path) -> None:
    model = with_blocks_ahead(tmp_path / "ahead.gguf", architectures.write_model("deepseek4-moe", tmp_path), 1.0)
    metadata = {**model.gguf.metadata, "deepseek4.attention.compress_ratios": 4}
    gguf = replace(model.gguf, metadata=metadata)
    with pytest.raises(ModelError, match="keeps what cannot be taken back; name a draft model with draft=FILE"):
        load_model(gguf).with_mtp_blocks()
