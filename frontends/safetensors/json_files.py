"""JSON files of a model folder: size limits, and values of a required type. The files may be hostile."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message

MAX_JSON_BYTES = 1 << 28
"""Bytes of the largest accepted JSON file; a tokenizer of 256,000 tokens has about 32 MiB."""

MAX_NUMBER = 3.4e38
"""The largest magnitude of a number; GGUF files have float32."""

GGUF_REMEDY = "use a GGUF file of the model"
"""The remedy for a folder with a property that hocket does not support."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The pairs of one JSON object, with its file for messages."""

    path: Path
    pairs: Mapping[str, object]

    def get_nonnegative_integer(self, key: str, default: int | None = None) -> int | None:
        """Return an integer of 0 to 2**31 - 1, or `default` if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.make_error(f"{key} is {reprlib.repr(value)}; need an integer of 0 to 2147483647")
        return value

    def require_positive_integer(self, key: str) -> int:
        """Return a positive integer; raise `ModelError` if it is missing or has another type."""
        value = self.get_nonnegative_integer(key)
        if not value:
            raise self.make_error(f"{key} is {value}; need a positive integer")
        return value

    def get_finite_number(self, key: str, default: float) -> float:
        """Return a number that float32 can hold, or `default` if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER:
            return float(value)
        raise self.make_error(f"{key} is {reprlib.repr(value)}; need a finite number of float32")

    def get_boolean(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.make_error(f"{key} is {reprlib.repr(value)}; need true or false")
        return value

    def get_text(self, key: str, default: str) -> str:
        """Return a string, or `default` if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            return default
        if type(value) is not str:
            raise self.make_error(f"{key} is {reprlib.repr(value)}; need a string")
        return value

    def get_object_or_empty(self, key: str) -> JsonObject:
        """Return the object of a key; it is empty if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            value = {}
        if type(value) is not dict:
            raise self.make_error(f"{key} is {reprlib.repr(value)}; need an object")
        return JsonObject(self.path, value)

    def get_list_or_empty(self, key: str) -> list[object]:
        """Return the list of a key; it is empty if the key is missing or null."""
        value = self.pairs.get(key)
        if value is None:
            return []
        if type(value) is not list:
            raise self.make_error(f"{key} is {reprlib.repr(value)}; need a list")
        return value

    def make_error(self, problem: str, remedy: str = "download the folder again") -> ModelError:
        """Return a one-line error about this file: its path, the problem and a remedy."""
        return ModelError(f"{format_name_for_message(str(self.path))}: {problem}; {remedy}")


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file.

    Raises:
        ModelError: The file is missing or too large, or it holds no JSON object.
    """
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_JSON_BYTES:
            raise ModelError(
                f"{format_name_for_message(str(path))}: has {size} bytes; need a file of at most {MAX_JSON_BYTES}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{format_name_for_message(str(path))}: cannot be read ({error.strerror}); download the folder again"
        ) from None
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> JsonObject:
    """Return the object that JSON bytes of `path` describe.

    Raises:
        ModelError: The bytes are no UTF-8 JSON of an object, or a key is repeated.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{format_name_for_message(str(path))}: is no valid JSON ({format_name_for_message(str(error))}); "
            "download the folder again"
        ) from None
    if type(value) is not dict:
        raise ModelError(f"{format_name_for_message(str(path))}: holds a {type(value).__name__}; need a JSON object")
    return JsonObject(path, value)


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice in an object")
    return result
