"""Predict the gain from overlapping compute with collectives, for a decode step and a prompt of Llama-3-70B.

Run ``python benchmarks/planning/overlap_gain.py > benchmarks/results/DATE-overlap.md``; it takes some minutes. The
model file is only a header, machines are simulated, and times are predictions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from hocket.benchmarks.planning.scaling import CONTEXT_TOKENS
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.graph import Graph
from hocket.scheduler import Plan, parse_simulated_group, plan_for_group
from hocket.scheduler.costs.simulated_devices import SimulatedGpu
from hocket.scheduler.ir.formatting import format_seconds

MACHINES = ("h200:8,nvlink", "h200:4,nvlink", "h200:4,pcie5", "h100:2,pcie5", "cpu:2")
STEPS = {"one token": 1, "a prompt of 2,048": 2048}
PAGE_HEAD = """# Overlap of compute and collectives

- Measured: nothing. All times are **predictions**, in which compute and a collective at the same time do not slow each
  other down.
- Machine: simulated devices.
- Model: only the header of Llama-3-70B with 4-bit weights, split mode `tensor`, {context} tokens of context.
- Command: `python benchmarks/planning/overlap_gain.py`.

`without` is the plan for devices that wait for each collective at once. `with` is the plan for devices that overlap
compute and collectives. `chunks` is the number of overlap chunks of a prompt. Simulated processors always wait, because
their threads execute the collective.
"""


def plan_with_overlap(graph: Graph, machine: str, *, has_overlap: bool) -> Plan:
    """Plan a graph for simulated devices; with `has_overlap`, they overlap compute with collectives."""
    simulation = parse_simulated_group(machine)
    with patch.object(
        SimulatedGpu,
        "can_overlap_collectives",
        SimulatedGpu.can_overlap_collectives if has_overlap else lambda *_: False,
    ):
        plan = plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph), split_mode="tensor")
        assert plan.cost  # computes the costs while the patch is active
    return plan


def format_comparison_rows(path: str) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each machine and step: times without and with overlap."""
    for machine in MACHINES:
        for name, tokens in STEPS.items():
            graph, _ = read_step_graph_and_context(path, context=CONTEXT_TOKENS, tokens=tokens)
            one_by_one, overlapped = (plan_with_overlap(graph, machine, has_overlap=does) for does in (False, True))
            before, after = one_by_one.cost, overlapped.cost
            chunks = [word for why in overlapped.reasons if "chunks" in why for word in why.split() if word.isdecimal()]
            yield (
                machine,
                name,
                format_seconds(before.total),
                format_seconds(before.collectives),
                format_seconds(after.total),
                format_seconds(after.collectives - after.overlapped_seconds),
                *(chunks or ["-"]),
                f"{before.total / after.total - 1:.0%}",
            )


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.given.models.large_headers import LARGE

    print(PAGE_HEAD.format(context=CONTEXT_TOKENS))
    print("| devices | step | without | collectives | with | waiting | chunks | gain in steps/s |")
    print("|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for row in format_comparison_rows(LARGE["llama"](Path(folder) / "llama.gguf")):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
