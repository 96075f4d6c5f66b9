"""Text completions, embeddings and models through the client of OpenAI."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..given.fakes.fake_service import FakeService, RunningServer, serve

openai = pytest.importorskip("openai")


@pytest.fixture(name="server", scope="module")
def text_server() -> Iterator[RunningServer]:
    with serve(FakeService(), aliases=("other",), strict_model=True) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    server.service.answer = "the answer"
    server.service.requests.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def complete(client: openai.OpenAI, prompt: object, **options: Any):
    return client.completions.create(model="other", prompt=prompt, **options)


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    answer = complete(client, "hi")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the answer", "stop")
    assert answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(complete(client, "hi", stream=True, echo=True, stream_options={"include_usage": True}))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == "hithe answer"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"
    assert chunks[-1].usage.total_tokens == 10


def test_prompts_have_several_forms(client: openai.OpenAI, server: RunningServer) -> None:
    server.service.answer = lambda prompt: f"<{prompt}>"
    h, i = server.service.tokenizer.encode_continuation("hi")
    texts = [choice.text for choice in complete(client, ["hi", "yo"], n=2).choices]
    assert texts == ["<hi>", "<hi>", "<yo>", "<yo>"]
    assert [choice.text for choice in complete(client, [[h, i], [h]]).choices] == ["<hi>", "<h>"]
    assert complete(client, [h, i]).choices[0].text == "<hi>"
    assert complete(client, [h, "i", h]).choices[0].text == "<hih>"
    assert complete(client, ["hi", "yo"]).usage.prompt_tokens == 4
    assert complete(client, [h, i], echo=True).choices[0].text == "hi<hi>"


@pytest.mark.parametrize("prompt", [[], "", [[]], [99999], [-1], [1.5], [True], {"x": 1}, [["a", None]]])
def test_a_prompt_without_tokens_or_of_another_form_is_refused(client: openai.OpenAI, prompt: object) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt)


def test_old_logprobs_have_offsets(client: openai.OpenAI) -> None:
    logprobs = complete(client, "hi", logprobs=1, max_tokens=3).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["the", " ", "a"], [0, 3, 4])
    assert (logprobs.token_logprobs, logprobs.top_logprobs[0]) == ([-0.25] * 3, {"!": -0.5})
    chunks = list(complete(client, "hi", logprobs=1, max_tokens=3, stream=True))
    offsets = [o for chunk in chunks for c in chunk.choices if c.logprobs for o in c.logprobs.text_offset]
    assert offsets == [0, 3, 4]
    with pytest.raises(openai.BadRequestError, match="logprobs of prompts"):
        complete(client, "hi", logprobs=1, echo=True)


def test_a_limit_of_zero_reads_the_prompt_alone(client: openai.OpenAI) -> None:
    answer = complete(client, "hi", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("hi", 0)


def test_vectors_are_numbers_or_bytes(client: openai.OpenAI, server: RunningServer) -> None:
    answer = client.embeddings.create(model="other", input=["hi", "the"])  # the client asks for base64
    assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1)
    assert [entry.index for entry in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == 3
    body = {"input": "hi"}
    floats = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    coded = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(floats)
    native = server.post("/embedding", {"content": "hi", "embd_normalize": -1}).json()
    assert native[0]["embedding"][0][0] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": ""},
        {"input": "a", "encoding_format": "int8"},
        {"input": "a", "dimensions": 2},
        {"input": {"content": [{"type": "image_url"}]}},
        {"input": "a", "embd_normalize": 1},
        {"input": "a", "model": "unknown"},
    ],
)
def test_wrong_embedding_requests_are_refused(server: RunningServer, body: dict[str, object]) -> None:
    assert server.post("/v1/embeddings", body).status_code in (400, 404)


def test_the_model_has_all_its_names(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.aliases, model.meta["n_vocab"]) == (
        "fake-model",
        "hocket",
        ["fake-model", "other"],
        270,
    )
    assert client.models.retrieve("other").id == "fake-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")
    with pytest.raises(openai.NotFoundError, match="third"):
        client.completions.create(model="third", prompt="hi")


def test_dimensions_other_than_the_width_are_refused(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="other", input="hi", dimensions=4).data[0].embedding) == 4
    with pytest.raises(openai.BadRequestError, match="dimensions is 3; the vectors of this model have 4 numbers"):
        client.embeddings.create(model="other", input="hi", dimensions=3)


def test_an_alias_that_is_the_name_is_listed_once() -> None:
    with serve(FakeService(), aliases=("fake-model", "second")) as server:
        assert server.get("/v1/models").json()["data"][0]["aliases"] == ["fake-model", "second"]
