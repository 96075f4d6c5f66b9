"""Plans and runs of a graph on one CPU device of the `cpu` backend."""

from __future__ import annotations

import numpy as np

import hocket
from hocket.backends.cpu.backend import CpuBackend


def list_cpu_kernels(graph: hocket.Graph) -> list[str]:
    """The ops of each kernel of a graph on one CPU device."""
    backend = CpuBackend(1)
    device_plan = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0]
    names = [i.op for i in device_plan.program.instructions]
    calls = backend.list_kernels(device_plan.program, device_plan.device)
    return [" ".join(names[n] for n in call.instruction_numbers) for call in calls]


def run_on_cpu(graph: hocket.Graph, values: dict[str, np.ndarray], inputs: dict[str, np.ndarray], threads: int):
    backend = CpuBackend(threads)
    plan = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))])
    return hocket.load(plan, values).run(inputs)
