"""Write docs/scaling.md: predicted tokens per second from 1 to 1,024 GPUs, the limit, and its reason.

Run ``python benchmarks/planning/scaling.py > docs/scaling.md``; it takes about an hour. Model files are only headers,
machines are simulated, and times are predictions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph import Graph
from hocket.scheduler import Plan, compute_missing_bytes, format_bytes, parse_simulated_group, plan_for_group
from hocket.scheduler.ir.formatting import format_seconds

GPU_COUNTS = (1, 2, 4, 8, 16, 64, 1024)
GPUS_PER_MACHINE = 8
MODELS = ("Llama-3-8B", "Llama-3-70B", "Qwen3-235B-A22B")
SEQUENCE_COUNTS = (1, 16, 128)
CONTEXT_TOKENS = 4096
PAGE_HEAD = """# From 1 to 1,024 GPUs

This page shows the number of GPUs that split mode `auto` takes, for three models. It is for readers who choose a
machine. `python benchmarks/planning/scaling.py > docs/scaling.md` writes it.

- **Model**: a file that is only a header, with 4-bit weights.
- **Step**: one token for each sequence. Each sequence has {context} tokens of context in use.
- **Devices**: simulated H200 in machines of {machine}, with NVLink inside a machine and InfiniBand of 400 Gbit/s
  between machines.
- **Times**: all figures are **predicted**. The efficiencies of kernels were measured on
  [an H100 and an H200](simulate.md#accuracy), one device at a time. The speeds of links come from data sheets.

The columns:

- `used`: the GPUs that `auto` takes. More GPUs would make a step longer, or shorten it by less than their price. Copies
  of the model on further GPUs multiply the tokens per second, and do not change the time of a step.
- `held`: the bytes of weights and states on all GPUs together.
- `spent on`: the time of the slowest GPU in a step. `work` is to read weights, states and activations, or arithmetic.
  `launches` is to start kernels, and `collectives` is to communicate.

Below each table are the best rejected candidates on more GPUs, for each number of sequences.

`auto` never takes more than one machine, for three reasons:

- On the eight GPUs of one machine, launches take the largest part of a step of one sequence. Their time does not
  shrink with the number of GPUs.
- A sum across two machines takes three times as long as a sum inside one machine.
- A layer split over several machines computes a decode step in one stage after the other. So it needs more memory and
  is no faster.
"""


def format_machine_spec(gpus: int) -> str:
    """Return the machine with `gpus` GPUs, as `parse_simulated_group` parses it."""
    if gpus <= GPUS_PER_MACHINE:
        return f"h200:{gpus}" + (",nvlink" if gpus > 1 else "")
    return f"h200:{GPUS_PER_MACHINE},nvlink x {gpus // GPUS_PER_MACHINE},ib400"


def describe_time_use(plan: Plan) -> str:
    """Return the shares of compute, launches and collectives in the time of a step."""
    total = plan.cost.total
    launches = plan.hardware.launch * max(
        sum(device_plan.predict_launches_by_instruction()) for device_plan in plan.device_plans
    )
    parts = {"work": plan.cost.compute - launches, "launches": launches, "collectives": plan.cost.collectives}
    shares_text = ", ".join(f"{name} {max(0.0, seconds) / total:.0%}" for name, seconds in parts.items())
    return (
        f"{shares_text} ({plan.cost.overlapped_seconds / total:.0%} overlapped)"
        if plan.cost.overlapped_seconds
        else shares_text
    )


def find_best_unused(plan: Plan, used: int) -> str:
    """Return the best rejected choice on more GPUs than are used, or ``-``."""
    aside = [r.removeprefix("left aside: ") for r in plan.reasons if r.startswith("left aside: ")]
    counted = [(re.search(r"on (\d+) devices|across (\d+) machines", text), text) for text in aside]
    larger = [
        text for found, text in counted if found and int(found[1] or 0) + GPUS_PER_MACHINE * int(found[2] or 0) > used
    ]
    return larger[0] if larger else "-"


def format_rows(graph: Graph, sequences: int) -> Iterator[tuple[str, str]]:
    """Yield a row for each choice of `auto`, with its numbers of GPUs; and the best rejected choice on more GPUs."""
    same: list[tuple[int, str]] = []
    for gpus in GPU_COUNTS:
        simulation = parse_simulated_group(format_machine_spec(gpus))
        same.append(
            (
                gpus,
                format_row(plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph)), sequences),
            )
        )
    for cells, group in groupby(same, key=lambda pair: pair[1].rpartition(" | ")[0]):
        taken = list(group)
        numbers = f"{taken[0][0]:,}" + (f" to {taken[-1][0]:,}" if len(taken) > 1 else "")
        yield f"| {sequences} | {numbers} | {cells} |", taken[-1][1].rpartition(" | ")[2]


def format_row(plan: Plan, sequences: int) -> str:
    """Return the cells of a plan: devices, seconds, tokens/s and bytes."""
    used = sum(bool(device_plan.program.instructions) for device_plan in plan.device_plans)
    stored_bytes = plan.count_memory_bytes_by_kind()["weight"] + plan.count_memory_bytes_by_kind()["state"]
    lacking = f", {format_bytes(short)} short" if (short := compute_missing_bytes(plan)) else ""
    rate = sequences / plan.cost.total
    cells = (
        used,
        format_seconds(plan.cost.total),
        f"{rate:,.0f}",
        f"{rate / used:,.0f}",
        format_bytes(stored_bytes) + lacking,
    )
    return f"{' | '.join(map(str, cells))} | {describe_time_use(plan)} | {find_best_unused(plan, used)}"


def main() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root))
    from tests.given.models.large_headers import SHAPES

    print(PAGE_HEAD.format(context=CONTEXT_TOKENS, machine=GPUS_PER_MACHINE), end="")
    with TemporaryDirectory() as folder:
        for name in MODELS:
            model = open_model(SHAPES[name](Path(folder) / f"{name}.gguf"), header_only=True)
            print(f"\n## {name}\n")
            print("| sequences | GPUs | used | a step | tokens/s | for each used | held | spent on |")
            print("|--:|--:|--:|--:|--:|--:|--:|---|")
            rejected: list[str] = []
            for sequences in SEQUENCE_COUNTS:
                graph = model.graph(Step(sequences, 1, CONTEXT_TOKENS, CONTEXT_TOKENS, sequences))
                for row, more in format_rows(graph, sequences):
                    print(row, flush=True)
                    rejected += [f"- {sequences} sequence{'s' * (sequences > 1)}: {more}"] * (more != "-")
            if rejected:
                print("", "The best rejected candidates on more GPUs:", "", *rejected, sep="\n")


if __name__ == "__main__":
    main()
