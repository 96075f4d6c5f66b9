"""Named 64-bit argument words of kernels: one declaration serves the kernel and the binding.

    ARGS = declare_args("rows columns source target pitch[2] eps:f32")

    @kernel
    def body(a, thread, threads): p = ARGS.source(a) + 3 * ARGS.pitch(a, 1)

    steps.add(body, ARGS(rows=4, columns=64, source=x.address, target=y.address, pitch=(256, 64), eps=bits), ...)

In a kernel, a name is a load from a constant position in the argument block:

- `name[n]` declares n words; the second argument is the index of the word.
- ``name[*]`` declares any number of words, at the end of the block.
- `name:f32` declares a float32 with the bits in the low half of the word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ....graph.lazy_dataclass import dataclass
from ....graph.old_names import make_module_getattr
from ..simd.vectors import ADDRESS, FLOAT, Intrinsic, load_argument_float, load_argument_word

FIELD_PATTERN = re.compile(r"(?P<name>[a-z]\w*)(\[(?P<count>\d+|\*)\])?(?P<float>:f32)?")


@dataclass(frozen=True, slots=True)
class ArgumentField:
    """One named field of an argument block.

    It has `count` words from index `start`. A count of None means the rest of the block.
    """

    start: int
    count: int | None
    loader: Intrinsic


@dataclass(frozen=True, eq=False)
class KernelArgs:
    """The named argument words of one kernel.

    In compiled code ``ARGS.name(a)`` loads a word, and ``ARGS.name(a, i)`` loads word i of a field of several words. In
    Python ``ARGS(name=…)`` returns the argument block: all words in order.
    """

    fields: Mapping[str, ArgumentField]
    parts: Mapping[str, Any]
    """Further names for subroutines that read several words."""

    def __call__(self, **values: int | Sequence[int]) -> list[int]:
        """Return the argument block as a list of words.

        Raises `TypeError` for a missing name, an unknown name or a wrong number of words.
        """
        if values.keys() != self.fields.keys():
            missing, unknown = sorted(self.fields.keys() - values.keys()), sorted(values.keys() - self.fields.keys())
            raise TypeError(f"words of a kernel: missing {missing}, unknown {unknown}; need {', '.join(self.fields)}")
        block: list[int] = []
        for name, field in self.fields.items():
            value = values[name]
            words = [value] if isinstance(value, int) else [*value]
            if field.count not in (None, len(words)):
                raise TypeError(f"word {name!r} of a kernel: got {len(words)} words, need {field.count}")
            block += words
        return block

    def first_word_index(self, name: str) -> int:
        """Return the index of the first word of the field `name` in the argument block."""
        return self.fields[name].start

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self.fields and name not in self.parts:
            raise AttributeError(f"a kernel has no word {name!r}; its words: {', '.join(self.fields)}")
        return self.parts[name] if name in self.parts else self.fields[name].loader


RESERVED_NAMES = ("fields", "parts", "first_word_index")


def declare_args(declared: str, parts: Mapping[str, Any] = MappingProxyType({})) -> KernelArgs:
    """Parse a declaration of argument words, such as ``"rows pitch[2] eps:f32"``, into a `KernelArgs`.

    ``pitch[2]`` is a field of two words. ``eps:f32`` is a float32. `parts` adds named subroutines that read several
    words. Raises `ValueError` for an invalid declaration.
    """
    fields: dict[str, ArgumentField] = {}
    start = 0
    for text in declared.split():
        match = FIELD_PATTERN.fullmatch(text)
        if match is None or match["name"] in {*fields, *parts, *RESERVED_NAMES}:
            raise ValueError(f"words of a kernel: {text!r} is no name of its own; write name, name[2] or name:f32")
        if any(field.count is None for field in fields.values()):
            raise ValueError(f"words of a kernel: {text!r} stands behind words of any number; put those last")
        count = None if match["count"] == "*" else int(match["count"] or 1)
        fields[match["name"]] = ArgumentField(
            start, count, _make_argument_loader(start, count == 1, bool(match["float"]))
        )
        start += count or 0
    return KernelArgs(MappingProxyType(fields), parts)


def _make_argument_loader(start: int, is_single: bool, as_float: bool) -> Intrinsic:
    """Make the intrinsic that loads one argument word.

    It loads the word at `start` if `is_single`, else word ``start + i``. With `as_float` the intrinsic returns the word
    as a float32. It takes the argument block and, unless `is_single`, i.
    """
    load, result = (load_argument_float, FLOAT) if as_float else (load_argument_word, ADDRESS)

    def one(b: Any, block: Any) -> Any:
        return load.body(b, block, block.type(start))

    def one_of(b: Any, block: Any, index: Any) -> Any:
        return load.body(b, block, b.add(index, block.type(start)))

    return Intrinsic(result, (ADDRESS,), one) if is_single else Intrinsic(result, (ADDRESS, ADDRESS), one_of)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), words="declare_args")
