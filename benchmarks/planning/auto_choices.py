"""Write docs/auto.md: the choices of ``--split-mode auto`` for large models on large machines, and all other choices.

Run ``python benchmarks/planning/auto_choices.py > docs/auto.md``; it takes about an hour. Model files are only headers,
machines are simulated, and times are predictions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hocket.benchmarks.planning.scaling import CONTEXT_TOKENS, describe_time_use
from hocket.frontends.inference.model_layout import create_layout_workload
from hocket.frontends.models import Model, Step
from hocket.frontends.open_model import open_model
from hocket.graph import Graph
from hocket.scheduler import Plan, Workload, compute_missing_bytes, format_bytes, parse_simulated_group, plan_for_group
from hocket.scheduler.ir.formatting import format_seconds

MACHINES = ("h200:1", "h200:2,nvlink", "h200:4,nvlink", "h200:8,nvlink", "rtx4090:2,pcie4")
STEPS = {
    "decode": Step(1, 1, CONTEXT_TOKENS, CONTEXT_TOKENS, 1),
    "a prompt of 512": Step(1, 512, CONTEXT_TOKENS, CONTEXT_TOKENS, 1),
    "16 sequences": Step(16, 1, CONTEXT_TOKENS, CONTEXT_TOKENS, 16),
}
COMPARED_PAIRS = (
    *(("Llama-3-8B", machine) for machine in ("h200:2,nvlink", "rtx4090:2,pcie4", "cpu:4", "a100:4,ethernet")),
    *(("Llama-3-70B", machine) for machine in ("h200:8,nvlink", "rtx3090:4,pcie4", "h200:2,nvlink x 2,ib400")),
    *(("Qwen3-Next-80B-A3B", machine) for machine in ("h200:4,nvlink", "h100:2,pcie5")),
    *(("Qwen3-235B-A22B", machine) for machine in ("h200:4,nvlink", "h100:8,nvlink")),
)
COMPARED_LAYER_COUNT = 12
"""Layers of the models that are also planned with every mode and number of devices."""
HeaderWriter = Callable[..., str]
PAGE_HEAD = """# Choices of `auto`

This page shows the plans that split mode `auto` takes for four models and several simulated machines. It is for readers
who wonder why `auto` uses fewer devices than they have. `python benchmarks/planning/auto_choices.py > docs/auto.md`
writes it.

