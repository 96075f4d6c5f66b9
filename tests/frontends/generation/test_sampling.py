"""Choosing tokens, and the loop that generates text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.conversation import Conversation
from hocket.frontends.generation.generate import (
    GenerationParams,
    GenerationTiming,
    compile_generation_plans,
    generate_tokens,
    sample_tokens_of_all_sequences,
    stream_text,
)
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.chat import CHAT_TEMPLATE_KEY
from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata
from hocket.frontends.inference.saved_state import save_state
from hocket.frontends.inference.session import Session
from hocket.frontends.models import Model, load_model
from hocket.frontends.open_model import open_model

from ...given.models.spelled import ASCII, SENTENCEPIECE, SENTENCEPIECE_TYPES, write_llama

EVERYTHING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
GREEDY = Sampling()


def log(*p: float) -> npt.NDArray[np.float32]:
    return np.log(np.array(p, np.float32))


def survivors(logits: npt.NDArray[np.float32], **filters: float) -> list[int]:
    return Sampling(1.0, **{**EVERYTHING, **filters}).filter_tokens(logits)[0].tolist()  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- choosing


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    rng = np.random.default_rng(0)
    assert GREEDY.choose_token(log(0.1, 0.4, 0.4, 0.1), rng) == 1


def test_each_filter_keeps_what_its_definition_says() -> None:
    logits = log(0.1, 0.4, 0.2, 0.3)
    assert survivors(logits) == [1, 3, 2, 0]
    assert survivors(logits, top_k=2) == [1, 3]
    assert survivors(logits, top_p=0.65) == [1, 3]
    assert survivors(logits, top_p=0.75) == [1, 3, 2]
    assert survivors(logits, top_p=1e-9) == [1]
    assert survivors(logits, min_p=0.45) == [1, 3, 2]
    assert survivors(logits, min_p=0.99) == [1]
    # top-p counts the remainder of top-k: 0.4 / 0.7 is enough for 0.5.
    assert survivors(logits, top_k=2, top_p=0.5) == [1]


@pytest.mark.parametrize("top_k", [0, 1, 16, 40, 256, 257, 5000])
@pytest.mark.parametrize("n", [1, 15, 33, 257, 3000])
def test_candidates_come_in_falling_order_and_equals_as_they_stand(n: int, top_k: int) -> None:
    rng = np.random.default_rng(n)
    plain = rng.standard_normal(n).astype(np.float32)
    zeros = np.where(rng.random(n) < 0.5, np.float32(0), np.float32(-0.0))
    few = np.where(rng.random(n) < 0.9, np.float32(-np.inf), plain)
    few[-1] = 0
    for logits in (plain, np.round(plain), np.sort(plain * np.float32(1e-39)), zeros, few):
        expected = np.argsort(-logits, kind="stable")[: top_k or None].tolist()
        assert survivors(logits, top_k=top_k) == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_as_often_as_their_probability_says(temperature: float) -> None:
    rng, logits = np.random.default_rng(1), log(0.5, 0.3, 0.15, 0.05)
    sampling = Sampling(temperature, **EVERYTHING)  # type: ignore[arg-type]
    count = 4000
    frequencies = np.bincount([sampling.choose_token(logits, rng) for _ in range(count)], minlength=4) / count
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    assert np.all(np.abs(frequencies - p) <= 4 * np.sqrt(p * (1 - p) / count))


def test_a_filtered_token_is_never_sampled() -> None:
    rng, sampling = np.random.default_rng(2), Sampling(5.0, top_k=2)
    assert {sampling.choose_token(log(0.1, 0.4, 0.2, 0.3), rng) for _ in range(200)} == {1, 3}


def test_a_very_low_temperature_is_greedy_without_a_warning() -> None:
    rng = np.random.default_rng(0)
    assert {Sampling(t).choose_token(log(0.2, 0.5, 0.3), rng) for t in (1e-310, 1e-30, 1e-3)} == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = np.array([0.5, bad, 0.1], np.float32)
    with pytest.raises(ModelError, match="gives token 1 the logit"):
        Sampling(temperature).choose_token(logits, np.random.default_rng(0))


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.0},
    ],
)
def test_an_impossible_setting_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(setting))} is .*; it must be"):
        Sampling(**setting)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- generating


@pytest.fixture(scope="module")
def tiny() -> tuple[Model, Tokenizer]:
    model = open_model(None)
    return model, tokenizer_from_metadata(model.gguf.metadata)


@pytest.fixture
def session(tiny: tuple[Model, Tokenizer]) -> Session:
    return Session(tiny[0], context=64)


@pytest.mark.long
def test_one_seed_gives_one_text_and_another_a_different_one(tiny: tuple[Model, Tokenizer]) -> None:
    def text(seed: int) -> list[int]:
        return list(
            generate_tokens(Session(tiny[0], context=64), [100, 200], limit=20, sampling=Sampling(1.0), seed=seed)
        )

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_generation_ends_at_the_limit_and_before_a_stop_token(session: Session) -> None:
    generated = list(generate_tokens(session, [100, 200], limit=12, sampling=GREEDY))
    assert len(generated) == 12
    session.reset(0)
    stop = generated[5]
    ended = list(generate_tokens(session, [100, 200], limit=12, sampling=GREEDY, stop=frozenset({stop})))
    assert ended == generated[: generated.index(stop)]
    session.reset(0)
    assert list(generate_tokens(session, [100, 200], limit=0, sampling=GREEDY)) == []


def test_timing_counts_the_tokens_that_were_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    timing, start, planned = GenerationTiming(), next(ticks), session.planning_seconds
    list(generate_tokens(session, [100, 200, 300], limit=5, sampling=GREEDY, timing=timing))
    spent = next(ticks) - start
    # The fifth new token comes from the logits of the fourth, and is not run itself.
    assert (timing.prompt_tokens, timing.new_tokens) == (3, 4)
    assert timing.prefill > 0 < timing.decode
    assert timing.planning == session.planning_seconds - planned
    assert timing.prefill + timing.decode + timing.planning <= spent
    again = GenerationTiming()
    session.reset(0)
    list(generate_tokens(session, [100, 200, 300], limit=5, sampling=GREEDY, timing=again))
    assert again.planning == 0  # both sizes of a step have their plans
    assert "tok/s" in str(timing)
    assert (timing + timing).new_tokens == 8
    assert str(GenerationTiming()) == "plans and kernels 0.0 s"
    timed = GenerationTiming(1, 0.5, 2, 0.5, 0.25, 0.9)
    assert str(timed) == "load 0.9 s, prefill 1 token 2.0 tok/s, decode 2 tokens 4.0 tok/s, plans and kernels 0.2 s"
    assert timed + timed == GenerationTiming(2, 1.0, 4, 1.0, 0.5, 1.8)


def test_plans_before_a_generation_count_as_plans_and_kernels(session: Session) -> None:
    timing = compile_generation_plans(session, [100, 200, 300], GenerationParams(5, GREEDY))
    planning_seconds = timing.planning
    assert planning_seconds >= session.planning_seconds > 0
    assert (
        len(
            list(
                sample_tokens_of_all_sequences(
                    session, [[100, 200, 300]], GenerationParams(5, GREEDY), known=[[]], timing=timing
                )
            )
        )
        == 5
    )
    assert timing.planning == pytest.approx(planning_seconds), "nothing else had to be planned"


def test_a_full_context_ends_an_unlimited_text_and_is_an_error_otherwise(session: Session) -> None:
    assert len(list(generate_tokens(session, [100] * 60, limit=-1, sampling=GREEDY))) == 5
    session.reset(0)
    assert len(list(generate_tokens(session, [100] * 60, limit=5, sampling=GREEDY))) == 5
    session.reset(0)
    with pytest.raises(ModelError, match="context of 64 tokens is full after 5 new ones"):
        list(generate_tokens(session, [100] * 60, limit=6, sampling=GREEDY))


def test_an_empty_prompt_is_an_error(session: Session) -> None:
    with pytest.raises(ModelError, match="prompt is empty"):
        list(generate_tokens(session, [], limit=1, sampling=GREEDY))


def test_text_is_streamed_in_whole_characters(tiny: tuple[Model, Tokenizer]) -> None:
    ids = tiny[1].encode("naïve 東京")
    pieces = list(stream_text(iter(ids), tiny[1]))
    assert "".join(pieces) == "naïve 東京"
    assert "\ufffd" not in "".join(pieces)
    assert list(stream_text(iter(ids[:-1]), tiny[1]))[-1] == "\ufffd"


# -------------------------------------------------------------------------------------------------- conversing

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def talk(tiny: tuple[Model, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Conversation]:
    """Return a builder of conversations with a chat template; ``session.heard`` collects the evaluated tokens."""

    def start(template: str = TEMPLATE, **settings: int) -> Conversation:
        model, tokenizer = tiny
        gguf = replace(model.gguf, metadata=MappingProxyType({**model.gguf.metadata, CHAT_TEMPLATE_KEY: template}))
        context = settings.pop("context", None)
        return Conversation(
            Session(load_model(gguf), context=context), tokenizer, GenerationParams(sampling=GREEDY, **settings)
        )

    return start


def reply_and_tokens(
    conversation: Conversation, message: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[int]]:
    """The answer, and the tokens that were evaluated for it."""
    session, tokens = conversation.session, list[int]()
    evaluate = type(session).evaluate

    def spy(new: list[list[int]]) -> object:
        tokens.extend(new[0])
        return evaluate(session, new)

    with monkeypatch.context() as patch:
        patch.setattr(session, "evaluate", spy)
        return "".join(conversation.reply(message)), tokens


def test_a_conversation_evaluates_only_what_is_new(
    talk: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(limit=6)
    tokenizer = conversation.tokenizer
    first, one = reply_and_tokens(conversation, "Is she happy?", monkeypatch)
    second, two = reply_and_tokens(conversation, "And he?", monkeypatch)
    # The last token of an answer that the limit cut is evaluated with the next message.
    new = f"<|endoftext|>user:{conversation.messages[2]['content']}<|endoftext|>assistant:"
    ids = tokenizer.encode(new, add_special=False, parse_special=True)
    assert two[1 : 1 + len(ids)] == ids
    assert tokenizer.decode([*one, *two][: len(one) + 1]) == f"user:Is she happy?assistant:{first}"
    anew = Session(conversation.session.model)
    want = "".join(
        stream_text(generate_tokens(anew, [*one, *two[: 1 + len(ids)]], limit=6, sampling=GREEDY), tokenizer)
    )
    assert second == want
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "user", "assistant"]
    assert conversation.timing.prompt_tokens == len(one) - 5 + 1 + len(ids)


def test_a_template_that_rewrites_the_past_makes_the_session_start_anew(
    talk: Callable[..., Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk("{{ messages | length }}: {{ messages[-1].content }}", limit=4)
    reply_and_tokens(conversation, "Is she happy?", monkeypatch)
    _, tokens = reply_and_tokens(conversation, "And he?", monkeypatch)
    assert conversation.tokenizer.decode(tokens).startswith("3: And he?")
    assert conversation.session.lengths[0] == len(tokens)


def test_a_model_without_a_template_cannot_chat(tiny: tuple[Model, Tokenizer]) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Conversation(Session(tiny[0]), tiny[1], GenerationParams(1, GREEDY))


def test_a_talk_that_was_saved_goes_on_as_if_it_had_not_ended(
    talk: Callable[..., Conversation], tmp_path: Path
) -> None:
    whole, first, second = talk(limit=6), talk(limit=6), talk(limit=6)
    texts = ["Is she happy?", "And he?", "Why?"]
    answers = ["".join(whole.reply(text)) for text in texts]
    assert "".join(first.reply(texts[0])) == answers[0]
    first.save(tmp_path / "talk")
    second.load(tmp_path / "talk")
    assert ["".join(second.reply(text)) for text in texts[1:]] == answers[1:]
    assert second.messages == whole.messages
    save_state(first.session, [first.tokens], tmp_path / "state")
    with pytest.raises(ModelError, match="holds no talk"):
        second.load(tmp_path / "state")
    save_state(first.session, [first.tokens], tmp_path / "state", talk={"messages": [{"role": 3}], "seen": ""})
    with pytest.raises(ModelError, match="its conversation is damaged"):
        second.load(tmp_path / "state")
    assert second.messages == whole.messages


@pytest.mark.long
def test_a_talk_goes_on_in_a_context_that_shifts(talk: Callable[..., Conversation]) -> None:
    conversation = talk(limit=24, context=64, pinned_tokens=0)
    for message in ("Is she happy?", "And he?", "Why?", "When?"):
        answer = "".join(conversation.reply(message))
        assert answer
        assert conversation.session.lengths[0] <= 64
        assert len(conversation.tokens) - conversation.session.lengths[0] in (0, 1)


@pytest.mark.long
def test_a_context_that_shifts_goes_on_with_its_first_tokens_and_half_of_the_last(
    tiny: tuple[Model, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, known = Session(tiny[0], context=16), [list[int]()]
    sampled = [
        one.token
        for one in sample_tokens_of_all_sequences(
            session, [[7, 8, 9]], GenerationParams(40, GREEDY, pinned_tokens=2), known=known
        )
    ]
    assert len(sampled) == 40
    anew = Session(tiny[0], context=64)
    tokens = [7, 8, 9, *sampled[:14]]  # the context is full behind 13 of them, and the next one is not read any more
    remaining_tokens = [*tokens[:2], *tokens[-6:]]
    assert next(iter(generate_tokens(anew, remaining_tokens, limit=1, sampling=GREEDY))) == sampled[14]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_bias_of_minus_infinity_bans_a_token(temperature: float) -> None:
    logits = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    sampling = Sampling(temperature, top_k=0, top_p=1.0, min_p=0.0, bias=((0, -math.inf), (2, -math.inf)))
    sampled = {sampling.choose_token(logits, np.random.default_rng(seed)) for seed in range(60)}
    assert sampled == ({1} if not temperature else {1, 3})
    banned = Sampling(temperature, bias=tuple((token, -math.inf) for token in range(4)))
    with pytest.raises(ModelError, match="bias is -inf for every token that may come next"):
        banned.choose_token(logits, np.random.default_rng(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1e30, -1e30])
def test_the_largest_biases_and_penalties_leave_a_choice(temperature: float, size: float) -> None:
    logits = np.array([3.0, -2.0, 1.0, 0.0], np.float32)
    penalties = {"presence_penalty": size, "frequency_penalty": size, "repeat_penalty": 1e30}
    sampling = Sampling(temperature, **penalties, bias=((0, size), (0, size), (1, -size)))
    with np.errstate(over="raise", invalid="raise"):
        assert 0 <= sampling.choose_token(logits, np.random.default_rng(0), [0, 1, 1] * 1000) < 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", ((5, math.inf),)),
        ("bias", ((5, math.nan),)),
        ("bias", ((5, 1e31),)),
        ("presence_penalty", -1e31),
        ("frequency_penalty", math.inf),
        ("repeat_penalty", math.inf),
    ],
)
def test_a_number_too_large_to_sample_by_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{name}[ =]"):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_the_second_turn_adds_no_space(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}#{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}#a:{% endif %}"
    )
    for kind, tokens, types, eos in (
        ("llama", SENTENCEPIECE, SENTENCEPIECE_TYPES, None),
        ("t5", ["<pad>", "</s>", "<unk>", "▁", *ASCII], [3, 3, 2, *[1] * 95], 1),
    ):
        path = write_llama(tmp_path / f"{kind}.gguf", tokens, types, kind=kind, eos=eos, template=template)
        model = open_model(path)
        tokenizer = tokenizer_from_metadata(model.gguf.metadata)
        settings = GenerationParams(3, Sampling(bias=((list(tokens).index("x"), 1e6),)))
        conversation = Conversation(Session(model), tokenizer, settings)
        answers = ["".join(conversation.reply(message)) for message in ("hi", "yo")]
        assert answers == ["xxx", "xxx"]
        read, whole = conversation.tokens, tokenizer.encode_chat("#u:hi;#a:xxx;#u:yo;#a:")
        assert read[: len(whole)] == whole[: len(read)], kind
