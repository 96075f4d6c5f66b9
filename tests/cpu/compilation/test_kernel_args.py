"""Words of a kernel have names, on both sides."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hocket.backends.cpu.compilation.compiler import KERNEL_FUNCTION, kernel
from hocket.backends.cpu.compilation.kernel_args import declare_args
from hocket.backends.cpu.kernels.vector.elementwise import make_row_args
from hocket.backends.cpu.simd.vectors import store_long, store_scalar
from hocket.backends.fusion.operands import float32_bits

ARGS = declare_args("target pitch[2] factor:f32 rest[*]")


@kernel
def copy_words(a, thread, threads):
    """Write the argument words that the kernel reads."""
    to = ARGS.target(a)
    store_long(to, ARGS.pitch(a, 0))
    store_long(to + 8, ARGS.pitch(a, 1))
    store_scalar(to + 16, ARGS.factor(a))
    for i in range(ARGS.rest(a, 0)):
        store_long(to + 24 + 8 * i, ARGS.rest(a, 1 + i))
    return 0


def test_a_kernel_reads_each_argument_by_its_name():
    target = np.zeros(6, np.int64)
    args = ARGS(rest=(3, -5, 6, -7), factor=float32_bits(0.25), pitch=(4, -9), target=target.ctypes.data)
    block = np.array(args, np.int64)
    assert KERNEL_FUNCTION(copy_words.address)(block.ctypes.data, 0, 1) == 0
    assert target[[0, 1, 3, 4, 5]].tolist() == [4, -9, -5, 6, -7]
    assert ctypes.c_float.from_address(target.ctypes.data + 16).value == 0.25


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"target": 1, "pitch": (1, 2), "rest": ()}, "missing ['factor'], unknown []"),
        ({"target": 1, "pitch": (1, 2), "rest": (), "factor": 1, "step": 3}, "missing [], unknown ['step']"),
        ({"target": 1, "pitch": (1, 2, 3), "rest": (), "factor": 1}, "word 'pitch' of a kernel: got 3 words, need 2"),
        ({"target": 1, "pitch": 1, "rest": (), "factor": 1}, "word 'pitch' of a kernel: got 1 words, need 2"),
    ],
)
def test_words_that_are_missing_unknown_or_too_many_are_refused_when_they_are_bound(args, why):
    with pytest.raises(TypeError) as caught:
        ARGS(**args)
    assert why in str(caught.value)


@pytest.mark.parametrize("declared", ["x x", "x[", "X", "rest[*] x", "fields", "x:f64"])
def test_what_is_no_declaration_is_refused(declared):
    with pytest.raises(ValueError, match="words of a kernel"):
        declare_args(declared)


def test_a_word_that_is_not_declared_is_refused_when_a_kernel_asks_for_it():
    with pytest.raises(AttributeError, match="a kernel has no word 'pace'; its words: target, pitch, factor, rest"):
        _ = ARGS.pace


def test_rows_of_operands_have_the_names_of_the_operands():
    args = make_row_args("x factors", "eps:f32")
    assert [*args.fields] == ["walk", "eps"]
    assert args.first_word_index("eps") == 4 + 2 * 5
    assert {"columns", "rows", "x", "x_step", "factors", "factors_step"} == {*args.parts}
