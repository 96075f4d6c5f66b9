"""Faults of the boxes in which a fused kernel reads its operands."""

from __future__ import annotations

from hocket.graph import DType

from .edits import set_box, set_operand, set_step
from .fault import fault

RESULT = "expression: the result at f32[6,128] at 0+9216"
VIEW, PLACE = "operands: a view has another shape", "operands: a box does not lie in the shape"
BOX_FAULTS = (
    fault("a box that begins one column later", "concatenation", RESULT, set_box(1, (0, 6), (63, 127))),
    fault("a box of other rows", "concatenation", VIEW, set_box(0, (1, 6), (0, 64))),
    fault("a box beyond the rows", "concatenation", PLACE, set_box(1, (0, 6), (65, 129))),
    fault("a box before the rows", "concatenation", PLACE, set_box(0, (0, 6), (-1, 63))),
    fault("a box with one axis", "concatenation", PLACE, set_box(0, (0, 64))),
    fault("boxes that are the same", "concatenation", RESULT, set_box(1, (0, 6), (0, 64))),
    fault("a box that is missing", "concatenation", "expression: a box is missing", set_step(6, "inside", (), 2)),
    fault("a box counted from the end", "concatenation", "expression: a box is missing", set_step(6, "inside", (), -1)),
    fault("an operand in the other box", "concatenation", RESULT, set_step(7, "operand", (3,), 3)),
    fault("an operand in no box", "concatenation", VIEW, set_step(7, "operand", (), 3)),
    fault(
        "an operand in a number",
        "concatenation",
        "operands: an operand is read in no box",
        set_step(7, "operand", (2,), 3),
    ),
    fault("the parts are exchanged", "concatenation", RESULT, set_step(8, "where", (3, 7, 5))),
    fault("the other box selects", "concatenation", RESULT, set_step(8, "where", (6, 5, 7))),
    fault("a part of the next row", "concatenation", RESULT, set_operand(2, offset=512)),
    fault("a part with dense rows", "concatenation", RESULT, set_operand(2, strides=(64, 1))),
    fault("a part of float16", "concatenation", "operands: an operand is not float32", set_operand(3, dtype=DType.F16)),
    fault("a part is not negated", "concatenation", RESULT, set_step(8, "where", (3, 4, 7))),
)
