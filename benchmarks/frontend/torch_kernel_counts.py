"""Count the kernels per forward of PyTorch models: of the CPU backend, and of the code that `torch.compile` generates.

The models are the classes of `transformers` and `torchvision` in docs/pytorch.md. Nothing is timed. Kernels of hocket
are the kernel calls of one run on one device. Kernels of Inductor are its generated loops and its calls of other
libraries. Its code is generated, but not compiled.

    python benchmarks/frontend/torch_kernel_counts.py counts.jsonl --write-results
    python benchmarks/frontend/torch_kernel_counts.py counts.jsonl --sides hocket --models BertModel resnet18

Each count becomes a line of the given file, and lines of this file are not counted again.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import hocket
from hocket.backends.capabilities import STAND_IN, KernelCall
from hocket.benchmarks import results_file as results
from tests.given.models import torch_models, vision_models

START_COUNT = 11_595
"""The kernels of hocket over all classes before kernels were fused, on 2026-11-27."""


def list_models() -> list[str]:
    """List the classes in docs/pytorch.md."""
    return [*torch_models.MODELS, *vision_models.MODELS]


def export_model(name: str) -> torch.export.ExportedProgram:
    """Return the program of a model for its arguments."""
    if name in torch_models.MODELS:
        return torch_models.export_model(*torch_models.make_model(name))
    model, picture = vision_models.make_model(name)
    return torch.export.export(model, (picture,), strict=False)


def list_hocket_kernels(exported: torch.export.ExportedProgram) -> list[tuple[KernelCall, str]]:
    """List the kernel calls of one run of a program on one CPU device, each with the ops that it computes."""
    (device_plan,) = hocket.plan(hocket.from_torch(exported).graph, "cpu:0").device_plans
    ops = [i.op for i in device_plan.program.instructions]
    calls = device_plan.backend.list_kernels(device_plan.program, device_plan.device)
    return [(call, " ".join(ops[n] for n in call.instruction_numbers)) for call in calls]


def count_hocket_kernels(exported: torch.export.ExportedProgram) -> dict[str, int]:
    """Count the kernel calls of one run of a program on one CPU device, and the calls of NumPy among them."""
    calls = [call for call, _ in list_hocket_kernels(exported)]
    return {"hocket": len(calls), "numpy": sum(call.kernel == STAND_IN for call in calls)}


def count_inductor_kernels(exported: torch.export.ExportedProgram) -> dict[str, int]:
    """Count the generated kernels and the calls of other libraries in the code that Inductor generates for a program.

    The code is neither compiled nor run.
    """
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []

    def keep_code(lowering: GraphLowering) -> types.SimpleNamespace:
        wrapper, _ = lowering.codegen()
        codes.append(wrapper.value)
        return types.SimpleNamespace(call=None, __file__="", value=wrapper.value)

    weights = [exported.state_dict.get(n, exported.constants.get(n)) for n in _list_leaf_names(exported)]
    inputs = [t for t in torch.utils._pytree.tree_leaves(exported.example_inputs) if isinstance(t, torch.Tensor)]
    module = exported.graph_module
    for node in module.graph.find_nodes(op="placeholder"):
        if not isinstance(node.meta["val"], torch.Tensor):  # a Python number, which the program has as a constant
            module.graph.erase_node(node)
    module.recompile()
    torch.compiler.reset()
    metrics.reset()
    with torch.no_grad(), patch.object(GraphLowering, "compile_to_module", keep_code):
        compile_fx(module, [*weights, *inputs])
    counts = [count_calls_in_generated_code(code) for code in codes]
    return {
        "generated": sum(generated for generated, _ in counts),
        "extern": sum(extern for _, extern in counts),
        "generated_by_metrics": metrics.generated_kernel_count,
    }


def _list_leaf_names(exported: torch.export.ExportedProgram) -> list[str]:
    """List the names of parameters, buffers and constants in the order of a program's arguments."""
    specs = exported.graph_signature.input_specs
    return [str(spec.target) for spec in specs if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")]


def count_calls_in_generated_code(code: str) -> tuple[int, int]:
    """Count the calls of generated kernels and of other libraries in the function ``call`` of Inductor's code."""
    functions = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    calls = [ast.unparse(n.func) for f in functions for n in ast.walk(f) if isinstance(n, ast.Call)]
    generated = sum(call.startswith("cpp_") for call in calls)
    extern = sum(call.startswith(("extern_kernels.", "torch.ops.", "aten.")) for call in calls)
    return generated, extern


SIDES: Mapping[str, Callable[[torch.export.ExportedProgram], dict[str, int]]] = {
    "hocket": count_hocket_kernels,
    "inductor": count_inductor_kernels,
}


def format_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all classes in Markdown, with sums and the classes with at most Inductor's count."""
    counted = [row for row in rows if "hocket" in row]
    both = [row for row in counted if "inductor" in row]
    fewer = sum(row["hocket"] <= row["inductor"] for row in both)
    fewer_by_metrics = sum(row["hocket"] <= row["extern"] + row["generated_by_metrics"] for row in both)
    keys = "model", "before", "hocket", "numpy"
    lines = [[*(row.get(key, "-") for key in keys), *_format_inductor_counts(row)] for row in rows]
    sums = [sum(row.get(key, 0) for row in counted) for key in keys[1:]]
    extern = sum(row["extern"] for row in both)
    lines.append([f"{len(counted)} counted", *sums, sum(row["inductor"] for row in both)])
    lines[-1].append(sum(row["generated_by_metrics"] for row in both) + extern)
    head = "class", "before", "now", "of these NumPy", "Inductor: calls in its code", "Inductor: by its metrics"
    text = (
        f"Kernels per forward: {sums[1]} in {len(counted)} of {len(rows)} classes; all had {START_COUNT} at first. At "
        f"most Inductor's count: {fewer} of {len(both)} classes by the calls in its code, and {fewer_by_metrics} by "
        f"`metrics.generated_kernel_count` and calls of other libraries."
    )
    return f"{textwrap.fill(text, 120)}\n\n{results.format_table(head, lines)}"


def _format_inductor_counts(row: Mapping[str, Any]) -> list[str]:
    if "inductor" not in row:
        return ["-", "-"]
    generated, extern, by_metrics = row["generated"], row["extern"], row["generated_by_metrics"]
    return [f"{generated} + {extern} = {row['inductor']}", str(by_metrics + extern)]


def main() -> None:
    """Make the counts that are not in the file, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=Path, help="the file with one count per line")
    parser.add_argument("--models", nargs="*", default=list_models())
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no count after so long")
    parser.add_argument("--write-results", action="store_true", help="write the table of all counts in the file")
    parser.add_argument("--before", type=Path, help="a file with earlier counts, for a column of the table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = read_counts(args.counts) if args.counts.exists() else {}
    start = time.monotonic()
    for name in args.models:
        missing = [side for side in args.sides if (name, side) not in found]
        if not missing or time.monotonic() - start > args.seconds:
            continue
        exported = export_model(name)
        for side in missing:
            found[name, side] = SIDES[side](exported)
            with args.counts.open("a") as file:
                file.write(json.dumps({"model": name, "side": side, "counts": found[name, side]}) + "\n")
            print(name, found[name, side], flush=True)
    if args.write_results:
        before = {} if args.before is None else read_counts(args.before)
        earlier = {name: counts["hocket"] for (name, side), counts in before.items() if side == "hocket"}
        rows = [merge_counts(name, found, earlier) for name in list_models()]
        about = results.collect_circumstances(shared=True)
        stem = Path(__file__).parents[1] / "results" / f"{about['date']}-torch-kernel-counts"
        results.write_result(stem, about, rows, format_counts(rows))


def read_counts(file: Path) -> dict[tuple[str, str], dict[str, int]]:
    """Read a file with one count per line; return the counts by class and side."""
    return {(r["model"], r["side"]): r["counts"] for r in map(json.loads, file.read_text().splitlines())}


def merge_counts(
    name: str, found: Mapping[tuple[str, str], Mapping[str, int]], before: Mapping[str, int]
) -> dict[str, Any]:
    """Merge the counts of a class to one row; `inductor` is the sum of its generated kernels and other calls."""
    row: dict[str, Any] = {"model": name, **found.get((name, "hocket"), {}), **found.get((name, "inductor"), {})}
    row |= {"before": before[name]} if name in before else {}
    return row | ({"inductor": row["generated"] + row["extern"]} if "generated" in row else {})


if __name__ == "__main__":
    main()
