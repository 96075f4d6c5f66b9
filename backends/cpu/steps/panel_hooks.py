"""Kernels that the kernel of a step calls: hooks for each panel of its result, and a prologue before its own work.

A panel is some rows by some columns. A hook is a kernel ``(words, rows, columns) -> 0``. `rows` and `columns` are
ranges: the first index in the upper half of the number, the count in the lower half. The prologue of a step consists of
kernels of earlier steps, each with all of its work for the thread.

The argument block of a step lists its hooks and its prologue at its end. A list has the number of kernels. Then it has
for each kernel the address, the number of its words, and its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....graph.lazy_dataclass import dataclass
from ...fusion.operands import Operand
from ..compilation.compiler import Kernel, subroutine
from ..simd.atomics import call_kernel
from ..simd.vectors import load_argument_word

RANGE_BITS = 32
RANGE_FACTOR, RANGE_MASK = 1 << RANGE_BITS, (1 << RANGE_BITS) - 1
"""The factor of the first index of a range, and the mask of its count."""


@subroutine
def call_listed_kernels(a, word, second, third):
    """Call all kernels of the list that begins at word number `word` of the argument block `a`.

    Each kernel gets its own words, `second` and `third`: the panel for hooks, thread and thread count for a prologue.
    """
    at = word + 1
    for _ in range(load_argument_word(a, word)):
        call_kernel(load_argument_word(a, at), a + 8 * (at + 2), second, third)
        at += 2 + load_argument_word(a, at + 1)


@subroutine
def call_hooks(a, word, first_row, rows, first_column, columns):
    """Call all hooks (epilogue kernels) of a step for one panel of its result: some rows by some columns.

    The list of hooks begins at word number `word` of the argument block `a`.
    """
    call_listed_kernels(a, word, first_row * RANGE_FACTOR + rows, first_column * RANGE_FACTOR + columns)


@subroutine
def call_prologue(a, word):
    """Call the kernels of earlier steps that a step runs before its own work (its prologue).

    Their list begins at word number `word` of the argument block `a`; 0 means no prologue.
    """
    if word != 0:
        call_listed_kernels(a, word, 0, 1)


class PrologueWord(int):
    """An argument word with the position in its block at which the list of prologue kernels begins.

    It is 0, for no prologue, until `prologues.join_steps` writes it. A kernel with such a word calls its prologue
    (kernels of earlier steps) first.
    """


class KernelWord(int):
    """An argument word that is the address of a kernel. It is 0 until the step table is built."""

    kernel: Kernel

    def __new__(cls, kernel: Kernel) -> KernelWord:
        word = super().__new__(cls, 0)
        word.kernel = kernel
        return word


@dataclass(frozen=True, slots=True)
class StepHook:
    """A hook of a step: an epilogue kernel that the kernel of the step calls for each panel of its result.

    Attributes:
        kernel: the kernel.
        words: its argument words, for all rows and columns.
        panel_columns: each panel must have a multiple of this number of columns.
        slice_columns: returns the operands and the results of a range of columns, given the first and the end column.
    """

    kernel: Kernel
    words: Sequence[int]
    panel_columns: int
    slice_columns: Callable[[int, int], tuple[Sequence[Operand], Sequence[Operand]]]


def make_hook_words(hooks: Sequence[StepHook]) -> list[int]:
    """Make the argument words of a list of hooks: the number of hooks, then address, word count and words of each."""
    words = [len(hooks)]
    for hook in hooks:
        words += [KernelWord(hook.kernel), len(hook.words), *hook.words]
    return words


def list_hook_accesses(hooks: Sequence[StepHook], first: int, last: int) -> tuple[list[Operand], list[Operand]]:
    """Return all operands and all results of hooks for columns `first` to `last` of the panel."""
    pairs = [hook.slice_columns(first, last) for hook in hooks]
    return [o for read, _ in pairs for o in read], [o for _, written in pairs for o in written]
