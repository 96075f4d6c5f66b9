"""Fit the efficiencies of kernel families to measured times, and write ``backends/cupy/kernel_efficiency.toml``.

    python benchmarks/gpu/fit_efficiency.py

The measured times are the whole steps in `model_steps.toml`, and single kernels in the JSON files of
`benchmarks/results`. The predicted time of a case is the sum of `Hardware.compute_seconds` over its nodes. Least
squares of the logarithm of predicted by measured time give one factor for each family and each kind of speed. No factor
is fitted for a single kernel.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hocket import ops
from hocket.backends.base import Backend, Device
from hocket.backends.capabilities import OTHER_OPS, KernelEfficiencies
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.cuda_driver import CudaDriver, PlanOnlyGpuBackend, SimulatedGpuDriver
from hocket.backends.cupy.kernel_efficiency import EFFICIENCY_FILE
from hocket.frontends.models import Model, Step
from hocket.frontends.open_model import open_model
from hocket.graph import DType, Value, input, state, weight
from hocket.graph.storage.files import write_text
from hocket.scheduler import Plan, plan_for_group
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS
from hocket.scheduler.costs.hardware import MANY_ROWS, PRODUCTS, Hardware, WorkCounter, WorkEstimate
from hocket.scheduler.costs.simulated_devices import SimulatedGpu, apply_efficiencies, parse_simulated_group

from .random_models import SIZE_4B, write_qwen3_next_header, write_qwen35_header

STEPS_FILE = Path(__file__).parent / "model_steps.toml"
RESULTS = Path(__file__).parents[1] / "results"
KERNEL_RESULTS = ("2026-11-26-h100-first", "2026-11-26-h100")
MEASURED_ON = ("h100", "h200")
KERNEL_WEIGHT, PRIOR_WEIGHT = 0.3, 0.05
"""Weights of residuals: of a single kernel and of a factor's distance from its start, relative to a whole step."""
SUPERSEDED_KERNEL = "attention_combine"
"""Rows of prompts with this kernel are left out: it merged the splits of a prompt, and has been replaced since."""
START: Mapping[str, dict[str, float]] = {
    "memory": {OTHER_OPS: 0.8, "mul_mat_id": 0.35, "attention": 0.6, "gated_delta_net": 0.8},
    "arithmetic": {PRODUCTS: 0.55, "mul_mat_id": 0.33, "f32": 0.04, "attention": 0.7, "gated_delta_net": 0.06},
    "launch": {OTHER_OPS: 1.1, MANY_ROWS: 5.0, "mul_mat_id": 1.3, "attention": 2.0, "gated_delta_net": 1.4},
}
START_SHARE = 0.6
"""The start of the memory share of a dtype."""
VECTOR_CASE = re.compile(r"(\w+) (\d+)×(\d+), 1 token")
ATTENTION_CASE = re.compile(r"(\d+) heads on (\d+) of (\d+), (\d+) tokens?(?: on (\d+))?, f16")
DELTA_CASE = re.compile(r"(\d+)/(\d+)×128, (?:batch (\d+)|(?:(\d+) × )?(\d+) tokens)")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The device time of one step of a model on a real GPU; `cells` are the cache cells that attention reads."""

    kind: str
    model: str
    tokens: int
    cells: int
    microseconds: float
    page: str

    def predict_plan(self) -> Plan:
        """Plan the step for one simulated device of its kind; `Plan.cost` has the predicted seconds."""
        step = Step(1, self.tokens, self.cells, self.cells, 1, keys=DType.F16, values=DType.F16)
        graph, simulation = _open_measured_model(self.model).graph(step), parse_simulated_group(f"{self.kind}:1")
        for backend, device in simulation.group:
            _use_measured_launches(backend, device)
        return plan_for_group(graph, simulation.group, hardware=simulation.hardware_for(graph))


def _use_measured_launches(backend: Backend, device: Device) -> None:
    """Plan for kernels that read all operands from memory, like the measured kernels."""
    assert isinstance(backend, SimulatedGpu)
    assert isinstance(backend.planning_backend, DriverBackend)
    limits = backend.planning_backend.driver.limits(device)
    driver = SimulatedGpuDriver(CudaDriver, replace(limits, computes_operands=False))
    backend.planning_backend = PlanOnlyGpuBackend(driver)


def read_model_steps() -> list[MeasuredStep]:
    """Read the measured steps of whole models."""
    return [MeasuredStep(*row) for row in tomllib.loads(STEPS_FILE.read_text("utf-8"))["steps"]]


@cache
def _open_measured_model(name: str) -> Model:
    """Open the header of a model in `model_steps.toml`."""
    if name == "tiny":
        return open_model(None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        if name == "qwen3.5-4b":
            write_qwen35_header(path, SIZE_4B)
        else:
            write_qwen3_next_header(path)
        return open_model(path, header_only=True)


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The work of a measured case: how often each amount of work with its launches occurs."""

    kind: str
    title: str
    work: Counter[tuple[WorkEstimate, float]]
    seconds: float
    residual_weight: float

    def predict_seconds(self, hardware: Hardware) -> float:
        return sum(n * hardware.compute_seconds(*work, launches=launches) for (work, launches), n in self.work.items())


