"""Signals order the accesses to the memory of other devices, neither luck nor x86.

Every fault that is planted here gives the right sums in the emulation.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.collectives import program_collectives as meetings
from hocket.backends.cupy.emulation import access_budget as main_path
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels.collective import MAX_DEVICES, MAX_PUSHED_BYTES
from hocket.cli import main
from hocket.conformance.reports.emulator_checks import emulate_cases_and_list_races
from hocket.graph import DType, Graph, input, weight
from hocket.graph.errors import BackendError
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load, plan_for_group

from ...given.devices.devices_meet import (
    CASES,
    CollectiveRig,
    DeviceStep,
    all_gather_case,
    all_reduce_case,
    make_partial_sums,
)
from ...given.devices.edited import EditedDriver, edit_kernels
from ...given.devices.emulation import barriers, needs_compiler
from ...given.plans.grouped import everything_that_fits, weights_of

pytestmark = [needs_compiler, pytest.mark.long()]
PARTS = {
    **CASES,
    "in a row": lambda n: [
        [DeviceStep("all_reduce", x, (40,), inplace=k < 2) for k in range(3)] for x in make_partial_sums(n, (40,))
    ],
    "larger": lambda n: [
        [DeviceStep("all_reduce", x, (11_000,), inplace=k < 1) for k in range(2)]
        for x in make_partial_sums(n, (11_000,))
    ],
    "narrow": lambda n: all_reduce_case(n, (129, 129)),
}


@pytest.fixture
def narrow(monkeypatch):
    """Sums go over the wire in 16 bits, where they may, however small."""
    monkeypatch.setattr(meetings, "MIN_NARROW_ELEMENTS", 1)


class SeenError(Exception):
    """A device saw by itself that another is not where it is."""


def faults_of(case, n, edit=list, *, dropped=("", 0), runs=1, times=1):
    """Return the unordered accesses of runs with different orders of threads; `times` runs follow each other as
    in a group.
    """
    driver = EditedDriver(edit, dropped)
    wire, parts = DType.BF16 if case == "narrow" else DType.F32, PARTS[case](n)
    rig = CollectiveRig(AccessLogBackend(driver), parts, wire=wire, group_size=n + (times > 1))
    faults = []
    for _ in range(runs):
        try:
            rig.run(times=times)
        except BackendError as why:  # the first to stop may only know that another one has failed
            if any("at another one" in str(failure) for _, failure in rig.failures):
                raise SeenError from why
            raise
        faults += list_races_between_launches(driver.take_log(), driver.memory)
    return faults


@pytest.mark.nightly(cases=24)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", PARTS)
def test_devices_run_collectives_in_order(case, n, narrow):
    assert faults_of(case, n, runs=3) == []


@pytest.mark.parametrize("case", [case for case in PARTS if case != "send"])
def test_runs_that_follow_each_other_are_in_order(case, narrow):
    assert faults_of(case, 3, times=4) == []


def test_a_sum_that_is_pushed_before_that_of_the_last_run_is_read_is_found():
    with suppress(SeenError):
        assert [why for _ in range(3) for why in faults_of("a few", 3, without("meet_all"), times=4)]


def test_a_graph_on_two_devices_is_in_order():
    """Check a graph with reused arena bytes; the second run reuses the arena of the first."""
    rng = np.random.default_rng(0)
    x = input("x", (5, 8))
    for layer in range(2):
        hidden = ops.silu(ops.mul_mat(weight(f"up{layer}", (12, 8)), x))
        x = ops.add(x, ops.mul_mat(weight(f"down{layer}", (8, 12)), hidden))
    graph, driver = Graph({"y": x}), AccessLogDriver()
    backend = AccessLogBackend(driver)
    group = [(backend, backend.device(d)) for d in range(2)]
    values = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in graph.weights}
    run = load(
        plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, random.Random(0))),
        weights_of(graph, values),
    )
    assert any(i.op in COLLECTIVES for i in run.plan.device_plans[0].program.instructions)
    for _ in range(2):
        run.run({"x": rng.standard_normal((5, 8)).astype(np.float32)})
        log = driver.take_log()
        assert len({ran.device for ran in log}) == 2
        assert list_races_between_launches(log, driver.memory) == []


@pytest.mark.nightly(cases=6)
@pytest.mark.parametrize("case", main_path.MAIN_PATH_CASES)
def test_threads_of_kernels_of_the_main_path_are_in_order(case):
    assert emulate_cases_and_list_races([case]) == []


def test_the_command_says_so(capsys):
    assert main(["check", "--backend", "cuda-emulated", "--order", "--case", "add(a=f32[64], b=f32[64])"]) == 0
    assert capsys.readouterr().out == "all accesses of 1 case are in order\n"
    assert main(["check", "--backend", "numpy", "--order"]) == 2


# ----------------------------------------------------------------------------------------------------------- planted


def without(kernel, which=0):
    """All launches but one of a kernel."""

    def edit(steps):
        mine = [i for i, step in enumerate(steps) if step.kernel.name == kernel]
        return [step for i, step in enumerate(steps) if not mine or i != mine[which]]

    return edit


def late(kernel):
    """Its first launch changes places with the next one."""

    def edit(steps):
        steps = list(steps)
        at = [i for i, step in enumerate(steps) if step.kernel.name == kernel][:1]
        for i in at:
            steps[i : i + 2] = reversed(steps[i : i + 2])
        return steps

    return edit


def pushed_to_one_half(steps):
    """In place of two in turn."""

    def push_to_one_half(launch):
        inboxes = slice(2, 2 + MAX_DEVICES)
        words = list(launch.words)
        turn = words[2 + MAX_DEVICES + 2]
        words[inboxes] = [word - turn * MAX_PUSHED_BYTES if word else 0 for word in words[inboxes]]
        return replace(launch, words=tuple(words))

    return [push_to_one_half(step) if "pushed" in step.kernel.name else step for step in steps]


def gathered_and_changed(n):
    """Build a graph that overwrites a gathered value at once."""
    return [[own[0], DeviceStep("neg", own[0].source, own[0].source.shape, over=True)] for own in all_gather_case(n)]


PARTS = {**PARTS, "gathered and changed": gathered_and_changed}
BARRIER_WORD = "g.signals[peer][words + APART * g.rank]"
PLANTED = {
    "a relaxed load": ("in a row", edit_kernels("cuda.cuh", '"acquire.sys"', '"relaxed.sys"')),
    "a load in the scope of a device": ("in a row", edit_kernels("cuda.cuh", '"acquire.sys"', '"acquire.gpu"')),
    "a load in the scope of a block": ("all_gather", edit_kernels("cuda.cuh", '"acquire.sys"', '"acquire.cta"')),
    "a relaxed store": ("in a row", edit_kernels("cuda.cuh", '"release.sys"', '"relaxed.sys"')),
    "a store in the scope of a device": ("all_to_all", edit_kernels("cuda.cuh", '"release.sys"', '"release.gpu"')),
    "a store in the scope of a block": ("send", edit_kernels("cuda.cuh", '"release.sys"', '"release.cta"')),
    "a plain load of a ticket": (
        "in a row",
        edit_kernels("collective.cu", "load_acquire(word);", "*(volatile const u64 *)word;"),
    ),
    "a plain store of a ticket": (
        "in a row",
        edit_kernels(
            "collective.cu", f"store_release(&{BARRIER_WORD}, mine)", f"*(volatile u64 *)&{BARRIER_WORD} = mine"
        ),
    ),
    "a wait for the first device only": (
        "in a row",
        edit_kernels("collective.cu", "if (peer < g.devices) {", "if (peer < 1) {"),
    ),
    "a wait for all devices but one": (
        "in a row",
        edit_kernels("collective.cu", "if (peer < g.devices) {", "if (peer + 1 < g.devices) {"),
    ),
    "no meeting before what was pushed is summed": (
        "in a row",
        edit_kernels("collective.cu", "if (!meet(a.group, 0, PUSHED + a.turn)) return;", ""),
    ),
    "sums that are pushed to the same half": ("in a row", pushed_to_one_half),
    "no first meeting of a sum": ("larger", edit_kernels("collective.cu", " || !meet(a.group, 0)", "")),
    "no second meeting of a sum": ("larger", edit_kernels("collective.cu", "    meet(a.group, 1);\n", "")),
    "a sum before its meeting": ("many", late("meet_all")),
    "no first meeting of a large sum": ("many", without("meet_all", 0)),
    "no second meeting of a large sum": ("many", without("meet_all", -1)),
    "parts of a sum that overlap": (
        "larger",
        edit_kernels(
            "collective.cu",
            "high = packs * (a.group.rank + 1) / devices",
            "high = packs * (a.group.rank + 1) / devices + 1",
        ),
    ),
    "no meeting before a gather": ("all_gather", without("meet_all", 0)),
    "a gather before its meeting": ("all_gather", late("meet_all")),
    "no meeting behind a gather": ("gathered and changed", without("meet_all", -1)),
    "no meeting before an exchange": ("all_to_all", without("meet_all", 0)),
    "no meeting before a scattered sum": ("reduce_scatter", without("meet_all", 0)),
    "a sender that does not tell in order": (
        "send",
        edit_kernels(
            "collective.cu", "store_release(&g.signals[a.other]", 'STORE_WORD("relaxed.sys", &g.signals[a.other]'
        ),
    ),
    "no wait for a sender": ("send", without("await_one")),
    "a wait for a sender that comes late": ("send", late("await_one")),
    "a sum rounded late": ("narrow", late("narrow")),
    "no first meeting of a narrow sum": ("narrow", without("meet_all", 0)),
    "no second meeting of a narrow sum": ("narrow", without("meet_all", -1)),
}


@pytest.mark.nightly(cases=10)
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_in_no_order_is_found(what, narrow):
    case, edit = PLANTED[what]
    with suppress(SeenError):
        assert faults_of(case, 3, edit)


BARRIERS = [("collective.cu", 0, "in a row"), ("collective.cu", 2, "in a row")]
"""Before a ticket, and behind a wait: file, number and case; ``test_barriers.py`` knows whether those are all."""


@pytest.mark.parametrize(("file", "number", "case"), BARRIERS)
def test_a_dropped_barrier_of_a_collective_is_missed(file, number, case):
    with suppress(SeenError):
        assert faults_of(case, 3, dropped=(file, barriers(file)[number]))
