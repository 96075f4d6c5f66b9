"""Reading ``tokenizer.ggml.*``: every value checked before HF ``tokenizers`` sees it, then its model built.

The metadata may come from a damaged or hostile file; whatever is wrong with it is one ModelError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..errors import ModelError
from .pretokenizers import GEMMA4, PreTokenizer, pre_tokenizer

if TYPE_CHECKING:
    import tokenizers

PREFIX = "tokenizer.ggml."
MAX_TOKEN = 1024
"""Characters of the longest token whose merges are derived: cutting one at every place costs its length squared."""
_NO_ID = (-1, 0xFFFFFFFF)
"""How some converters write that there is no such token."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Scalar = TypeVar("Scalar", str, bool)


def read_scalar(metadata: Mapping[str, object], name: str, kind: type[Scalar], default: Scalar) -> Scalar:
    """The value of one key, or ``default`` if it is missing; ModelError if it is of another type."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(f"{PREFIX}{name} is a {type(value).__name__}; need a {kind.__name__}")
    return value


def read_id(metadata: Mapping[str, object], name: str, n_tokens: int) -> int | None:
    """The token id under one key, None if it is missing or says "none"; ModelError if no such token exists."""
    value = metadata.get(PREFIX + name)
    if value is None or (type(value) is int and value in _NO_ID):
        return None
    if type(value) is not int or not 0 <= value < n_tokens:
        raise ModelError(f"{PREFIX}{name} is {str(value)[:40]}; need a token id of 0 to {n_tokens - 1}")
    return value


def read_tokens(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """The text of every token; ModelError if there are none, if two are equal, or if one is not Unicode text."""
    strings = _strings(metadata, "tokens")
    if not strings:
        raise ModelError(f"{PREFIX}tokens is empty; need a vocabulary")
    tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(strings))
    where: dict[str, int] = {}
    for i, text in enumerate(tokens):
        if where.setdefault(text, i) != i:
            raise ModelError(f"{PREFIX}tokens: {where[text]} and {i} are both {text[:40]!a}; need each text once")
    return tokens


def read_numbers(metadata: Mapping[str, object], name: str, length: int) -> tuple[float, ...] | None:
    """The numbers of an array beside the tokens, None if it is missing; ModelError if it has another length."""
    if metadata.get(PREFIX + name) is None:
        return None
    values = _array(metadata, name)
    if len(values) != length:
        raise ModelError(f"{PREFIX}{name} has {len(values)} values, {PREFIX}tokens {length}; need as many")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # the line itself checks it
            raise ModelError(f"{PREFIX}{name} holds {str(value)[:40]}; need finite numbers")
    return values  # type: ignore[return-value]  # checked one by one above


def read_rule(metadata: Mapping[str, object], kind: str) -> PreTokenizer:
    """How text is cut before merging; only byte-level BPE looks at ``tokenizer.ggml.pre``."""
    if kind == "gpt2":
        return pre_tokenizer(read_scalar(metadata, "pre", str, "default") or "default")
    return GEMMA4 if kind == "gemma4" else SPM


def byte_of(token: int, text: str) -> bytes:
    """The byte that a token of type byte stands for; ModelError if it is not written like ``<0x41>``."""
    match = _BYTE_TOKEN.fullmatch(text)
    if match is None:
        raise ModelError(f"{PREFIX}tokens: {token} is of type byte but reads {text[:40]!a}; need <0x00> to <0xFF>")
    return bytes.fromhex(match[1])


def check_unicode(who: str, text: str) -> None:
    """ModelError unless ``text`` can be written as UTF-8: HF panics on a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{who} is not valid Unicode at character {error.start}; need UTF-8 text") from None


def byte_level_model(
    metadata: Mapping[str, object], tokens: Sequence[str], rule: PreTokenizer, unk: int | None
) -> tokenizers.Tokenizer:
    """Byte-level BPE: merges from the file, inside the pieces that ``rule`` cuts.  ``unk`` is not used."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab = {text: i for i, text in enumerate(tokens)}
    model = models.BPE(vocab, _stored_merges(metadata, vocab), ignore_merges=rule.ignore_merges)
    built = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    return built


def raw_model(
    metadata: Mapping[str, object], tokens: Sequence[str], rule: PreTokenizer, unk: int | None
) -> tokenizers.Tokenizer:
    """BPE on raw text with byte fallback: stored merges (gemma4), or merges derived from scores (SentencePiece)."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab = {text: i for i, text in enumerate(tokens)}
    merges = _stored_merges(metadata, vocab) if rule.patterns else _derived_merges(metadata, tokens, vocab)
    unk_token = None if unk is None else tokens[unk]
    built = Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    if rule.patterns:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return built


SPM = PreTokenizer((), add_bos=True)
"""SentencePiece merges over the whole text."""

Builder = Callable[[Mapping[str, object], Sequence[str], PreTokenizer, int | None], "tokenizers.Tokenizer"]
BUILDERS: Mapping[str, Builder] = {"gpt2": byte_level_model, "llama": raw_model, "gemma4": raw_model}
"""How the model of each kind (``tokenizer.ggml.model``) is built."""


def _stored_merges(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for i, merge in enumerate(_strings(metadata, "merges")):
        cut = merge.find(" ", 1)  # the first part may itself start with a space, so that one does not separate
        pair = merge[:cut], merge[cut + 1 :]
        if cut < 0 or pair[0] not in vocab or pair[1] not in vocab or pair[0] + pair[1] not in vocab:
            raise ModelError(f"{PREFIX}merges: {i}, {merge[:40]!a}, is not two tokens that together are a third")
        merges.setdefault(pair)
    return list(merges)


def _derived_merges(
    metadata: Mapping[str, object], tokens: Sequence[str], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest score first: SentencePiece stores no merges."""
    scores = read_numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise ModelError(f"{PREFIX}scores is missing; a vocabulary of kind 'llama' needs one score a token")
    if max(map(len, tokens)) > MAX_TOKEN:
        raise ModelError(f"{PREFIX}tokens holds one of {max(map(len, tokens))} characters; at most {MAX_TOKEN} can be")
    merges = []
    # On equal scores the longer left part first: merging goes from left to right.
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        text = tokens[i]
        cuts = range(len(text) - 1, 0, -1)
        merges += [(text[:cut], text[cut:]) for cut in cuts if text[:cut] in vocab and text[cut:] in vocab]
    return merges


def _strings(metadata: Mapping[str, object], name: str) -> tuple[str, ...]:
    values = _array(metadata, name)
    for i, value in enumerate(values):
        if type(value) is not str:
            raise ModelError(f"{PREFIX}{name}: {i} is a {type(value).__name__}; need strings")
    strings: tuple[str, ...] = values  # type: ignore[assignment]  # checked one by one above
    check_unicode(f"{PREFIX}{name}", "".join(strings))
    return strings


def _array(metadata: Mapping[str, object], name: str) -> tuple[object, ...]:
    values = metadata.get(PREFIX + name)
    if values is None:
        raise ModelError(f"{PREFIX}{name} is missing; need an array")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ModelError(f"{PREFIX}{name} is a {type(values).__name__}; need an array")
    return tuple(values[:])  # one slice: a lazy array decodes all at once
