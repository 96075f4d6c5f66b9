"""Faults planted in sums with terms in chunks: in the join of two summands, and in the addition."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, Value, input, weight
from hocket.ops.collectives import all_reduce
from hocket.scheduler import Plan, plan_for_group
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.plans.faults import Edit, nodes, require_named

T, K, N = 6, 8, 4
CHUNKS = ((0, 3), (3, 6))


@cache
def summed_plan() -> Plan:
    """Build two products split along their terms; both sums are outputs, and their product is `a` times `b`."""
    x = input("x", (T, K))
    a, b = (ops.mul_mat(weight(f"w{n}", (N, K)), x, name=n) for n in "ab")
    graph = Graph({"a": a, "b": b, "y": ops.rms_norm(ops.mul(a, b, name="product"), name="y")})

    def terms(graph, factors):
        return frozenset(f for v in graph.weights for f in factors.factors_of(v) if f.size == K)

    return plan_for_group(graph, [find_device("cpu:0"), find_device("cpu:1")], choose=terms)


def rows(value: Value, start: int, stop: int) -> Value:
    return ops.slice_(value, axis=0, start=start, stop=stop)


def columns(value: Value, start: int, stop: int) -> Value:
    return ops.slice_(value, axis=1, start=start, stop=stop)


def in_chunks(first: tuple[int, int], second: tuple[int, int], one: Edit, two: Edit) -> Edit:
    """Return the sum of a product with rows in two chunks, each by a function of the weight and its rows."""

    def edit(node, src):
        w, x = src[0].node.inputs
        chunks = one(w, rows(x, *first)), two(w, rows(x, *second))
        return all_reduce(ops.concat(*chunks, axis=0), sequence=9, name=node.name)

    return edit


def all_terms(w: Value, x: Value) -> Value:
    """Return all terms of the device."""
    return ops.mul_mat(w, x)


def some_terms(start: int, stop: int) -> Callable[[Value, Value], Value]:
    return lambda w, x: ops.mul_mat(columns(w, start, stop), columns(x, start, stop))


def sum_of(sequence: int) -> Callable[[Value, Value], Value]:
    return lambda w, x: all_reduce(ops.mul_mat(w, x), sequence=sequence)


def on_both(edit: Edit) -> Callable[[], Plan]:
    return lambda: nodes(summed_plan(), 0, 1, a__sum=edit)


def chunk_of_another() -> Plan:
    """The second chunk of `b` is of `a`."""
    values: dict[str, Value] = {}

    def note(node, src):
        values["a"] = ops.mul_mat(*src, name=node.name)
        return values["a"]

    def mix_chunks(node, src):
        return all_reduce(ops.concat(rows(src[0], 0, 3), rows(values["a"], 3, 6), axis=0), name=node.name, **node.attrs)

    return nodes(summed_plan(), 0, 1, a=note, b__sum=mix_chunks)


def factor_in_turn(of_a: Callable[[int], bool]) -> Callable[[], Plan]:
    """The product with terms of its first factor on one device and of its second on the other, summed."""

    def edit(device: int) -> Edit:
        def product(node, src):
            a, b = src
            own = (a.node.inputs[0], b) if of_a(device) else (a, b.node.inputs[0])
            return all_reduce(ops.mul(*own), sequence=7, name=node.name)

        return product

    return lambda: nodes(nodes(summed_plan(), 0, product=edit(0)), 1, product=edit(1))


RIGHT = {
    "each chunk once": on_both(in_chunks(*CHUNKS, all_terms, all_terms)),
    "chunks of other sizes on one device": lambda: nodes(
        nodes(summed_plan(), 0, a__sum=in_chunks(*CHUNKS, all_terms, all_terms)),
        *(1,),
        a__sum=in_chunks((0, 1), (1, 6), all_terms, all_terms),
    ),
    "the same factor of a product in terms on both devices": factor_in_turn(lambda _: True),
}
FAULTS = {
    "a chunk is there twice": (
        r"concat\(%mul_mat, %mul_mat, axis=0\) .* no such node with these operands",
        on_both(in_chunks((0, 3), (0, 3), all_terms, all_terms)),
    ),
    "chunks are exchanged": (
        r"%product .* different entries of leading axis 0: \[3:6, 0:3\] and \[0:6\]",
        on_both(in_chunks((3, 6), (0, 3), all_terms, all_terms)),
    ),
    "chunks are exchanged on one device": (
        r"%a\.sum .* the devices have different entries",
        lambda: nodes(
            nodes(summed_plan(), 0, a__sum=in_chunks(*CHUNKS, all_terms, all_terms)),
            *(1,),
            a__sum=in_chunks((3, 6), (0, 3), all_terms, all_terms),
        ),
    ),
    "chunks have rows in common": (
        r"concat\(%mul_mat, %mul_mat, axis=0\) .* no such node with these operands",
        on_both(in_chunks((0, 4), (2, 4), all_terms, all_terms)),
    ),
    "a chunk is of another product": (
        r"concat\(%slice, %slice, axis=0\) .* no such node with these operands",
        chunk_of_another,
    ),
    "some terms of the second chunk are missing": (
        r"concat\(%mul_mat, %mul_mat, axis=0\) .* no such node with these operands",
        on_both(in_chunks(*CHUNKS, all_terms, some_terms(0, 2))),
    ),
    "chunks have other terms": (
        r"concat\(%mul_mat, %mul_mat, axis=0\) .* no such node with these operands",
        on_both(in_chunks(*CHUNKS, some_terms(0, 2), some_terms(2, 4))),
    ),
    "a term of the second chunk is there twice": (
        r"concat\(%slice, %slice, axis=1\) .* no such node with these operands",
        on_both(
            in_chunks(
                *CHUNKS, all_terms, lambda w, x: ops.mul_mat(*(ops.concat(v, columns(v, 0, 1), axis=1) for v in (w, x)))
            )
        ),
    ),
    "a chunk is counted twice": (
        r"add\(%mul_mat, %mul_mat\) .* no such node with these operands",
        on_both(in_chunks(*CHUNKS, all_terms, lambda w, x: ops.add(*[ops.mul_mat(w, x)] * 2))),
    ),
    "a chunk is summed already": (
        r"concat\(%mul_mat, %all_reduce, axis=0\) .* no such node with these operands",
        on_both(in_chunks(*CHUNKS, all_terms, sum_of(6))),
    ),
    "both chunks are summed already": (
        r"%a\.sum .* device 0 has the complete value, and devices \[1\] add to it",
        on_both(in_chunks(*CHUNKS, sum_of(6), sum_of(7))),
    ),
    "one device has terms of one factor, the other of the other": (
        r"%product .* the devices have partial sums of different kinds",
        factor_in_turn(lambda device: device == 0),
    ),
}


@pytest.mark.parametrize("what", RIGHT)
def test_such_chunks_are_proven(what):
    assert not [*find_plan_faults(RIGHT[what]())]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_names_the_fault(fault):
    require_named(*FAULTS[fault])
