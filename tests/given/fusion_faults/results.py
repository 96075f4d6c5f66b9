"""Faults of the results of a fused kernel: one that is missing, wrong, or lies over other values."""

from __future__ import annotations

from .edits import add_output, add_result, add_undo, drop_result, move_result, move_source, set_result
from .fault import fault

RESULT_FAULTS = (
    fault(
        "a result with other readers is not written",
        "norm",
        "results: the result of instruction 0 is not written",
        drop_result(0),
    ),
    fault(
        "the result of the run is not written",
        "norm",
        "results: the result of instruction 4 is not written",
        drop_result(1),
    ),
    fault("no result is written", "clamped", "results: the result of instruction 4 is not written", drop_result(0)),
    fault(
        "a number per row is not written",
        "number per row",
        "results: the result of instruction 1 is not written",
        drop_result(0),
    ),
    fault(
        "the operand of a matrix product is not written",
        "product between",
        "results: the result of instruction 1 is not written",
        drop_result(0, group=1),
    ),
    fault(
        "the operand of a collective's product is not written",
        "collective",
        "results: the result of instruction 1 is not written",
        drop_result(0, group=1),
    ),
    fault(
        "a new value for a state is not written",
        "state read and written",
        "results: the result of instruction 3 is not written",
        drop_result(0),
    ),
    fault(
        "a new output is not written",
        "number per row",
        "results: the result of instruction 0 is not written",
        add_output("product", 0),
    ),
    fault(
        "a new output of a mask is not written",
        "chosen",
        "results: the result of instruction 0 is not written",
        add_output("mask", 0),
    ),
    fault(
        "a rollback reads a step",
        "number per row",
        "results: the result of instruction 0 is not written",
        add_undo(0, 0),
    ),
    fault(
        "a later instruction reads a step",
        "softmax",
        "expression: the result at f32[2,6,128] at 0+0",
        move_source(4, 0, offset=24704),
    ),
    fault(
        "two results change places",
        "several results",
        "expression: the result at f32[6,128] at 0+0",
        set_result(0, step=3),
        set_result(1, step=2),
    ),
    fault(
        "a result is written as another",
        "several results",
        "expression: the result at f32[6,128] at 0+6144",
        set_result(1, step=4),
    ),
    fault(
        "two results overlap",
        "several results",
        "in place: f32[6,128] at 0+9216 overlaps f32[6,128] at 0+9216",
        set_result(1, offset=9216),
    ),
    fault(
        "two results overlap in part",
        "several results",
        "in place: f32[6,128] at 0+9216 overlaps f32[6,128] at 0+7680",
        set_result(1, offset=6144 + 1536),
    ),
    fault(
        "one result more lies over another",
        "several results",
        "in place: f32[6,128] at 0+9216 overlaps f32[6,128] at 0+9216",
        add_result(3, like=2),
    ),
    fault(
        "one result more lies over a value that is read later",
        "product between",
        "results: it writes a place that is no needed result",
        add_result(5, offset=9216),
    ),
    fault(
        "one result more lies behind the arena",
        "product between",
        "results: it writes a place that is no needed result",
        add_result(5, offset=12288),
    ),
    fault(
        "one result more lies over a weight",
        "product between",
        "states: f32[6,128] at 1+0 is not in the arena",
        add_result(5, buffer=1, offset=0),
    ),
    fault(
        "one result more lies over a state",
        "cache rows",
        "states: f32[6,128] at 1+0 is not in the arena",
        add_result(2, buffer=1, offset=0),
    ),
    fault(
        "one result more lies over saved rows",
        "cache rows",
        "results: it writes a place that is no needed result",
        add_result(2, offset=17472),
    ),
    fault(
        "one result more lies over a state before it is saved",
        "state in place",
        "states: f32[6,128] at 1+0 is not in the arena",
        add_result(1, buffer=1, offset=0),
    ),
    fault(
        "one result more lies over an output",
        "cache rows",
        "results: it writes a place that is no needed result",
        add_result(2, offset=20544),
    ),
    fault(
        "a result over rows that are read later",
        "clamped",
        "in place: f32[6,128] at 0+1536 overlaps f32[6,128] at 0+0",
        move_result(4, 1536),
        set_result(0, offset=1536),
    ),
    fault(
        "a result over an operand, shifted by an element",
        "clamped",
        "in place: f32[6,128] at 0+4 overlaps f32[6,128] at 0+0",
        move_result(4, 4),
        set_result(0, offset=4),
    ),
    fault(
        "a result over a repeated row",
        "row computed inside",
        "in place: f32[6,128] at 0+6144 overlaps f32[6,128] at 0+6144 strides [0, 1]",
        move_result(3, 6144),
        set_result(0, group=1, offset=6144),
    ),
    fault(
        "numbers of rows over an operand",
        "number per row",
        "in place: f32[6,1] at 0+3072 overlaps f32[6,128] at 0+3072",
        move_result(1, 3072),
        set_result(0, offset=3072),
    ),
    fault(
        "numbers of rows at the end of an operand",
        "number per row",
        "in place: f32[6,1] at 0+6120 overlaps f32[6,128] at 0+3072",
        move_result(1, 6144 - 24),
        set_result(0, offset=6144 - 24),
    ),
)
