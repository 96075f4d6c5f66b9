"""The interpreter of the scalar language in NumPy: float64 references of ops that are declared in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import describe_exception
from .broadcasting import tile_to_shape
from .expression import Expression, format_formula, trace
from .numpy_functions import NUMPY_FUNCTIONS, Array
from .scalar import Scalar
from .signature import DimensionRole, Signature, SignatureMismatch

ArrangeOperands: TypeAlias = "Callable[[Sequence[Any], Attrs], Sequence[Any]]"
"""A function from the operands of an op to the operands of its expression; None stands for an absent one."""
PlaceOperands: TypeAlias = "Callable[[Sequence[tuple[int, ...]], Attrs], Sequence[tuple[int, ...]] | None]"
"""A function from the shapes of operands and attributes to the index of the result at which each operand begins.

It returns None if the attributes ask for more than a placement.
"""


@dataclass(frozen=True, eq=False)
class ScalarLanguageDeclaration:
    """The declaration of an op by a function that computes one element or row of the result (the scalar language).

    Attributes:
        build: the function: it takes one `Scalar` for each operand and each float attribute, and returns the result.
            Other attributes come as they are, and select between expressions.
        attribute_types: annotations of the attributes by name.
        arrange: function that returns the operands of `build`, or None if the op has the same ones.
        place: function that returns where operands begin in the result, or None if operands broadcast to it.
    """

    build: Callable[..., Scalar]
    attribute_types: Mapping[str, str]
    arrange: ArrangeOperands | None = None
    place: PlaceOperands | None = None

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

        Raises:
            SignatureMismatch: the declaration is wrong; the message says why.
        """
        floats = tuple(name for name, kind in self.attribute_types.items() if kind == "float")
        others = tuple((name, attributes[name]) for name in self.attribute_types if name not in floats)
        try:
            return trace(self.build, (*present,), floats, others)
        except Exception as why:  # the function may be of another package, which may raise anything
            raise SignatureMismatch(f"the declaration of the op fails: {describe_exception(why)}") from None

    def require_result_shape(
        self, signature: Signature, present: Sequence[bool], attributes: Mapping[str, Attr]
    ) -> None:
        """Require that the expression for these operands has the shape that the signature declares.

        Raises:
            SignatureMismatch: the declaration is wrong, or the signature declares another shape.
        """
        if self.place is not None:
            return
        first, result = signature.operands[0], signature.results[0]
        if self.arrange is None and len(signature.operands) != len(self.operand_names):
            raise SignatureMismatch(
                f"the signature has {format_count(len(signature.operands), 'operand')}, the function has "
                f"{len(self.operand_names)}"
            )
        is_number = self.trace(
            present if self.arrange is None else [True] * len(self.operand_names), attributes
        ).reduces_row
        last = (("1",),) if is_number else tuple(d.factors for d in first.dims[-1:])
        shape = (*(d.factors for d in first.dims[:-1]), *last)
        if len(signature.results) > 1 or (
            (self.arrange is None or is_number)
            and (tuple(d.factors for d in result.dims) != shape or result.leading is not first.leading)
        ):
            raise SignatureMismatch(
                f"the expression is one number for each {'row' if is_number else 'element'} of {first.text}, but the"
                f" signature declares {result.text}"
            )

    def require_whole_rows(self, signature: Signature, attributes: Mapping[str, Attr]) -> None:
        """Require that the op declares its last axis as unsharded if an element depends on its whole row.

        Raises:
            SignatureMismatch: the signature lets devices share a row.
        """
        dims = signature.operands[0].dims
        if dims and dims[-1].role in (DimensionRole.COUPLED, DimensionRole.CONTRACTED):
            return
        if self.trace([True] * len(self.operand_names), attributes).depends_on_row_reduction_or_length:
            raise SignatureMismatch(
                "the expression reads whole rows, but devices may share them; declare the last axis as *c"
            )

    def require_float_dtypes(self, signature: Signature) -> None:
        """Require that operands and results are floats; a kernel that follows from an expression has no integers.

        Placed operands may be integers, which a backend moves by other kernels.

        Raises:
            SignatureMismatch: an operand or a result may have integers.
        """
        for part in () if self.place else (*signature.operands, *signature.results):
            if integers := [dtype for dtype in part.dtypes if dtype.is_integer]:
                raise SignatureMismatch(f"{part.text} may be {integers[0]}; a Scalar is a float")

    def has_expression_selecting_attributes(self, attributes: Mapping[str, Attr]) -> bool:
        """Return whether `attributes` has all attributes that decide which expression an op has, as a kind does.

        These are all attributes that are not floats.
        """
        return all(name in attributes or kind == "float" for name, kind in self.attribute_types.items())

    def format(self, attributes: Mapping[str, Attr]) -> str:
        """Return the expression of all operands as text."""
        return format_formula(self.trace([True] * len(self.operand_names), attributes), self.operand_names)

    def make_float64_reference(self) -> Callable[..., Array]:
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
    """Evaluate an expression on NumPy arrays.

    Float64 arrays are computed in float64. Operands are repeated as tiles to the shape of the first one.

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
    return np.full(first.shape, values[-1]) if len(values) - 1 in numbers else np.asarray(values[-1])
