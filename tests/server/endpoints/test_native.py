"""The endpoints of llama-server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from ...given.fakes.fake_service import FakeService, RunningServer, serve


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with serve(FakeService()) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    running.service.answer = "the answer"
    running.service.requests.clear()
    return running


def read_events(response: httpx.Response) -> list[dict[str, object]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_has_the_fields_of_llama_server(server: RunningServer) -> None:
    body = {"prompt": "hi", "n_predict": 4, "return_tokens": True, "n_probs": 2, "stop": ["zz"], "seed": 3}
    result = server.post("/completion", body).json()
    assert (result["content"], result["stop"], result["stop_type"], result["truncated"]) == (
        "the an",
        True,
        "limit",
        False,
    )
    assert (result["tokens_predicted"], result["tokens_evaluated"], result["prompt"]) == (4, 2, "hi")
    assert (len(result["tokens"]), result["has_new_line"], result["model"]) == (4, False, "fake-model")
    settings = result["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["stop"], settings["mirostat"]) == (4, 3, ["zz"], 0)
    (first, *_) = result["completion_probabilities"]
    assert (first["token"], first["bytes"], len(first["top_logprobs"])) == ("the", list(b"the"), 2)
    assert result["timings"]["prompt_n"] + result["timings"]["cache_n"] == 2


def test_a_stream_ends_with_the_whole_object(server: RunningServer) -> None:
    events = read_events(server.post("/completions", {"prompt": "hi", "stream": True, "return_progress": True}))
    assert "".join(str(event["content"]) for event in events) == "the answer"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert (events[-1]["stop_type"], events[-1]["tokens"], "generation_settings" in events[-1]) == ("eos", [], True)
    assert events[0]["prompt_progress"] == {"total": 2, "cache": 2, "processed": 2}
    assert all(len(event["tokens"]) == 1 for event in events[1:-1])


def test_stop_strings_context_and_new_lines_are_reported(server: RunningServer) -> None:
    server.service.answer = "one\nstop two"
    result = server.post("/completion", {"prompt": "hi", "stop": ["stop"]}).json()
    assert (result["stop_type"], result["stopping_word"], result["has_new_line"]) == ("word", "stop", True)
    server.service.answer = "x" * 3000
    result = server.post("/completion", {"prompt": "hi"}).json()
    assert (result["stop_type"], result["truncated"], result["tokens_predicted"]) == ("limit", True, 2046)


def test_several_prompts_give_a_list(server: RunningServer) -> None:
    results = server.post("/completion", {"prompt": ["hi", [1, 2], {"prompt_string": "yo"}]}).json()
    assert [(result["index"], result["content"]) for result in results] == [(i, "the answer") for i in range(3)]


def test_the_number_of_texts_is_limited(server: RunningServer) -> None:
    assert len(server.post("/completion", {"prompt": ["a", "b"], "n_cmpl": 2}).json()) == 4
    assert server.post("/completion", {"prompt": "a", "n": 5}).status_code == 400
    response = server.post("/completion", {"prompt": ["a"] * 257})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_the_end_token_is_banned_on_request(server: RunningServer) -> None:
    result = server.post("/completion", {"prompt": "hi", "ignore_eos": True, "n_predict": 12}).json()
    assert (result["tokens_predicted"], result["stop_type"]) == (12, "limit")
    eos = server.service.tokenizer.eos_id
    assert result["generation_settings"]["logit_bias"] == [{"token": eos, "bias": None}]


def test_fields_are_selected(server: RunningServer) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing"]
    body = {"prompt": "hi", "n_predict": 1, "response_fields": fields}
    assert server.post("/completion", body).json() == {"content": "the", "generation_settings/n_predict": 1}


def test_reading_alone_gives_no_text(server: RunningServer) -> None:
    result = server.post("/completion", {"prompt": "hi", "n_predict": 0}).json()
    assert (result["content"], result["tokens_predicted"]) == ("", 0)


def test_tokens_go_there_and_back(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"content": "the 😀<|user|>"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"content": "the 😀<|user|>"}
    parts = server.post("/tokenize", {"content": "the 😀", "with_pieces": True}).json()["tokens"]
    assert [part["piece"] for part in parts] == ["the", " ", [0xF0], [0x9F], [0x98], [0x80]]
    plain = server.post("/tokenize", {"content": "<|user|>", "parse_special": False}).json()["tokens"]
    assert len(plain) == 8
    assert server.post("/tokenize", {}).json() == {"tokens": []}
    assert server.post("/detokenize", {"tokens": [99999]}).status_code == 400


def test_the_server_reports_its_state(server: RunningServer) -> None:
    assert server.get("/health").json() == server.get("/v1/health").json() == {"status": "ok"}
    props = server.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 2048)
    assert (props["fingerprint"], "enable_thinking" in props["chat_template"]) == ("b0-fake", True)
    slots = server.get("/slots").json()
    assert [slot["is_processing"] for slot in slots] == [False] * 4
    assert server.get("/plan").text == "the plan of a fake\n"
    assert "/v1" in server.get("/").text


def test_metrics_have_both_names_and_change(server: RunningServer) -> None:
    before = parse_metrics(server.get("/metrics").text)
    server.post("/completion", {"prompt": "hi"})
    response = server.get("/metrics")
    after = parse_metrics(response.text)
    assert response.headers["process-start-time-unix"].isdigit()
    assert after["hocket_new_tokens_total"] - before["hocket_new_tokens_total"] == 8
    assert after["llamacpp:tokens_predicted_total"] == after["hocket_new_tokens_total"]
    assert after["hocket_first_token_seconds_count"] - before["hocket_first_token_seconds_count"] == 1
    name = 'hocket_responses_total{path="/completion",status="200"}'
    assert after[name] - before.get(name, 0) == 1
    for name in ("n_decode_total", "n_tokens_max", "requests_processing", "requests_deferred", "prompt_seconds_total"):
        assert f"# HELP llamacpp:{name} " in response.text
        assert f"# TYPE llamacpp:{name} " in response.text


def parse_metrics(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_unknown_paths_are_one_metric(server: RunningServer) -> None:
    for i in range(3):
        assert server.get(f"/no/such/{i}").status_code == 404
    assert "/no/such" not in server.get("/metrics").text


def test_endpoints_can_be_switched_off() -> None:
    with serve(has_metrics=False, has_slots=False) as server:
        for path in ("/metrics", "/slots"):
            response = server.get(path)
            assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def test_busy_slots_are_reported() -> None:
    with (
        serve(FakeService("x" * 500, slots=1, delay=0.01)) as server,
        httpx.stream("POST", f"{server.url}/completion", json={"prompt": "hi", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert server.get("/slots").json()[0]["is_processing"]
        assert server.get("/slots?fail_on_no_slot=1").status_code == 503


def test_properties_have_the_file_and_the_default_seed() -> None:
    with serve(model_file="tiny.gguf", seed=42) as server:
        props = server.get("/props").json()
        assert props["model_path"] == "tiny.gguf"
        assert props["default_generation_settings"]["params"]["seed"] == 42
        for seed, expected in ((None, 42), (7, 7)):
            result = server.post("/completion", {"prompt": "hi", "seed": seed}).json()
            assert result["generation_settings"]["seed"] == expected
        results = [server.post("/completion", {"prompt": "hi", "seed": -1}).json() for _ in range(2)]
        assert len({result["generation_settings"]["seed"] for result in results}) == 2


def test_embedded_tokens_are_counted(server: RunningServer) -> None:
    before = parse_metrics(server.get("/metrics").text)
    assert server.post("/embedding", {"content": ["the", "hi"]}).status_code == 200
    after = parse_metrics(server.get("/metrics").text)
    for name, added in (("hocket_embedding_tokens_total", 3), ("llamacpp:prompt_tokens_total", 3)):
        assert after[name] - before[name] == added
    assert after["llamacpp:n_decode_total"] - before["llamacpp:n_decode_total"] == 1
    assert after["llamacpp:tokens_predicted_total"] == before["llamacpp:tokens_predicted_total"]


def test_templates_get_the_date() -> None:
    template = "{{ date_string }}; {{ datetime }}"
    with serve(chat_template=template) as server:
        body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
        day, month, year = server.post("/apply-template", body).json()["prompt"].partition(";")[0].split()
        assert (len(day), len(month), len(year)) == (2, 3, 4)
        body["chat_template_kwargs"] = {"date_string": "01 Jan 1970", "datetime": ""}
        assert server.post("/apply-template", body).json()["prompt"] == "01 Jan 1970; "


def test_prompts_are_visible_on_request() -> None:
    with serve(shows_prompts=True) as server:
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).json()
        assert answer["__verbose"]["prompt"] == "<|user|>hi<|assistant|>"
