"""Rank heads: scores of pairs of texts, against transformers and the logits of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

import hocket
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.pooling import RANK_POOLING
from hocket.frontends.ranking import RANK_TEMPLATE_KEY, RankHead, encode_rank_text, rank_documents, read_rank_head

from ..given.fakes.fake_service import build_metadata
from ..given.models.architectures import add_key, write_file
from ..given.models.cross_encoder import CROSS_ENCODER_KEYS, write_cross_encoder, write_modern_ranker
from ..given.models.goldens import golden, path_of
from ..given.models.rewritten import write_fixture


@pytest.mark.long
def test_a_cross_encoder_scores_as_transformers_does(tmp_path: Path) -> None:
    oracle = write_cross_encoder(tmp_path / "model.gguf")
    import torch

    texts = [[1, 5, 9, 2, 33, 2], [1, 5, 9, 2, 70, 71, 72, 2], [1, 60, 2]]
    with hocket.Model(tmp_path / "model.gguf", exact=True) as model:
        source = model.session.model
        scores = model.pool_texts(texts, read_rank_head(source.gguf, source.architecture).score_token_rows)
        with pytest.raises(hocket.ModelError, match=r"4 \(rank\): it scores pairs of texts"):
            model.embed([[1, 2]])
    with torch.no_grad():
        want = [oracle.double()(input_ids=torch.tensor([text])).logits[0].numpy() for text in texts]
    assert np.abs(np.subtract(scores, want)).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_modern_bert_scores_as_transformers_does(tmp_path: Path, pooling: str) -> None:
    """Its head has a GELU and a norm, and reads the mean of all rows or the first one."""
    oracle = write_modern_ranker(tmp_path / "model.gguf", pooling)
    import torch

    texts = [[1, 5, 9, 2, 33, 2], [1, 5, 9, 2, 70, 71, 72, 2], [1, 60, 2]]
    with hocket.Model(tmp_path / "model.gguf", exact=True) as model:
        source = model.session.model
        head = read_rank_head(source.gguf, source.architecture)
        scores = model.pool_texts(texts, head.score_token_rows)
    assert (head.pools_mean, head.norm is None) == (pooling == "mean", False)
    with torch.no_grad():
        want = [oracle(input_ids=torch.tensor([text])).logits[0].numpy() for text in texts]
    assert np.abs(np.subtract(scores, want)).max() <= 1e-5 * np.abs(want).max()


def test_a_reranker_of_qwen_scores_by_the_probability_of_yes(tmp_path: Path) -> None:
    tokens, want = golden("qwen3")
    yes, no = 7, 30
    reader = GGUFReader(path_of("qwen3"))
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    table = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
    tensors["cls.output.weight"] = table[[yes, no]].astype(np.float32)
    model_file = tmp_path / "model.gguf"
    source = write_fixture(model_file, "qwen3", tensors, pooling_type=RANK_POOLING)
    head = read_rank_head(source.gguf, source.architecture)
    with hocket.Model(model_file, exact=True) as model:
        (score,) = model.pool_texts([list(tokens)], head.score_token_rows)[0]
    logits = want[-1][[yes, no]].astype(np.float64)
    assert score == pytest.approx(1 / (1 + np.exp(logits[1] - logits[0])), rel=1e-3)


def test_a_model_without_a_head_is_refused() -> None:
    with hocket.Model(path_of("llama")) as model, pytest.raises(hocket.ModelError, match="has no head that ranks"):
        rank_documents(model, "a", ["b"])


def test_a_head_without_last_layer_gives_the_first_number() -> None:
    dense = np.eye(2, dtype=np.float32), np.array([0.5, 0], np.float32)
    rows = np.array([[1, 2], [3, 4]], np.float32)
    assert RankHead(dense, None, False).score_token_rows(rows) == pytest.approx([np.tanh(1.5)])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cls.weight", (4, 5)), ("cls.bias", (3,)), ("cls.output.weight", (1, 9)), ("cls.norm.weight", (5,))],
)
def test_a_head_of_wrong_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    width = 8
    writer = GGUFWriter(None, "bert")
    for key, value in {**CROSS_ENCODER_KEYS, "embedding_length": width}.items():
        add_key(writer, f"bert.{key}", value)
    shapes = {"cls.weight": (4, width), "cls.bias": (4,), "cls.output.weight": (1, 4), name: shape}
    for tensor, size in shapes.items():
        writer.add_tensor(tensor, np.zeros(size, np.float32))
    write_file(writer, tmp_path / "head.gguf")
    from hocket.frontends.gguf.reader import open_gguf

    with pytest.raises(hocket.ModelError, match=name.rpartition(".")[0].replace(".", r"\.")):
        read_rank_head(open_gguf(tmp_path / "head.gguf"), "bert")


def test_query_and_document_are_one_text() -> None:
    metadata = build_metadata()
    tokenizer = tokenizer_from_metadata(metadata)

    def show(**keys: object) -> str:
        changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
        ids = encode_rank_text(changed, tokenizer_from_metadata(changed), "the {document}", "<|end|>")
        return tokenizer.decode(ids, special=True)

    end = tokenizer.tokens[tokenizer.eos_id or 0]
    assert show() == "the {document}<|end|>"
    marked = {"add_bos_token": True, "add_eos_token": True}
    assert show(**marked) == f"{end}the {{document}}{end}<|end|>{end}"
    separator = tokenizer.encode("z")[0]
    assert show(**marked, add_sep_token=True, seperator_token_id=separator) == (
        f"{end}the {{document}}{end}z<|end|>{end}"
    )
    template = {**metadata, RANK_TEMPLATE_KEY: "Q: {query} D: {document} A:"}
    assert tokenizer.decode(encode_rank_text(template, tokenizer, "the {document}", "x"), special=True) == (
        "Q: the {document} D: x A:"
    )
    with pytest.raises(hocket.ModelError, match="need a string"):
        encode_rank_text({**metadata, RANK_TEMPLATE_KEY: 3}, tokenizer, "a", "b")
