"""Saved speeds of ranks: all ranks make the same plans, from the speeds that any rank has."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from hocket.backends.base import find_device
from hocket.distributed import SINGLE_PROCESS
from hocket.frontends.inference.device_group import DeviceGroup
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.graph import DType
from hocket.scheduler import DEFAULT_HARDWARE
from hocket.scheduler.costs import calibration_file
from hocket.scheduler.costs.calibration_file import (
    choose_calibrated_or_built_in_hardware,
    format_calibrated_with_day,
    format_saved_speeds_key,
    scale_built_in_hardware_by_threads,
    write_speeds,
)
from hocket.scheduler.costs.rank_speeds import agree_on_slowest_rank_speeds
from hocket.scheduler.costs.speeds import Speeds
from hocket.scheduler.measurement.probe_graphs import build_matmul_chain_graph

from ..given.models.goldens import FIXTURES
from ..given.ranks.thread_link import in_threads

SLOW_SPEEDS = Speeds({"f32": 20e9}, {"f32": 0.1 + 0.2}, 3e-6, 5e9, 7e-6, 1e9, 1.25, 1.5, 2e9, 3e9, {"f32": 8e9})
QUICK = replace(SLOW_SPEEDS, flops={"f32": 4e9}, bandwidth={"f32": 10e9})
GRAPH = build_matmul_chain_graph(DType.F32, 1, 8)


@pytest.fixture
def ranks_with(tmp_path, monkeypatch):
    """Return a runner of ``run(world)`` on each rank; each rank has a folder of its own with its saved speeds."""
    here = threading.local()
    monkeypatch.setattr(calibration_file, "make_saved_speeds_path", lambda: tmp_path / str(here.rank))

    def run_all(saved, run, *, hosts=1):
        def one(world):
            here.rank = world.rank
            if saved[world.rank] is not None:
                write_speeds(saved[world.rank])
            return run(world)

        return in_threads(len(saved), one, hosts=hosts)

    return run_all


def pair(ranks=(0, 1), name="numpy"):
    backend, device = find_device(f"{name}:0")
    return [(backend, replace(device, rank=rank)) for rank in ranks]


def calibrated_hardware(speeds, graph=GRAPH, source="calibrated"):
    """Return the hardware of a plan by kept speeds, which names its source."""
    return replace(speeds.hardware_for(graph), source=source)


def make_saved_speeds(speeds, count=2):
    """Return the saved speeds of a machine for `count` devices at once."""
    return None if speeds is None else {format_saved_speeds_key(pair(range(count))): speeds}


@pytest.mark.parametrize(
    ("saved", "known"),
    [
        ((QUICK, None), QUICK),
        ((None, QUICK), QUICK),
        ((QUICK, SLOW_SPEEDS), SLOW_SPEEDS),
        ((SLOW_SPEEDS, QUICK), SLOW_SPEEDS),
        ((None, None), None),
    ],
    ids=["first", "second", "second is slower", "first is slower", "neither"],
)
def test_ranks_plan_the_same_by_the_speeds_of_the_slowest(saved, known, ranks_with):
    model = open_model(FIXTURES / "llama" / "model.gguf")

    def run(world):
        session = Session(
            model, on=DeviceGroup(devices=("numpy:0",), split_mode="layer"), context=128, batch=64, world=world
        )
        plans = session._layout_plan, session.plan(session.make_step(64, 128))
        return [
            (plan.digest(), plan.hardware, plan.cost, plan.hardware == expected_hardware(plan.graph)) for plan in plans
        ]

    def expected_hardware(graph):
        return DEFAULT_HARDWARE if known is None else calibrated_hardware(known, graph)

    first, second = ranks_with([make_saved_speeds(speeds) for speeds in saved], run)
    assert first == second
    assert all(is_as_expected for *_, is_as_expected in first)


def test_machines_are_each_asked_for_the_speeds_of_their_own_devices(ranks_with):
    """Check two machines with other names for their speeds.

    One has two devices on two ranks, the other has one. The link between them has no measured speed.
    """
    saved = [make_saved_speeds(QUICK), make_saved_speeds(replace(SLOW_SPEEDS, launch=9e-6), 1), None]
    hardware = ranks_with(
        saved, lambda world: agree_on_slowest_rank_speeds(pair((0, 1, 2)), world).hardware_for_graph(GRAPH), hosts=2
    )
    known = calibrated_hardware(saved[1][format_saved_speeds_key(pair((1,)))])
    apart = {"link_bandwidth": DEFAULT_HARDWARE.across_bandwidth, "link_latency": DEFAULT_HARDWARE.across_latency}
    assert hardware == [replace(known, **apart)] * 3


def test_a_rank_names_its_own_devices_by_its_own_threads(ranks_with):
    """Each rank sees devices of another machine with as many threads as its own have."""

    def group(rank):
        return [(backend.with_threads(rank + 1), device) for backend, device in pair(name="cpu")]

    saved = [{format_saved_speeds_key(group(rank)[:1]): speeds} for rank, speeds in enumerate((QUICK, SLOW_SPEEDS))]
    assert saved[0].keys() != saved[1].keys()
    shared = ranks_with(
        saved, lambda world: agree_on_slowest_rank_speeds(group(world.rank), world).slowest_speeds, hosts=2
    )
    assert shared == [SLOW_SPEEDS, SLOW_SPEEDS]


def test_other_devices_than_were_measured_are_estimated(ranks_with):
    (hardware,) = set(
        map(
            str,
            ranks_with(
                [make_saved_speeds(QUICK, 3)] * 2,
                lambda w: agree_on_slowest_rank_speeds(pair(), w).hardware_for_graph(GRAPH),
            ),
        )
    )
    assert hardware == str(DEFAULT_HARDWARE)


def test_without_ranks_the_speeds_are_those_saved_here(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration_file, "make_saved_speeds_path", lambda: tmp_path / "speeds")
    group = [find_device("numpy:0"), find_device("numpy:1")]
    assert agree_on_slowest_rank_speeds(group, SINGLE_PROCESS).hardware_for_graph(
        GRAPH
    ) == scale_built_in_hardware_by_threads(group)
    write_speeds({format_saved_speeds_key(group): QUICK})
    calibrated_here = calibrated_hardware(QUICK, source=format_calibrated_with_day(group))
    assert (
        agree_on_slowest_rank_speeds(group, SINGLE_PROCESS).hardware_for_graph(GRAPH)
        == choose_calibrated_or_built_in_hardware(GRAPH, group)
        == calibrated_here
    )
    assert choose_calibrated_or_built_in_hardware(GRAPH, pair()) == DEFAULT_HARDWARE, (
        "ranks that do not talk plan the same"
    )
