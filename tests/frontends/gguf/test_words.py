"""WordPiece and unigrams against the ids of transformers' ``BertTokenizer`` and of sentencepiece."""

from __future__ import annotations

import base64
import zlib

import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata

from ...given.tokenizers import with_prefix

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat ##s sat un ##believ ##able cafe , . ! 中 文 don "
    "' t a ##b ##c [ ] ` cls 1 ##2"
)
CHARACTERS = zlib.decompress(
    base64.b85decode(
        "c-ke?2aFXo7y#hD%V9!t3{ghdO95pM0hz}T5D*1K8M22bhziIakLdtKrhp=xoXVl>L-sso!cdulfUKaAy+Ik@lO|vOwtw3+>E93^"
        "LMRwQ#!MmBqH{BZkc#POG(Ijwvxo3ghzld-pD>r4FBpYrg2h?L%#&p0DY9Wpc$%E#VBOBRkW0)%ZX6NvQh@vvdVGaYgu*;SQHt>_"
        "B`D7GJVz-?Qijr$qbwCDPbDf+nHQ)^6{_(fHK<N4YLZB8>QaaL)T03}(TIjL=4G1Fgl4?LYrIMen)5m>d4pE8=1tnthPP-(2int#"
        "j&z|j-RMdWx|77)^yD4hr5Eqfn-6%OzVzWk`Z0k13}PTd7|bw+GJ@fZj6FP~8O2z}@DbzqgpV1|r+mf)Ch|Fx_<|`+W*SrZlIhH3"
        "2469Y*?i3$z9E^p%;Q_WBZVLMo>b=ZBMVp<Vl^4UVivKKB`jwdD@bD{KeL)utYr=BV>QV}Hn5pZq_c%>Y-I=A*~QLSE+rDuXGFpt"
        "{oU+iFTe5&`}vK79N;jA_?;sh<0!}ZgOi-#6n}Dt)12ch=ee8^34e=!@lR|`S|nT)FT`?O;wo3T&NXgwgWKHVE_e8sd)((g9`fM-"
        "zn7@yx+jH4#<Pml"
    )
)
"""The normalisation of sentencepiece: tabs, ideographic and unbreakable spaces become spaces, Ａ is A, ﬁ is fi, é is e.
"""
PIECES = {
    "<pad>": 0.0,
    "</s>": 0.0,
    "<unk>": 0.0,
    "<u>": 0.0,
    "▁the": -1.991,
    "▁": -2.4681,
    "at": -2.5378,
    "s": -2.8217,
    "▁a": -2.8492,
    "n": -3.2007,
    "▁fi": -3.2059,
    "e": -3.2132,
    "d": -3.2396,
    "c": -3.2396,
    "▁hat": -3.2486,
    "▁sat": -3.2568,
    "▁fin": -3.2847,
    "▁o": -3.2997,
    "o": -3.8336,
    "▁th": -3.8739,
    "i": -3.9161,
    "t": -3.9298,
    "f": -3.9431,
    "l": -3.9454,
    "m": -3.9454,
    "r": -3.9454,
    "y": -3.9454,
    "▁thing": -3.95,
    "g": -3.9764,
    "a": -3.9765,
    "h": -3.9766,
    "▁thi": -3.9766,
}


def word_piece(**changes: object) -> dict[str, object]:
    def as_in_files(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            return token
        return token[2:] if token.startswith("##") else "▁" + token

    tokens = [as_in_files(token) for token in WORDS.split()]
    types = [CONTROL] * 5 + [NORMAL] * (len(tokens) - 5)
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    return with_prefix(**({"model": "bert", "tokens": tokens, "token_type": types, **ids} | changes))


def unigrams(**changes: object) -> dict[str, object]:
    types = [CONTROL, CONTROL, UNKNOWN, USER, *[NORMAL] * (len(PIECES) - 4)]
    values: dict[str, object] = {"model": "t5", "tokens": [*PIECES], "scores": [*PIECES.values()], "token_type": types}
    values |= {"precompiled_charsmap": [byte - 256 * (byte > 127) for byte in CHARACTERS]}
    values |= {"remove_extra_whitespaces": True, "eos_token_id": 1, "unknown_token_id": 2}
    return with_prefix(**(values | changes))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The cats SAT.", [5, 6, 7, 8, 14]),
        ("unbelievable Café, don't!", [9, 10, 11, 12, 13, 18, 19, 20, 15]),
        ("中文 cat中", [16, 17, 6, 16]),
        ("abc abd 12 121", [21, 22, 23, 1, 28, 29, 1]),
        ("  the\t\ncat\u00a0sat\u200b ", [5, 6, 8]),
        ("a" + "b" * 99, [21, *[22] * 99]),
        ("a" + "b" * 100, [1]),
        ("", []),
    ],
)
def test_word_pieces_are_those_of_transformers(text: str, ids: list[int]) -> None:
    tokenizer = tokenizer_from_metadata(word_piece())
    assert tokenizer.encode(text) == [2, *ids, 3]
    assert tokenizer.encode(text, add_special=False) == ids


