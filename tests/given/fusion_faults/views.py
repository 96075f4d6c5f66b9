"""Faults of the places that a fused kernel reads and writes: offsets, strides, dtypes and repeated axes."""

from __future__ import annotations

from hocket.graph import DType

from .edits import add_group, drop_group, set_operand, set_order, set_result, swap_operands
from .fault import fault

VIEW_FAULTS = (
    fault(
        "the other half of the columns",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, offset=0),
    ),
    fault(
        "a view that begins one element later",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, offset=516),
    ),
    fault(
        "a view that begins before its buffer",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, offset=-512),
    ),
    fault(
        "a view with dense rows",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, strides=(128, 1)),
    ),
    fault(
        "a view of every second column",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, strides=(256, 2)),
    ),
    fault(
        "a view in reverse",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        set_operand(2, offset=512 + 508, strides=(256, -1)),
    ),
    fault(
        "a view of one row", "views", "expression: the result at f32[6,128] at 0+12288", set_operand(2, strides=(0, 1))
    ),
    fault("a view of another dtype", "views", "operands: an operand is not float32", set_operand(2, dtype=DType.I32)),
    fault(
        "a view of bfloat16", "several results", "operands: an operand is not float32", set_operand(1, dtype=DType.BF16)
    ),
    fault("a view of another shape", "views", "operands: a view has another shape", set_operand(2, shape=(6, 64))),
    fault(
        "a view of other rank",
        "views",
        "operands: a view has another shape",
        set_operand(2, shape=(768,), strides=(1,)),
    ),
    fault(
        "an operand behind the arena",
        "several results",
        "expression: the result at f32[6,128] at 0+0",
        set_operand(1, offset=12288),
    ),
    fault(
        "an operand of another buffer", "norm", "expression: the result at f32[6,128] at 0+0", set_operand(1, buffer=1)
    ),
    fault(
        "an operand of a buffer that is missing",
        "norm",
        "expression: the result at f32[6,128] at 0+0",
        set_operand(1, buffer=7),
    ),
    fault(
        "a weight is repeated along the columns",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_operand(2, strides=(1, 0)),
    ),
    fault(
        "one weight for all columns",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_operand(2, strides=(0, 0)),
    ),
    fault(
        "weights go on in the next row",
        "norm",
        "expression: the result at f32[6,128] at 0+6144",
        set_operand(2, strides=(128, 1)),
    ),
    fault(
        "a row repeats every second element",
        "row computed inside",
        "expression: the result at f32[6,128] at 0+0",
        set_operand(1, group=1, strides=(0, 2)),
    ),
    fault(
        "a broadcast along the last axis",
        "cube",
        "expression: the result at f32[4,4,4] at 0+0",
        set_operand(1, strides=(4, 1, 0)),
    ),
    fault(
        "a broadcast along the first axis",
        "cube",
        "expression: the result at f32[4,4,4] at 0+0",
        set_operand(1, strides=(0, 4, 1)),
    ),
    fault(
        "a plane is repeated along the middle axis",
        "cube",
        "expression: the result at f32[4,4,4] at 0+0",
        set_operand(2, strides=(4, 0, 1)),
    ),
    fault(
        "a plane is transposed",
        "cube",
        "expression: the result at f32[4,4,4] at 0+0",
        set_operand(2, strides=(0, 1, 4)),
    ),
    fault(
        "two broadcast operands are swapped", "cube", "expression: the result at f32[4,4,4] at 0+0", swap_operands(1, 2)
    ),
    fault(
        "a square operand is transposed",
        "square",
        "expression: the result at f32[128,128] at 0+0",
        set_operand(1, strides=(1, 128)),
    ),
    fault(
        "a square result is transposed",
        "square",
        "in place: f32[128,128] at 0+0 strides [1, 128] overlaps f32[128,128] at 0+0",
        set_result(0, strides=(1, 128)),
    ),
    fault(
        "a result is float16",
        "several results",
        "expression: the result at f16[6,128] at 0+9216",
        set_result(2, dtype=DType.F16),
    ),
    fault(
        "a result is int32",
        "several results",
        "expression: the result at i32[6,128] at 0+9216",
        set_result(2, dtype=DType.I32),
    ),
    fault(
        "a result one element later",
        "clamped",
        "results: the result of instruction 4 is not written",
        set_result(0, offset=9220),
    ),
    fault(
        "a result behind the arena",
        "clamped",
        "results: the result of instruction 4 is not written",
        set_result(0, offset=18432),
    ),
    fault(
        "a result in another buffer",
        "norm",
        "states: f32[6,128] at 1+6144 is not in the arena",
        set_result(1, buffer=1),
    ),
    fault(
        "a result in one row",
        "several results",
        "expression: the result at f32[6,128] at 0+9216 strides [0, 1]",
        set_result(2, strides=(0, 1)),
    ),
    fault(
        "halves of a member are read as one",
        "halves",
        "expression: an op has another size",
        drop_group(),
        set_order((0, 1, 2)),
        add_group(
            (0, 1, 2),
            [("operand", (), 0), ("neg", (0,), ""), ("exp", (1,), ""), ("div", (2, 1), "")],
            [(1, 0)],
            [(3, 2)],
        ),
    ),
    fault(
        "a result of a member is read transposed",
        "transposed result",
        "expression: the result at f32[128,128] at 0+65536",
        drop_group(),
        set_order((0, 1)),
        add_group((0, 1), [("operand", (), 0), ("neg", (0,), ""), ("sub", (1, 1), "")], [(0, 0)], [(2, 1)]),
    ),
    fault(
        "numbers of rows are read as a row",
        "sum read as row",
        "expression: a part of a row is read",
        drop_group(),
        set_order((0, 1, 2)),
        add_group(
            (0, 1, 2),
            [("operand", (), 0), ("neg", (0,), ""), ("row_sum", (1,), ""), ("div", (0, 2), "")],
            [(0, 0)],
            [(3, 2)],
        ),
    ),
    fault(
        "a transposed operand is read in memory order",
        "views",
        "expression: the result at f32[6,128] at 0+12288",
        drop_group(),
        set_order((0, 1, 2)),
        add_group(
            (0, 1, 2),
            [
                ("operand", (), 0),
                ("operand", (), 1),
                ("sub", (0, 1), ""),
                ("neg", (2,), ""),
                ("operand", (), 2),
                ("div", (3, 4), ""),
            ],
            [(0, 0), (0, 1), (2, 1)],
            [(5, 2)],
        ),
        set_operand(0, strides=(128, 1)),
    ),
    fault(
        "a cast is left out",
        "cast",
        "expression: the op cast is not declared in the scalar language",
        set_order((0, 1, 2, 3)),
        add_group(
            (0, 1, 2, 3),
            [("operand", (), 0), ("neg", (0,), ""), ("operand", (), 1), ("sub", (1, 2), "")],
            [(0, 0), (3, 1)],
            [(3, 3)],
        ),
    ),
    fault(
        "a packed gate is a member",
        "packed gate",
        "expression: the op glu is not declared in the scalar language",
        set_order((0, 1, 2)),
        add_group(
            (0, 1, 2),
            [
                ("operand", (), 0),
                ("neg", (0,), ""),
                ("neg", (1,), ""),
                ("exp", (2,), ""),
                ("constant", (), (1.0).hex()),
                ("add", (4, 3), ""),
                ("div", (1, 5), ""),
                ("mul", (6, 1), ""),
                ("operand", (), 1),
                ("sub", (7, 8), ""),
            ],
            [(2, 1), (2, 1)],
            [(9, 2)],
        ),
    ),
)
