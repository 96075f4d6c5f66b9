"""Faults of the steps of a fused kernel: operands, constants, attributes, roundings and records that are malformed."""

from __future__ import annotations

from .edits import add_steps, drop_attributes, drop_operand, set_attribute, set_result, set_step, swap_operands
from .fault import fault, next_float32

STEP_FAULTS = (
    fault(
        "swapped operands of sub",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(6, "sub", (5, 3)),
    ),
    fault(
        "swapped operands of div",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(3, "div", (2, 1)),
    ),
    fault(
        "swapped views of operands", "clamped", "expression: the result at f32[6,128] at 0+9216", swap_operands(0, 1)
    ),
    fault(
        "a negation is dropped", "clamped", "expression: the result at f32[6,128] at 0+9216", set_step(3, "div", (0, 2))
    ),
    fault(
        "a step is computed from the operand and not from the member",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        set_step(5, "neg", (0,)),
    ),
    fault(
        "one use of a value has other operands",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_step(18, "mul", (17, 0)),
    ),
    fault(
        "both factors of a product are one",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        set_step(9, "mul", (8, 8)),
    ),
    fault(
        "a constant differs in the last bit",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        set_step(4, "constant", (), next_float32(1.0).hex()),
    ),
    fault(
        "a constant has another sign of zero",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_step(7, "constant", (), "0x0.0p+0"),
    ),
    fault(
        "a constant is not a number",
        "chosen",
        "expression: the result at f32[6,128] at 0+18432",
        set_step(4, "constant", (), "nan"),
    ),
    fault(
        "eps differs in the last bit",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_attribute("1.eps", next_float32(1e-5)),
    ),
    fault(
        "a scale differs in the last bit",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_attribute("2.scale", next_float32(0.7)),
    ),
    fault(
        "a scale has the other sign",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_attribute("2.scale", -0.7),
    ),
    fault(
        "a bias that is added nearly nowhere",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_attribute("2.bias", 1e-38),
    ),
    fault(
        "a limit is not a number",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_attribute("4.min", float("nan")),
    ),
    fault(
        "a limit is infinite",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_attribute("4.max", float("inf")),
    ),
    fault(
        "the attribute of another member",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_step(10, "attribute", (), "1.scale"),
    ),
    fault(
        "swapped limits",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(7, "attribute", (), "4.max"),
        set_step(9, "attribute", (), "4.min"),
    ),
    fault(
        "swapped minimum and maximum",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(8, "minimum", (6, 7)),
    ),
    fault(
        "the limits are applied in the other order",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(7, "attribute", (), "4.max"),
        set_step(8, "minimum", (6, 7)),
        set_step(9, "attribute", (), "4.min"),
        set_step(10, "maximum", (8, 9)),
    ),
    fault(
        "a product with the scale of another member",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_step(14, "fma", (9, 3, 13)),
    ),
    fault(
        "a missing rounding: fma for mul and add",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(6, "fma", (1, 4, 3)),
    ),
    fault(
        "a doubled rounding: mul and add for fma",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_step(9, "mul", (2, 3)),
        add_steps(("add", (9, 8), ""), ("fma", (15, 10, 13), "")),
        set_result(0, step=16),
    ),
    fault(
        "swapped factor and addend of fma",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        set_step(9, "fma", (2, 8, 3)),
    ),
    fault(
        "a reciprocal in place of a division",
        "number per row",
        "expression: the result at f32[6,128] at 0+9216",
        add_steps(("constant", (), (1.0).hex()), ("div", (7, 5), ""), ("mul", (0, 8), "")),
        set_result(1, step=9),
    ),
    fault(
        "a product is associated in another order",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        set_step(9, "operand", (), 2),
        set_step(10, "mul", (3, 9)),
        set_step(11, "mul", (8, 10)),
    ),
    fault(
        "scales are multiplied before the value",
        "scaled",
        "expression: the result at f32[6,128] at 0+0",
        add_steps(("mul", (3, 10), ""), ("fma", (2, 15, 13), "")),
        set_result(0, step=16),
    ),
    fault(
        "less or equal for less",
        "chosen",
        "expression: the result at f32[6,128] at 0+18432",
        set_step(2, "less_equal", (0, 1)),
    ),
    fault(
        "swapped operands of less",
        "chosen",
        "expression: the result at f32[6,128] at 0+18432",
        set_step(2, "less", (1, 0)),
    ),
    fault(
        "swapped branches",
        "chosen",
        "expression: the result at f32[6,128] at 0+18432",
        set_step(10, "where", (9, 8, 6)),
    ),
    fault(
        "equal for not equal", "chosen", "expression: the result at f32[6,128] at 0+18432", set_step(9, "equal", (5, 4))
    ),
    fault(
        "the mask is taken of a comparison with one",
        "chosen",
        "expression: the result at f32[6,128] at 0+18432",
        set_step(9, "not_equal", (5, 3)),
    ),
    fault("absolute for neg", "gated", "expression: the result at f32[6,128] at 0+0", set_step(3, "neg", (2,))),
    fault(
        "expm1 for exp", "several results", "expression: the result at f32[6,128] at 0+6144", set_step(3, "expm1", (2,))
    ),
    fault(
        "an activation is applied twice",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        add_steps(("neg", (11,), ""), ("neg", (1,), ""), ("mul", (9, 13), "")),
        set_result(0, step=14),
    ),
    fault(
        "an operand is read twice and another never",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(4, "operand", (), 1),
    ),
    fault("a step reads a later one", "clamped", "expression: a step reads a later one", set_step(3, "div", (1, 4))),
    fault("a step reads itself", "clamped", "expression: a step reads a later one", set_step(3, "div", (1, 3))),
    fault(
        "a step counted from the end", "clamped", "expression: a step reads a later one", set_step(3, "div", (1, -8))
    ),
    fault("a step that is missing", "clamped", "expression: a step reads a later one", set_step(3, "div", (1, 99))),
    fault(
        "a function that is missing",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(3, "divide", (1, 2)),
    ),
    fault(
        "a function with too many sources",
        "clamped",
        "expression: the result at f32[6,128] at 0+9216",
        set_step(1, "neg", (0, 0)),
    ),
    fault("an operand that is missing", "clamped", "operands: an operand is missing", drop_operand()),
    fault(
        "an operand counted from the end", "clamped", "operands: an operand is missing", set_step(4, "operand", (), -3)
    ),
    fault("attributes that are missing", "clamped", "expression: a number of the call is missing", drop_attributes()),
    fault("a result of a step that is missing", "clamped", "expression: a result is no step", set_result(0, step=11)),
    fault(
        "a result of a step counted from the end", "clamped", "expression: a result is no step", set_result(0, step=-2)
    ),
    fault(
        "a constant that is no number",
        "gated",
        "expression: the result at f32[6,128] at 0+0",
        set_step(4, "constant", (), "one"),
    ),
)
