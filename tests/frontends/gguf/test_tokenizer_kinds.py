"""Kinds of ``tokenizer.ggml.model`` with algorithms of their own: ``plamo2``, ``hybriddna``, ``whitespace``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from hocket.frontends.gguf.tokenization.tokenizer import BYTE_OF_CHARACTER, Tokenizer, tokenizer_from_metadata

from ...given.calls import count_calls
from ...given.tokenizers import token_texts

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


def build_tokenizer(**values: object) -> Tokenizer:
    return tokenizer_from_metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})


SPECIAL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]


def plamo(scores: dict[str, float], padding: tuple[str, ...] = (), **changes: object) -> Tokenizer:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *scores, *padding]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scores), *[UNUSED] * len(padding)]
    values: dict[str, object] = {"model": "plamo2", "pre": "default", "tokens": tokens, "token_type": types}
    values["scores"] = [0.0] * 260 + [*scores.values()] + [-1000.0] * len(padding)
    return build_tokenizer(**(values | changes))


def segmentations(text: str, tokens: dict[str, float]) -> Iterator[tuple[float, list[str]]]:
    """Every way to cut a text into tokens and bytes, with its sum of scores, longer first parts first."""
    if not text:
        yield 0.0, []
        return
    parts = [(size, tokens[text[:size]], [text[:size]]) for size in range(len(text), 0, -1) if text[:size] in tokens]
    for size, score, ids in [*parts, (1, -1000.0, [f"<0x{byte:02X}>" for byte in text[0].encode()])]:
        for others, rest in segmentations(text[size:], tokens):
            yield round(score * 10_000) + others, ids + rest


@pytest.mark.parametrize("seed", range(6))
def test_plamo2_takes_the_highest_sum_of_scores(seed: int) -> None:
    rng = random.Random(seed)
    pieces = sorted({"".join(rng.choices("ab私😀 ", k=rng.choice([1, 2, 2, 3, 4]))) for _ in range(30)} - {"b"})
    scores = {piece: -rng.choice([rng.uniform(0, 12), 1.0, 2.0, 3.0, rng.uniform(0, 1400)]) for piece in pieces}
    tokenizer = plamo(scores)
    for _ in range(60):
        text = "".join(rng.choices("ab私😀 é", k=rng.randrange(1, 8)))
        assert token_texts(tokenizer, text) == max(segmentations(text, scores), key=lambda scored: scored[0])[1], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_plamo2_spells_characters_outside_the_vocabulary_in_bytes() -> None:
    tokenizer = plamo({"a": -1.0, "▁": -1.0})
    assert token_texts(tokenizer, "aé▁") == ["a", "<0xC3>", "<0xA9>", "▁"]
    every = "\ufeff\0\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(every)) == every
    assert len(tokenizer.encode(every)) == len(every.encode())
    assert tokenizer.encode("") == []


def test_plamo2_prefers_bytes_to_tokens_that_cost_more() -> None:
    tokenizer = plamo({"a": -1.0, "b": -1000.0, "ab": -1001.0, "c": -1000.0001, "d": -2000.0, "bb": -2000.0})
    assert token_texts(tokenizer, "abbcd") == ["ab", "b", "<0x63>", "<0x64>"]


def test_rows_that_fill_a_plamo2_vocabulary_up_are_no_tokens() -> None:
    tokenizer = plamo({"[": -1.0, "PAD": -1.0, "1": -1.0, "]": -1.0}, padding=("[PAD1]",))
    assert token_texts(tokenizer, "[PAD1]") == ["[", "PAD", "1", "]"]


def test_plamo2_has_llama_cpps_special_tokens() -> None:
    tokenizer = plamo({"a": -1.0})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert token_texts(tokenizer, "a<|plamo:eos|>a", parse_special=True) == ["a", "<|plamo:eos|>", "a"]
    assert token_texts(plamo({"a": -1.0}, add_bos_token=True), "a") == ["<|plamo:bos|>", "a"]


def test_a_plamo2_vocabulary_without_bytes_has_its_unknown_token() -> None:
    tokenizer = build_tokenizer(model="plamo2", tokens=["<unk>", "a", "ab"], scores=[0.0, -1.0, -1.5])
    assert token_texts(tokenizer, "aab私") == ["a", "ab", "<unk>"]


def test_a_long_text_takes_plamo2_calls_in_proportion() -> None:
    tokenizer = plamo({"a" * size: -float(size) for size in (1, 2, 4, 8)})
    ids, calls = count_calls(lambda: tokenizer.encode("a" * 50_000))
    assert len(ids) == 50_000 // 8
    assert calls < 12 * 50_000


DNA = [
    *BYTE_OF_CHARACTER,
    "CC",
    "<dna>",
    "</dna>",
    "<oov>",
    *("".join(six) + "\ue000" for six in itertools.product("ATCG", repeat=6)),
]


def hybrid(**changes: object) -> Tokenizer:
    values: dict[str, object] = {"model": "hybriddna", "pre": "qwen2", "tokens": DNA, "merges": ["C C"]}
    return build_tokenizer(**(values | changes))


def test_bases_between_tags_are_tokens_of_six() -> None:
    tokenizer = hybrid()
    ids = tokenizer.encode("CCA <dna>CCCCCCacgtacGT</dna>CC<dna>AXAAAATé</dna>")
    assert [tokenizer.tokens[i].replace("\ue000", "*") for i in ids] == [
        *("CC", "A", "Ġ", "<dna>", "CCCCCC*", "ACGTAC*", "GTAAAA*", "</dna>"),
        *("CC", "<dna>", "<oov>", "<oov>", "</dna>"),
    ]
    assert tokenizer.decode(ids[:8]) == "CCA <dna>CCCCCCACGTACGTAAAA</dna>"


def test_bases_without_a_closing_tag_reach_to_the_end() -> None:
    tokenizer = hybrid()
    assert tokenizer.decode(tokenizer.encode("</dna>A<dna>GGGGGGT")) == "</dna>A<dna>GGGGGGTAAAAA"
    assert tokenizer.decode(tokenizer.encode("<dna></dna><dna>")) == "<dna></dna><dna>"


def test_a_vocabulary_without_tags_is_byte_level() -> None:
    tokenizer = hybrid(tokens=[*BYTE_OF_CHARACTER, "CC"])
    assert token_texts(tokenizer, "CC<dna>") == ["CC", *"<dna>"]


def spaceless(**changes: object) -> Tokenizer:
    tokens = ["<unk>", "a", "b", "ab", "A", "中", "文", "中文", "Σ", "σ", "▁"]
    values: dict[str, object] = {"model": "whitespace", "pre": "whitespace", "tokens": tokens}
    return build_tokenizer(**(values | {"merges": ["a b", "中 文"]} | changes))


def test_white_space_is_left_out() -> None:
    assert token_texts(spaceless(), "ab a\u3000中文\n\tb ▁ 中 文") == ["ab", "a", "中文", "b", "▁", "中", "文"]
    assert spaceless().encode(" \n") == []
    assert spaceless().decode(spaceless().encode("ab 中文▁")) == "ab中文▁"


def test_words_are_in_lower_case_if_the_file_or_another_name_says_so() -> None:
    assert token_texts(spaceless(), "aA Σ") == ["a", "A", "Σ"]
    lower = spaceless(**{"normalizer.lowercase": True})
    assert token_texts(lower, "AB ΑΣ aΣ") == ["ab", "σ", "a", "σ"]
    assert token_texts(spaceless(pre="sarvam-moe"), "A Σ") == ["a", "▁", "σ"]
    assert token_texts(spaceless(pre="sarvam-moe", **{"normalizer.lowercase": False}), "A Σ") == ["A", "▁", "Σ"]


def test_a_character_without_a_token_is_unknown_if_the_file_names_one_for_that() -> None:
    assert token_texts(spaceless(), "a私b") == ["a", "b"]
    assert token_texts(spaceless(unknown_token_id=0), "a私b") == ["a", "<unk>", "b"]
