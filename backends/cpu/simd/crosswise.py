"""Sums of rows that lie one after the other, each row times a number: with four numbers for a row at once.

What is summed are columns of a matrix that was turned over, a lane each, so that no lanes have to be added up.
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
"""As many as there may be; where registers are few the rest is not used."""


def _form() -> tuple[int, int]:
    """How many rows are taken at once, so that an instruction need not wait for the sum before, and of how many
    vectors."""
    return (2, 2) if vectors_in_registers() == MANY else (1, 1)


def _number(value: int) -> Any:
    return ir.Constant(llvm_type(ADDRESS), value)


@intrinsic(ADDRESS)
def rows_at_once(b):
    return _number(_form()[0])


@intrinsic(ADDRESS)
def bytes_at_once(b):
    """Of each row."""
    return _number(64 * _form()[1])


@intrinsic(SUMS)
def no_sums(b):
    return bundle(b, [zeros.body(b)] * (4 * FOUR))


@intrinsic(SUMS, SUMS, *[ADDRESS] * 6)
def add_rows(b, sums, at, pace, first, second, third, fourth):
    """What the next rows add, which begin at `at`, `pace` bytes apart; the numbers of each kind are neighbours."""
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
    """Those of each kind of number, `pace` bytes apart."""
    rows, vectors = _form()
    known = members(b, sums)
    for kind in range(FOUR):
        for i in range(vectors):
            parts = [known[(row * FOUR + kind) * vectors + i] for row in range(rows)]
            whole = parts[0] if rows == 1 else add.body(b, *parts)
            store.body(b, b.add(b.add(to, b.mul(pace, _number(kind))), _number(64 * i)), whole)
