"""Decoders with ``attention.causal = false``: each token sees those behind it, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hocket import ops
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import ARCHITECTURES, Batch, Model, Step
from hocket.frontends.models.inputs.attention_window import AttentionWindow
from hocket.frontends.models.inputs.graph_builder import StepGraphBuilder
from hocket.frontends.open_model import open_model
from hocket.graph import Graph

from ...given.models.architectures import ALL, golden, write_model
from ...given.models.exact import with_metadata
from ...given.models.goldens import F64, nmse, path_of


def compute_hidden(model: Model, tokens: list[int]) -> F64:
    """Return the operand of the output matrix for each token, in float64."""
    count = len(tokens)
    step = Step(1, count, count, count, count, "hidden")
    model.graph(replace(step, output_kind="logits"))  # which reads the output matrix
    graph = model.graph(step)
    weights = {w.node.name: model.gguf.tensor(w.node.name).dequantise().astype(np.float64) for w in graph.weights}
    inputs = model.inputs(step, Batch([tokens], [0], [(0, i) for i in range(count)], [[]]))
    with np.errstate(divide="ignore"):  # the logarithm of 0 hides a cell
        return next(iter(ops.evaluate(graph, {**weights, **inputs})[0].values()))


def causal_and_open(name: str, folder: Path) -> tuple[Model, Model]:
    model = open_model(write_model(name, folder))
    return model, with_metadata(model, attention__causal=False)


DECODERS = [
    name
    for name in ALL
    if (family := ARCHITECTURES[name.rsplit("-", 1)[0]]).is_causal
    and family.uses_attention
    and family.mixer != "compressed"
]


@pytest.mark.nightly(cases=44)
@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", DECODERS)
def test_the_first_token_of_every_decoder_sees_the_last_one(name: str, tmp_path: Path) -> None:
    causal, seeing = causal_and_open(name, tmp_path)
    tokens = golden(name)[0][:5]
    other = [*tokens[:-1], (tokens[-1] + 1) % causal.vocabulary_size]
    assert causal.is_causal
    assert not seeing.is_causal
    assert nmse(compute_hidden(causal, tokens)[:4], compute_hidden(causal, other)[:4]) <= 1e-20
    assert nmse(compute_hidden(seeing, tokens)[:1], compute_hidden(seeing, other)[:1]) > 1e-9


def reference(model: Model, tokens: list[int], heads: int, kv_heads: int, eps: float) -> F64:
    """A LLaMA in which all tokens see each other, written out."""
    t = {name: tensor.dequantise().astype(np.float64) for name, tensor in model.gguf.tensors.items()}
    x, count = t["token_embd.weight"][tokens], len(tokens)

    def norm(x: F64, name: str) -> F64:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * t[f"{name}.weight"])

    for i in range(model.layer_count_without_mtp):
        block, h = f"blk.{i}", norm(x, f"blk.{i}.attn_norm")
        q, k, v = (
            (h @ t[f"{block}.attn_{c}.weight"].T).reshape(count, n, -1)
            for c, n in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        )
        angles = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, q.shape[-1], 2) / q.shape[-1])
        turn = np.exp(1j * angles)[:, None]
        q, k = (((z[..., ::2] + 1j * z[..., 1::2]) * turn) for z in (q, k))
        k, v = (np.repeat(z, heads // kv_heads, axis=1) for z in (k, v))
        scores = np.einsum("thd,shd->hts", q, k.conj()).real / np.sqrt(v.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", shares, v).reshape(count, -1) @ t[f"{block}.attn_output.weight"].T
        h = norm(x, f"{block}.ffn_norm")
        gate = h @ t[f"{block}.ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ t[f"{block}.ffn_up.weight"].T)) @ t[f"{block}.ffn_down.weight"].T
    return norm(x, "output_norm")


def test_a_llama_equals_attention_to_all_tokens_written_out() -> None:
    model = with_metadata(open_model(path_of("llama")), attention__causal=False)
    mixer = model.hyper.blocks[0].mixers[0]
    tokens = [3, 9, 27, 4, 60, 11]
    want = reference(model, tokens, mixer.heads, mixer.kv_heads, model.hyper.norm.eps)  # type: ignore[attr-defined]
    assert nmse(compute_hidden(model, tokens), want) <= 1e-12
    rows = Session(model, on=DeviceGroup(devices=("cpu:0", "cpu:1"), exact=True), sequences=2)
    _, got = rows.evaluate([tokens[:2], tokens], every_position=True, hidden=True)
    assert nmse(got, want) <= 1e-9


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_window_or_chunk_hides_tokens_before_and_none_behind(window: int, chunked: bool) -> None:
    step = Step(1, 8, 8, 8, 8)
    mask = StepGraphBuilder(step).attention_mask(AttentionWindow(window, chunked, is_causal=False))
    inputs = {"pos": np.arange(8)[None], "last": np.full((1, 8), 7)}
    with np.errstate(divide="ignore"):  # the logarithm of 0
        got = ops.evaluate(Graph({"mask": mask}), inputs)[0]["mask"][0]
    at = np.arange(8)
    first = at // window * window if chunked else at - window + 1
    assert np.array_equal(got, np.where(at[None] < first[:, None], -np.inf, 0.0))


def test_texts_longer_than_a_batch_are_read_as_a_whole() -> None:
    model = with_metadata(open_model(path_of("llama")), attention__causal=False)
    tokens = np.random.default_rng(0).integers(1, model.vocabulary_size, 40).tolist()
    short = Session(model, on=DeviceGroup(exact=True), batch=8).evaluate([tokens], every_position=True, hidden=True)[0]
    assert nmse(short, compute_hidden(model, tokens)) <= 1e-9


def test_generation_and_blocks_of_tokens_refuse_it(tmp_path: Path) -> None:
    session = Session(with_metadata(open_model(path_of("llama")), attention__causal=False))
    session.evaluate([[1, 2]])
    with pytest.raises(ModelError, match="sees all tokens at once"):
        session.evaluate([[3]])
    with pytest.raises(ModelError, match=r"deepseek4\.attention\.causal is false; blocks of tokens need causal"):
        causal_and_open("deepseek4-moe", tmp_path)


def test_an_encoder_sees_all_tokens_whatever_its_file_says(tmp_path: Path) -> None:
    model, _ = causal_and_open("eurobert-encoder", tmp_path)
    tokens = golden("eurobert-encoder")[0]
    assert np.array_equal(
        compute_hidden(with_metadata(model, attention__causal=True), tokens), compute_hidden(model, tokens)
    )