def apply_to_measured_kinds(efficiencies: KernelEfficiencies) -> dict[str, Hardware]:
    """Return the speeds of each measured kind of device."""
    return {kind: apply_efficiencies(DATA_SHEETS[kind], efficiencies) for kind in MEASURED_ON}


def list_measured_work() -> Iterator[MeasuredWork]:
    """Yield the work of all measured steps and kernels."""
    for step in read_model_steps():
        (device_plan,) = step.predict_plan().device_plans
        counts, launches = WorkCounter(), device_plan.find_kernel_launches_and_fallbacks()[0]
        nodes = device_plan.graph.nodes
        work = Counter(
            (counts.count_work(nodes[i.index]), n)
            for i, n in zip(device_plan.program.instructions, launches, strict=True)
            if i.index >= 0
        )
        title = f"{step.model}, {step.tokens} tokens on {step.cells}"
        yield MeasuredWork(step.kind, title, work, 1e-6 * step.microseconds, 1.0)
    for name in KERNEL_RESULTS:
        for row in json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]:
            if _is_current(row):
                yield from _list_kernel_work(row)


def _is_current(row: Mapping[str, Any]) -> bool:
    """Return whether a row is the measured time of a kernel that hocket uses."""
    is_prompt = "1 token" not in row["case"]
    is_ours = row.get("ours") is not False and row.get("mode") in (None, "exact")
    return (
        "µs" in row
        and "error" not in row
        and is_ours
        and not (is_prompt and SUPERSEDED_KERNEL in row.get("kernels", ""))
    )


def _list_kernel_work(row: Mapping[str, Any]) -> Iterator[MeasuredWork]:
    """Yield the work of a row about a single kernel, if its family is fitted."""
    for pattern, build, launches in KERNEL_CASES:
        if match := pattern.fullmatch(row["case"]):
            sizes = (int(text) if text and text.isdecimal() else text for text in match.groups())
            node = build(*sizes).node
            work = Counter({(WorkCounter().count_work(node), row.get("launches", launches)): 1})
            yield MeasuredWork("h100", row["case"], work, 1e-6 * row["µs"], KERNEL_WEIGHT)


def _build_vector_product(dtype: str, rows: int, columns: int) -> Value:
    return ops.mul_mat(weight("w", (rows, columns), dtype), input("x", (1, columns)))


def _build_attention(heads: int, kv_heads: int, size: int, tokens: int, cells: int | None) -> Value:
    keys, values = (state(name, (cells or tokens, kv_heads, size), "f16") for name in "kv")
    return ops.attention(input("q", (tokens, heads, size)), keys, values, scale=0.1)


