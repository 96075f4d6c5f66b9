"""Checked access to operand specs and attributes, for the shape rules of several families of ops."""

from __future__ import annotations

from ...graph.attrs import Attrs
from ...graph.spec import Spec
from .op import OperandSpecs
from .signature import SignatureMismatch


def first_spec(specs: OperandSpecs) -> Spec:
    """Return the spec of the first operand, which must be present."""
    assert specs[0] is not None
    return specs[0]


def integers_attribute(attrs: Attrs, name: str) -> tuple[int, ...]:
    """Return an attribute that is a tuple of integers."""
    return attrs[name]  # type: ignore[return-value]  # `normalise_attribute` checks the type


def integer_attribute(attrs: Attrs, name: str) -> int:
    """Return an attribute that is an integer."""
    return attrs[name]  # type: ignore[return-value]  # `normalise_attribute` checks the type


def axis_attribute(attrs: Attrs, spec: Spec, name: str = "axis") -> int:
    """Return attribute `name`, which is an axis of `spec`; an axis counted from the end becomes one from the front.

    Raises:
        SignatureMismatch: `spec` has no such axis.
    """
    axis, rank = integer_attribute(attrs, name), len(spec.shape)
    if not -rank <= axis < rank:
        raise SignatureMismatch(f"{name} is {axis}, but {spec} has rank {rank}")
    return axis % rank
