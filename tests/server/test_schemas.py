"""Bodies: bounds, unknown fields, and fields of samplers that hocket lacks."""

from __future__ import annotations

import json

import pytest

from hocket.server.bodies.schemas import ChatBody, NativeCompletionBody, TextCompletionBody, decode_body
from hocket.server.errors import ApiError

ONE_MESSAGE = [{"role": "user", "content": "hi"}]


def decode_chat(**fields: object) -> tuple[ChatBody, tuple[str, ...]]:
    return decode_body(json.dumps({"messages": ONE_MESSAGE, **fields}).encode(), ChatBody)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 999999),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -1),
        ("top_p", 1.5),
        ("min_p", 1),
        ("top_k", 1.5),
        ("top_k", 1 << 40),
        ("n", 0),
        ("n", 17),
        ("n", -1),
        ("max_tokens", -2),
        ("max_tokens", 1 << 31),
        ("max_tokens", 10**30),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("seed", 1 << 70),
        ("seed", 0.5),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop", [1]),
        ("presence_penalty", 101),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("logit_bias", {"1": "much"}),
        ("logit_bias", [[1]]),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [1]),
        ("messages", None),
        ("tools", [{}] * 129),
        ("stream", 1),
        ("stream_options", {"include_usages": True}),
        ("response_format", {"type": 1}),
        ("response_format", {}),
        ("grammar", "x" * 70_000),
        ("chat_template_kwargs", []),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        decode_chat(**{name: value})
    assert caught.value.status == 400
    assert name in (caught.value.param or "") or name in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 2),
        ("typical_p", 0.9),
        ("dynatemp_range", 0.5),
        ("xtc_probability", 0.1),
        ("dry_multiplier", 0.8),
        ("top_n_sigma", 1.0),
        ("samplers", ["top_k"]),
        ("lora", [{"id": 0, "scale": 1}]),
        ("store", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("n_keep", 5),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("post_sampling_probs", True),
        ("no_such_field", 1),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
def test_an_unsupported_field_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        decode_chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    reason = "there is no field 'no_such_field' here" if name == "no_such_field" else f"{name} is not supported"
    assert caught.value.message == f"{reason}; leave it out"


def test_unsupported_samplers_are_accepted_at_their_neutral_values() -> None:
    neutral = {"mirostat": 0, "typical_p": 1.0, "dynatemp_range": 0, "xtc_probability": 0.0, "dry_multiplier": 0}
    neutral |= {
        "top_n_sigma": -1,
        "lora": [],
        "store": False,
        "best_of": 1,
        "verbosity": "medium",
        "suffix": "",
        "n_keep": 0,
        "samplers": [],
    }
    assert decode_chat(**neutral)[1] == ()


def test_fields_without_influence_are_named() -> None:
    body, ignored = decode_chat(user="me", metadata={"a": "b"}, mirostat_tau=5.0, n_cache_reuse=1, temperature=None)
    assert ignored == ("metadata", "mirostat_tau", "n_cache_reuse", "user")
    assert body.temperature is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"messages": NaN}',
        b'{"temperature": 1e999}',
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'{"messages":' + b"[" * 100_000,
        b'{"chat_template_kwargs":' + b'{"a":' * 100_000,
        b'{"messages": []} x',
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(data, ChatBody)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message


def test_integers_are_accepted_for_numbers() -> None:
    assert decode_chat(temperature=1, top_p=1)[0].temperature == 1.0


def test_stop_strings_are_a_tuple_without_empty_ones() -> None:
    assert decode_chat(stop="a")[0].nonempty_stop_strings == ("a",)
    assert decode_chat(stop=["a", "", "b"])[0].nonempty_stop_strings == ("a", "b")
    assert decode_chat()[0].nonempty_stop_strings == ()


def test_prompts_have_several_forms() -> None:
    for prompt in ("a", [1, 2], ["a", "b"], [[1], [2]], [1, "a"], {"prompt_string": "a"}):
        assert decode_body(json.dumps({"prompt": prompt}).encode(), TextCompletionBody)[0].prompt == prompt
    with pytest.raises(ApiError):
        decode_body(b'{"prompt": 1}', NativeCompletionBody)


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_named(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"^the body is empty; send a JSON object$"):
        decode_body(body, NativeCompletionBody)
