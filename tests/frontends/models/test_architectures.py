"""Every row of the table of architectures against the logits of llama.cpp, and encoders against PyTorch.

The messages about some models are tested as well.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from hocket import ops
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import open_gguf
from hocket.frontends.gguf.hyperparameter_keys import ArchitectureMetadata
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import ARCHITECTURES, Batch, Model, ModelWeights, Step, load_model
from hocket.frontends.models.picture_tokens import find_picture_token_ranges
from hocket.frontends.models.read_hyperparameters import read_hyperparameters
from hocket.frontends.open_model import open_model

from ...given.models import rwkv
from ...given.models.architectures import ALL, ROWS, golden, write_file, write_model
from ...given.models.exact import with_metadata
from ...given.models.goldens import F64, INDEX, nmse
from ...given.models.sharded import COUNTS, RESULTS

ROUNDED = (
    *("bloom-dense", "codeshell-dense", "falcon-dense", "gpt2-dense", "gptneox-dense", "mpt-dense", "phi2-dense"),
    *("gemma3n-dense", "pockettts-dense", "spark2_5-dense", "starcoder-dense", "starcoder2-dense"),
)
"""Models with a GELU that llama.cpp looks up in half precision, which only backends round as it does."""
CARRIED = (
    *("bailingmoe3-moe", "deepseek2-moe", "falcon-h1-dense", "glm5-next-moe", "jamba-dense"),
    *("lfm2moe-moe", "mamba-dense", "minimax-01-moe", "plamo2-dense", "plm-dense", "qwen4exp-moe", "step35-moe"),
)
"""Models in which something is carried from step to step: latent vectors, states, convolutions, blocks, hashes."""


ENCODERS = [name for name in ALL if ARCHITECTURES[name.rsplit("-", 1)[0]].run_mode == "encoder"]


def exact(model: Model, parts: list[list[int]]) -> F64:
    """Return float64 logits at every position, or an encoder's embedding of each token, of a text in parts."""
    weights: dict[str, F64] = {}
    states: dict[str, F64] = {}
    rows, known = [], list[int]()
    for part in parts:
        step = Step(1, len(part), sum(map(len, parts)), sum(map(len, parts)), len(part))
        graph = model.graph(step)
        for leaf in graph.weights:
            if leaf.node.name not in weights:
                weights[leaf.node.name] = model.gguf.tensor(leaf.node.name).dequantise().astype(np.float64)
        inputs = model.inputs(step, Batch([part], [len(known)], [(0, i) for i in range(len(part))], [known]))
        outputs, changed = ops.evaluate(graph, {**weights, **states, **inputs})
        states |= changed
        rows += outputs.values()
        known += part
    return np.concatenate(rows)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", [name for name in ALL if name not in ROUNDED])
def test_logits_in_one_batch_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokens, want = golden(name)
    assert nmse(exact(open_model(write_model(name, tmp_path)), [tokens])[-ROWS:], want) <= 1e-8


@pytest.mark.parametrize("name", CARRIED)
def test_logits_in_parts_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokens, want = golden(name)
    parts = [tokens[:4], tokens[4:5], tokens[5:]]
    assert nmse(exact(open_model(write_model(name, tmp_path)), parts)[-ROWS:], want) <= 1e-8


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_gelu_is_rounded_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    tokens, want = golden(name)
    session = Session(open_model(write_model(name, tmp_path)), on=DeviceGroup(exact=True))
    assert nmse(session.evaluate([tokens], every_position=True)[0][-ROWS:], want) <= 1e-8


@pytest.mark.parametrize("name", ["bloom-dense", "mpt-dense", "deepseek2-moe", "lfm2moe-moe"])
def test_two_devices_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    tokens, _ = golden(name)
    model = open_model(write_model(name, tmp_path))
    one = Session(model, on=DeviceGroup(exact=True)).evaluate([tokens], every_position=True)[0]
    two = Session(model, on=DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", exact=True)).evaluate(
        [tokens], every_position=True
    )[0]
    assert nmse(two, one) <= 1e-10
    assert np.array_equal(two, one) or name not in ROUNDED  # where a last bit may flip an entry of a table


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_of_texts_side_by_side_agree_with_pytorch_or_llama_cpp_on_any_devices(
    name: str, tmp_path: Path
) -> None:
    tokens, want = golden(name)
    model = open_model(write_model(name, tmp_path))
    for devices in (("cpu:0",), ("cpu:0", "cpu:1")):
        session = Session(model, on=DeviceGroup(devices=devices, split_mode="tensor", exact=True), sequences=2)
        _, rows = session.evaluate([tokens[:5], tokens], every_position=True, hidden=True)
        assert nmse(rows[-ROWS:], want) <= 1e-10
        assert not session.state_names
    with pytest.raises(ModelError, match=f"{model.architecture} is an encoder.*use `hocket embed`"):
        session.evaluate([[1], []])


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[24], [9, 1, 14]])
def test_blocks_of_gemma_3n_from_the_20th_on_read_the_caches_of_earlier_blocks(
    lengths: list[int], tmp_path: Path
) -> None:
    name = "computed_gelu/gemma3n-dense"
    (tmp_path / "computed_gelu").mkdir()
    tokens, want = golden(name)
    gguf = open_model(write_model(name, tmp_path)).gguf
    family = replace(ARCHITECTURES["gemma3n"], activation="gelu tanh")
    hyper = read_hyperparameters(ArchitectureMetadata(gguf, "gemma3n"), family)
    model = Model("gemma3n", gguf, hyper, ModelWeights(gguf, family.ignores, family.optional_tensors))
    ends = np.cumsum(lengths)
    parts = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    assert nmse(exact(model, parts)[-ROWS:], want) <= 1e-8
    states = {leaf.node.name for leaf in model.graph(Step(1, 1, 8, 8, 1)).states}
    assert states == {f"cache_{letter}.{i}" for letter in "kv" for i in range(20)}


