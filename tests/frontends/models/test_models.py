"""Model families against the logits of llama.cpp, and against themselves: in steps, side by side, built twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import open_gguf
from hocket.frontends.models import ARCHITECTURES, Batch, Step, build_step_inputs, load_model

from ...given.calls import count_calls
from ...given.models.exact import SAME, STEP, ExactRun, compute_logits_in_one_batch, open_with_metadata
from ...given.models.goldens import DENSE, INDEX, TINY, TINY_GOLDENS, golden, nmse, open_fixture

# ------------------------------------------------------------------------------------------- against llama.cpp


@pytest.mark.parametrize("name", [*DENSE, "qwen3-q8_0", "qwen3-q4_k_m"])
def test_logits_equal_those_of_llama_cpp(name: str) -> None:
    tokens, want = golden(name)
    assert (
        nmse(compute_logits_in_one_batch(ExactRun(load_model(open_fixture(name))), tokens), want)
        <= INDEX[name]["tol_f32"]
    )


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", DENSE)
def test_logits_token_by_token_equal_those_of_llama_cpp(name: str) -> None:
    tokens, want = golden(name)
    run, step = ExactRun(load_model(open_fixture(name))), Step(1, 1, 256, 256, 1)
    got = [run(step, Batch([[token]], [i]))[0] for i, token in enumerate(tokens)]
    assert nmse(np.array(got), want) <= INDEX[name]["tol_f32"]


def test_the_embedded_model_has_the_logits_of_llama_cpp() -> None:
    model = load_model(open_gguf(TINY))
    tokens = np.load(TINY_GOLDENS / "tokens60.npy").tolist()
    want = np.load(TINY_GOLDENS / "logits60_q8_0_dequantized.npy").astype(np.float64)
    assert model.is_recurrent
    assert (model.context_length, model.vocabulary_size, model.layer_count_without_mtp) == (512, 2048, 8)
    assert nmse(compute_logits_in_one_batch(ExactRun(model), tokens), want) <= 1e-8


# --------------------------------------------------------------------------------------------- against themselves


@pytest.mark.parametrize("name", DENSE)
def test_prefill_and_decode_equal_one_batch(name: str) -> None:
    tokens = golden(name)[0][:13]
    want = compute_logits_in_one_batch(ExactRun(load_model(open_fixture(name))), tokens)
    run = ExactRun(load_model(open_fixture(name)))
    # The second run is padded; the others fill their buckets.
    chunks = [
        (tokens[:6], 8, 8),
        (tokens[6:8], 2, 16),
        (tokens[8:11], 8, 16),
        ([tokens[11]], 1, 16),
        ([tokens[12]], 1, 32),
    ]
    at, got = 0, []
    for new, bucket, cells in chunks:
        step = Step(1, bucket, cells, 32, bucket)
        got += list(run(step, Batch([new], [at], [(0, i) for i in range(len(new))]))[: len(new)])
        at += len(new)
    assert nmse(np.array(got), want) <= SAME


@pytest.mark.parametrize("name", ["llama-rope-freqs", "qwen3", "qwen35"])
def test_ragged_sequences_side_by_side_equal_each_alone(name: str) -> None:
    tokens, model = golden(name)[0], load_model(open_fixture(name))
    texts = [tokens[:14], tokens[20:29], tokens[5:8]]
    want = [compute_logits_in_one_batch(ExactRun(model), text) for text in texts]
    run, lengths, got = ExactRun(model), [0, 0, 0], [[], [], []]
    # Sequences of different length, one that idles from the start, and one that joins later.
    for bucket, counts in ((8, (8, 5, 0)), (4, (1, 4, 2)), (1, (1, 0, 1)), (4, (4, 0, 0))):
        new = [text[at : at + n] for text, at, n in zip(texts, lengths, counts, strict=True)]
        step = Step(3, bucket, 16, 32, 3 * bucket)
        outputs = [(i, t) for i, n in enumerate(counts) for t in range(n)]
        logits = run(step, Batch(new, lengths, outputs))
        for (i, _), row in zip(outputs, logits, strict=False):
            got[i].append(row)
        lengths = [at + n for at, n in zip(lengths, counts, strict=True)]
    assert lengths == [14, 9, 3]
    for one, alone in zip(got, want, strict=True):
        assert nmse(np.array(one), alone) <= SAME


def test_logits_come_for_the_last_token_of_each_sequence_unless_asked() -> None:
    tokens, model = golden("qwen3")[0], load_model(open_fixture("qwen3"))
    step = Step(2, 8, 16, 16, 2)
    got = ExactRun(model)(step, Batch([tokens[:8], tokens[8:11]], [0, 0]))
    want = [compute_logits_in_one_batch(ExactRun(model), text)[-1] for text in (tokens[:8], tokens[8:11])]
    assert nmse(got, np.array(want)) <= SAME


def test_zeroed_states_start_a_recurrent_sequence_anew() -> None:
    tokens, model = golden("qwen35")[0], load_model(open_fixture("qwen35"))
    run, step = ExactRun(model), Step(2, 4, 16, 16, 2)
    run(step, Batch([tokens[:4], tokens[4:8]], [0, 0]))
    for name, value in run.states.items():
        if name.startswith(("conv_state", "delta_state")):
            value[1] = 0.0
    got = run(step, Batch([[tokens[8]], tokens[9:12]], [4, 0]))
    want = [compute_logits_in_one_batch(ExactRun(model), text)[-1] for text in ([*tokens[:4], tokens[8]], tokens[9:12])]
    assert nmse(got, np.array(want)) <= SAME


@pytest.mark.parametrize("name", DENSE)
def test_a_model_built_twice_gives_the_same_graph(name: str) -> None:
    step = Step(2, 4, 16, 32, 3)
    one, model = load_model(open_fixture(name)).graph(step), load_model(open_fixture(name))
    model.graph(Step(1, 1, 8, 8, 1))
    two = model.graph(step)
    assert one.digest() == two.digest()
    assert str(one) == str(two)
    masks = [node.attrs["window"] for node in one.nodes if node.op == "causal_mask"]
    assert masks == ([16, 0] if name == "gemma3" else [0])
    assert set(model.graph(step).weights) == set(two.weights)


def test_only_output_rows_reach_the_last_feed_forward() -> None:
    graph = load_model(open_fixture("llama")).graph(Step(1, 16, 16, 16, 2))
    products = {node.name: node.specs[0].shape[0] for node in graph.nodes if node.op == "mul_mat"}
    assert products["blk.0.ffn_up"] == products["blk.1.attn_q"] == 16
    assert products["blk.1.ffn_up"] == products["logits"] == 2


def test_the_work_of_building_a_graph_grows_with_its_layers_alone() -> None:
    """Counted in calls, which no busy host changes: four times the layers cost at most four times the calls."""
    model = open_fixture("llama")
    blocks = {n: t for n, t in model.tensors.items() if n.startswith("blk.0.")}
    others = {n: t for n, t in model.tensors.items() if not n.startswith("blk.")}

    def calls(layers: int) -> int:
        tensors = others | {n.replace("blk.0.", f"blk.{i}."): t for i in range(layers) for n, t in blocks.items()}
        deep = load_model(replace(model, tensors=tensors, metadata={**model.metadata, "llama.block_count": layers}))
        graph, count = count_calls(lambda: deep.graph(Step(1, 1, 256, 256, 1)))
        assert len(graph.states) == 2 * layers
        return count

    assert calls(32) < 4 * calls(8)


# -------------------------------------------------------------------------------------------------- metadata of files


def array_of(folder: Path, values: list[int] | list[bool]) -> object:
    """A metadata array as a file holds it."""
    writer = gguf_package.GGUFWriter(folder / "array.gguf", "none")
    writer.add_array("array", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(folder / "array.gguf").metadata["array"]


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama", {"attention__head_count": 0}, "attention.head_count is 0; need at least 1"),
        ("llama", {"attention__head_count": None}, "attention.head_count is missing"),
        ("llama", {"attention__head_count_kv": 3}, "need a divisor of head_count 4"),
        ("llama", {"attention__head_count": 3, "attention__key_length": None}, "need a divisor of embedding_length"),
        ("llama", {"attention__layer_norm_rms_epsilon": float("nan")}, "need a positive number"),
        ("llama", {"block_count": 1 << 30}, "the file holds only 21 tensors"),
        ("llama", {"block_count": "two"}, "need an integer"),
        ("llama", {"embedding_length": -64}, "need at least 1"),
        ("llama", {"rope__dimension_count": 18}, "need an even number of at most 16"),
        ("llama", {"rope__freq_base": float("inf")}, "need a positive number"),
        ("llama", {"rope__freq_base": 1.0}, "need a number above 1"),
        ("llama", {"rope__scaling__type": "dynamic"}, "need one of none, linear, yarn, longrope"),
        ("llama", {"rope__scaling__factor": -2.0}, "need a positive number"),
        ("qwen3", {"context_length": None}, "context_length is missing"),
        ("qwen3", {"context_length": 1 << 63}, "need at most 2147483647"),
        ("qwen3", {"rope__scaling__factor": 1e-300}, "need a positive number"),
        ("gemma3", {"attention__sliding_window_pattern": 0}, "sliding_window_pattern is 0; need at least 1"),
        ("gemma3", {"rope__freq_base_swa": 1.0}, "rope.freq_base_swa is 1.0; need a number above 1"),
        ("qwen35", {"nextn_predict_layers": 3}, "need fewer than block_count 3"),
        ("qwen35", {"full_attention_interval": 0}, "need at least 1"),
        ("qwen35", {"ssm__group_count": 3}, "need a multiple of group_count 3"),
        ("qwen35", {"ssm__inner_size": 64}, "need time_step_rank * state_size 128"),
        ("qwen35", {"ssm__conv_kernel": 1}, "need at least 2"),
    ],
)
def test_bad_hyperparameters_are_refused(name: str, keys: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(open_with_metadata(name, **keys))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    model = open_fixture("llama")
    many = len(ARCHITECTURES)
    with pytest.raises(
        ModelError, match=f"'mambo' is unknown; need one of the {many} in docs/models.md, such as mamba"
    ):
        load_model(replace(model, metadata={**model.metadata, "general.architecture": "mambo"}))


def test_a_missing_tensor_is_named() -> None:
    model = open_fixture("qwen3")
    tensors = {n: t for n, t in model.tensors.items() if n != "blk.1.attn_q_norm.weight"}
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_q_norm\.weight is missing"):
        load_model(replace(model, tensors=tensors)).graph(STEP)


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    model = open_fixture("qwen35")
    name = "blk.0.ssm_conv1d.weight"
    tensors = {**model.tensors, name: replace(model.tensors[name], shape=(4, 256))}
    with pytest.raises(ModelError, match=r"ssm_conv1d\.weight has shape \[4, 256\]; need \[256, 4\]"):
        load_model(replace(model, tensors=tensors)).graph(STEP)


def test_a_tensor_of_a_dtype_that_cannot_serve_is_refused() -> None:
    model = open_fixture("llama")
    for name, need in (("output_norm.weight", "f32, f16, bf16;"), ("output.weight", "or a quantised type;")):
        tensor = replace(model.tensors[name], dtype=open_fixture("llama").tensors[name].dtype.I32)
        with pytest.raises(ModelError, match=f"tensor {name} is i32; need .*{need}"):
            load_model(replace(model, tensors={**model.tensors, name: tensor})).graph(STEP)


def test_a_tensor_that_would_be_ignored_is_refused() -> None:
    model = open_fixture("llama")
    tensors = {**model.tensors, "blk.1.attn_q.shift": model.tensors["output_norm.weight"]}
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.shift'\] are not part of this architecture"):
        load_model(replace(model, tensors=tensors)).graph(STEP)


def test_a_value_bias_shows_as_its_image_behind_the_output_projection() -> None:
    model, tokens = open_fixture("llama"), golden("llama")[0][:6]
    narrow, wide = model.tensors["output_norm.weight"], model.tensors["output_norm.weight"]
    bias = np.random.default_rng(0).normal(size=32)
    matrix = model.tensors["blk.1.attn_output.weight"].dequantise().astype(np.float64)
    # Attention weights sum to one, so a bias on v passes through; each KV head serves two neighbouring query heads.
    image = matrix @ np.repeat(bias.reshape(2, 16), 2, axis=0).reshape(-1)
    with_v = {**model.tensors, "blk.1.attn_v.bias": replace(narrow, shape=(32,))}
    with_o = {**model.tensors, "blk.1.attn_output.bias": wide}
    got = compute_logits_in_one_batch(
        ExactRun(load_model(replace(model, tensors=with_v)), {"blk.1.attn_v.bias": bias}), tokens
    )
    want = compute_logits_in_one_batch(
        ExactRun(load_model(replace(model, tensors=with_o)), {"blk.1.attn_output.bias": image}), tokens
    )
    assert nmse(got, want) <= SAME
    assert nmse(got, compute_logits_in_one_batch(ExactRun(load_model(model)), tokens)) > 1e-3


def test_every_optional_bias_is_read() -> None:
    model, shapes = open_fixture("llama"), {"attn_k": 32, "attn_v": 32}
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    vector = model.tensors["output_norm.weight"]
    biases = {f"blk.0.{n}.bias": replace(vector, shape=(shapes.get(n, 64),)) for n in names}
    biases["output.bias"] = replace(vector, shape=(128,))
    graph = load_model(replace(model, tensors={**model.tensors, **biases})).graph(STEP)
    assert set(biases) <= {leaf.node.name for leaf in graph.weights}


@pytest.mark.parametrize(
    ("keys", "attrs"),
    [
        ({}, {"freq_scale": 1.0, "ext_factor": 0.0, "mode": "normal", "base": 10000.0, "n_dims": 16}),
        ({"rope__scaling__factor": 4.0}, {"freq_scale": 0.25, "ext_factor": 0.0}),
        ({"rope__scaling__factor": 0.0}, {"freq_scale": 1.0}),
        ({"rope__scale_linear": 2.0}, {"freq_scale": 0.5}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"freq_scale": 1.0, "ext_factor": 0.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0},
            {"freq_scale": 0.125, "ext_factor": 1.0, "attn_factor": 1.0, "original_context": 4096},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 8.0,
                "rope__scaling__original_context_length": 512,
                "rope__scaling__attn_factor": 0.5,
            },
            {"original_context": 512, "attn_factor": 0.5, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ],
)
def test_rope_scaling_reaches_every_rotation(keys: dict[str, object], attrs: dict[str, object]) -> None:
    nodes = [n for n in load_model(open_with_metadata("llama", **keys)).graph(STEP).nodes if n.op == "rope"]
    assert len(nodes) == 4
    for node in nodes:
        assert {name: node.attrs[name] for name in attrs} == attrs


def test_the_attention_scale_can_be_set_and_zero_means_unset() -> None:
    for metadata_scale, scale in ((0.5, 0.5), (0.0, 0.25), (None, 0.25)):
        graph = load_model(open_with_metadata("llama", attention__scale=metadata_scale)).graph(STEP)
        assert {n.attrs["scale"] for n in graph.nodes if n.op == "attention"} == {scale}


def test_a_value_per_layer_may_stand_for_one_value(tmp_path: Path) -> None:
    plain = load_model(open_fixture("llama")).graph(STEP).digest()
    same = open_with_metadata("llama", attention__head_count=array_of(tmp_path, [4, 4]))
    assert load_model(same).graph(STEP).digest() == plain
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight has shape \[64, 64\]; need \[32, 64\]"):
        load_model(open_with_metadata("llama", attention__head_count=array_of(tmp_path, [4, 2]))).graph(STEP)
    with pytest.raises(ModelError, match="need a value for each of 2 layers"):
        load_model(open_with_metadata("llama", attention__head_count=array_of(tmp_path, [4])))
    # Of a hybrid model only the layers that attend count.
    hybrid = open_with_metadata("qwen35", attention__head_count_kv=array_of(tmp_path, [0, 0, 1]))
    assert load_model(hybrid).graph(STEP).digest() == load_model(open_fixture("qwen35")).graph(STEP).digest()


@pytest.mark.parametrize("flags", [[True, True, False], [1, 1, 0]])
def test_recurrent_layers_may_be_listed(tmp_path: Path, flags: list[int]) -> None:
    listed = open_with_metadata(
        "qwen35", full_attention_interval=None, attention__recurrent_layers=array_of(tmp_path, flags)
    )
    assert load_model(listed).graph(STEP).digest() == load_model(open_fixture("qwen35")).graph(STEP).digest()


def test_blocks_that_predict_further_tokens_are_not_run() -> None:
    model = open_with_metadata("qwen35", block_count=4, nextn_predict_layers=1)
    tensors = {**model.tensors, "blk.3.nextn.eh_proj.weight": model.tensors["output_norm.weight"]}
    graph = load_model(replace(model, tensors=tensors)).graph(STEP)
    assert graph.digest() == load_model(open_fixture("qwen35")).graph(STEP).digest()


# --------------------------------------------------------------------------------------------- steps and their inputs


def test_inputs_of_a_ragged_batch_are_padded() -> None:
    step = Step(sequences=2, tokens=4, cells=8, context=16, outputs=3)
    got = build_step_inputs(step, Batch([[5, 6, 7], [8]], [2, 0]), taps=4)
    want = {
        "tokens": [5, 6, 7, 0, 8, 0, 0, 0],
        "pos": [[2, 3, 4, 0], [0, 0, 0, 0]],
        "slot": [2, 3, 4, 16, 64, 80, 80, 80],
        "out_ids": [2, 4, 0],
        "valid": [[[1], [1], [1], [0]], [[1], [0], [0], [0]]],
        "conv_rows": [[3, 4, 5], [1, 2, 3]],
    }
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].dtype == (np.float32 if name == "valid" else np.int32)
    expected = build_step_inputs(step, Batch([[5, 6, 7], [8]], [2, 0], [(0, 1)]), taps=4)
    assert expected["out_ids"].tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        got["out_ids"][0] = 1  # the next token gets it again


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch([[1]], [0]), "the step runs 2"),
        (Batch([[1], [2]], [0]), "the step runs 2"),
        (Batch([[1, 2, 3], []], [0, 0]), "has 3 new tokens, the step takes 2"),
        (Batch([[1, 2], [3]], [3, 0]), "would grow from 3 to 5 tokens, the step reads 4 cells"),
        (Batch([[1], [3]], [-1, 0]), "would grow from -1"),
        (Batch([[1], [3]], [0, 0], [(1, 1)]), "wants the logits of (1, 1)"),
        (Batch([[1], [3]], [0, 0], [(0, 0), (1, 0), (0, 0)]), "wants 3 rows of logits, the step gives 2"),
        (Batch([[128], [3]], [0, 0]), "need 0 to 127"),
        (Batch([[1], [-3]], [0, 0]), "need 0 to 127"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Batch, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(open_fixture("llama")).inputs(Step(2, 2, 4, 8, 2), batch)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 1, 1, 1, 1), "sequences is 0"),
        ((1, 1, 9, 8, 1), "reads 9 cells of 8"),
        ((2, 1, 1, 1 << 30, 1), "use a smaller context"),
        ((1, 1.5, 1, 1, 1), "tokens is 1.5"),
    ],
)
def test_an_impossible_step_is_refused(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Step(*sizes)
