"""Faults of the rows and the shape over which a fused kernel loops."""

from __future__ import annotations

from .edits import add_steps, set_all_shapes, set_result, set_shape, set_step
from .fault import fault

ROW_FAULTS = (
    fault(
        "a sum for a maximum",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(5, "row_sum", (4,), group=1),
    ),
    fault(
        "a maximum before the scale",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(5, "row_max", (2,), group=1),
    ),
    fault(
        "no maximum is subtracted",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(9, "exp", (4,), group=1),
    ),
    fault(
        "no limit of the maximum",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(8, "sub", (4, 5), group=1),
    ),
    fault(
        "no test of an empty row",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(16, "mul", (9, 14), group=1),
    ),
    fault(
        "a division by the sum",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+24704",
        set_step(16, "div", (9, 10), group=1),
    ),
    fault(
        "the sum of the operand and not of the step",
        "mean",
        "expression: the result at f32[6,128] at 0+6144",
        set_step(7, "row_sum", (5,)),
    ),
    fault(
        "the sum of another operand",
        "mean",
        "expression: the result at f32[6,1] at 0+9216",
        set_step(1, "operand", (), 1),
        set_step(3, "row_sum", (1,)),
        set_step(4, "div", (3, 2)),
        set_step(5, "sub", (0, 4)),
        set_step(6, "absolute", (1,)),
        set_result(0, step=4),
        set_step(8, "div", (5, 7)),
    ),
    fault(
        "the square of the wrong value",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_step(4, "row_dot", (0, 0)),
    ),
    fault(
        "a dot product of two values",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_step(4, "row_dot", (2, 0)),
    ),
    fault(
        "a sum of squares for a dot product",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_step(3, "mul", (2, 2)),
        set_step(4, "row_sum", (3,)),
        set_step(10, "constant", (), (1.0).hex()),
        set_step(11, "div", (10, 9)),
        set_step(12, "mul", (2, 11)),
        set_step(13, "operand", (), 2),
        set_step(14, "mul", (12, 13)),
        set_step(15, "neg", (14,)),
        set_step(16, "exp", (15,)),
        set_step(17, "add", (10, 16)),
        set_step(18, "div", (14, 17)),
        add_steps(("mul", (18, 2), "")),
        set_result(1, step=19),
    ),
    fault(
        "the variance without the mean",
        "layer norm",
        "expression: the result at f32[6,128] at 0+0",
        set_step(8, "row_dot", (2, 2)),
    ),
    fault(
        "the variance of one element less",
        "layer norm",
        "expression: the result at f32[6,128] at 0+0",
        set_step(4, "constant", (), (127.0).hex()),
    ),
    fault(
        "the length of a row is that of a column",
        "mean",
        "expression: the result at f32[6,1] at 0+9216",
        set_step(2, "constant", (), (6.0).hex()),
    ),
    fault(
        "a mean is not divided", "mean", "expression: the result at f32[6,128] at 0+6144", set_step(4, "sub", (0, 1))
    ),
    fault(
        "the root is left out",
        "number per row",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(6, "div", (0, 4)),
    ),
    fault("rows are twice as long", "reshaped", "expression: an op reduces other rows", set_all_shapes(6, 128)),
    fault("rows are half as long", "norm", "operands: a view has another shape", set_shape(12, 64)),
    fault(
        "rows are half as long in all views",
        "layer norm",
        "expression: an op reduces other rows",
        set_all_shapes(12, 64),
    ),
    fault("rows are columns", "layer norm", "expression: an op reduces other rows", set_all_shapes(128, 6)),
    fault(
        "a group of half the rows",
        "several results",
        "results: the result of instruction 0 is not written",
        set_all_shapes(3, 128),
    ),
    fault(
        "a group of twice the rows",
        "several results",
        "in place: f32[12,128] at 0+0 overlaps f32[12,128] at 0+3072",
        set_all_shapes(12, 128),
    ),
    fault(
        "a group of no rows",
        "several results",
        "results: the result of instruction 0 is not written",
        set_all_shapes(0, 128),
    ),
    fault("a loop over half the rows", "several results", "operands: a view has another shape", set_shape(3, 128)),
    fault(
        "a loop over another order of axes", "several results", "operands: a view has another shape", set_shape(128, 6)
    ),
    fault(
        "an element is written as the number of the row",
        "number per row",
        "expression: the result at f32[6,1] at 0+12288",
        set_result(0, step=2),
    ),
    fault(
        "the number of the row is another",
        "number per row",
        "expression: the result at f32[6,1] at 0+12288",
        set_result(0, step=4),
    ),
    fault(
        "a number of the row is written to each column",
        "number per row",
        "results: the result of instruction 1 is not written",
        set_result(0, shape=(6, 128), strides=(128, 1)),
    ),
    fault(
        "an element is written once per row",
        "number per row",
        "results: the result of instruction 4 is not written",
        set_result(1, shape=(6, 1), strides=(128, 1)),
    ),
    fault(
        "numbers of rows lie apart",
        "number per row",
        "expression: the result at f32[6,1] at 0+12288 strides [2, 1]",
        set_result(0, strides=(2, 1)),
    ),
)
