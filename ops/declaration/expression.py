"""Expressions of the scalar language as a list of steps, which interpreters and compilers walk in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...graph.attrs import Attr
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import format_value
from .numpy_functions import NUMPY_FUNCTIONS
from .scalar import ROW_FUNCTIONS, Scalar

LEAVES = ("operand", "row_operand", "attribute", "constant", "row_count", "inside")
"""Functions of steps without sources.

Groups of several ops have ``row_operand``: an operand with one number per row. They number boxes, the parts of their
shape in which ``inside`` is true, and an ``operand`` that is read in a box has this truth value as its source.
"""
OPERAND_FUNCTIONS = frozenset({"operand", "row_operand"})


class Step(NamedTuple):
    """One step of an expression: a function, the numbers of the steps that it reads, and the value of a leaf."""

    function: str
    sources: tuple[int, ...]
    value: int | str


@dataclass(frozen=True)
class Expression:
    """A computation of one element or one row as a list of steps; each step reads earlier steps.

    Equal terms are one step. Expressions with equal steps are equal. `declaration` is the function of the scalar
    language that declares the op. An expression of several ops lists its results in `listed_results`.
    """

    steps: tuple[Step, ...]
    declaration: Callable[..., Scalar] | None = field(default=None, compare=False, repr=False)
    listed_results: tuple[int, ...] = ()

    @property
    def results(self) -> tuple[int, ...]:
        """The numbers of the steps that are results: the listed ones, or else the last step."""
        return self.listed_results or (len(self.steps) - 1,)

    @cached_property
    def steps_without_operands(self) -> frozenset[int]:
        """The steps that depend only on constants and attributes, so that each is one number for the whole call.

        They are computed in float64 (rule 2 of the scalar language).
        """
        return frozenset(self._find_steps_computed_only_from(lambda step: step.function in ("attribute", "constant")))

    @cached_property
    def steps_with_one_number_per_row(self) -> frozenset[int]:
        """The steps with one number for each row, such as a sum of the row; includes `steps_without_operands`."""
        leaves = ("row_operand", "attribute", "constant", "row_count")
        return frozenset(
            self._find_steps_computed_only_from(lambda step: step.function in leaves or step.function in ROW_FUNCTIONS)
        )

    def _find_steps_computed_only_from(self, holds: Callable[[Step], bool]) -> set[int]:
        """Find the steps for which `holds` is true, and all steps that are computed only from such steps."""
        found: set[int] = set()
        for number, step in enumerate(self.steps):
            if holds(step) or (step.sources and found.issuperset(step.sources)):
                found.add(number)
        return found

    def find_steps_of_operands(self, operands: frozenset[int]) -> frozenset[int]:
        """Find the steps that depend only on some operands, given by their indices, and on numbers of the row."""

        def is_leaf(step: Step) -> bool:
            return step.function == "operand" and not step.sources and int(step.value) in operands

        per_row = self.steps_with_one_number_per_row
        numbers = {step: number for number, step in enumerate(self.steps)}
        return frozenset(self._find_steps_computed_only_from(lambda s: is_leaf(s) or numbers[s] in per_row))

    @cached_property
    def depends_on_row_reduction_or_length(self) -> bool:
        """Whether an element of the result depends on its row, by a reduction, a number or the number of elements."""
        return any(s.function in ROW_FUNCTIONS or s.function in ("row_count", "row_operand") for s in self.steps)

    @cached_property
    def reduces_row(self) -> bool:
        """Whether each result is one number for each row, such as the sum of the row."""
        return self.depends_on_row_reduction_or_length and self.steps_with_one_number_per_row.issuperset(self.results)

    def find_element_steps(self, number: int, known: frozenset[int] = frozenset()) -> set[int]:
        """Find the steps that must be computed for each element in order to get step `number`, itself included.

        Numbers of the row and `known` steps are left out, with everything that only they need.
        """
        found: set[int] = set()
        pending = [number]
        while pending:  # without recursion: an expression may have thousands of steps in a chain
            step = pending.pop()
            if step not in known and step not in found and step not in self.steps_with_one_number_per_row:
                found.add(step)
                pending += self.steps[step].sources
        return found

    @cached_property
    def last_readers(self) -> Mapping[int, int]:
        """For each step, the last step that reads it."""
        return {source: number for number, step in enumerate(self.steps) for source in step.sources}

    def compute_number_steps(self, attributes: Mapping[str, Attr]) -> dict[int, float]:
        """Compute `steps_without_operands` in float64 from the attributes of a call. Return the numbers by step."""
        numbers: dict[int, Any] = {}
        for number in sorted(self.steps_without_operands):
            function, sources, value = self.steps[number]
            if function == "attribute":
                numbers[number] = float(attributes[str(value)])  # type: ignore[arg-type]  # only float attributes
            elif function == "constant":
                numbers[number] = float.fromhex(str(value))
            else:
                numbers[number] = NUMPY_FUNCTIONS[function](*(numbers[s] for s in sources), out=None)
        return {k: v.item() if isinstance(v, np.generic) else v for k, v in numbers.items()}


def linearise(result: Scalar) -> Expression:
    """Convert an expression tree (`Scalar`) to a list of steps (`Expression`); equal subtrees become one step.

    Raises:
        TypeError: the result is no number, or a reduction reads a number of the row.
    """
    if not isinstance(result, Scalar):
        raise TypeError(f"the result of an op must be a Scalar of its operands, but is {format_value(result)}")
    if result.is_truth:
        raise TypeError("the result of an op must be a number, but is a truth value; use where(truth, 1.0, 0.0)")
    numbers: dict[Step, int] = {}
    seen: dict[int, int] = {}

    pending = [result]
    while pending:  # without recursion, so that chains may have any length
        scalar = pending[-1]
        if unseen := [source for source in scalar.sources if id(source) not in seen]:
            pending += reversed(unseen)
            continue
        pending.pop()
        step = Step(scalar.function, tuple(seen[id(source)] for source in scalar.sources), scalar.value)
        seen[id(scalar)] = numbers.setdefault(step, len(numbers))
    expression = Expression(tuple(numbers))
    if any(
        s.function in ROW_FUNCTIONS and expression.steps_with_one_number_per_row.issuperset(s.sources)
        for s in expression.steps
    ):
        raise TypeError("a reduction of a row needs elements of the row, but reads a number of the row")
    return expression


@lru_cache(maxsize=4096)
def trace(
    build: Callable[..., Scalar],
    present: tuple[bool, ...],
    float_attributes: tuple[str, ...],
    others: tuple[tuple[str, Attr], ...],
) -> Expression:
    """Trace a function of the scalar language: call it with symbolic operands, and return its expression.

    Args:
        build: the function that declares an op.
        present: whether each operand is present; None stands for an absent one.
        float_attributes: names of the attributes that are numbers of the call.
        others: the other attributes, which select between expressions.

    Raises:
        TypeError: the function returns no number.
    """
    operands = [Scalar("operand", (), index) if there else None for index, there in enumerate(present)]
    numbers = {name: Scalar("attribute", (), name) for name in float_attributes}
    return replace(linearise(build(*operands, **numbers, **dict(others))), declaration=build)


# ------------------------------------------------------------------------------------------------------- formulas

_INFIX = {
    **{"add": ("+", 1), "sub": ("-", 1), "mul": ("*", 2), "div": ("/", 2)},
    **{"less": ("<", 0), "less_equal": ("<=", 0), "equal": ("==", 0), "not_equal": ("!=", 0)},
}
_OTHER_NAMES = {"absolute": "abs", "maximum": "max", "minimum": "min", "round_half_away": "round", "row_count": "count"}
_ATOM = 4


def format_formula(expression: Expression, operand_names: tuple[str, ...]) -> str:
    """Return an expression as text: definitions of terms that occur more than once, then the result.

    Terms are ``t1``, ``t2``, …, and parts are separated by semicolons.
    """
    uses = [source for step in expression.steps for source in step.sources]
    texts: list[tuple[str, int]] = []
    definitions: list[str] = []
    for number, step in enumerate(expression.steps):
        text, level = _format_step_and_binding_strength(step, texts, operand_names)
        if uses.count(number) > 1 and step.function not in LEAVES:
            definitions.append(f"t{len(definitions) + 1} = {text}")
            text, level = f"t{len(definitions)}", _ATOM
        texts.append((text, level))
    return "; ".join([*definitions, texts[-1][0]])


def _format_step_and_binding_strength(
    step: Step, texts: list[tuple[str, int]], operand_names: tuple[str, ...]
) -> tuple[str, int]:
    """Return the text of one step, and the precedence of its outermost operator, from which parentheses follow."""
    function, sources, value = step
    if function == "operand":
        return operand_names[int(value)], _ATOM
    if function == "inside":
        return f"inside({operand_names[int(value)]})", _ATOM
    if function == "constant":
        number = float.fromhex(str(value))
        return f"{number:.12g}", _ATOM if number >= 0 else 3
    if function == "attribute":
        return str(value), _ATOM
    if function == "neg":
        text, level = texts[sources[0]]
        return f"-{text}" if level >= 3 else f"-({text})", 3
    if function in _INFIX:
        sign, level = _INFIX[function]
        (left, left_level), (right, right_level) = (texts[s] for s in sources)
        left = left if left_level >= level else f"({left})"
        right = right if right_level > level else f"({right})"
        return f"{left} {sign} {right}", level
    arguments = ", ".join(texts[s][0] for s in sources)
    name = _OTHER_NAMES.get(function, function)
    return name if function == "row_count" else f"{name}({arguments})", _ATOM
