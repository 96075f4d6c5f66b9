"""How many times longer than predicted the ops take that NumPy computes on cpu: ``python benchmarks/cpu/stand_ins.py``.

`hocket.scheduler.costs.stand_ins` has the rounded ratios. The prediction holds for a compiled kernel at the
built-in speeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np

import hocket
from hocket import ops
from hocket.backends.capabilities import STAND_IN
from hocket.benchmarks import results_file as results
from hocket.graph import Graph, Value, input
from hocket.scheduler.costs.hardware import DEFAULT_HARDWARE, WorkCounter

ROWS, COLUMNS, RUNS = 512, 2048, 7
TABLE_COLUMNS = ("op", "µs", "GB/s", "predicted µs", "ratio")


def make_input(name: str, *shape: int, dtype: str = "f32") -> Value:
    """Make an input with the name and the shape; the default shape is `ROWS` × `COLUMNS`."""
    return input(name, shape or (ROWS, COLUMNS), dtype)


OP_BUILDERS: Mapping[str, Callable[[], Value]] = {
    "sin": lambda: ops.sin(make_input("x")),
    "arctan": lambda: ops.arctan(make_input("x")),
    "argmax": lambda: ops.argmax(make_input("x")),
    "sum": lambda: ops.sum(make_input("x")),
    "roll": lambda: ops.roll(make_input("x"), shifts=(3, 5)),
    "power": lambda: ops.power(make_input("x"), make_input("y")),
    "count_equal": lambda: ops.count_equal(make_input("x", dtype="i32"), make_input("y", dtype="i32")),
    "tri": lambda: ops.tri(make_input("x", ROWS, ROWS), kind="lower"),
    "diag": lambda: ops.diag(make_input("x", ROWS)),
    "group_norm": lambda: ops.group_norm(make_input("x", 32, 64, 64), groups=8, eps=1e-5),
    "scatter": lambda: ops.scatter(make_input("x"), make_input("i", dtype="i32"), make_input("y")),
    "gather": lambda: ops.gather(make_input("x"), make_input("i", dtype="i32")),
    "solve_tri": lambda: ops.solve_tri(make_input("a", 16, 64, 64), make_input("b", 16, 64, 64)),
    "timestep_embedding": lambda: ops.timestep_embedding(make_input("x", ROWS), dim=320),
    "argsort": lambda: ops.argsort(make_input("x")),
}


def measure_op(op: str, build: Callable[[], Value]) -> dict[str, object]:
    """Measure an op that NumPy computes, and return its result row.

    Raises:
        SystemExit: The op has a compiled kernel.
    """
    graph, rng = Graph({"y": build()}), np.random.default_rng(5)
    run = hocket.load(hocket.plan(graph, "cpu:0"), {})
    if STAND_IN not in run.list_kernel_names():
        raise SystemExit(f"{op}: has a compiled kernel; remove it from the cases")
    arrays = {v.node.name: rng.random(v.shape) + 0.5 for v in graph.inputs if not v.dtype.is_integer}
    arrays |= {v.node.name: rng.integers(0, ROWS, v.shape) for v in graph.inputs if v.dtype.is_integer}
    run.bind({name: arrays[name].astype(v.dtype.storage) for v in graph.inputs if (name := v.node.name) in arrays})
    seconds = median(sum(step.seconds for step in run.time_kernels()[0]) for _ in range(RUNS))
    work = WorkCounter().count_work(next(node for node in graph.nodes if node.op == op))
    predicted = DEFAULT_HARDWARE.compute_seconds(*work)
    return {"op": op, "seconds": seconds, "gbs": work.nbytes / seconds / 1e9, "predicted": predicted}


def format_cells(row: dict[str, object]) -> list[str]:
    """Return the cells of a result row for the table."""
    ratio = row["seconds"] / row["predicted"]
    return [
        row["op"],
        f"{row['seconds'] * 1e6:.0f}",
        f"{row['gbs']:.2f}",
        f"{row['predicted'] * 1e6:.0f}",
        f"{ratio:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    about = results.collect_circumstances(args.shared)
    rows = [measure_op(op, build) for op, build in OP_BUILDERS.items()]
    print(results.format_table(TABLE_COLUMNS, list(map(format_cells, rows))), end="")
    if args.save:
        results.write_result(args.save, about, rows, results.format_table(TABLE_COLUMNS, list(map(format_cells, rows))))


if __name__ == "__main__":
    main()