def _build_delta_net(keys: int, values: int, batch: int | None, sequences: int | None, tokens: int | None) -> Value:
    count, length = batch or sequences or 1, tokens or 1
    lead = (count, length) if count > 1 else (length,)
    q, k = (input(name, (*lead, keys, 128)) for name in "qk")
    v, g, beta = input("v", (*lead, values, 128)), input("g", (*lead, values, 1)), input("beta", (*lead, values))
    return ops.gated_delta_net(q, k, v, g, beta, state("s", (*lead[:-1], values, 128, 128)))[0]


KERNEL_CASES: Sequence[tuple[re.Pattern[str], Callable[..., Value], int]] = (
    (VECTOR_CASE, _build_vector_product, 1),
    (ATTENTION_CASE, _build_attention, 2),
    (DELTA_CASE, _build_delta_net, 2),
)
"""For each family: the titles of its cases, the function that builds the node, and the launches if the row has none."""


def fit_efficiencies(measured: Sequence[MeasuredWork]) -> KernelEfficiencies:
    """Fit the factors of all families."""
    from scipy.optimize import least_squares

    start = {name: dict(factors) for name, factors in START.items()}
    dtypes = {match[1]: START_SHARE for work in measured if (match := VECTOR_CASE.fullmatch(work.title))}
    start["memory"] |= dtypes
    keys = [(table, name) for table, factors in start.items() for name in factors]
    first = np.log([start[table][name] for table, name in keys])

    def make_efficiencies(logs: Sequence[float]) -> KernelEfficiencies:
        tables: dict[str, dict[str, float]] = {table: {} for table in start}
        for (table, name), log in zip(keys, logs, strict=True):
            tables[table][name] = float(np.exp(log))
        tables["memory"][PRODUCTS] = min(tables["memory"][dtype] for dtype in dtypes)
        return KernelEfficiencies(MEASURED_ON, **tables)

    def compute_residuals(logs: Sequence[float]) -> list[float]:
        hardware = apply_to_measured_kinds(make_efficiencies(logs))
        errors = [
            one.residual_weight * float(np.log(one.predict_seconds(hardware[one.kind]) / one.seconds))
            for one in measured
        ]
        return [*errors, *(PRIOR_WEIGHT * (np.asarray(logs) - first))]

    largest = [np.inf if table == "launch" else 0.0 for table, _ in keys]  # no kernel is faster than the data sheet
    return make_efficiencies(least_squares(compute_residuals, first, bounds=(-np.inf, largest)).x)


def format_efficiencies(efficiencies: KernelEfficiencies) -> str:
    """Return the text of the TOML file, with three digits of each factor."""
    text = HEAD + f"measured_on = {json.dumps(list(efficiencies.measured_on))}\n"
    for name in START:
        table = "".join(
            f"{json.dumps(key) if ' ' in key else key} = {share:.3g}\n"
            for key, share in getattr(efficiencies, name).items()
        )
        text += f"\n[{name}]\n{table}"
    return text


HEAD = """# Efficiencies of CUDA kernel families, as factors of a data sheet (`KernelEfficiencies` in capabilities.py).
# Written by `python benchmarks/gpu/fit_efficiency.py` from times that were measured on the devices in `measured_on`.
# "products" is for weights of all other dtypes (the lowest share of a measured one), "others" for all other ops.
"""


def main() -> None:
    measured = list(list_measured_work())
    efficiencies = fit_efficiencies(measured)
    write_text(EFFICIENCY_FILE, format_efficiencies(efficiencies))
    hardware = apply_to_measured_kinds(efficiencies)
    for one in measured:
        ratio = one.predict_seconds(hardware[one.kind]) / one.seconds
        sys.stdout.write(f"{ratio:5.2f} of {1e6 * one.seconds:9.1f} µs: {one.kind}, {one.title}\n")


if __name__ == "__main__":
    main()
