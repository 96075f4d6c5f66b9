"""The passes of a generated row kernel over a row, and the words of its arguments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from .....ops.declaration.expression import OPERAND_FUNCTIONS, Expression
from .....ops.declaration.scalar import ROW_FUNCTIONS

HEADER_WORDS = 4
"""Words of a walk (the arguments that iterate over rows) before its operands: row length, three counts of rows."""
OPERAND_WORDS = 5
"""Words of an operand: address, bytes from row to row along three axes, bytes from element to element."""
BOX_WORDS = 8
"""Words of a box after the operands: its first and its end index along three axes of rows, and its columns."""

TRANSCENDENTAL_FUNCTIONS = frozenset({"exp", "expm1", "log", "log1p", "tanh", "erf", "softplus", "normal_cdf"})
"""Functions that take longer than a store and a load."""


@dataclass(frozen=True)
class ExpressionKernel:
    """The description of a generated kernel: its expression, and the element strides for which its code is valid.

    Attributes:
        expression: the expression.
        is_single: whether each operand that the expression reads has one element for each row.
        is_strided: whether the elements of a row of each operand are apart; empty if none is.
        panels: ``"columns"`` for a hook that computes any columns of a matrix row. ``"blocks"`` is a hook with several
            blocks in a matrix row; a block is a row of the kernel. ``"hooked"`` is a kernel over such blocks that calls
            a hook after its last block in each matrix row. It is empty for a kernel over rows.
    """

    expression: Expression
    is_single: tuple[bool, ...]
    is_strided: tuple[bool, ...] = ()
    panels: str = ""

    @cached_property
    def operand_indices(self) -> tuple[int, ...]:
        """The indices of the operands that the expression reads, ascending; the argument words have this order."""
        return tuple(sorted({int(s.value) for s in self.expression.steps if s.function in OPERAND_FUNCTIONS}))

    @cached_property
    def box_count(self) -> int:
        """The number of boxes: parts of the shape, such as ranges of a concatenation, that operands cover."""
        return 1 + max((int(s.value) for s in self.expression.steps if s.function == "inside"), default=-1)

    @cached_property
    def operand_boxes(self) -> tuple[int | None, ...]:
        """For each operand that the expression reads, the number of its box; None if it covers the whole shape.

        A box is a part of the shape, such as the range of one operand of a concatenation.
        """
        steps = self.expression.steps
        boxes = {int(s.value): int(steps[s.sources[0]].value) for s in steps if s.function == "operand" and s.sources}
        return tuple(boxes.get(index) for index in self.operand_indices)

    @cached_property
    def steps_passed_as_words(self) -> tuple[int, ...]:
        """The steps that are numbers of the call, such as an epsilon: argument words pass them.

        Constants are part of the code.
        """
        steps, numbers = self.expression.steps, self.expression.steps_without_operands
        read = {s for n, step in enumerate(steps) if n not in numbers for s in step.sources} | {
            *self.expression.results
        }
        return tuple(sorted(n for n in read & numbers if steps[n].function != "constant"))

    @property
    def name(self) -> str:
        """The name of the kernel: the functions of the expression, and a digest of everything that changes the code."""
        functions = [s.function for s in self.expression.steps if s.sources]
        strided = self.is_strided if any(self.is_strided) else ()
        code = self.expression.steps, self.is_single, *self.expression.listed_results, *strided
        digest = hashlib.sha256(repr(code).encode()).hexdigest()[:12]
        return f"{self.panels or 'rows'}.{'.'.join(functions[:8]) or 'copy'}.{digest}"

    @cached_property
    def last_reduction(self) -> int:
        """The last step that reduces the row. It is -1 if there is none."""
        return max((n for n, s in enumerate(self.expression.steps) if s.function in ROW_FUNCTIONS), default=-1)

    @cached_property
    def stored_step(self) -> int | None:
        """The step with values that the last pass reads back, instead of computing them again; None without one.

        The pass of the last reduction writes them to the result. Example: the exponentials of a softmax. The step must
        be a transcendental function, from which, with numbers of the row, the last pass computes the only result.
        """
        expression = self.expression
        if self.last_reduction < 0 or expression.reduces_row or len(expression.results) > 1:
            return None
        for candidate in expression.steps[self.last_reduction].sources:
            last_pass = expression.find_element_steps(expression.results[0], frozenset((candidate,)))
            if expression.steps[candidate].function in TRANSCENDENTAL_FUNCTIONS and not any(
                expression.steps[n].function == "operand" for n in last_pass
            ):
                return candidate
        return None

    @cached_property
    def copied_step(self) -> int | None:
        """The step that reads strided elements in several passes: the first one copies them to the result.

        The later passes read the copy. It is None without strided operands, with one pass, or without room for a copy.
        """
        if not self.has_several_passes or not self.can_copy_to_result:
            return None
        strided = {index for index, apart in zip(self.operand_indices, self.is_strided, strict=False) if apart}
        steps = enumerate(self.expression.steps)
        return next((n for n, s in steps if s.function == "operand" and int(s.value) in strided), None)

    @property
    def has_several_passes(self) -> bool:
        """Whether more than one pass over a row reads its elements."""
        return sum(map(bool, self.list_passes())) > 1

    @property
    def can_copy_to_result(self) -> bool:
        """Whether the result has room for a copy of a row until the last pass.

        It must be the only result, with an element for each column. The pass of the last reduction writes `stored_step`
        to the result. If this reduction has a second source, its copy may be overwritten before it is read.
        """
        expression = self.expression
        is_free = self.stored_step is None or len({*expression.steps[self.last_reduction].sources}) == 1
        return len(expression.results) == 1 and not expression.reduces_row and not self.box_count and is_free

    def list_passes(self) -> list[set[int]]:
        """Return the steps per element of each pass over a row: a pass per reduction, then the pass of the results."""
        expression = self.expression
        ends = [[*step.sources] for step in expression.steps if step.function in ROW_FUNCTIONS] + [
            [n for n in expression.results if n not in expression.steps_with_one_number_per_row]
        ]
        known = [frozenset[int]()] * (len(ends) - 1) + [
            frozenset(() if self.stored_step is None else (self.stored_step,))
        ]
        return [
            set[int]().union(*(expression.find_element_steps(n, there) for n in some))
            for some, there in zip(ends, known, strict=True)
        ]
