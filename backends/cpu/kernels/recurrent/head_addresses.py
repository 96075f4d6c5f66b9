"""Addresses of the heads of each token of each sequence, for recurrent kernels."""

from __future__ import annotations

from ....fusion.operands import Operand
from ...compilation.compiler import subroutine
from ...simd.vectors import load_argument_word


@subroutine
def compute_head_vector_address(a, first, n, t, h):
    """Return the address of the vector of sequence `n`, token `t` and head `h` in an operand.

    Word `first` of the arguments `a` is the address of the operand. The next three words are the strides of n, t and h
    in bytes.
    """
    return (
        load_argument_word(a, first)
        + n * load_argument_word(a, first + 1)
        + t * load_argument_word(a, first + 2)
        + h * load_argument_word(a, first + 3)
    )


def compute_address_and_strides(operand: Operand, axes: int, batched: bool) -> list[int]:
    """Return the address of an operand, and its strides from sequence to sequence, token to token, head to head.

    The strides are in bytes. `axes` is the number of axes after the sequence axis: token, head and, if it is 3,
    element.
    """
    rank = len(operand.shape)
    head = rank - (axes - 1)
    steps = [4 * operand.strides[head - 1], 4 * operand.strides[head]]
    return [operand.address, 4 * operand.strides[0] if batched else 0, *steps]