@pytest.mark.parametrize("ranges", [((4, 8),), ((0, 2), (5, 6), (90, 96))])
def test_tokens_of_pictures_have_the_lowest_logits(ranges: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    model = open_model(write_model("chameleon-dense", tmp_path))
    assert model.hyper.hidden_tokens == ()
    silent = np.isin(np.arange(96), [i for start, stop in ranges for i in range(start, stop)])
    names = [("IMGIMG" if flag else "t") + str(i) for i, flag in enumerate(silent)]
    named = with_names(model, names)
    assert named.hyper.hidden_tokens == ranges
    want, got = (Session(m, on=DeviceGroup(exact=True)).evaluate([[5, 6]])[0] for m in (model, named))
    assert np.array_equal(got, np.where(silent, np.finfo(np.float32).min, want))


def with_names(model: Model, names: list[str]) -> Model:
    """Return the model as if its tokens had ``names``."""
    path = model.gguf.path.with_name("names.gguf")
    writer = GGUFWriter(None, model.architecture)
    writer.add_token_list(names)
    write_file(writer, path)
    tokens = {"tokenizer.ggml.tokens": open_gguf(path).metadata["tokenizer.ggml.tokens"]}
    return load_model(replace(model.gguf, metadata={**model.gguf.metadata, **tokens}))


@pytest.mark.parametrize(("rows", "want"), [(8195, ()), (8196, ((4, 8196),))])
def test_tokens_of_pictures_without_names_are_where_llama_cpp_has_them(
    rows: int, want: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    gguf = open_model(write_model("chameleon-dense", tmp_path)).gguf
    table = replace(gguf.tensor("token_embd.weight"), shape=(rows, 32))
    gguf = replace(gguf, tensors={**gguf.tensors, "token_embd.weight": table})
    assert find_picture_token_ranges(ArchitectureMetadata(gguf, "chameleon")) == want


def test_xielu_needs_numbers_for_every_block(tmp_path: Path) -> None:
    gguf = open_model(write_model("apertus-dense", tmp_path)).gguf
    without = {key: value for key, value in gguf.metadata.items() if key != "xielu.beta"}
    with pytest.raises(ModelError, match=r"metadata xielu\.beta is missing; need .*an array of 3"):
        load_model(replace(gguf, metadata=without))
    with pytest.raises(ModelError, match=r"metadata xielu\.eps holds inf; need numbers that float32 holds"):
        load_model(replace(gguf, metadata={**gguf.metadata, "xielu.eps": float("inf")}))


@pytest.mark.parametrize(
    ("name", "tensor", "axes"),
    [
        ("gemma3n-dense", "per_layer_token_embd.weight", 2),
        ("mamba-dense", "blk.0.ssm_dt.weight", 2),
        ("step35-moe", "blk.1.ffn_down_exps.weight", 3),
    ],
)
def test_a_tensor_with_too_few_axes_or_none_is_refused(name: str, tensor: str, axes: int, tmp_path: Path) -> None:
    gguf = open_model(write_model(name, tmp_path)).gguf
    others = {key: value for key, value in gguf.tensors.items() if key != tensor}
    flat = replace(gguf.tensor(tensor), shape=(4,))
    with pytest.raises(ModelError, match=rf"tensor {tensor} has shape \[4\]; need at least {axes} axes"):
        load_model(replace(gguf, tensors={**others, tensor: flat})).graph(Step(1, 2, 8, 8, 1))
    with pytest.raises(ModelError, match=rf"tensor {tensor} is missing"):
        load_model(replace(gguf, tensors=others)).graph(Step(1, 2, 8, 8, 1))


def test_half_of_the_columns_that_turn_is_an_even_number(tmp_path: Path) -> None:
    model = open_model(write_model("step35-moe", tmp_path))
    with pytest.raises(ModelError, match=r"step35\.rope\.dimension_count is 10; need a multiple of 4"):
        with_metadata(model, rope__dimension_count=10)


def test_biases_of_distances_need_a_sound_table(tmp_path: Path) -> None:
    path = write_model("t5-relu", tmp_path)
    model = open_model(path)
    tensor = replace(model.gguf.tensor("blk.0.attn_rel_b.weight"), shape=(3, 4))
    gguf = replace(model.gguf, tensors={**model.gguf.tensors, "blk.0.attn_rel_b.weight": tensor})
    weights = ModelWeights(gguf)
    with pytest.raises(ModelError, match=r"attn_rel_b\.weight has 3 buckets; need 4 to 511"):
        replace(model, gguf=gguf, weights=weights).graph(Step(1, 4, 8, 8, 4))


def test_a_model_that_sees_all_tokens_at_once_has_no_steps(tmp_path: Path) -> None:
    tokens, _ = golden("llada-dense")
    session = Session(open_model(write_model("llada-dense", tmp_path)))
    session.evaluate([tokens[:3]])
    with pytest.raises(ModelError, match="sees all tokens at once"):
        session.evaluate([tokens[3:4]])


def test_a_context_in_which_attention_would_have_to_choose_is_refused(tmp_path: Path) -> None:
    model = open_model(write_model("minimax-m3-moe", tmp_path))
    max_tokens = model.hyper.selected_tokens
    model.graph(Step(1, 1, 256, max_tokens, 1))
    with pytest.raises(ModelError, match=f"use a context size of at most {max_tokens}"):
        model.graph(Step(1, 1, 256, max_tokens + 1, 1))


def test_an_optional_tensor_that_is_not_used_changes_nothing(tmp_path: Path) -> None:
    graph = open_model(write_model("refact-moe", tmp_path)).graph(Step(1, 1, 8, 8, 1))
    read = {leaf.node.name for leaf in graph.weights}
    assert "blk.0.attn_q.scale" in read
    assert not read & {"rope_freqs.weight", "blk.0.attn_output.bias", "blk.0.attn_q.input_scale"}


def test_every_architecture_is_compared_with_llama_cpp_or_a_paper() -> None:
    compared = {name.rsplit("-", 1)[0] for name in ALL} | {row["arch"] for row in INDEX.values()}
    assert set(ARCHITECTURES) <= compared | set(rwkv.KINDS)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["qwen4exp-moe", "deepseek4-moe"])
def test_blocks_and_hashes_of_one_sequence_leave_another_alone(name: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 128, 21).tolist()
    model = open_model(write_model(name, tmp_path))
    want = Session(model, on=DeviceGroup(exact=True), context=64).evaluate([tokens])[0]
    both = Session(model, on=DeviceGroup(exact=True), context=64, sequences=2)
    both.evaluate([[7, 8, 9], tokens[:10]])
    both.evaluate([[1], tokens[10:13]])
    assert nmse(both.evaluate([[], tokens[13:]])[1], want) <= 1e-10
    both.reset(1)
    assert nmse(both.evaluate([[2, 3], tokens])[1], want) <= 1e-10


@pytest.mark.long
def test_a_block_of_128_tokens_is_the_same_however_they_come(tmp_path: Path) -> None:
    model = open_model(write_model("deepseek4-moe", tmp_path))
    tokens = np.random.default_rng(1).integers(0, model.vocabulary_size, 140).tolist()
    want = Session(model, on=DeviceGroup(exact=True), context=256).evaluate([tokens])[0]
    parts = Session(model, on=DeviceGroup(exact=True), context=256, batch=50).evaluate([tokens])[0]
    short = Session(model, on=DeviceGroup(exact=True), context=256).evaluate([tokens[13:]])[0]
    assert nmse(parts, want) <= 1e-10 < nmse(short, want)


def test_hashes_need_the_tokens_before(tmp_path: Path) -> None:
    model = open_model(write_model("qwen4exp-moe", tmp_path))
    step = Step(1, 1, 16, 16, 1)
    with pytest.raises(ModelError, match="of which this model needs the last 2; give them as `history_tokens`"):
        model.inputs(step, Batch([[5]], [4]))
    hash_rows = model.inputs(step, Batch([[5]], [4], history_tokens=[[3, 4]]))["ngram_rows"]
    # Multipliers 1, 3, 5; four tables of 128 rows, two for each length.
    assert hash_rows.tolist() == [(5 ^ 12), 128 + (5 ^ 12), 256 + (5 ^ 12 ^ 15), 384 + (5 ^ 12 ^ 15)]
    ended = model.inputs(step, Batch([[5]], [4], history_tokens=[[3, 0]]))["ngram_rows"]
    assert ended.tolist() == [5, 133, 261, 389]


def test_a_saved_sequence_goes_on_with_the_hashes_of_its_last_tokens(tmp_path: Path) -> None:
    model = open_model(write_model("qwen4exp-moe", tmp_path))
    session = Session(model, on=DeviceGroup(exact=True), context=64)
    session.evaluate([[5, 6, 7]])
    save_state(session, [[5, 6, 7]], tmp_path / "state")
    want = session.evaluate([[8]])[0]
    load_state(session, tmp_path / "state")
    assert (session.evaluate([[8]])[0] == want).all()
    session.reset(0)
    assert nmse(session.evaluate([[8]])[0], want) > 1e-3


def test_every_model_has_been_sharded_over_devices() -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    assert set(results) == {*ALL, *rwkv.KINDS}
    assert all(set(errors) == set(map(str, COUNTS)) and max(errors.values()) <= 1e-10 for errors in results.values())