- **Model**: a file that is only a header, with 4-bit weights and a context of {context} tokens in use.
- **Times**: all times are **predicted**, from efficiencies of kernels that were measured on an H100 and an H200. Other
  GPUs are an [estimate](simulate.md#accuracy) by their data sheets.

`auto` takes the plan with the least time, with a price for memory and devices (`scheduler/planning/candidate.py`). A
full copy of weights and states on every device must save {copied:.0%} of the time, and twice as many devices
{joined:.0%}. A plan that does not fit comes last.

The columns:

- `held`: the bytes of weights and states on all devices together.
- `spent on`: the time of the slowest device in a run. `work` is divided among the devices, `launches` are not, and
  `collectives` are added. The share in brackets is the part of the collectives that overlaps with work.
"""


def plan_on_machine(
    graph: Graph, machine: str, mode: str = "auto", devices: int | None = None, use: Workload | None = None
) -> Plan:
    """Plan a graph for a simulated machine, optionally for its first devices and for a workload."""
    simulation = parse_simulated_group(machine)
    return plan_for_group(
        graph, simulation.group[:devices], split_mode=mode, hardware=simulation.hardware_for(graph), use=use
    )


def build_workload(model: Model, sequences: int) -> Workload:
    """Return the workload for which a session of `sequences` sequences chooses its layout."""
    return create_layout_workload(
        lambda n, tokens: model.graph(Step(n, tokens, CONTEXT_TOKENS, CONTEXT_TOKENS, n)), sequences, CONTEXT_TOKENS
    )


def predict_plan_seconds(plan: Plan, use: Workload | None) -> float:
    """Return the predicted seconds of one run, or of a workload."""
    if use is None:
        return plan.cost.total
    build_plan = cache(
        lambda *asked: plan_for_group(use.build_graph(*asked), plan.group, hardware=plan.hardware, like=plan)
    )
    return use.score_plans(build_plan)[0]


def compute_stored_bytes(plan: Plan) -> int:
    """Return the bytes of weights and states on all devices of a plan."""
    return plan.count_memory_bytes_by_kind()["weight"] + plan.count_memory_bytes_by_kind()["state"]


def format_choices(name: str, path: str) -> Iterator[str]:
    """Yield the section of a model: the choice of `auto` for each machine and step, and the next best choice."""
    yield f"\n## {name}\n"
    yield "| machine | step | taken | a run | spent on | held |"
    yield "|---|---|---|---|---|---|"
    rejected = []
    model = open_model(path, header_only=True)
    for machine in MACHINES:
        for kind, step in STEPS.items():
            plan = plan_on_machine(model.graph(step), machine)
            taken = [r.removeprefix("taken: ").rsplit(":", 1)[0] for r in plan.reasons if r.startswith("taken: ")]
            aside = [r.removeprefix("left aside: ") for r in plan.reasons if r.startswith("left aside: ")]
            cells = (
                machine,
                kind,
                (taken or ["whole, on 1 device"])[0],
                format_seconds(plan.cost.total),
                describe_time_use(plan),
            )
            lacking = f", {format_bytes(short)} short" if (short := compute_missing_bytes(plan)) else ""
            stored = format_bytes(compute_stored_bytes(plan))
            yield f"| {' | '.join(cells)} | {stored}{lacking} |"
            rejected += [f"- {machine}, {kind}: {aside[0]}"] if aside else []
    yield "\nThe best rejected candidates:\n"
    yield from rejected


def format_comparisons(shapes: dict[str, HeaderWriter], folder: Path) -> Iterator[str]:
    """Yield the section that compares `auto` with all other modes on all numbers of devices."""
    yield "\n## Against choices by hand\n"
    yield f"The table has times of the first {COMPARED_LAYER_COUNT} layers: of one token, and of prompts and tokens of"
    yield "several sequences, with prefill chunks and micro-batches. It omits plans that copy the weights to every"
    yield "device.\n\n| model | machine | for | auto | best by hand | which | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for name, machine in COMPARED_PAIRS:
        model = open_model(shapes[name](folder / f"{name}-short.gguf", layers=COMPARED_LAYER_COUNT), header_only=True)
        for sequences in (0, 1, 16):
            use = build_workload(model, sequences) if sequences else None
            graph = model.graph(STEPS["decode"]) if use is None else use.build_graph(sequences, 1)
            auto, device_count = plan_on_machine(graph, machine, use=use), len(parse_simulated_group(machine).group)
            rivals: list[tuple[float, str]] = []
            for devices in sorted({1, 2, device_count}):
                for mode in ("none",) if devices == 1 else ("layer", "tensor", "layer,tensor")[: 2 + (devices > 2)]:
                    plan = plan_on_machine(graph, machine, mode, devices, use)
                    once = sum(v.spec.nbytes for v in (*graph.weights, *graph.states))
                    copies = compute_stored_bytes(plan) > once * (1 + (devices - 1) / 2)
                    rivals += (
                        []
                        if copies
                        else [(predict_plan_seconds(plan, use), f"{mode}, {devices} device{'s' * (devices > 1)}")]
                    )
            (best, which), own = min(rivals), predict_plan_seconds(auto, use)
            workload_text = "one token" if use is None else str(use)
            cells = (
                f"{name}, {COMPARED_LAYER_COUNT} layers",
                machine,
                workload_text,
                format_seconds(own),
                format_seconds(best),
                which,
                f"{own / best:.3f}",
            )
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root))
    from hocket.scheduler.planning.candidate import DOUBLED_DEVICES_PENALTY, FULL_COPY_PENALTY
    from tests.given.models.large_headers import SHAPES

    print(PAGE_HEAD.format(context=CONTEXT_TOKENS, copied=FULL_COPY_PENALTY, joined=DOUBLED_DEVICES_PENALTY), end="")
    with TemporaryDirectory() as folder:
        for name, write in SHAPES.items():
            print(*format_choices(name, write(Path(folder) / f"{name}.gguf")), sep="\n", flush=True)
        print(*format_comparisons(SHAPES, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
