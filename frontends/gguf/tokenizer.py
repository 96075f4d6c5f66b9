"""Text to token ids and back, from the metadata of a GGUF file alone.

Three kinds of vocabulary (``tokenizer.ggml.model``): byte-level BPE (``gpt2``), SentencePiece BPE (``llama``) and BPE
on raw text (``gemma4``).  Merging is done by HF ``tokenizers``, built on first use; everything around it (special
tokens in text, BOS and EOS, defaults of missing keys) follows llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ModelError
from .pretokenizers import GEMMA4, PreTokenizer, pre_tokenizer
from .special import CONTROL, UNKNOWN, USER, special_tokens

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"
MAX_TOKEN = 1024
"""Characters of the longest token whose merges are derived: cutting one at every place costs its length squared."""
NORMAL, BYTE = 1, 6
NO_VOCABULARY = ("test", "none", "no_vocab")
DEFAULT_IDS: Mapping[str, tuple[int | None, int | None, int | None]] = {
    "gpt2": (11, 11, None),
    "llama": (1, 2, 0),
    "gemma4": (None, None, None),
}
"""BOS, EOS and unknown id of each kind where the file names none."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_ID = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tokenizer:
    """A vocabulary and its rules; make one with ``tokenizer_from_metadata``.

    ``encode`` and the first ``decode`` may take a second or more, as merges and byte tables are built when needed.
    """

    kind: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends a generation: EOS, end of turn, end of message, and those known by their text."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strip_after: frozenset[int]
    """Special tokens that swallow the white space after them (phi-3)."""
    _build: Callable[[], tokenizers.Tokenizer]
    _built: list[tokenizers.Tokenizer] = field(default_factory=list)
    _specials: dict[bool, tuple[int, ...]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """The size of the vocabulary; a model's output may be wider, its surplus rows mean nothing."""
        return len(self.tokens)

    @property
    def bos_text(self) -> str:
        """The text of BOS as chat templates expect it; empty if there is none."""
        return "" if self.bos_id is None else self.tokens[self.bos_id]

    @property
    def eos_text(self) -> str:
        """The text of EOS as chat templates expect it; empty if there is none."""
        return "" if self.eos_id is None else self.tokens[self.eos_id]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of ``text``; the two flags are those of ``llama_tokenize``.

        ``add_special`` adds BOS and EOS as the model asks.  ``parse_special`` reads the text of a control token as
        that token; otherwise it is plain text, and only user-defined tokens are found.  ModelError if the text is
        not valid Unicode or the vocabulary is broken.
        """
        check_unicode("the text", text)
        ids = list(self._encode_pieces(text, parse_special))
        bos = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_special and self.add_eos and self.eos_id is not None else []
        return bos + ids + eos

    def encode_chat(self, rendered: str) -> list[int]:
        """The token ids of a rendered chat: special tokens parsed, and BOS added only if the template did not.

        No EOS is added, as the answer is still to come.  ModelError as ``encode``.
        """
        ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ``ids``, from the start of a text; bytes that are not UTF-8 become U+FFFD.

        Control tokens are left out unless ``special``.  The one space that ``encode`` puts first is taken off; other
        spaces stay as they are (llama.cpp drops some before punctuation).  ModelError for an id out of range.
        """
        data = b"".join(self.token_bytes(i, special=special) for i in ids)
        if self.add_space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token, perhaps part of a character; of a control token its text, or nothing.

        ModelError if the vocabulary has no such token.
        """
        if not 0 <= token < self.n_tokens:
            raise ModelError(f"token {token} is not in the vocabulary; need 0 to {self.n_tokens - 1}")
        text, type_ = self.tokens[token], self.types[token]
        if type_ in (CONTROL, UNKNOWN, USER):
            return text.encode() if special or type_ == USER else b""
        if type_ == BYTE:
            return bytes([_byte_of(token, text)])
        if type_ != NORMAL:
            return b""
        if self.kind == "gpt2":
            return b"".join(_BYTES.get(char) or char.encode() for char in text)
        return text.replace(SPACE, " ").encode()

    def _encode_pieces(self, text: str, parse_special: bool) -> Iterator[int]:
        after_special = True
        for piece in self._split(text, parse_special):
            if isinstance(piece, int):
                yield piece
            else:
                yield from self._merge(" " + piece if self.add_space_prefix and after_special else piece)
            after_special = isinstance(piece, int)

    def _split(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut out special tokens, the longest first wherever it is (not the leftmost first), as llama.cpp does."""
        pieces: list[str | int] = [text] if text else []
        for token in self._searched(parse_special):
            if self.tokens[token] in text:
                pieces = [part for piece in pieces for part in self._cut(piece, token)]
        return pieces

    def _cut(self, piece: str | int, token: int) -> Iterator[str | int]:
        if isinstance(piece, int):
            yield piece
            return
        first, *rest = piece.split(self.tokens[token])
        if first:
            yield first
        for part in rest:
            yield token
            if token in self.strip_after:
                part = part.lstrip(" \t\n\v\f\r")
            if part:
                yield part

    def _searched(self, parse_special: bool) -> tuple[int, ...]:
        """The special tokens to look for in a text, longest first."""
        if parse_special not in self._specials:
            types = (CONTROL, UNKNOWN, USER) if parse_special else (USER,)
            found = [i for i, type_ in enumerate(self.types) if type_ in types]
            found.sort(key=lambda i: -len(self.tokens[i].encode()))
            self._specials[parse_special] = tuple(found)
        return self._specials[parse_special]

    def _merge(self, text: str) -> Sequence[int]:
        if not self._built:
            self._built.append(_guarded("the vocabulary cannot be used", self._build))
        if self.kind != "gpt2":
            text = text.replace(" ", SPACE)
        run = partial(self._built[0].encode, text, add_special_tokens=False)
        ids: list[int] = _guarded(f"a text of {len(text)} characters cannot be tokenized", run).ids
        return ids

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind}, {self.n_tokens} tokens>"


