"""Tokenizers against llama.cpp's ids, and against metadata that is wrong."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.reader import open_gguf
from hocket.frontends.gguf.tokenization.pretokenizers import PRE_TOKENIZERS
from hocket.frontends.gguf.tokenization.tokenizer import (
    BYTE_OF_CHARACTER,
    MAX_RUN_CHARACTERS,
    Tokenizer,
    TokenToTextStream,
    tokenizer_from_metadata,
)

from ...given.calls import count_calls
from ...given.models.goldens import GOLDENS, ROOT
from ...given.tokenizers import with_prefix

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata_of(path: str | Path) -> Mapping[str, object]:
    return open_gguf(path, header_only=True).metadata


TINY = metadata_of(ROOT / "data" / "hocket-tiny-q8_0.gguf")
TOKENIZER = tokenizer_from_metadata(TINY)


def byte_level(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary: the bytes, a few merges, and special tokens from id 258 on."""
    tokens = [*BYTE_OF_CHARACTER, "he", "ll", "<|x|>", "<|im_end|>", "<u>", "12", "123"]
    types = [NORMAL] * 258 + [CONTROL, NORMAL, USER, NORMAL, NORMAL]
    values: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types}
    values |= {"merges": ["h e", "l l", "1 2"], "bos_token_id": 258, "eos_token_id": 258}
    return with_prefix(**(values | changes))


def sentence_piece(**changes: object) -> dict[str, object]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "ab", "▁ab", "bc", "▁a", "<u>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 8, USER]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, 0.0]
    values: dict[str, object] = {"model": "llama", "tokens": pieces, "token_type": types, "scores": scores}
    return with_prefix(**(values | changes))


def gemma4(**changes: object) -> dict[str, object]:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "\n", "\n\n", "▁a", "a▁", "</s>", "<|tool_response>", "<turn|>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[NORMAL] * 10]
    values: dict[str, object] = {"model": "gemma4", "tokens": pieces, "token_type": types, "eos_token_id": 1}
    values |= {"merges": ["\n \n", "▁ a", "a ▁"], "bos_token_id": 2, "unknown_token_id": 3, "add_bos_token": False}
    return with_prefix(**(values | changes))


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.tokens[i] for i in ids]


