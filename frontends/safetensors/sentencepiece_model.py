"""The vocabulary of ``tokenizer.model``, a protocol buffer of SentencePiece. The file may be hostile.

Source of the field numbers: ``sentencepiece_model.proto`` of SentencePiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message
from .json_files import MAX_JSON_BYTES

ENTRIES, TRAINER, NORMALIZER = 1, 2, 3
"""Fields of a model."""
ENTRY_TEXT, ENTRY_SCORE, ENTRY_KIND = 1, 2, 3
"""Fields of a piece."""
MODEL_KIND, UNKNOWN_ID, BOS_ID, EOS_ID, PAD_ID = 3, 40, 41, 42, 43
"""Fields of the trainer's settings."""
ADDS_PREFIX = 3
"""Field of the normalizer's settings."""
BPE = 2
"""The kind of a model with merges; SentencePiece has others."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""
LAST_KIND = 6
MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class TokenizerModel:
    """The tokens of a model in the order of their ids, with their scores and their kinds, and its settings.

    - `kinds`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte, as in ``tokenizer.ggml.token_type``.
    - `special_ids`: the ids of BOS, EOS and padding by the names in ``tokenizer_config.json``, without absent ones.
    - `adds_prefix`: whether a space precedes a text.
    """

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    special_ids: dict[str, int]
    adds_prefix: bool


def read_sentencepiece_model(path: Path) -> TokenizerModel:
    """Return the model in a file.

    Raises:
        ModelError: The file cannot be read, is damaged, or has no BPE model.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise _make_error(path, f"is larger than {MAX_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise _make_error(path, f"cannot be read ({error.strerror})") from None
    texts, scores, kinds = [], [], []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _read_protobuf_fields(path, data):
        if field == ENTRIES and isinstance(value, bytes):
            text, score, kind = _read_entry(path, value)
            texts.append(text)
            scores.append(score)
            kinds.append(kind)
        elif field == TRAINER and isinstance(value, bytes):
            trainer |= dict(_read_protobuf_fields(path, value))
        elif field == NORMALIZER and isinstance(value, bytes):
            normalizer |= dict(_read_protobuf_fields(path, value))
    if not texts or trainer.get(MODEL_KIND) != BPE:
        raise _make_error(path, "holds no SentencePiece model of kind BPE")
    fields = {"unk": (UNKNOWN_ID, 0), "bos": (BOS_ID, 1), "eos": (EOS_ID, 2), "pad": (PAD_ID, -1)}
    ids = {name: trainer.get(field, default) for name, (field, default) in fields.items()}
    return TokenizerModel(
        tuple(texts),
        tuple(scores),
        tuple(kinds),
        {name: number for name, number in ids.items() if isinstance(number, int) and 0 <= number < len(texts)},
        bool(normalizer.get(ADDS_PREFIX, 1)),
    )


def _read_entry(path: Path, data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, 1
    for field, value in _read_protobuf_fields(path, data):
        if field == ENTRY_TEXT and isinstance(value, bytes):
            try:
                text = value.decode("utf-8")
            except UnicodeDecodeError:
                raise _make_error(path, f"has a token that is no UTF-8: {value!r:.60}") from None
        elif field == ENTRY_SCORE and isinstance(value, bytes) and len(value) == struct.calcsize("<f"):
            score = struct.unpack("<f", value)[0]
        elif field == ENTRY_KIND and isinstance(value, int):
            kind = value
    if not text or not 1 <= kind <= LAST_KIND:
        raise _make_error(path, f"has the token {text!a:.60} of kind {kind}; need a text and a kind of 1 to 6")
    return text, score, kind


def _read_protobuf_fields(path: Path, data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each protobuf field: an integer, or the bytes of every other wire type."""
    at = 0
    while at < len(data):
        key, at = _read_varint(path, data, at)
        kind = key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = _read_varint(path, data, at)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if kind == BYTES:
            size, at = _read_varint(path, data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise _make_error(path, f"is no protocol buffer (wire type {kind})")
        if size > len(data) - at:
            raise _make_error(path, f"ends inside a field of {size} bytes")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(path: Path, data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned integer of up to 64 bits at an offset, and the offset after it."""
    value = 0
    for i in range(MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise _make_error(path, "ends inside a number")
        value |= (data[at + i] & 127) << 7 * i
        if data[at + i] < 128:
            return value & (1 << 64) - 1, at + i + 1
    raise _make_error(path, "has a number of more than 64 bits")


def _make_error(path: Path, problem: str) -> ModelError:
    return ModelError(f"{format_name_for_message(str(path))}: {problem}; download the file again")
