"""Faults that make kernels slower but not wrong are found without a device.

They show in memory requests, in machine code, or in the number of launches.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from hocket.backends.cupy import program_binding
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device import disassembly, nvrtc
from hocket.backends.cupy.emulation.access_budget import MAIN_PATH_CASES, list_budget_violations
from hocket.backends.cupy.emulation.access_counters import AccessCountingDriver
from hocket.backends.cupy.kernel_resources import compile_resource_rows, read_resource_table
from hocket.backends.cupy.kernel_table import FUSED, SOURCES
from hocket.backends.cupy.kernels import elementwise
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.reports.emulator_checks import emulate_cases_and_count_accesses
from hocket.frontends.commands.plan import read_step_graph_and_context
from hocket.scheduler import parse_simulated_group, plan, plan_for_group

from ...given.devices.attention import by_warps
from ...given.devices.emulation import needs_compiler, replace_in_source
from ...given.devices.inefficiencies import ADD, BY_WARPS, EXPECTED_LAUNCHES, MACHINE_CODE_FAULTS, MEMORY_FAULTS, NARROW
from ...given.devices.recorded import find_access_regressions, find_resource_regressions
from ...given.devices.tools import needs
from ...given.models.goldens import decode_graph
from ...given.models.large_headers import qwen_80b


class Planting(AccessCountingDriver):
    """Counts kernels that see a file with another text in it."""

    def __init__(self, file, good, bad):
        super().__init__()
        self.file, self.texts = file, (good, bad)

    def record(self, steps, on):
        return super().record([self.plant_in(launch) for launch in steps], on)

    def plant_in(self, launch):
        kernel = launch.kernel
        if self.file not in kernel.source.files:
            return launch
        return replace(launch, kernel=replace_in_source(kernel.single_kernel_source, *self.texts)[kernel.name])


def launches_of(driver, case):
    """Return the access counters of the launches of a case."""
    backend = DriverBackend(driver)
    result = run_case(parse_case(case), backend, backend.device(0))
    assert result.outcome is Outcome.PASS, f"it is wrong, not slow: {result.why}"
    return [*driver.counters.values()]


@pytest.mark.nightly(cases=8)
@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("what", MEMORY_FAULTS)
def test_what_is_asked_of_memory_in_vain_is_counted(what):
    file, good, bad, case = MEMORY_FAULTS[what]
    assert case in MAIN_PATH_CASES, "nobody counts that unless it is planted"
    assert good.count("\n") == bad.count("\n"), "what is allowed is found by the lines"
    is_recorded = what not in BY_WARPS
    with nullcontext() if is_recorded else by_warps():
        counted = launches_of(Planting(file, good, bad), case)
    assert [why for of in counted for why in list_budget_violations(of)] + [
        why for of in counted * is_recorded for why in find_access_regressions(of)
    ]


@pytest.mark.long
@needs_compiler
def test_tiles_of_keys_that_come_one_at_a_time_are_counted():
    """In three stages, which devices without warpgroups have alone, and no page."""
    with by_warps():
        planting = Planting("attention_short.cu", "cp_async_wait<STAGES - 2>", "cp_async_wait<0>")
        (planted,) = launches_of(planting, NARROW)
        (plain,) = launches_of(AccessCountingDriver(), NARROW)
    assert (planted.copies_in_flight, plain.copies_in_flight) == (1, 2)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("threads", [32, 512])
def test_blocks_of_other_sizes_are_counted(threads, monkeypatch):
    monkeypatch.setattr(elementwise, "ELEMENTWISE_THREADS", threads)
    (launch,) = emulate_cases_and_count_accesses([ADD])
    assert [*find_access_regressions(launch)] == [f"{launch.kernel}: blocks of {threads} threads in place of 256"]


@pytest.fixture(scope="module")
def _compiler():
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("what", MACHINE_CODE_FAULTS)
def test_machine_code_that_does_more_is_found(what):
    file, good, bad, kernel = MACHINE_CODE_FAULTS[what]
    name = kernel.partition(": ")[2]
    (source,) = (s for s in SOURCES if name in s.names and f"{s.file}: {name}" == kernel)
    assert file in source.files
    ((row, spills),) = compile_resource_rows(
        replace_in_source(source[name].single_kernel_source, good, bad), "sm_90a"
    ).values()
    assert spills or list(find_resource_regressions(row, read_resource_table().kernels[kernel]["sm_90a"]))


def count_launches(planned):
    """How many launches a plan for one device takes."""
    (lane,) = planned.device_plans
    return len(lane.backend.list_kernels(lane.program, lane.device))


def launches(model):
    """How many a decoded token takes."""
    return count_launches(plan(decode_graph(model), ("cuda-emulated:0",)))


@pytest.mark.long
def test_layers_of_qwen3_next_take_few_launches(tmp_path):
    def of_layers(count):
        graph, _ = read_step_graph_and_context(qwen_80b(tmp_path / f"{count}.gguf", count), context=4096, tokens=1)
        simulated = parse_simulated_group("h200")
        return count_launches(plan_for_group(graph, simulated.group[:1], hardware=simulated.hardware_for(graph)))

    delta = of_layers(3) - of_layers(2)
    attention = of_layers(8) - of_layers(4) - 3 * delta  # the first attention's launches for all of them are in both
    assert delta <= 11
    assert attention <= 12


@pytest.mark.parametrize("model", EXPECTED_LAUNCHES)
def test_a_token_takes_no_more_launches_than_before(model):
    assert launches(model) <= EXPECTED_LAUNCHES[model][0], "fewer are welcome: write them into the table"


@pytest.mark.parametrize(
    ("model", "chain"), [(m, chain) for m, (_, chains) in EXPECTED_LAUNCHES.items() for chain in chains]
)
def test_launches_that_are_not_saved_are_counted(model, chain, monkeypatch):
    left = {op: tuple(f for f in chains if f.__name__ != chain) for op, chains in FUSED.items()}
    assert left != FUSED
    monkeypatch.setattr(program_binding, "FUSED", left)
    assert launches(model) > EXPECTED_LAUNCHES[model][0]
