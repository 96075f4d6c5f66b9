"""The tokenizer: text to token ids and back, from the metadata of a GGUF file alone.

Kinds of vocabulary, by ``tokenizer.ggml.model``:

- ``gpt2``: BPE, mostly byte-level; ``hybriddna``: with DNA sequences; ``whitespace``: without white space
- ``llama``: SentencePiece BPE; ``gemma4``: BPE on raw text
- ``rwkv``: longest match; ``plamo2``: lowest cost; ``bert``: WordPiece; ``t5``: unigrams

`tokenizer_models` has the model of each kind. Special tokens in text, BOS, EOS and the defaults of missing keys
follow ``llama-vocab.cpp`` of llama.cpp.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TypeVar

from ....graph.errors import format_count
from ....graph.lazy_dataclass import dataclass
from ....graph.validation import BOOL, TEXT, format_value, instance_of, integer_between, validate_arguments
from ...errors import ModelError
from .dna_tokenizer import KMER_SUFFIX
from .pretokenizers import PreTokenizerRule
from .rwkv_tokenizer import unescape_token_to_bytes
from .special_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER,
    correct_types_and_find_end_tokens,
    find_phi3_space_stripping_tokens,
)
from .tokenizer_models import SPACE_MARK, TOKENIZER_MODELS, TokenizerModelCache
from .vocabulary import (
    PRE_KINDS,
    parse_byte_token,
    read_numbers_per_token_or_none,
    read_pre_tokenizer_rule,
    read_scalar_or_default,
    read_token_id_or_none,
    read_vocabulary,
    require_utf8_encodable,
)

Result = TypeVar("Result")
TOKEN_ID = integer_between(0)
MAX_RUN_CHARACTERS = 1 << 21
"""Characters of the longest word or the longest run of white space; the regex engine fails at five times as many."""
WHITE_SPACE = " \t\n\v\f\r"
"""White space that is removed after the tokens of `Tokenizer.strip_after`."""
_RUN_PATTERN = re.compile(r"\s+|\S+")
EMPTY_VOCABULARY_KINDS = ("test", "none", "no_vocab")
DEFAULT_IDS: Mapping[str, tuple[int | None, int | None, int | None]] = {
    **dict.fromkeys(PRE_KINDS, (11, 11, None)),
    "llama": (1, 2, 0),
    "gemma4": (None, None, None),
    "rwkv": (None, None, None),
    "plamo2": (1, 2, 0),
    "bert": (101, 102, 100),
    "t5": (None, 1, 2),
}
"""Default ids of BOS, EOS and the unknown token for each kind."""
_ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_SHIFTED_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
BYTE_OF_CHARACTER = {chr(b): bytes([b]) for b in _PRINTABLE_BYTES} | {
    chr(256 + i): bytes([b]) for i, b in enumerate(_SHIFTED_BYTES)
}
"""The byte of each letter in byte-level vocabularies (the table of GPT-2)."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer: a vocabulary and its rules, built by `tokenizer_from_metadata`.

    The first `encode` of a long text builds the model and may take seconds. `decode` needs no model.
    """

    kind: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    """All tokens that end a generation: EOS, end of turn, end of message, and tokens known by their text."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strip_after: frozenset[int]
    """Special tokens that remove the white space after them (phi-3)."""
    _rule: PreTokenizerRule
    _model_cache: TokenizerModelCache
    _special_tokens: dict[bool, tuple[int, ...]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """The number of tokens. The logits of a model may have more columns, which are padding."""
        return len(self.tokens)

    @property
    def bos_text(self) -> str:
        """The text of the BOS (begin-of-sequence) token for chat templates; empty without BOS."""
        return "" if self.bos_id is None else self.tokens[self.bos_id]

    @property
    def eos_text(self) -> str:
        """The text of the EOS (end-of-sequence) token for chat templates; empty without EOS."""
        return "" if self.eos_id is None else self.tokens[self.eos_id]

    @validate_arguments(ModelError, text=TEXT, add_special=BOOL, parse_special=BOOL)
    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Encode a text: return its token ids. Both flags are as in ``llama_tokenize``.

        Args:
            text: The text; it must be valid Unicode.
            add_special: Whether to add BOS and EOS if the model uses them.
            parse_special: Whether the text of a control token becomes that token. User-defined tokens always do.

        Raises:
            ModelError: The text is not valid Unicode, or the vocabulary is broken.
        """
        require_utf8_encodable("the text", text)
        if self._rule.uses_byte_letters and len(text) > MAX_RUN_CHARACTERS:
            _require_short_runs(text)
        ids = list(self._encode_with_special_tokens(text, parse_special))
        bos = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_special and self.add_eos and self.eos_id is not None else []
        return bos + ids + eos

    @validate_arguments(ModelError, rendered=TEXT)
    def encode_chat(self, rendered: str) -> list[int]:
        """Encode a rendered chat: return its token ids, with the text of special tokens as these tokens.

        BOS is added unless the template has written it. EOS is not added, because the answer follows.

        Raises:
            ModelError: As for `encode`.
        """
        ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @validate_arguments(ModelError, text=TEXT)
    def encode_continuation(self, text: str) -> list[int]:
        """Encode a text that continues another text: neither a space nor special tokens are added before it.

        Raises:
            ModelError: As for `encode`.
        """
        require_utf8_encodable("the text", text)
        return list(self._encode_with_special_tokens(text, False, begins=False))

    @validate_arguments(ModelError, rendered=TEXT, last=TOKEN_ID)
    def encode_chat_continuation(self, rendered: str, last: int) -> list[int]:
        """Encode the continuation of a rendered chat, which follows the token `last`.

        Raises:
            ModelError: As for `encode`.
        """
        require_utf8_encodable("the text", rendered)
        is_special = self.types[last] in (CONTROL, UNKNOWN, USER)
        if last in self.strip_after:
            rendered = rendered.lstrip(WHITE_SPACE)
        return list(self._encode_with_special_tokens(rendered, True, begins=is_special))

    @validate_arguments(ModelError, ids=instance_of(Sequence, Iterator, description="a sequence of ids"), special=BOOL)
    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Decode token ids to text.

        Bytes that are not UTF-8 become U+FFFD. The first space is removed if `encode` adds one. Other spaces stay
        (llama.cpp drops some before punctuation).

        Args:
            ids: The token ids, from the beginning of a text.
            special: Whether to include the text of control tokens.

        Raises:
            ModelError: An id is not in the vocabulary.
        """
        data = b"".join(self.token_bytes(i, special=special) for i in ids)
        if self.add_space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of the text of one token, possibly an incomplete character.

        A control token has the bytes of its text if `special` is true, and none otherwise.

        Raises:
            ModelError: The vocabulary has no such token.
        """
        if not TOKEN_ID.accepts(token) or token >= self.n_tokens:
            raise ModelError(f"token {format_value(token)} is not in the vocabulary; need 0 to {self.n_tokens - 1}")
        text, type_ = self.tokens[token], self.types[token]
        if type_ in (CONTROL, UNKNOWN, USER):
            return text.encode() if special or type_ == USER else b""
        if type_ == BYTE:
            return parse_byte_token(token, text)
        if type_ != NORMAL:
            return b""
        if self.kind == "rwkv":
            return unescape_token_to_bytes(text)
        if self._rule.uses_byte_letters:
            letters = text.removesuffix(KMER_SUFFIX) if self.kind == "hybriddna" else text
            return b"".join(BYTE_OF_CHARACTER.get(char) or char.encode() for char in letters)
        return (text.replace(SPACE_MARK, " ") if self._rule.uses_space_marks else text).encode()

    def _encode_with_special_tokens(self, text: str, parse_special: bool, *, begins: bool = True) -> Iterator[int]:
        """Encode a text with special tokens: yield the ids of the special tokens and of the text between them.

        Args:
            text: The text.
            parse_special: Whether the text of a control token becomes that token.
            begins: False for the continuation of another text, before which no space is added.
        """
        for piece in self._split_at_longest_special_tokens(text, parse_special):
            if isinstance(piece, int):
                yield piece
            else:
                prefixed = self.kind == "llama" and self.add_space_prefix and begins
                yield from self._encode_plain(" " + piece if prefixed else piece, begins)
            begins = isinstance(piece, int)

    def _split_at_longest_special_tokens(self, text: str, parse_special: bool) -> list[str | int]:
        """Split a text at its special tokens: return texts and token ids in order.

        As in llama.cpp, the longest special token is searched first, even if a shorter one stands further left.
        """
        pieces: list[str | int] = [text] if text else []
        for token in self._list_special_tokens_longest_first(parse_special):
            if self.tokens[token] in text:
                pieces = [part for piece in pieces for part in self._split_at_token(piece, token)]
        return pieces

    def _split_at_token(self, piece: str | int, token: int) -> Iterator[str | int]:
        if isinstance(piece, int):
            yield piece
            return
        first, *rest = piece.split(self.tokens[token])
        if first:
            yield first
        for part in rest:
            yield token
            if token in self.strip_after:
                part = part.lstrip(WHITE_SPACE)
            if part:
                yield part

    def _list_special_tokens_longest_first(self, parse_special: bool) -> tuple[int, ...]:
        """List the ids of the special tokens to search for in a text, the longest token first.

        Control tokens are included only if `parse_special` is true.
        """
        if parse_special not in self._special_tokens:
            types = (CONTROL, UNKNOWN, USER) if parse_special else (USER,)
            special = [i for i, type_ in enumerate(self.types) if type_ in types]
            special.sort(key=lambda i: -len(self.tokens[i].encode()))
            self._special_tokens[parse_special] = tuple(special)
        return self._special_tokens[parse_special]

    def _encode_plain(self, text: str, begins: bool) -> Sequence[int]:
        text = self._model_cache.normalise_text(text, begins)
        model = _call_and_convert_errors(
            "the vocabulary cannot be used", partial(self._model_cache.choose_fastest_exact_model, text, begins)
        )

        def ids() -> list[int]:
            no_token_id = len(self.tokens)  # the id of `NO_TOKEN`
            return [i for i in model.encode(text, add_special_tokens=False).ids if i < no_token_id]

        return _call_and_convert_errors(f"a text of {format_count(len(text), 'character')} cannot be tokenized", ids)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind}, {self.n_tokens} tokens>"


class TokenToTextStream:
    """A streaming decoder: token ids in, complete characters out, to print a text while it is generated.

    Control tokens have no text unless `special` is true.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Decode one more token, and return the characters that it completes, often none.

        Raises:
            ModelError: The id is not in the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token, special=self._special))

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character, and reset the stream."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def tokenizer_from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that the ``tokenizer.ggml.*`` keys of a GGUF file describe.

    The merges are checked when the first text is encoded.

    Raises:
        ModelError: The file has no vocabulary, an unknown kind or pre-tokenizer, or inconsistent values.
    """
    kind = _read_kind(metadata)
    tokens, token_ids = read_vocabulary(metadata)
    types = read_numbers_per_token_or_none(metadata, "token_type", len(tokens)) or (NORMAL,) * len(tokens)
    rule = read_pre_tokenizer_rule(metadata, kind)
    ids = _read_special_ids(metadata, kind, len(tokens), rule.has_bos)
    final_types, eos_ids = correct_types_and_find_end_tokens(token_ids, tokens, [*map(int, types)], ids)
    adds = {"bos": read_scalar_or_default(metadata, "add_bos_token", bool, rule.add_bos) or rule.forces_bos}
    adds["eos"] = read_scalar_or_default(metadata, "add_eos_token", bool, kind == "t5") or kind == "bert"
    for name, is_added in adds.items():
        if is_added and ids[name] is None:
            raise ModelError(f"tokenizer.ggml.{name}_token_id is missing, but {name.upper()} is to be added; set it")
    for i, type_ in enumerate(final_types if BYTE in final_types else ()):
        if type_ == BYTE:
            parse_byte_token(i, tokens[i])
    name_ = metadata.get("general.name")
    return Tokenizer(
        kind,
        tokens,
        final_types,
        ids["bos"],
        ids["eos"],
        eos_ids,
        add_bos=adds["bos"],
        add_eos=adds["eos"],
        add_space_prefix=kind in ("llama", "bert", "t5")
        and read_scalar_or_default(metadata, "add_space_prefix", bool, True),
        strip_after=find_phi3_space_stripping_tokens(name_ if isinstance(name_, str) else "", tokens, final_types),
        _rule=rule,
        _model_cache=TokenizerModelCache(metadata, kind, tokens, token_ids, rule, ids["unknown"]),
    )


def _read_special_ids(metadata: Mapping[str, object], kind: str, n_tokens: int, has_bos: bool) -> dict[str, int | None]:
    ids = {name: read_token_id_or_none(metadata, f"{name}_token_id", n_tokens) for name in _ID_NAMES}
    if kind == "bert":  # the tokens before and after a text
        cls, sep = (read_token_id_or_none(metadata, f"{name}_token_id", n_tokens) for name in ("cls", "seperator"))
        ids |= {"bos": cls if ids["bos"] is None else ids["bos"], "eos": ids["eos"] if sep is None else sep}
    bos, eos, unknown = DEFAULT_IDS[kind]
    for name, default in (("bos", bos if has_bos else None), ("eos", eos), ("unknown", unknown)):
        if ids[name] is None and default is not None and default < n_tokens:
            ids[name] = default
    return ids


def has_vocabulary(metadata: Mapping[str, object]) -> bool:
    """Return whether the metadata of a GGUF file have a vocabulary; a model without one works on token ids only."""
    return read_scalar_or_default(metadata, "model", str, "none") not in EMPTY_VOCABULARY_KINDS


def _read_kind(metadata: Mapping[str, object]) -> str:
    kind = read_scalar_or_default(metadata, "model", str, "none")
    if kind in EMPTY_VOCABULARY_KINDS:
        raise ModelError(
            f"the model has no vocabulary (tokenizer.ggml.model is {kind!r}); give token ids to Model.tokens"
        )
    if kind not in TOKENIZER_MODELS:
        raise ModelError(
            f"tokenizer.ggml.model: unknown tokenizer {kind[:80]!a}; known are {', '.join(TOKENIZER_MODELS)}"
        )
    return kind


def _require_short_runs(text: str) -> None:
    for run in _RUN_PATTERN.finditer(text):
        if run.end() - run.start() > MAX_RUN_CHARACTERS:
            raise ModelError(
                f"the text has {run.end() - run.start()} characters in one word or one gap; "
                f"at most {MAX_RUN_CHARACTERS} can be"
            )


def _call_and_convert_errors(problem: str, run: Callable[[], Result]) -> Result:
    """Call a function of HF ``tokenizers``, and convert its errors to `ModelError`.

    The Rust code raises plain `Exception`, or a panic that derives from `BaseException`.

    Args:
        problem: The beginning of the error message.
        run: The function.
    """
    try:
        return run()
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelError(f"{problem}: {' '.join(str(error).split())[:200]}") from error
