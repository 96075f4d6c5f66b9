"""Rules that split text into words before BPE, by the value of ``tokenizer.ggml.pre``; BPE merges inside a word only.

The regular expressions come from the ``tokenizer.json`` of each model and use the syntax of the Oniguruma engine of HF
``tokenizers``. The names, the defaults for BOS and the spelling of tokens follow ``llama-vocab.cpp`` of llama.cpp
(b11434).
"""

from __future__ import annotations

from collections.abc import Iterator

from ....graph.lazy_dataclass import dataclass
from ...errors import ModelError


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """A rule of a BPE tokenizer that splits a text into pieces before the merges; BPE merges only inside a piece.

    The regular expressions split the text one after the other. Matches, and the text between matches, become pieces.
    The rule also tells how tokens are spelled.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that equals a token becomes that token, even if no merges produce it."""
    add_bos: bool = False
    """Whether BOS is added by default."""
    forces_bos: bool = False
    """Whether BOS is added even against the file."""
    has_bos: bool = True
    """Whether a file without a BOS id has the default BOS id of its kind."""
    uses_byte_letters: bool = True
    """Whether tokens spell bytes by the letters of the GPT-2 table; otherwise tokens are plain text."""
    uses_space_marks: bool = False
    """Whether tokens spell a space as ``▁``."""
    line_prefix: str = ""
    """Text that is prepended to each line that does not begin with it."""


_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _build_llama3_pattern(digits: str, contraction: str = _CASELESS + "|") -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{contraction}{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"


def _build_camel_case_pattern(contraction: str, digits: str, tail: str = r"[\r\n/]*", excluded: str = "") -> str:
    """Build a pattern that splits camelCase words before upper-case letters.

    Args:
        contraction: Pattern of a word ending such as ``'s``.
        digits: Pattern of numbers.
        tail: Pattern of the characters that may follow punctuation in the same piece.
        excluded: Text for the character classes of letters that excludes characters from them.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{tail}|\s*[\r\n]+|{_SPACES}"


_LLAMA3 = _build_llama3_pattern(r"\p{N}{1,3}")
_QWEN2 = _build_llama3_pattern(r"\p{N}")
_QWEN35 = (
    rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_GPT4O = _build_camel_case_pattern(f"{_CASELESS}?", r"\p{N}{1,3}")
_KIMI_K2 = r"[\p{Han}]+|" + _build_camel_case_pattern(
    f"{_CASELESS}?", r"\p{N}{1,3}", tail=r"[\r\n]*", excluded=r"&&[^\p{Han}]"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}"
)
_SEED = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_SPARK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK
_JAIS2 = (
    _LLAMA3.removesuffix(_SPACES)
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"\s"
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
    "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻"
    "𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Character class of ``deepseek-llm``: the letters with case in Unicode 12."""
_AFMOE_DIGITS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3}"
"""Groups of three digits from the right; the first group has the remainder."""
_AFMOE_CJK = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_SUPERBPE_DIGITS = (r"\p{N}+", r"(?:(?<!\d)|(?<=\A\d|\A\d\d|\D\d|\D\d\d))(?=(?:\d{3})++(?!\d))", r"\d{3}(?=\d)")
"""Equivalent to the published ``\\p{N}+`` and ``(?=(\\d{3})+(?!\\d))``, but in linear time.

The first pattern after ``\\p{N}+`` matches the start of the groups of three, the next one the gaps between them."""
_TINY_AYA_DIGITS = (r"(?<!\d)\d++\b", r"\A(?:\d{1,2}(?=(?:\d{3})*+\z)|\d{3}(?=\d*+\z))|(?!\A)\G\d{3}")
"""Equivalent to the published ``\\d{1,3}(?=(?:\\d{3})*\\b)``, but in linear time: whole numbers come first."""
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)
_LINES = r"[^\n]+|\n+"
GEMMA4 = PreTokenizerRule((_LINES,), forces_bos=True, uses_byte_letters=False, uses_space_marks=True)
"""The rule for ``tokenizer.ggml.model = gemma4``, which ignores ``tokenizer.ggml.pre``."""

_RULES: tuple[tuple[str, PreTokenizerRule], ...] = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizerRule((_LLAMA3,))),
    ("glm4 glm5", PreTokenizerRule((_LLAMA3,), ignore_merges=True, has_bos=False)),
    ("chatglm-bpe", PreTokenizerRule((_LLAMA3,), has_bos=False)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizerRule((_QWEN2,))),
    ("qwen35", PreTokenizerRule((_QWEN35,))),
    ("ufakzeka", PreTokenizerRule((_build_llama3_pattern(r"\p{N}", contraction=""),))),
    ("laguna", PreTokenizerRule((r"[^\n]+|[\n]+", _QWEN2))),
    ("minicpm5", PreTokenizerRule((r"\p{N}{1,3}", _build_llama3_pattern(r"\p{N}+")), ignore_merges=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizerRule((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizerRule((_GPT4O,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizerRule((*_TINY_AYA_DIGITS, _GPT4O))),
    ("youtu", PreTokenizerRule((_YOUTU, _build_camel_case_pattern(f"{_CASELESS}?", r"\p{N}")), ignore_merges=True)),
    ("jais-2", PreTokenizerRule((_JAIS2,))),
    ("exaone-moe", PreTokenizerRule((_EXAONE_MOE,))),
    ("spark2_5", PreTokenizerRule((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"))),
    ("tekken", PreTokenizerRule((_build_camel_case_pattern("", r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("kimi-k2", PreTokenizerRule((_KIMI_K2,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizerRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    (
        "deepseek-llm",
        PreTokenizerRule(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _ASIAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))),
    ("afmoe", PreTokenizerRule((_AFMOE_DIGITS, _AFMOE_CJK, _DEEPSEEK3))),
    ("superbpe", PreTokenizerRule(_SUPERBPE_DIGITS)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizerRule((_BAILING,))),
    ("seed-coder", PreTokenizerRule((_SEED,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizerRule((r"\p{N}", _GPT2)),
    ),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 modern-bert "
        "jina-es jina-de jina-v1-en jina-v2-code jina-v2-es jina-v2-de roberta-bpe",
        PreTokenizerRule((_GPT2,)),
    ),
    ("chameleon", PreTokenizerRule((*_CHAMELEON, _GPT2), add_bos=True)),
    ("falcon", PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizerRule((_BLOOM,))),
    ("viking", PreTokenizerRule((_BLOOM, r"\p{N}"))),
    ("gemma4 granite-embed-multi-311m", GEMMA4),
    ("sarvam-moe", PreTokenizerRule((_LINES,), uses_byte_letters=False, uses_space_marks=True)),
    ("mmbert", PreTokenizerRule((r"▁[^▁\n]*|\n+",), uses_byte_letters=False, uses_space_marks=True, line_prefix="▁")),
    ("whitespace", PreTokenizerRule((r"\S+",), uses_byte_letters=False)),
)


def _list_rules() -> Iterator[tuple[str, PreTokenizerRule]]:
    for names, rule in _RULES:
        for name in names.split():
            yield name, rule


PRE_TOKENIZERS = dict(_list_rules())
"""Every known value of ``tokenizer.ggml.pre``."""


def select_pre_tokenizer_rule(name: str) -> PreTokenizerRule:
    """Return the pre-tokenizer rule with this value of ``tokenizer.ggml.pre``.

    Raises:
        ModelError: The name is unknown; a default rule could give wrong token ids.
    """
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre: unknown pre-tokenizer {name[:80]!r}; known are {known}")
    return PRE_TOKENIZERS[name]