@pytest.mark.parametrize(("text", "ids"), [("The cat", [1, 6]), ("café cafe", [1, 12])])
def test_words_keep_case_and_accents_where_the_file_says_so(text: str, ids: list[int]) -> None:
    tokenizer = tokenizer_from_metadata(word_piece(**{"normalizer.lowercase": False}))
    assert tokenizer.encode(text, add_special=False) == ids


def test_special_tokens_in_a_text_are_words_unless_they_are_asked_for() -> None:
    tokenizer = tokenizer_from_metadata(word_piece())
    assert tokenizer.encode("the [MASK] sat", add_special=False, parse_special=True) == [5, 4, 8]
    assert tokenizer.encode("[CLS]", add_special=False) == [24, 27, 25]


def test_word_pieces_are_text_again() -> None:
    tokenizer = tokenizer_from_metadata(word_piece())
    assert tokenizer.decode(tokenizer.encode("the unbelievable cats")) == "the unbelievable cats"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("the cat", [4, 5, 13, 6]),
        ("  the  fine\u3000hat ", [4, 16, 11, 14]),
        ("ﬁnd the Ａ é file", [16, 12, 4, 5, 2, 5, 11, 10, 23, 11]),
        ("x", [5, 2]),
        ("", []),
    ],
)
def test_unigrams_are_those_of_sentencepiece(text: str, ids: list[int]) -> None:
    assert tokenizer_from_metadata(unigrams()).encode(text) == [*ids, 1]


def test_special_tokens_split_a_text_of_unigrams() -> None:
    tokenizer = tokenizer_from_metadata(unigrams(add_eos_token=False))
    assert tokenizer.encode("the <u> cat") == [4, 3, 5, 13, 6]
    assert 1 not in tokenizer.encode("</s>")
    assert tokenizer.encode("</s>", parse_special=True) == [1]


def test_spaces_stay_where_the_file_does_not_say_otherwise() -> None:
    tokenizer = tokenizer_from_metadata(unigrams(remove_extra_whitespaces=None, add_space_prefix=False))
    assert tokenizer.encode("at  at", add_special=False) == [6, 5, 5, 6]
    assert tokenizer.decode([4, 5, 13, 6]) == " the cat"
    assert tokenizer_from_metadata(unigrams()).decode([4, 5, 13, 6]) == "the cat"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (word_piece(unknown_token_id=None), "unknown_token_id is missing"),
        (word_piece(seperator_token_id=99), "seperator_token_id is 99; need a token id"),
        (word_piece(**{"normalizer.lowercase": 1}), "normalizer.lowercase is a int; need a bool"),
        (unigrams(scores=None), "scores is missing; a vocabulary of kind 't5'"),
        (unigrams(precompiled_charsmap=[1, 300]), "precompiled_charsmap holds something else than bytes"),
        (unigrams(precompiled_charsmap=[255, 255, 255, 255, 1]), "vocabulary cannot be used"),
    ],
)
def test_wrong_metadata_is_one_line_that_says_what_is_wrong(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        tokenizer_from_metadata(metadata).encode("hello")
    assert "\n" not in str(raised.value)


def test_a_character_without_a_unigram_becomes_its_bytes() -> None:
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * 4, *[6] * 256]
    values = {"model": "t5", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))]}
    tokenizer = tokenizer_from_metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})
    assert tokenizer.encode("a🦙b") == [6, *(7 + byte for byte in "🦙".encode()), 5, 1]
    assert tokenizer.encode("é私", add_special=False) == [3, *(7 + byte for byte in "é私".encode())]
    ids = tokenizer.encode("<0x41>", add_special=False)
    assert ids == [3, *(7 + byte for byte in b"<0x41>")]
    assert tokenizer.decode(ids) == "<0x41>"
    assert tokenizer.encode("a", add_special=False) == [6]
    assert tokenizer.encode_continuation("a") == [4]
    few = {**values, "tokens": [*tokens[:-1], "c"], "token_type": [*types[:-1], NORMAL]}
    without = tokenizer_from_metadata({f"tokenizer.ggml.{name}": value for name, value in few.items()})
    assert without.encode("a🦙b") == [6, 2, 5, 1]
