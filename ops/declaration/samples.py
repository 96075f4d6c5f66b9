"""Sample cases of an op as text, and legal values of operands: ``w=q4_K[64,256], x=f32[7,256], eps=1e-06``."""

from __future__ import annotations

from itertools import product

from ...graph.errors import GraphError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import BOOL, FINITE, TEXT, validate_constructor


@validate_constructor(GraphError, low=FINITE, high=FINITE | TEXT, distinct=BOOL)
@dataclass(frozen=True, slots=True)
class LegalRange:
    """The legal values of an operand: from `low` to `high` inclusive.

    If `high` is the name of a dimension, the values are row numbers, so they are less than its size. If `distinct` is
    set, no value occurs twice in a row of the operand.
    """

    low: float
    high: float | str
    distinct: bool = False


def expand_template(template: str, **axes: tuple[object, ...]) -> tuple[str, ...]:
    """Expand `template` to one text for each combination of the values of `axes`.

    >>> expand_template("x={x}[{n},4]", x=("f32", "f16"), n=(1, 2))
    ('x=f32[1,4]', 'x=f32[2,4]', 'x=f16[1,4]', 'x=f16[2,4]')
    """
    return tuple(template.format(**dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
