"""Write docs/scaling.md: predicted tokens per second from 1 to 1,024 GPUs, the limit, and its reason.

Run ``python benchmarks/plan_scaling.py > docs/scaling.md``; it takes some minutes. Model files are only headers,
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
from hocket.frontends.open import open_model
from hocket.graph import Graph
from hocket.scheduler import Plan, compute_missing_bytes, format_bytes, plan_for_group, simulate
from hocket.scheduler.units import format_seconds

GPU_COUNTS = (1, 2, 4, 8, 16, 64, 1024)
GPUS_PER_MACHINE = 8
MODELS = ("Llama-3-8B", "Llama-3-70B", "Qwen3-235B-A22B")
SEQUENCE_COUNTS = (1, 16, 128)
CONTEXT_TOKENS = 4096
PAGE_HEAD = """# From 1 to 1,024 GPUs

Written by `python benchmarks/plan_scaling.py > docs/scaling.md`: files that are only headers, 4-bit weights, {context}
tokens of context in use by each sequence, simulated H200 in machines of {machine} (NVLink within, InfiniBand of 400
Gbit/s across), one token for each sequence and step, split mode `auto`.  All figures are **predicted**:
what kernels take from their machine code, the rest from data sheets; none was measured.  On an H100 some kernels
took up to [2.4 times the predicted time](first-gpu.md#what-an-h100-says-of-the-model-of-time).

`used` are the GPUs that `auto` takes: more would make a step longer, or shorten it by less than their price.  Whoever
has more runs copies of the model side by side: tokens per second then grow with the copies, and the time of a step
stays.  `spent on` says what the slowest GPU does in a step: reading weights, states and activations, or arithmetic
(`work`), starting kernels (`launches`), and meeting others (`collectives`).  `more` is the best choice on more GPUs
that was left aside.

The limit lies at one machine.  There starting kernels takes the largest part of a step of one sequence, and does not
shrink with the number of GPUs; a sum across two machines takes three times as long as one within; and stages of
layers on several machines take turns in a step of decoding, so they hold more and are no faster.
"""


def format_machine_spec(gpus: int) -> str:
    """Return the machine with `gpus` GPUs, as `simulate` parses it."""
    if gpus <= GPUS_PER_MACHINE:
        return f"h200:{gpus}" + (",nvlink" if gpus > 1 else "")
    return f"h200:{GPUS_PER_MACHINE},nvlink x {gpus // GPUS_PER_MACHINE},ib400"


def describe_time_use(plan: Plan) -> str:
    """Return the shares of compute, launches and collectives in the time of a step."""
    total = plan.cost.total
    launches = plan.hardware.launch * max(sum(device_plan.launches()) for device_plan in plan.lanes)
    parts = {"work": plan.cost.compute - launches, "launches": launches, "collectives": plan.cost.collectives}
    shares_text = ", ".join(f"{name} {max(0.0, seconds) / total:.0%}" for name, seconds in parts.items())
    return f"{shares_text} ({plan.cost.hidden / total:.0%} beside work)" if plan.cost.hidden else shares_text


def find_best_unused(plan: Plan, used: int) -> str:
    """Return the best rejected choice on more GPUs than are used, or ``-``."""
    aside = [r.removeprefix("left aside: ") for r in plan.reasons if r.startswith("left aside: ")]
    counted = [(re.search(r"on (\d+) devices|across (\d+) machines", text), text) for text in aside]
    larger = [
        text for found, text in counted if found and int(found[1] or 0) + GPUS_PER_MACHINE * int(found[2] or 0) > used
    ]
    return larger[0] if larger else "-"


def format_rows(graph: Graph, sequences: int) -> Iterator[str]:
    """Yield a row for each choice of `auto`, with the numbers of GPUs for which it is chosen."""
    same: list[tuple[int, str]] = []
    for gpus in GPU_COUNTS:
        simulation = simulate(format_machine_spec(gpus))
        same.append(
            (
                gpus,
                format_row(plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph)), sequences),
            )
        )
    for cells, group in groupby(same, key=lambda pair: pair[1].rpartition(" | ")[0]):
        taken = list(group)
        numbers = f"{taken[0][0]:,}" + (f" to {taken[-1][0]:,}" if len(taken) > 1 else "")
        yield f"| {sequences} | {numbers} | {cells} | {taken[-1][1].rpartition(' | ')[2]} |"


def format_row(plan: Plan, sequences: int) -> str:
    """Return the cells of a plan: devices, seconds, tokens/s and bytes."""
    used = sum(bool(device_plan.program.instructions) for device_plan in plan.lanes)
    stored_bytes = plan.memory()["weight"] + plan.memory()["state"]
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
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    from tests.given.models.large_headers import SHAPES

    print(PAGE_HEAD.format(context=CONTEXT_TOKENS, machine=GPUS_PER_MACHINE), end="")
    with TemporaryDirectory() as folder:
        for name in MODELS:
            model = open_model(SHAPES[name](Path(folder) / f"{name}.gguf"), header_only=True)
            print(f"\n## {name}\n")
            print("| sequences | GPUs | used | a step | tokens/s | for each used | held | spent on | more |")
            print("|--:|--:|--:|--:|--:|--:|--:|---|---|")
            for sequences in SEQUENCE_COUNTS:
                graph = model.graph(Step(sequences, 1, CONTEXT_TOKENS, CONTEXT_TOKENS, sequences))
                print(*format_rows(graph, sequences), sep="\n", flush=True)


if __name__ == "__main__":
    main()
