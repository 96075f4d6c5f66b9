"""The rerank endpoint, in the formats of Jina and TEI, and the service of an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import hocket
from hocket.frontends.serving.served_model import EncoderService, is_non_generative
from hocket.server.app import create_app
from hocket.server.options import ServerOptions

from ...given.fakes.fake_service import FakeService, RunningServer, build_metadata, serve
from ...given.models.cross_encoder import write_cross_encoder
from ...given.models.goldens import path_of

DOCUMENTS = ["no", "the answer", "an answer", "the"]
QUERY = "the answer"


@pytest.fixture(name="server", scope="module")
def rank_server() -> Iterator[RunningServer]:
    with serve(FakeService()) as running:
        yield running


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_come_in_the_order_of_their_scores(server: RunningServer, path: str) -> None:
    answer = server.post(path, {"model": "any", "query": QUERY, "documents": DOCUMENTS}).json()
    assert [(result["index"], result["relevance_score"]) for result in answer["results"]] == [
        (1, 2),
        (2, 1),
        (3, 1),
        (0, 0),
    ]
    assert (answer["object"], answer["model"]) == ("list", "fake-model")
    count = sum(len(server.service.tokenizer.encode(QUERY + document)) for document in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


@pytest.mark.parametrize(("top", "count"), [(0, 0), (2, 2), (9, 4)])
def test_the_best_documents_can_be_asked_for(server: RunningServer, top: int, count: int) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": top, "return_documents": True}
    results = server.post("/rerank", body).json()["results"]
    assert [result["document"]["text"] for result in results] == ["the answer", "an answer", "the", "no"][:count]


def test_texts_are_ranked_in_the_format_of_tei(server: RunningServer) -> None:
    assert server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS[:2]}).json() == [
        {"index": 1, "score": 2.0},
        {"index": 0, "score": 0.0},
    ]
    assert server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS[:1], "return_text": True}).json() == [
        {"index": 0, "score": 0.0, "text": "no"}
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, None),
        ({"query": 3, "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": "b"}, "documents"),
        ({"query": "a", "documents": [1]}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
    ],
)
def test_wrong_rerank_requests_are_refused(server: RunningServer, body: dict[str, object], param: str | None) -> None:
    answer = server.post("/rerank", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_model_without_rank_head_refuses_in_one_line() -> None:
    service = FakeService()
    service.ranks = False
    with serve(service) as server:
        answer = server.post("/rerank", {"query": "a", "documents": ["b"]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "this model has no head that ranks documents",
        )


@pytest.mark.long
def test_an_encoder_is_served_without_an_engine(tmp_path: Path) -> None:
    metadata = {key: value for key, value in build_metadata().items() if key != "tokenizer.chat_template"}
    count = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    write_cross_encoder(tmp_path / "ranker.gguf", metadata, count)
    with hocket.Model(tmp_path / "ranker.gguf", exact=True) as model:
        assert is_non_generative(model)
        service = EncoderService(model, name="ranker", version="0")
        client = TestClient(create_app(service, ServerOptions()), base_url="http://127.0.0.1")
        assert client.get("/health").json() == {"status": "ok"}
        answer = client.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
        scores, token_count = service.rank(QUERY, DOCUMENTS)
        assert [result["relevance_score"] for result in answer["results"]] == sorted(map(float, scores), reverse=True)
        assert len(set(map(float, scores))) == len(DOCUMENTS)
        assert answer["usage"]["total_tokens"] == token_count
        refused = client.post("/completion", json={"prompt": "a"})
        assert refused.json()["error"]["message"] == (
            "bert is an encoder and generates no text; use /v1/embeddings or /rerank"
        )
        assert client.get("/slots").json()[0]["is_processing"] is False
        assert "decode" not in client.get("/plan").text
        assert client.get("/metrics").status_code == 200


def test_a_model_that_generates_needs_an_engine() -> None:
    with hocket.Model(path_of("llama")) as model:
        assert not is_non_generative(model)
