"""Reads hyperparameters of a model file: checked metadata under the prefix of the architecture."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .metadata import LazyMetadataArray
from .reader import Gguf

CONVERT_REMEDY = "use a model converted for its architecture"
MAX_I32 = 2**31 - 1
"""Largest count; counts become sizes and attributes, and kernels read them as i32."""
MIN_POSITIVE, MAX_MAGNITUDE = 1e-37, 1e37
"""Magnitudes of the smallest and the largest number; numbers become float32, and some are inverted."""


@dataclass(frozen=True, slots=True)
class ArchitectureMetadata:
    """Reads the metadata ``architecture.*`` of the file `gguf`, with checks of types and ranges.

    Every method that reads a key raises `ModelError` for a missing, mistyped or implausible value. `name` is the key
    without the prefix of the architecture.
    """

    gguf: Gguf
    architecture: str

    def has(self, name: str) -> bool:
        return self._full_key(name) in self.gguf.metadata

    def make_key_error(self, name: str, problem: str) -> ModelError:
        """Make a one-line error about the key `name`, with the full key, the problem and a remedy."""
        return ModelError(f"{self.gguf.path}: metadata {self._full_key(name)} {problem}; {CONVERT_REMEDY}")

    def read_count(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer, or return `default` if the key is missing.

        The integer must be from `minimum` to `MAX_I32`.
        """
        if default is not None and not self.has(name):
            return default
        return self._check_count(name, self.gguf.require(self._full_key(name), int), minimum)

    def read_count_or_default(self, name: str, default: int) -> int:
        """Read a count; return `default` if the key is missing or 0, because llama.cpp writes 0 for unset."""
        return self.read_count(name, 0, minimum=0) or default

    def read_per_block_counts(self, name: str, blocks: int, default: int | None = None) -> tuple[int, ...]:
        """Read one count per block; the file has an array of them, or one number for all blocks."""
        return tuple(
            self._check_count(name, n, 0) for n in self.gguf.read_per_layer(self._full_key(name), int, blocks, default)
        )

    def read_integers_or_empty(self, name: str, min_count: int = 0) -> tuple[int, ...]:
        """Read a list of at least `min_count` non-negative integers.

        The result is empty if the key is missing or is not a list.
        """
        values = self.gguf.numbers(self._full_key(name)) if self.is_list(name) else ()
        numbers = tuple(int(value) for value in values)
        if len(numbers) < min_count or any(number < 0 for number in numbers):
            raise self.make_key_error(name, f"holds {reprlib.repr(numbers)}; need {min_count} integers of at least 0")
        return numbers

    def read_per_block_limits_or_zero(self, name: str, blocks: int) -> tuple[float, ...]:
        """Read one non-negative number per block that limits some value; 0 means no limit, also for a missing key."""
        values = self.gguf.read_per_layer(self._full_key(name), float, blocks, 0.0)
        if bad := [v for v in values if not 0.0 <= v <= MAX_MAGNITUDE]:
            raise self.make_key_error(name, f"holds {bad[0]}; need numbers of at least 0 that float32 holds")
        return values

    def read_positive_float32(self, name: str, default: float | None = None) -> float:
        """Read a positive number that fits float32, or return `default` if the key is missing."""
        if default is not None and not self.has(name):
            return default
        value = self.gguf.require(self._full_key(name), float)
        if not MIN_POSITIVE <= value <= MAX_MAGNITUDE:  # false for NaN too
            raise self.make_key_error(name, f"is {value}; need a positive number that float32 holds")
        return value

    def read_xielu_parameters(self, blocks: int) -> tuple[tuple[float, ...], ...]:
        """Read the parameters ``(alpha_n, alpha_p, beta, eps)`` of `ops.xielu` for each block.

        These keys have no prefix of the architecture.
        """
        columns = []
        for key in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"):
            values = self.gguf.read_per_layer(key, float, blocks)
            if bad := [v for v in values if not abs(v) <= MAX_MAGNITUDE]:
                problem = f"metadata {key} holds {bad[0]}; need numbers that float32 holds"
                raise ModelError(f"{self.gguf.path}: {problem}; {CONVERT_REMEDY}")
            columns.append(values)
        return tuple(zip(*columns, strict=True))

    def read_float32_or_default(self, name: str, default: float) -> float:
        """Read a number that float32 can hold, or return `default`.

        A missing key and a number that does not fit float32 give `default`.
        """
        value = self.gguf.get(self._full_key(name), float, default)
        return value if abs(value) <= MAX_MAGNITUDE else default

    def read_required_epsilon(self, name: str) -> float:
        """Read the epsilon of a norm, a non-negative number; the key is required."""
        value = self.gguf.require(self._full_key(name), float)
        return value if value == 0.0 else self.read_positive_float32(name)

    def read_positive_zero_as_none(self, name: str) -> float | None:
        """Read a positive number, or return `None` if the key is missing or 0; converters write 0 for unset."""
        return None if not self.gguf.get(self._full_key(name), float, 0.0) else self.read_positive_float32(name)

    def read_choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """Read a text that must be one of `known`. A missing key gives `default`."""
        word = self.gguf.get(self._full_key(name), str, default)
        if word not in known:
            raise self.make_key_error(name, f"is {reprlib.repr(word)}; need one of {', '.join(known)}")
        return word

    def read_per_block_flags(self, name: str, blocks: int) -> tuple[bool, ...]:
        """Read one boolean per block, from one value for all blocks or from a list.

        Integers count too, because llama.cpp writes integers.
        """
        value = self.gguf.metadata.get(self._full_key(name))
        first = value[0] if isinstance(value, LazyMetadataArray) and len(value) else value
        kind: type[bool] | type[int] = bool if isinstance(first, bool) else int
        return tuple(flag != 0 for flag in self.gguf.read_per_layer(self._full_key(name), kind, blocks))

    def read_flag(self, name: str, default: bool) -> bool:
        """Read a boolean, or return `default` if the key is missing. An integer counts as true unless it is 0."""
        return self.read_per_block_flags(name, 1)[0] if self.has(name) else default

    def is_list(self, name: str) -> bool:
        """Return whether the value of the key is a list, as opposed to one value for all blocks."""
        return isinstance(self.gguf.metadata.get(self._full_key(name)), LazyMetadataArray)

    def read_block_count_limited_by_tensor_count(self) -> int:
        """Read ``block_count``, the number of blocks of the model, which is at most the number of tensors of the file.

        This limit stops loops over the blocks of a damaged file.
        """
        blocks = self.read_count("block_count")
        if blocks > len(self.gguf.tensors):
            raise self.make_key_error(
                "block_count", f"is {blocks}; the file holds only {format_count(len(self.gguf.tensors), 'tensor')}"
            )
        return blocks

    def count_token_embedding_rows(self) -> int:
        """Return the number of rows of the token embedding, which may exceed the token count of the tokenizer."""
        return self.gguf.tensor("token_embd.weight").shape[0]

    def _full_key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _check_count(self, name: str, value: int, minimum: int) -> int:
        if not minimum <= value <= MAX_I32:
            bound = f"at least {minimum}" if value < minimum else f"at most {MAX_I32}"
            raise self.make_key_error(name, f"is {value}; need {bound}")
        return value
