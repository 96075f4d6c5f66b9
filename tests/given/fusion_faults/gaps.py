"""Faults that the verifier did not find at first.

The first two were written without a look at the verifier, the others after one. The verifier raised another error for
the packed gate, and named another place for the last fault.
"""

from __future__ import annotations

from hocket.graph import DType

from .edits import (
    add_group,
    add_output,
    drop_group,
    move_result,
    move_source,
    repeat_group,
    set_members,
    set_order,
    set_result,
    set_scratch,
    set_step,
    set_value_dtype,
)
from .fault import fault

GAP_FAULTS = (
    fault(
        "the last member is left out",
        "layer norm",
        "expression: the result at f32[6,128] at 0+0",
        set_result(0, step=14),
    ),
    fault("a group twice", "clamped", "order: the instructions (0, 1, 2, 3, 4) have 2 kernels", repeat_group()),
    fault(
        "a member that reads a member is listed first",
        "row computed inside",
        "order: the instructions (3, 2) of a kernel are not ascending",
        set_members(3, 2, group=1),
        set_order((0, 1), (3, 2)),
        set_step(2, "operand", (), 2, group=1),
        set_step(3, "sub", (0, 2), group=1),
        set_result(0, step=3, group=1),
    ),
    fault(
        "scratch lies over an operand that is read later",
        "softmax",
        "operands: operand 1 of instruction 0",
        drop_group(),
        set_scratch(3, 6144, 6144),
        set_order((3,), (0, 1), (2,), (4,)),
    ),
    fault(
        "a value inside is float16",
        "clamped",
        "operands: operand 0 of instruction 1 is not float32",
        set_value_dtype(0, 1, 0, DType.F16),
    ),
    fault(
        "a value inside is read as int32",
        "clamped",
        "operands: operand 0 of instruction 1 is not float32",
        move_source(1, 0, dtype=DType.I32),
    ),
    fault(
        "a packed gate without its halves is a member",
        "packed gate",
        "expression: the op glu is not declared in the scalar language",
        set_order((0,), (1, 2)),
        add_group(
            (1, 2),
            [
                ("operand", (), 0),
                ("neg", (0,), ""),
                ("exp", (1,), ""),
                ("constant", (), (1.0).hex()),
                ("add", (3, 2), ""),
                ("div", (0, 4), ""),
                ("operand", (), 1),
                ("sub", (5, 6), ""),
            ],
            [(2, 1), (2, 1)],
            [(7, 2)],
        ),
    ),
    fault(
        "a group of other kernels reads a part too early",
        "product between",
        "operands: operand 0 of instruction 7",
        move_source(7, 0, offset=6144, shape=(12, 128)),
        move_result(7, 20480),
        set_order((0, 1), (2, 7), (3, 4, 5, 6)),
    ),
    fault(
        "a value that is overwritten in part, and then read, is not written",
        "mean",
        "results: the result of instruction 2 is not written",
        move_result(4, 18944),
        move_result(2, 20480),
        set_result(1, offset=18944),
        add_output("rest", 2, offset=22016, shape=(3, 128)),
    ),
)
