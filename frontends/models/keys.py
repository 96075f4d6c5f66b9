"""The hyperparameters of a model file: metadata under the prefix of its architecture, checked one by one."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ModelError
from ..gguf import Array, Gguf

REMEDY = "use a model converted for its architecture"
MOST = 2**31 - 1
"""Counts end up as sizes and attributes, which kernels take as i32."""
SMALLEST, LARGEST = 1e-37, 1e37
"""Numbers end up as float32, and some are inverted."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata ``architecture.*`` of ``gguf``.  Every method raises ModelError for a missing or absurd value."""

    gguf: Gguf
    architecture: str

    def has(self, name: str) -> bool:
        return self._key(name) in self.gguf.metadata

    def error(self, name: str, problem: str) -> ModelError:
        """A one-line error about the key ``name``."""
        return ModelError(f"{self.gguf.path}: metadata {self._key(name)} {problem}; {REMEDY}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least`` that i32 holds; ``default`` if the key is missing."""
        if default is not None and not self.has(name):
            return default
        return self._checked(name, self.gguf.require(self._key(name), int), least)

    def same(self, name: str, blocks: int, default: int | None = None, *, layers: Sequence[int] = ()) -> int:
        """A positive integer from a scalar, or from an array of one value a block that is equal in all ``layers``
        (in all blocks, unless given): converters write either form."""
        values = self.gguf.per_layer(self._key(name), int, blocks, default)
        chosen = [values[i] for i in layers or range(blocks)]
        if len(set(chosen)) > 1:
            raise self.error(name, f"differs between layers, {reprlib.repr(chosen)}; need one value for all of them")
        return self._checked(name, chosen[0], 1)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above zero that float32 holds; ``default`` if the key is missing."""
        if default is not None and not self.has(name):
            return default
        value = self.gguf.require(self._key(name), float)
        if not SMALLEST <= value <= LARGEST:  # so it is not NaN either
            raise self.error(name, f"is {value}; need a positive number that float32 holds")
        return value

    def optional(self, name: str) -> float | None:
        """A positive number, or None where the key is missing or 0, which converters write for unset."""
        return None if not self.gguf.get(self._key(name), float, 0.0) else self.positive(name)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of the words ``known``; ``default`` if the key is missing."""
        word = self.gguf.get(self._key(name), str, default)
        if word not in known:
            raise self.error(name, f"is {reprlib.repr(word)}; need one of {', '.join(known)}")
        return word

    def flags(self, name: str, blocks: int) -> tuple[bool, ...]:
        """One boolean a block; llama.cpp keeps them as integers, so those serve too."""
        value = self.gguf.metadata.get(self._key(name))
        first = value[0] if isinstance(value, Array) and len(value) else value
        kind: type[bool] | type[int] = bool if isinstance(first, bool) else int
        return tuple(flag != 0 for flag in self.gguf.per_layer(self._key(name), kind, blocks))

    def blocks(self) -> int:
        """``block_count``, bounded by the tensors in the file, so that a damaged count cannot make us loop for long."""
        blocks = self.count("block_count")
        if blocks > len(self.gguf.tensors):
            raise self.error("block_count", f"is {blocks}; the file holds only {len(self.gguf.tensors)} tensors")
        return blocks

    def head_size(self, width: int, heads: int, *, key: str = "attention.key_length") -> int:
        """Size of an attention head, ``width / heads`` unless given; keys and values must have the same."""
        if not self.has(key) and width % heads:
            raise self.error("attention.head_count", f"is {heads}; need a divisor of embedding_length {width}")
        size = self.count(key, width // heads)
        if (values := self.count("attention.value_length", size)) != size:
            raise self.error("attention.value_length", f"is {values}; need the key length {size}")
        return size

    def shared_heads(self, heads: int, blocks: int, layers: Sequence[int] = ()) -> int:
        """Key/value heads, of which each serves an equal group of the ``heads`` query heads."""
        shared = self.same("attention.head_count_kv", blocks, heads, layers=layers)
        if heads % shared:
            raise self.error("attention.head_count_kv", f"is {shared}; need a divisor of head_count {heads}")
        return shared

    def vocabulary(self) -> int:
        """Rows of the token embedding, which may be more than the tokenizer has tokens."""
        return self.gguf.tensor("token_embd.weight").shape[0]

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _checked(self, name: str, value: int, least: int) -> int:
        if not least <= value <= MOST:
            bound = f"at least {least}" if value < least else f"at most {MOST}"
            raise self.error(name, f"is {value}; need {bound}")
        return value
