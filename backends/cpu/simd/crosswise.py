"""Weighted sums of consecutive rows, with four weights per row at once.

A lane is a column of a transposed matrix, so no lanes have to be added.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .tiles import bundle, members
from .vectors import (
    ADDRESS,
    FLOATS,
    MANY,
    NOTHING,
    add,
    fma,
    intrinsic,
    llvm_type,
    load,
    several,
    splat_from,
    store,
    vectors_in_registers,
    zeros,
)

FOUR = 4
SUMS = several(FLOATS, 4 * FOUR)
"""The largest number of sums; with few registers some stay unused."""


def _form() -> tuple[int, int]:
    """Return the rows that are added in one step, and the vectors of each row.

    With two rows an instruction does not wait for the sum before it.
    """
    return (2, 2) if vectors_in_registers() == MANY else (1, 1)


def _number(value: int) -> Any:
    return ir.Constant(llvm_type(ADDRESS), value)


@intrinsic(ADDRESS)
def rows_at_once(b):
    return _number(_form()[0])


@intrinsic(ADDRESS)
def bytes_at_once(b):
    """Return the bytes of each row in one step."""
    return _number(64 * _form()[1])


@intrinsic(SUMS)
def no_sums(b):
    return bundle(b, [zeros.body(b)] * (4 * FOUR))


@intrinsic(SUMS, SUMS, *[ADDRESS] * 6)
def add_rows(b, sums, at, pace, first, second, third, fourth):
    """Add the next rows, which begin at `at`, `pace` bytes apart; the weights of each kind are adjacent."""
    rows, vectors = _form()
    known = members(b, sums)
    for row in range(rows):
        start = b.add(at, b.mul(pace, _number(row)))
        held = [load.body(b, b.add(start, _number(64 * i))) for i in range(vectors)]
        for kind, numbers in enumerate((first, second, third, fourth)):
            by = splat_from.body(b, b.add(numbers, _number(4 * row)))
            for i, vector in enumerate(held):
                place = (row * FOUR + kind) * vectors + i
                known[place] = fma.body(b, vector, by, known[place])
    return bundle(b, known)


@intrinsic(NOTHING, ADDRESS, ADDRESS, SUMS)
def store_sums(b, to, pace, sums):
    """Store the sums of each kind of weight, `pace` bytes apart."""
    rows, vectors = _form()
    known = members(b, sums)
    for kind in range(FOUR):
        for i in range(vectors):
            parts = [known[(row * FOUR + kind) * vectors + i] for row in range(rows)]
            whole = parts[0] if rows == 1 else add.body(b, *parts)
            store.body(b, b.add(b.add(to, b.mul(pace, _number(kind))), _number(64 * i)), whole)