class Utf8Stream:
    """Token ids in, text out, never part of a character: what printing a text while it is generated needs.

    Control tokens give no text unless ``special``.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that are complete with this token, often none.  ModelError for an id out of range."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, special=self._special))

    def finish(self) -> str:
        """What is left, with U+FFFD for an incomplete character; the stream may be used again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def tokenizer_from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer a GGUF file describes in its ``tokenizer.ggml.*`` keys.

    ModelError, one line, if the file has no vocabulary, an unknown kind or pre-tokenizer, or values that do not fit
    together.  Merges are checked when the first text is encoded.
    """
    kind = _value(metadata, "model", str, "")
    if kind in NO_VOCABULARY:
        raise ModelError(f"the model has no vocabulary (tokenizer.ggml.model is {kind!r}); give token ids with --tokens")
    if kind not in DEFAULT_IDS:
        known = ", ".join(DEFAULT_IDS)
        raise ModelError(f"tokenizer.ggml.model: unknown tokenizer {kind[:80]!r}; known are {known}")
    tokens = _tokens(metadata)
    rule = _rule(metadata, kind)
    types = _numbers(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    ids = {name: _token_id(metadata, f"{name}_token_id", len(tokens)) for name in _ID_NAMES}
    bos, eos, unk = (
        named if named is not None else default if default is not None and default < len(tokens) else None
        for named, default in zip((ids["bos"], ids["eos"], ids["unknown"]), DEFAULT_IDS[kind], strict=True)
    )
    if ids["bos"] is None and not rule.has_bos:
        bos = None
    final_types, eos_ids = special_tokens(tokens, types, {**ids, "eos": eos})
    add_bos = _value(metadata, "add_bos_token", bool, rule.add_bos) or kind == "gemma4"
    add_eos = _value(metadata, "add_eos_token", bool, False)
    for wanted, named, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and named is None:
            raise ModelError(f"tokenizer.ggml.add_{name}_token asks for a token, but there is no {name}_token_id")
    _check_bytes(tokens, final_types)
    return Tokenizer(
        kind,
        tokens,
        final_types,
        bos,
        eos,
        unk,
        eos_ids,
        add_bos,
        add_eos,
        add_space_prefix=_value(metadata, "add_space_prefix", bool, kind == "llama") and kind == "llama",
        strip_after=_strip_after(metadata, tokens, final_types),
        _build=partial(_BUILDERS[kind], metadata, tokens, rule, unk),
    )


_ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "fim_pad", "fim_rep", "fim_sep")


def check_unicode(who: str, text: str) -> None:
    """ModelError unless ``text`` can be written as UTF-8 (a lone surrogate cannot, and HF panics on it)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{who} is not valid Unicode at character {error.start}; pass UTF-8 text") from None


def _guarded(what: str, run: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """The one boundary to HF ``tokenizers``, whose Rust side raises plain Exception, or a panic that is not one."""
    try:
        return run()
    except ModelError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelError(f"{what}: {' '.join(str(error).split())[:200]}") from error
