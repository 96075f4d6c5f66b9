"""The names of ``tokenizer.ggml.pre``: words as llama.cpp (b11434) or the published regexes cut them."""

from __future__ import annotations

import random
import unicodedata
from functools import cache
from hashlib import sha256

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Sequence, Split

from hocket.frontends.gguf.tokenization.pretokenizers import PRE_TOKENIZERS
from hocket.frontends.gguf.tokenization.tokenizer import BYTE_OF_CHARACTER, Tokenizer, tokenizer_from_metadata

from ...given.tokenizers import token_texts

NORMAL, USER, BYTE = 1, 4, 6
LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3
    llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 mmbert modern-bert mpt olmo phi-2
    pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5
    stablelm2 starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking whitespace youtu
"""
MIXED = "I'm camelCase  1234567 日本ไทย नमस्ते\r\n\t<a.b> x_y "
TAGGED_TEXT = " 1578a IMGIMGABZ<sentinel:12>"
GREEK_TEXT = "Ωμέγα K\u212a \u1fbe 你好 12345\n\n "
GOLDEN_WORDS = {
    ("deepseek-llm", MIXED): "I|'|m| camelCase|  |1234567| |日本ไทย| |नमस्ते|\r|\n|\t<|a|.|b|>| x|_|y| ",
    ("deepseek-llm", TAGGED_TEXT): " |1578|a| IMGIMGABZ|<|sentinel|:|12|>",
    ("deepseek-llm", GREEK_TEXT): "Ωμέγα| K|\u212a| |\u1fbe| |你好| |12345|\n|\n| ",
    ("deepseek-llm", "\u212b\U00010400\u0251 ａ\u3001〉。"): "\u212b|\U00010400\u0251| ａ|\u3001|〉|。",
    ("afmoe", MIXED): "I|'m| camelCase|  |1|234|567| |日本ไ|ทย| नमस्ते|\r\n|\t|<a|.b|>| x|_y| ",
    ("afmoe", TAGGED_TEXT): " |1|578|a| IMGIMGABZ|<sentinel|:|12|>",
    ("afmoe", GREEK_TEXT): "Ωμέγα| K\u212a| \u1fbe| |你好| |12|345|\n\n| ",
    ("superbpe", MIXED): "I'm camelCase  |1|234|567| 日本ไทย नमस्ते\r\n\t<a.b> x_y ",
    ("superbpe", TAGGED_TEXT): " |1|578|a IMGIMGABZ<sentinel:|12|>",
    (
        "chameleon",
        MIXED,
    ): "I|'|m| camelCase|  |1|2|3|4|5|6|7| 日本ไทย| नमस|\u094d|त|\u0947|\r|\n|\t|<|a|.|b|>| x|_|y| ",
    ("chameleon", TAGGED_TEXT): " |1|5|7|8|a| |IMGIMGABZ|<|sentinel|:|1|2|>",
    ("granite-embed-multi-97m", MIXED): "I'm| camel|Case| | |123|456|7| 日本ไทย| नमस्ते|\r\n|\t|<a|.b|>| x|_y| ",
    ("tiny_aya", MIXED): "I'm| camel|Case|  |1|234|567| 日本ไทย| नमस्ते|\r\n|\t|<a|.b|>| x|_y| ",
    ("tiny_aya", TAGGED_TEXT): " |157|8|a| IMGIMGABZ|<sentinel|:|12|>",
    ("tiny_aya", "\xa0\xa01"): "\xa0\xa0|1",
    ("kimi-k2", "GoldMagikarp"): "Gold|Magikarp",
    ("gpt-4o", "\u20e3's"): "\u20e3's",
    ("deepseek-coder", " \u2028"): " |\u2028",
    ("gemma4", MIXED.replace(" ", "▁")): "I'm▁camelCase▁▁1234567▁日本ไทย▁नमस्ते\r|\n|\t<a.b>▁x_y▁",
    ("sarvam-moe", GREEK_TEXT): "Ωμέγα K\u212a \u1fbe 你好 12345|\n\n| ",
    ("mmbert", "▁I'm▁camel▁▁1\n\n▁x"): "▁I'm|▁camel|▁|▁1|\n\n|▁x",
    ("whitespace", MIXED): "I'm| |camelCase|  |1234567| |日本ไทย| |नमस्ते|\r\n\t|<a.b>| |x_y| ",
}
PUBLISHED = {
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", *PRE_TOKENIZERS["gpt-4o"].patterns),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", *PRE_TOKENIZERS["afmoe"].patterns[1:]),
}

CHARACTERS = (
    "abcxyzIMGABZstdmrevl",
    "ABCXYZÀÉΩ",
    "'’",
    "0123456789",
    "½²١٣Ⅷ",
    " ",
    "   \t\n\r\xa0\u2028\u3000",
    '.,!?;:-_/\\()[]{}<>|^~`$+=#@*&%"',
    "日本你好ぁァ가ㄱㄅ",
    "नमस्तेไทยລາວကខក្",
    "\u0301\u0300\u20e3\u094d",
    "éßσςǅʰªµ",
    "…“”—、。，！",
    "😀👍\U00010400\U0001e900",
    "\u200b\u00ad\ufeff\x00\x7f\x1c",
    "▁▁",
    ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE"),
    ["<sentinel:1>", "IMGIMGABZ", "https://x.y/a_b", "\r\n", "\n\n", "  ", " a", "1234567"],
)
"""Kinds of characters and short texts that the rules treat differently."""
DIGESTS = {
    # Equal to the words of `unicode_regex_split` in llama.cpp b11434, with the regexes of `llama-vocab.cpp`.
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 glm5 "
    "chatglm-bpe": "9ff5342ae2aec115",
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": "34d123bf28931355",
    "qwen35": "cebdd439471daa64",
    "ufakzeka": "a484964e30d4fc9b",
    "laguna": "968c6fb86f9bd5d1",
    "minicpm5": "a8fb9f2cded8247b",
    "jais-2": "fc1e616d020d13ae",
    "exaone-moe": "888b1bcf709d2058",
    "spark2_5": "f8660dcbd9e34200",
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": "4fcfb3746665bf39",
    "bailingmoe bailingmoe2 llada-moe": "34d123bf28931355",
    "seed-coder": "0369cd41c4903adc",
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": "bae28daf58c4f666",
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 modern-bert jina-es jina-de "
    "jina-v1-en jina-v2-code jina-v2-es jina-v2-de roberta-bpe": "9ecb4a4996d6a6a3",
    "chameleon": "a69616c670d9797a",
    "falcon": "9ba03a11c0bc6235",
    "default": "408a2720aaa08103",
    "poro-chat bloom gpt3-finnish": "5624de6329588090",
    "viking": "4ad91ae627c8efe1",
    "gemma4 granite-embed-multi-311m sarvam-moe": "7670b68295bd5fb1",
    "whitespace": "f409bcc885d845b7",
    # Equal to the words by the regexes of the models, which `llama-vocab.cpp` and `unicode.cpp` quote, in Oniguruma.
    # llama.cpp itself replaces them by simpler ones. For granite-embed-multi-97m it has only the simpler one: see
    # `test_granite_splits_ten_thousand_texts_as_llama_cpp_where_cased_letters_are_ascii`.
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": "ad93b7141f38a8b1",
    "tiny_aya cohere2moe": "eb1a153061e14100",
    "youtu": "e599cea36152eb93",
    "tekken": "e4bfb5b25f0b9fd6",
    "kimi-k2": "eae53b1838b76537",
    "deepseek-llm": "8745fbb11e1ef9c9",
    "deepseek-coder": "4fdec423f6612e95",
    "afmoe": "5c6e5de0f3aed5d0",
    "superbpe": "77523f929b51ef3f",
    "mmbert": "d59c2045fdab79a6",
}
"""The SHA-256 prefix of the words of 10,000 texts, by the names of a rule; computed with both programs."""


def split_by(patterns: tuple[str, ...]) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated") for pattern in patterns])


def words(splitter: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def raw(pre: str, tokens: str, merges: tuple[str, ...] = (), **changes: object) -> Tokenizer:
    """A vocabulary of text, not of letters for bytes."""
    listed = [*tokens.split(), "\n", "<u>"]
    types = [BYTE if token.startswith("<0x") else NORMAL for token in listed[:-1]] + [USER]
    values = {"model": "gpt2", "pre": pre, "tokens": listed, "token_type": types, "merges": [*merges]} | changes
    return tokenizer_from_metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})


def test_every_name_of_llama_cpp_is_known() -> None:
    assert sorted(PRE_TOKENIZERS) == sorted(LLAMA_CPP.split())


@pytest.mark.parametrize(("name", "text"), GOLDEN_WORDS)
def test_each_name_splits_text_into_the_words_of_its_models(name: str, text: str) -> None:
    assert words(split_by(PRE_TOKENIZERS[name].patterns), text) == GOLDEN_WORDS[name, text].split("|")


@cache
def list_seeded_texts(count: int = 10_000) -> list[str]:
    """Return short texts of one to three kinds of characters, or of all kinds, without NUL."""
    dice, texts = random.Random(0), []
    for _ in range(count * 11 // 10):
        kinds = dice.sample(CHARACTERS, dice.randrange(1, 4)) if dice.random() < 0.5 else CHARACTERS
        texts.append("".join(dice.choice(dice.choice(kinds)) for _ in range(dice.randrange(1, 14))))
    return [text for text in texts if "\x00" not in text][:count]


@pytest.mark.parametrize("names", DIGESTS)
def test_each_name_splits_ten_thousand_texts_as_llama_cpp_or_the_published_regex(names: str) -> None:
    (patterns,) = {PRE_TOKENIZERS[name].patterns for name in names.split()}
    splitter, digest = split_by(patterns), sha256()
    for text in list_seeded_texts():
        digest.update(("\x01".join(words(splitter, text)) + "\x02").encode())
    assert digest.hexdigest().startswith(DIGESTS[names])


def test_granite_splits_ten_thousand_texts_as_llama_cpp_where_cased_letters_are_ascii() -> None:
    """The digest is of the words by llama.cpp's regex, which tells upper case from lower case in ASCII only.

    llama.cpp quotes no regex of the model. Its pull request 22716 first shared the regex of GPT-4o, and later copied
    it with combining marks. So other cased letters are split as in GPT-4o.
    """
    texts = [
        text
        for text in list_seeded_texts(20_000)
        if not any(ord(c) > 127 and unicodedata.category(c) in ("Lu", "Ll", "Lt") for c in text)
    ][:10_000]
    splitter, digest = split_by(PRE_TOKENIZERS["granite-embed-multi-97m"].patterns), sha256()
    for text in texts:
        digest.update(("\x01".join(words(splitter, text)) + "\x02").encode())
    assert len(texts) == 10_000
    assert digest.hexdigest().startswith("c1b150964cb24a12")


def test_each_name_is_compared_on_ten_thousand_texts() -> None:
    assert sorted(" ".join(DIGESTS).split()) == sorted(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_digits_are_split_as_by_the_published_regexes(name: str) -> None:
    rng = random.Random(0)
    published, ours = split_by(PUBLISHED[name]), split_by(PRE_TOKENIZERS[name].patterns)
    for _ in range(4000):
        plain = rng.choice([0.6, 0.9, 1.0])
        kinds = ("0123456789" if rng.random() < plain else "½²１٣Ⅷa_ .\u0301\n" for _ in range(rng.randrange(1, 20)))
        text = "".join(map(rng.choice, kinds))
        assert words(ours, text) == words(published, text), text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_long_run_of_digits_is_split_into_groups_of_three(name: str) -> None:
    """In proportion to its length: a lookahead from every digit to the end would take its square."""
    splitter = split_by(PRE_TOKENIZERS[name].patterns)
    for left in ("", "1", "12"):
        assert words(splitter, left + "345" * 50_000) == [*filter(None, [left])] + ["345"] * 50_000


def test_names_of_gemma_merge_text_and_force_bos() -> None:
    for name in ("gemma4", "granite-embed-multi-311m"):
        tokenizer = raw(name, "▁ a b ▁a ▁ab é", ("▁ a", "▁a b"), bos_token_id=1, add_bos_token=False)
        assert token_texts(tokenizer, "ab ab\né  ") == ["a", "a", "b", "▁ab", "\n", "é", "▁", "▁"]
        assert tokenizer.decode(tokenizer.encode("b ab\né  ", add_special=False)) == "b ab\né  "


def test_sarvam_merges_text_and_leaves_bos_to_the_file() -> None:
    tokenizer = raw("sarvam-moe", "▁ a b ▁a ▁ab", ("▁ a", "▁a b"))
    assert token_texts(tokenizer, "ab ab<u> a") == ["a", "b", "▁ab", "<u>", "▁a"]


def test_each_line_of_mmbert_begins_with_a_space_and_each_space_a_word() -> None:
    tokenizer = raw("mmbert", "▁ a b ▁a a▁", ("a ▁", "▁ a"))
    assert token_texts(tokenizer, "ab a\nb\n\n a  ") == ["▁a", "b", "▁a", "\n", "▁", "b", "\n", "\n", "▁a", "▁", "▁"]
    assert [tokenizer.tokens[i] for i in tokenizer.encode_continuation("a a\nb")] == ["a", "▁a", "\n", "▁", "b"]


def test_a_name_for_text_between_white_space_merges_text() -> None:
    tokenizer = raw("whitespace", "a b ab é", ("a b",))
    assert token_texts(tokenizer, "ab é\nba") == ["ab", "é", "\n", "b", "a"]
    assert tokenizer.decode(tokenizer.encode("abé")) == "abé"


def test_nothing_is_merged_across_a_character_without_a_token() -> None:
    assert token_texts(raw("whitespace", "a b ab", ("a b",)), "ab a私b") == ["ab", "a", "b"]
    whole = raw("sarvam-moe", " ".join(f"<0x{byte:02X}>" for byte in range(256)) + " a")
    assert whole.decode(whole.encode("a私a")) == "a私a"


def test_chameleon_adds_bos_and_granite_keeps_whole_words() -> None:
    letters = [*BYTE_OF_CHARACTER, "ab", "abc"]
    values = {"model": "gpt2", "tokens": letters, "merges": ["a b"], "bos_token_id": 0}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    for name, want in (
        ("chameleon", ["!", "ab", "c"]),
        ("granite-embed-multi-97m", ["abc"]),
        ("superbpe", ["ab", "c"]),
    ):
        assert token_texts(tokenizer_from_metadata(metadata | {"tokenizer.ggml.pre": name}), "abc") == want, name