def path_of_variable(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set ")
    return Path(os.environ[variable])


@pytest.mark.parametrize("name", ["prompts", "tokenizer"])
def test_hocket_tiny_tokenises_as_llama_cpp_does(name: str) -> None:
    for case in json.loads((GOLDENS / "hocket_tiny" / f"{name}.json").read_text(encoding="utf-8")):
        assert TOKENIZER.encode(case["text"], parse_special=True) == case["ids"]
        assert TOKENIZER.decode(case["ids"], special=True) == case["text"]


def test_smollm2_tokenises_all_strings_as_llama_cpp_does() -> None:
    tokenizer = tokenizer_from_metadata(metadata_of(path_of_variable("HOCKET_SMOLLM2")))
    cases = json.loads((GOLDENS / "smollm2_tokenize.json").read_text(encoding="utf-8"))
    flags = ("add_special", "parse_special")
    equal = sum(tokenizer.encode(case["text"], **{f: case[f] for f in flags}) == case["ids"] for case in cases)
    assert f"{equal} of {len(cases)} strings tokenise equally" == "37 of 37 strings tokenise equally"
    assert {2, 0} <= tokenizer.eos_ids


def test_ggml_vocabularies_tokenise_as_llama_cpp_does() -> None:
    paths = [
        p
        for p in path_of_variable("HOCKET_GGML_VOCABS").glob("ggml-vocab-*.gguf")
        if p.with_suffix(".gguf.out").exists()
    ]
    paths = [p for p in paths if p.stem != "ggml-vocab-bert-bge"]
    assert paths
    for path in paths:
        tokenizer = tokenizer_from_metadata(metadata_of(path))
        inputs = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = path.with_suffix(".gguf.out").read_text().splitlines()
        for text, line in zip(inputs[: len(lines)], lines, strict=True):
            assert tokenizer.encode(text, add_special=False) == [int(i) for i in line.split()], (path.name, text)


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    stream = TokenToTextStream(TOKENIZER)
    assert "".join(stream.feed(i) for i in ids) + stream.finish() == text


@given(st.text(max_size=40) | st.text("ab▁hel123 \n<u>é", max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_short_text_is_merged_as_with_the_whole_vocabulary(text: str) -> None:
    for tokenizer in (TOKENIZER, *map(tokenizer_from_metadata, (byte_level(), sentence_piece(), gemma4()))):
        merger = tokenizer._model_cache
        ids = [
            m.encode(text, add_special_tokens=False).ids
            for m in (merger.choose_fastest_exact_model(text), merger._full_model)
        ]
        assert ids[0] == ids[1], (tokenizer, text)


def test_many_short_texts_load_the_whole_vocabulary() -> None:
    tokenizer = tokenizer_from_metadata(TINY)
    words = [f"word {i}" for i in range(2000)]
    first = [tokenizer.encode(word) for word in words]
    assert "_full_model" in vars(tokenizer._model_cache)
    assert [tokenizer.encode(word) for word in words] == first


def test_cached_merges_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    text = "Hello, how are you?"
    ids = tokenizer_from_metadata(TINY).encode(text)
    (file,) = (tmp_path / "merges").iterdir()
    whole = file.read_bytes()
    monkeypatch.setattr("hocket.frontends.gguf.tokenization.tokenizer_models.read_merges_by_priority", lambda *_: 1 / 0)
    assert tokenizer_from_metadata(TINY).encode(text) == ids
    monkeypatch.undo()
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    for damaged in (whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], b""):
        file.write_bytes(damaged)
        assert tokenizer_from_metadata(TINY).encode(text) == ids
        assert file.read_bytes() == whole


def test_a_stream_never_shows_part_of_a_character() -> None:
    stream = TokenToTextStream(TOKENIZER)
    parts = [stream.feed(i) for i in TOKENIZER.encode("é😀!")]
    assert "".join(parts) == "é😀!"
    assert all("\ufffd" not in part for part in parts)
    assert parts.count("") >= 3


def test_a_stream_that_ends_inside_a_character_ends_in_one_replacement() -> None:
    stream = TokenToTextStream(TOKENIZER)
    assert "".join(stream.feed(i) for i in TOKENIZER.encode("a😀")[:-1]) + stream.finish() == "a\ufffd"
    assert stream.feed(TOKENIZER.encode("b")[0]) == "b"


def test_control_tokens_are_silent_in_a_stream_unless_requested() -> None:
    assert TokenToTextStream(TOKENIZER).feed(2047) == ""
    assert TokenToTextStream(TOKENIZER, special=True).feed(2047) == "<|endoftext|>"
    assert TOKENIZER.decode([2047]) == ""


def test_special_text_is_plain_text_unless_parsed() -> None:
    tokenizer = tokenizer_from_metadata(byte_level())
    assert tokenizer.encode("<|x|>", parse_special=True) == [258]
    assert texts(tokenizer, tokenizer.encode("<|x|>")) == list("<|x|>")


def test_user_defined_tokens_are_always_found() -> None:
    tokenizer = tokenizer_from_metadata(byte_level())
    assert texts(tokenizer, tokenizer.encode("he<u>ll")) == ["he", "<u>", "ll"]
    assert tokenizer.decode([260]) == "<u>"


def test_the_longest_special_token_is_split_off_first() -> None:
    metadata = byte_level(
        tokens=[*BYTE_OF_CHARACTER, "ab", "bcd"], token_type=[NORMAL] * 256 + [CONTROL] * 2, merges=[]
    )
    metadata |= with_prefix(bos_token_id=0xFFFFFFFF, eos_token_id=256)
    assert texts(*(t := tokenizer_from_metadata(metadata), t.encode("abcd", parse_special=True))) == ["a", "bcd"]


def test_a_control_token_marked_as_normal_is_found_by_its_text_and_ends_a_generation() -> None:
    tokenizer = tokenizer_from_metadata(byte_level())
    assert tokenizer.eos_ids == {258, 259}
    assert tokenizer.decode([259]) == ""


def test_end_of_turn_and_message_ids_end_a_generation() -> None:
    assert tokenizer_from_metadata(byte_level(eot_token_id=5, eom_token_id=6)).eos_ids == {258, 259, 5, 6}


def test_the_end_of_a_message_is_no_end_in_gpt_oss() -> None:
    tokens = [*BYTE_OF_CHARACTER, "<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    tokenizer = tokenizer_from_metadata(
        byte_level(
            tokens=tokens, token_type=[NORMAL] * 256 + [CONTROL] * 4, merges=[], eos_token_id=257, bos_token_id=0
        )
    )
    assert tokenizer.eos_ids == {257, 258}
    assert tokenizer.decode([256, 257, 259]) == "<|end|><|channel|>"


def test_missing_ids_have_llama_cpps_defaults() -> None:
    bpe = tokenizer_from_metadata(byte_level(bos_token_id=None, eos_token_id=None))
    assert (bpe.bos_id, bpe.eos_id, bpe.add_bos) == (11, 11, False)
    glm = tokenizer_from_metadata(byte_level(bos_token_id=None, eos_token_id=None, pre="glm4"))
    assert (glm.bos_id, glm.eos_id) == (None, 11)
    spm = tokenizer_from_metadata(sentence_piece())
    assert (spm.bos_id, spm.eos_id, spm.add_bos, spm.add_eos) == (1, 2, True, False)


def test_bos_and_eos_are_added_as_the_model_asks() -> None:
    asked = tokenizer_from_metadata(byte_level(add_bos_token=True, add_eos_token=True))
    assert texts(asked, asked.encode("he")) == ["<|x|>", "he", "<|x|>"]
    assert texts(asked, asked.encode("he", add_special=False)) == ["he"]
    assert tokenizer_from_metadata(byte_level(pre="llama-bpe")).add_bos
    assert not tokenizer_from_metadata(byte_level(pre="llama-bpe", add_bos_token=False)).add_bos


def test_a_chat_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = tokenizer_from_metadata(byte_level(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode_chat("<|x|>he") == tokenizer.encode_chat("he") == [258, 256]
    assert tokenizer_from_metadata(byte_level()).encode_chat("he") == [256]


def test_ignore_merges_keeps_whole_words_that_no_merge_reaches() -> None:
    merged = tokenizer_from_metadata(byte_level(pre="dbrx"))
    assert texts(merged, merged.encode("123")) == ["12", "3"]
    whole = tokenizer_from_metadata(byte_level(pre="llama3", add_bos_token=False))
    assert texts(whole, whole.encode("123")) == ["123"]


def test_sentence_piece_merges_the_best_score_first() -> None:
    tokenizer = tokenizer_from_metadata(sentence_piece())
    assert texts(tokenizer, tokenizer.encode("abc")) == ["<s>", "▁ab", "c"]
    assert texts(tokenizer, tokenizer.encode("bca b")) == ["<s>", "▁", "bc", "a", "▁", "b"]


def test_sentence_piece_puts_a_space_first_and_after_special_tokens() -> None:
    tokenizer = tokenizer_from_metadata(sentence_piece())
    assert texts(tokenizer, tokenizer.encode("a<u>a", add_special=False)) == ["▁a", "<u>", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    bare = tokenizer_from_metadata(sentence_piece(add_space_prefix=False))
    assert texts(bare, bare.encode("a", add_special=False)) == ["a"]


def test_unknown_characters_become_their_bytes() -> None:
    tokenizer = tokenizer_from_metadata(sentence_piece())
    ids = tokenizer.encode("aé", add_special=False)
    assert texts(tokenizer, ids) == ["▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.token_bytes(ids[1]) == b"\xc3"


def test_phi3_special_tokens_swallow_the_spaces_after_them() -> None:
    metadata = {**sentence_piece(add_space_prefix=False), "general.name": "Phi-3 mini"}
    tokenizer = tokenizer_from_metadata(metadata)
    assert texts(tokenizer, tokenizer.encode("<u> \n a", add_special=False)) == ["<u>", "a"]


def test_gemma4_merges_raw_text_between_newlines_and_forces_bos() -> None:
    tokenizer = tokenizer_from_metadata(gemma4())
    assert texts(tokenizer, tokenizer.encode("a a\n\nbé")) == ["<bos>", "a", "▁a", "\n\n", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" a  b\n")) == " a  b\n"


def test_gemma4_reads_the_sentence_piece_end_as_plain_text() -> None:
    tokenizer = tokenizer_from_metadata(gemma4())
    assert texts(tokenizer, sorted(tokenizer.eos_ids)) == ["<eos>", "<|tool_response>", "<turn|>"]
    assert tokenizer.decode([267]) == "</s>"


def test_padding_rows_of_the_vocabulary_have_no_text() -> None:
    metadata = byte_level(
        tokens=[*BYTE_OF_CHARACTER, "[PAD1]", ""], token_type=[NORMAL] * 256 + [UNUSED] * 2, merges=[]
    )
    tokenizer = tokenizer_from_metadata(metadata | with_prefix(bos_token_id=0, eos_token_id=0))
    assert (tokenizer.n_tokens, tokenizer.decode([256, 257, 39])) == (258, "H")


@pytest.mark.parametrize("pre", sorted(name for name, rule in PRE_TOKENIZERS.items() if rule.uses_byte_letters))
def test_every_pre_tokenizer_compiles_and_loses_no_text(pre: str) -> None:
    tokenizer = tokenizer_from_metadata({**TINY, "tokenizer.ggml.pre": pre})
    text = "I'm  HTTPServer2 12345 你好 世界 é नमस्ते <a.b>\r\n\t x \n\n?! 'LL  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


WORDS = {
    "kimi-k2": ["Mixed", "中文", "Text", " don't", " ", "123", "4"],
    "gpt-4o": ["Mixed中文", "Text", " don't", " ", "123", "4"],
    "glm4": ["Mixed中文Text", " don", "'t", " ", "123", "4"],
    "qwen2": ["Mixed中文Text", " don", "'t", " ", "1", "2", "3", "4"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_split_by_the_pre_tokenizer(pre: str) -> None:
    (pattern,) = PRE_TOKENIZERS[pre].patterns
    words = Split(Regex(pattern), "isolated").pre_tokenize_str("Mixed中文Text don't 1234")
    assert [word for word, _ in words] == WORDS[pre]


@pytest.mark.parametrize("text", ["a" * 200_000, " " * 200_000, "中" * 70_000, "<|end" * 40_000, "A" * 200_000])
def test_a_long_text_takes_calls_in_proportion(text: str) -> None:
    TOKENIZER.encode("a")  # the first time takes calls for the vocabulary
    ids, calls = count_calls(lambda: TOKENIZER.encode(text, parse_special=True))
    assert TOKENIZER.decode(ids) == text
    assert calls < 4 * len(text)


WRONG: list[tuple[dict[str, object], str]] = [
    ({}, "the model has no vocabulary"),
    (with_prefix(model="test"), "no vocabulary.*give token ids to Model.tokens"),
    (with_prefix(model="none"), "no vocabulary"),
    (with_prefix(model="plamo9"), "unknown tokenizer 'plamo9'; known are gpt2, llama, gemma4, .*, plamo2"),
    (
        with_prefix(model="plamo2", tokens=["a"]),
        "scores is missing; a vocabulary of kind 'plamo2' needs one score a token",
    ),
    (with_prefix(model=3), "is a int; need a str"),
    (byte_level(pre="qwen99"), "unknown pre-tokenizer 'qwen99'; known are .*qwen2, qwen35"),
    (byte_level(pre=["qwen2"]), "tokenizer.ggml.pre is a list"),
    (byte_level(tokens=None), "tokens is missing"),
    (byte_level(tokens="abc"), "tokens is a str; need an array"),
    (byte_level(tokens=[]), "tokens is empty"),
    (byte_level(tokens=[1, 2]), "tokens: 0 is a int; need strings"),
    (byte_level(tokens=[b"a"]), "tokens: 0 is a bytes; need strings"),
    (byte_level(tokens=["a", "\ud800"]), "not valid Unicode"),
    (byte_level(tokens=[*map(str, range(10_000)), "\ud800"]), "not valid Unicode"),
    (byte_level(tokens=["a", "b", "a"], token_type=None), "0 and 2 are both 'a'"),
    (byte_level(token_type=[1]), "token_type has 1 value, tokenizer.ggml.tokens 263"),
    (byte_level(token_type=["x"] * 263), "token_type holds x; need finite numbers"),
    (byte_level(token_type=[BYTE] * 263), "is of type byte but reads"),
    (byte_level(bos_token_id=263), "bos_token_id is 263; need a token id of 0 to 262"),
    (byte_level(eos_token_id=-5), "eos_token_id is -5"),
    (byte_level(eot_token_id="x"), "eot_token_id is x"),
    (byte_level(add_bos_token=1), "add_bos_token is a int; need a bool"),
    (byte_level(pre="glm4", bos_token_id=None, add_bos_token=True), "bos_token_id is missing"),
    (byte_level(merges=None), "merges is missing"),
    (byte_level(merges=[1]), "merges: 0 is a int"),
    (byte_level(merges=["he"]), "merges: 0, 'he', is not two tokens"),
    (byte_level(merges=["h e", "h x"]), "merges: 1, 'h x', is not two tokens"),
    (byte_level(merges=["h zzz"]), "is not two tokens"),
    (sentence_piece(scores=None), "scores is missing"),
    (sentence_piece(scores=[1.0]), "scores has 1 value"),
    (sentence_piece(scores=[float("nan")] * 268), "scores holds nan"),
    (with_prefix(model="llama", tokens=["a", "b" * 2000, "c"], scores=[0.0] * 3), "one of 2000 characters"),
]


@pytest.mark.parametrize(("metadata", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_metadata_is_one_line_that_says_what_is_wrong(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        tokenizer_from_metadata(metadata).encode("hello")
    assert "\n" not in str(raised.value)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ModelError, match="not valid Unicode at character 1"):
        TOKENIZER.encode("a\udcff")


def test_a_word_longer_than_the_regex_engine_can_take_is_refused() -> None:
    with pytest.raises(ModelError, match="2097153 characters in one word or one gap"):
        TOKENIZER.encode("a b" + " " * (MAX_RUN_CHARACTERS + 1) + "c")


@pytest.mark.parametrize("token", [-1, 2048])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ModelError, match=f"token {token} is not in the vocabulary; need 0 to 2047"):
        TOKENIZER.decode([token])


def test_a_text_inside_another_begins_without_a_space() -> None:
    tokenizer = tokenizer_from_metadata(sentence_piece())
    assert tokenizer.decode(tokenizer.encode("ab", add_special=False)) == "ab"
    assert tokenizer.encode("ab", add_special=False) == [264]
    assert tokenizer.encode_continuation("ab") == [263]
    assert tokenizer.encode_continuation("<s>")[0] != 1
    assert tokenizer.encode_chat_continuation("ab", last=263) == [263]
    assert tokenizer.encode_chat_continuation("ab", last=2) == [264]
    assert tokenizer.encode_chat_continuation("</s>ab", last=263) == [2, 264]


def merged_by_scores(text: str, where: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """The pair with the highest score first, of several the leftmost one."""
    pieces = list(text)
    while pairs := [
        (-scores[where[whole]], i) for i, whole in enumerate(map("".join, itertools.pairwise(pieces))) if whole in where
    ]:
        at = min(pairs)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return [where[piece] for piece in pieces]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("different", [1, 3, 1000])
def test_of_merges_with_one_score_the_leftmost_is_first(seed: int, different: int) -> None:
    rng = random.Random(seed)
    longer = sorted({"".join(rng.choices("abc▁", k=rng.choice([2, 2, 3, 4]))) for _ in range(14)})
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", *longer]
    scores = [0.0] * 7 + [-float(rng.randrange(different)) for _ in longer]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)]
    tokenizer = tokenizer_from_metadata(with_prefix(model="llama", tokens=tokens, token_type=types, scores=scores))
    where = {text: i for i, text in enumerate(tokens)}
    for _ in range(30):
        text = "".join(rng.choices("abc ", k=rng.randrange(1, 14)))
        want = merged_by_scores("▁" + text.replace(" ", "▁"), where, scores)
        assert tokenizer.encode(text, add_special=False) == want


def test_merges_with_one_score_fall_back_to_bytes_and_to_unknown() -> None:
    values = sentence_piece(scores=[0.0] * 268)
    tokenizer = tokenizer_from_metadata(values)
    assert tokenizer.encode("ab私", add_special=False)[-3:] == [3 + byte for byte in "私".encode()]
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"]
    bare = tokenizer_from_metadata(
        with_prefix(model="llama", tokens=tokens, token_type=[2, 3, 3, *[1] * 5], scores=[0.0] * 8)
    )
    assert bare.encode("a私私b", add_special=False) == [6, 0, 5]
