"""Graphs that update a state and read it, each by another op, with inputs that need no rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hocket import Graph, input, ops, state


def build_state_graphs(dtype: str) -> Iterator[tuple[str, Graph]]:
    """Over a state [9, 64] of that type."""
    old, rows, ids = state("s", (9, 64), dtype), input("rows", (3, 64)), input("ids", (3,), "i32")
    new, x = ops.set_rows(old, rows, ids), input("x", (9, 64))
    read = ops.cast(new, dtype="f32")
    yield "rows of it", Graph({"y": ops.get_rows(new, ids)}, {old: new})
    yield "an output", Graph({"y": new}, {old: new})
    yield "a slice", Graph({"y": ops.scale(ops.slice_(read, axis=0, start=1, stop=5), scale=2.0)}, {old: new})
    yield "what it was", Graph({"y": ops.cast(old, dtype="f32"), "z": read}, {old: new})
    yield "joined", Graph({"y": ops.cast(ops.concat(new, new, axis=0), dtype="f32")}, {old: new})
    yield "a matrix", Graph({"y": ops.mul_mat(new, x)}, {old: new})
    yield "written twice", Graph({"y": read}, {old: ops.set_rows(new, ops.scale(rows, scale=2.0), ids)})
    if not old.dtype.is_quantised:
        whole = ops.cast(ops.add(ops.cast(old, dtype="f32"), x), dtype=dtype)
        yield "all of it is new", Graph({"y": x}, {old: whole})
        yield "transposed", Graph({"y": ops.cast(ops.transpose(new), dtype="f32")}, {old: new})


def inputs_of(graph: Graph, multiples: Sequence[int] = range(-99, 99)) -> dict[str, npt.NDArray[np.generic]]:
    """Multiples of 1/32; each 32 numbers of the rows that are written begin with the first and the last multiple."""
    rng, floats = np.random.default_rng(0), {"rows": (3, 64), "x": (9, 64)}
    arrays = {n: (rng.choice(multiples, shape) / 32).astype(np.float32) for n, shape in floats.items()}
    arrays["rows"][:, ::32], arrays["rows"][:, 1::32] = multiples[0] / 32, multiples[-1] / 32
    known = {**arrays, "ids": np.array([1, 4, 7], np.int32)}
    return {v.node.name: known[v.node.name] for v in graph.inputs}
