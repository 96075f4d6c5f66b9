"""The interpreter of the scalar language in NumPy: float64 references of ops that are declared in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.lazy_dataclass import dataclass
from .broadcasting import tile_to_shape
from .expression import Expression, format_formula, trace
from .numpy_functions import NUMPY_FUNCTIONS, Array
from .scalar import Scalar
from .signature import DimensionRole, Signature, SignatureMismatch

ArrangeOperands: TypeAlias = "Callable[[Sequence[Any], Attrs], Sequence[Any]]"
"""A function from the operands of an op to the operands of its expression; None stands for an absent one."""


@dataclass(frozen=True, eq=False)
class ScalarLanguageDeclaration:
    """The declaration of an op by a function in the scalar language.

    Attributes:
        build: the function: it takes one `Scalar` for each operand and each float attribute, and returns the result.
            Other attributes come as they are, and select between expressions.
        attribute_types: annotations of the attributes by name.
        arrange: function that returns the operands of `build`, or None if the op has the same ones.
    """

    build: Callable[..., Scalar]
    attribute_types: Mapping[str, str]
    arrange: ArrangeOperands | None = None

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands of the expression."""
        return self.build.__code__.co_varnames[: self.build.__code__.co_argcount]

    def arrange_operands_for_expression(self, operands: Sequence[Any], attributes: Attrs) -> list[Any]:
        """Return the operands of the expression for the operands of the op; None stands for an absent one.

        `arrange` may reorder, reshape or split the operands of the op.
        """
        arranged = [*(self.arrange(operands, attributes) if self.arrange else operands)]
        return arranged + [None] * (len(self.operand_names) - len(arranged))

    def trace(self, present: Sequence[bool], attributes: Mapping[str, Attr]) -> Expression:
        """Return the expression of a call.

        Args:
            present: whether each operand of the expression is present.
            attributes: the attributes of the call; attributes that are not floats select between expressions.
        """
        floats = tuple(name for name, kind in self.attribute_types.items() if kind == "float")
        others = tuple((name, attributes[name]) for name in self.attribute_types if name not in floats)
        return trace(self.build, (*present,), floats, others)

    def require_whole_rows(self, signature: Signature, attributes: Mapping[str, Attr]) -> None:
        """Require that the op declares its last axis as unsharded if an element depends on its whole row.

        Raises:
            SignatureMismatch: the signature lets devices share a row.
        """
        dims = signature.operands[0].dims
        if dims and dims[-1].role in (DimensionRole.COUPLED, DimensionRole.CONTRACTED):
            return
        if self.trace([True] * len(self.operand_names), attributes).depends_on_whole_row:
            raise SignatureMismatch(
                "the expression reads whole rows, but devices may share them; declare the last axis as *c"
            )

    def is_selected_by(self, attributes: Mapping[str, Attr]) -> bool:
        """Return whether `attributes` has each attribute that is not a float, because these select the expression."""
        return all(name in attributes or kind == "float" for name, kind in self.attribute_types.items())

    def format(self, attributes: Mapping[str, Attr]) -> str:
        """Return the expression of all operands as text."""
        return format_formula(self.trace([True] * len(self.operand_names), attributes), self.operand_names)

    def make_reference(self) -> Callable[..., Array]:
        """Make the float64 reference of an op: a function of its operands, and of its attributes by name."""
        defaults = self.build.__kwdefaults__ or {}

        @wraps(self.build)
        def reference(*operands: Array | None, **attributes: Any) -> Array:
            values = {**defaults, **attributes}
            arranged = self.arrange_operands_for_expression(operands, values)
            expression = self.trace([a is not None for a in arranged], values)
            return evaluate(expression, arranged, values)

        return reference


def evaluate(expression: Expression, operands: Sequence[Array | None], attributes: Mapping[str, Attr]) -> Array:
    """Evaluate an expression on NumPy arrays; float64 arrays are computed in float64.

    Operands are repeated as tiles to the shape of the first one.

    Args:
        expression: the expression of one element or row of the result.
        operands: arrays with the row as the last axis; None for absent ones.
        attributes: the float attributes of the call by name.
    """
    first = next(a for a in operands if a is not None)
    values: list[Any] = []
    numbers = expression.compute_number_steps(attributes)
    with np.errstate(all="ignore"):  # IEEE results (inf, NaN) are results here
        for number, (function, sources, value) in enumerate(expression.steps):
            if number in numbers:
                values.append(numbers[number])
            elif function == "operand":
                array = operands[int(value)]
                assert array is not None
                values.append(tile_to_shape(np.asarray(array), first.shape))
            elif function == "row_count":
                values.append(max(1, first.shape[-1]))
            else:
                values.append(NUMPY_FUNCTIONS[function](*(values[s] for s in sources), out=None))
    return np.asarray(values[-1])
