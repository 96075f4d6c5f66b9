"""The hyperparameters of a model file: metadata under the prefix of its architecture, checked one by one."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .metadata import MetadataArray
from .reader import Gguf

CONVERT_REMEDY = "use a model converted for its architecture"
MAX_I32 = 2**31 - 1
"""Counts end up as sizes and attributes, which kernels take as i32."""
MIN_POSITIVE, MAX_MAGNITUDE = 1e-37, 1e37
"""Numbers end up as float32, and some are inverted."""


@dataclass(frozen=True, slots=True)
class ArchitectureKeys:
    """The metadata ``architecture.*`` of ``gguf``.  Every method raises ModelError for a missing or absurd value."""

    gguf: Gguf
    architecture: str

    def has(self, name: str) -> bool:
        return self._full_key(name) in self.gguf.metadata

    def error(self, name: str, problem: str) -> ModelError:
        """A one-line error about the key ``name``."""
        return ModelError(f"{self.gguf.path}: metadata {self._full_key(name)} {problem}; {CONVERT_REMEDY}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least`` that i32 holds; ``default`` if the key is missing."""
        if default is not None and not self.has(name):
            return default
        return self._check_count(name, self.gguf.require(self._full_key(name), int), least)

    def count_or_default(self, name: str, default: int) -> int:
        """A count, or ``default`` where the key is missing or 0, which llama.cpp writes for unset."""
        return self.count(name, 0, least=0) or default

    def per_block_counts(self, name: str, blocks: int, default: int | None = None) -> tuple[int, ...]:
        """A count for each block, from a scalar or from an array of one value a block."""
        return tuple(
            self._check_count(name, n, 0) for n in self.gguf.per_layer(self._full_key(name), int, blocks, default)
        )

    def integers(self, name: str, least: int = 0) -> tuple[int, ...]:
        """Integers of at least 0, at least so many of them; none where the key is missing or no list."""
        values = self.gguf.numbers(self._full_key(name)) if self.is_list(name) else ()
        numbers = tuple(int(value) for value in values)
        if len(numbers) < least or any(number < 0 for number in numbers):
            raise self.error(name, f"holds {reprlib.repr(numbers)}; need {least} integers of at least 0")
        return numbers

    def per_block_limits(self, name: str, blocks: int) -> tuple[float, ...]:
        """A number of at least 0 for each block; 0 where the key is missing."""
        values = self.gguf.per_layer(self._full_key(name), float, blocks, 0.0)
        if bad := [v for v in values if not 0.0 <= v <= MAX_MAGNITUDE]:
            raise self.error(name, f"holds {bad[0]}; need numbers of at least 0 that float32 holds")
        return values

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above zero that float32 holds; ``default`` if the key is missing."""
        if default is not None and not self.has(name):
            return default
        value = self.gguf.require(self._full_key(name), float)
        if not MIN_POSITIVE <= value <= MAX_MAGNITUDE:  # so it is not NaN either
            raise self.error(name, f"is {value}; need a positive number that float32 holds")
        return value

    def xielu(self, blocks: int) -> tuple[tuple[float, ...], ...]:
        """The attributes alpha_n, alpha_p, beta and eps of `ops.xielu` for each block, of keys without architecture."""
        columns = []
        for key in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"):
            values = self.gguf.per_layer(key, float, blocks)
            if bad := [v for v in values if not abs(v) <= MAX_MAGNITUDE]:
                problem = f"metadata {key} holds {bad[0]}; need numbers that float32 holds"
                raise ModelError(f"{self.gguf.path}: {problem}; {CONVERT_REMEDY}")
            columns.append(values)
        return tuple(zip(*columns, strict=True))

    def number(self, name: str, default: float) -> float:
        """Any number that float32 holds, ``default`` if the key is missing or not finite."""
        value = self.gguf.get(self._full_key(name), float, default)
        return value if abs(value) <= MAX_MAGNITUDE else default

    def eps(self, name: str) -> float:
        """A number of at least 0 that norms add, which must be given."""
        value = self.gguf.require(self._full_key(name), float)
        return value if value == 0.0 else self.positive(name)

    def positive_or_none(self, name: str) -> float | None:
        """A positive number, or None where the key is missing or 0, which converters write for unset."""
        return None if not self.gguf.get(self._full_key(name), float, 0.0) else self.positive(name)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of the words ``known``; ``default`` if the key is missing."""
        word = self.gguf.get(self._full_key(name), str, default)
        if word not in known:
            raise self.error(name, f"is {reprlib.repr(word)}; need one of {', '.join(known)}")
        return word

    def per_block_flags(self, name: str, blocks: int) -> tuple[bool, ...]:
        """One boolean a block; llama.cpp keeps them as integers, so those serve too."""
        value = self.gguf.metadata.get(self._full_key(name))
        first = value[0] if isinstance(value, MetadataArray) and len(value) else value
        kind: type[bool] | type[int] = bool if isinstance(first, bool) else int
        return tuple(flag != 0 for flag in self.gguf.per_layer(self._full_key(name), kind, blocks))

    def flag(self, name: str, default: bool) -> bool:
        """One boolean, or an integer that is not 0; ``default`` if the key is missing."""
        return self.per_block_flags(name, 1)[0] if self.has(name) else default

    def is_list(self, name: str) -> bool:
        """Whether the key holds a list, not one value for all."""
        return isinstance(self.gguf.metadata.get(self._full_key(name)), MetadataArray)

    def block_count(self) -> int:
        """``block_count``, bounded by the tensors in the file, so that a damaged count cannot make us loop for long."""
        blocks = self.count("block_count")
        if blocks > len(self.gguf.tensors):
            raise self.error("block_count", f"is {blocks}; the file holds only {len(self.gguf.tensors)} tensors")
        return blocks

    def vocabulary_rows(self) -> int:
        """Rows of the token embedding, which may be more than the tokenizer has tokens."""
        return self.gguf.tensor("token_embd.weight").shape[0]

    def _full_key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _check_count(self, name: str, value: int, least: int) -> int:
        if not least <= value <= MAX_I32:
            bound = f"at least {least}" if value < least else f"at most {MAX_I32}"
            raise self.error(name, f"is {value}; need {bound}")
        return value
