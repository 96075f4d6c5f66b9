"""Speeds that are measured, stored, and used by plans; nothing here reads a clock."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hocket.backends.base import find_device
from hocket.backends.cpu.backend import CpuBackend
from hocket.cli import main
from hocket.frontends.commands import calibrate
from hocket.frontends.inference.device_group import ONE_DEVICE, DeviceGroup, resolve_devices
from hocket.frontends.measure_plan import format_time_comparison_table
from hocket.graph import DType, Graph, constant, input, state, weight
from hocket.graph.spec import Spec
from hocket.graph.storage.disk_cache import read_cached, write_cached
from hocket.ops import add, get_rows, mul_mat, mul_mat_id, reshape, set_rows
from hocket.scheduler import DEFAULT_HARDWARE, plan_for_group, plan_with_cache
from hocket.scheduler.costs.calibration_file import (
    Speeds,
    _warn_of_unusable_file,
    choose_calibrated_or_built_in_hardware,
    describe_speed_source,
    format_saved_speeds_key,
    make_saved_speeds_path,
    read_speeds,
    scale_built_in_hardware_by_threads,
    write_speeds,
)
from hocket.scheduler.costs.hardware import FULL_UNPACK_ROWS, Hardware, WorkCounter, find_memory_owner_node
from hocket.scheduler.measurement.calibrate import PROBED_DTYPES, ConcurrentTimer, compute_trimmed_mean, measure_speeds
from hocket.scheduler.measurement.probe_graphs import (
    CHAIN_STEPS,
    PROMPT_ROWS,
    build_decode_attention_graph,
    build_delta_rule_graph,
    build_launch_and_message_chain_graph,
    build_matmul_chain_graph,
    build_prefill_attention_graph,
)
from hocket.scheduler.reports.measured_steps import MeasuredInstruction, MeasuredPlan

from ...given.models.goldens import TINY

KERNELS = os.environ["HOCKET_CACHE_DIR"]
"""Where all tests keep compiled kernels."""
SPEEDS = Speeds(
    {"q8_0": 10e9, "f32": 20e9}, {"q8_0": 4e9, "f32": 1e9}, 3e-6, 5e9, 7e-6, unpacking={"q8_0": 2e9, "f32": 8e9}
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    _warn_of_unusable_file.cache_clear()
    return tmp_path


def test_plans_use_the_saved_speeds_of_their_devices():
    graph, group = build_matmul_chain_graph(DType.Q8_0, 1, 1), resolve_devices(ONE_DEVICE)
    assert plan_with_cache(graph, group).hardware == DEFAULT_HARDWARE
    write_speeds({format_saved_speeds_key(group): SPEEDS})
    plan = plan_with_cache(graph, group)
    assert (plan.hardware.bandwidth, plan.hardware.flops) == pytest.approx((10e9, 4e9))
    assert (plan.hardware.launch, plan.hardware.link_bandwidth, plan.hardware.link_latency) == (3e-6, 5e9, 7e-6)
    others = resolve_devices(DeviceGroup(devices=("cpu:0", "cpu:1")))
    assert choose_calibrated_or_built_in_hardware(graph, others).source == "built in", (
        "two at once have other speeds than one"
    )


@pytest.mark.parametrize(
    ("processors", "threads", "share"),
    [(2, (2,), 1), (2, (1,), 1 / 2), (2, (1, 1), 1 / 2), (8, (4, 4), 1 / 2), (8, (1, 1), 1 / 8), (1, (1, 1, 1), 1 / 3)],
)
def test_virtual_devices_share_the_built_in_speeds_of_their_processors(processors, threads, share, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    group = [
        (find_device("cpu:0")[0].with_threads(count), find_device(f"cpu:{i}")[1]) for i, count in enumerate(threads)
    ]
    hardware = scale_built_in_hardware_by_threads(group)
    assert (hardware.flops, hardware.bandwidth) == pytest.approx(
        (share * DEFAULT_HARDWARE.flops, share * DEFAULT_HARDWARE.bandwidth)
    )
    assert hardware.source == "built in"


def test_two_virtual_devices_are_not_predicted_faster_than_one():
    seconds = []
    for devices in (("cpu:0",), ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1", "cpu:2")):
        group, graph = (
            resolve_devices(DeviceGroup(devices=devices)),
            build_prefill_attention_graph(),
        )
        for mode in ("auto", "tensor", "layer"):
            plan = plan_for_group(
                graph, group, split_mode=mode, hardware=choose_calibrated_or_built_in_hardware(graph, group)
            )
            seconds.append(plan.cost.total)
            assert seconds[0] <= seconds[-1] * (1 + 1e-9), (devices, mode)


def test_what_reads_no_weights_has_arithmetic_of_its_own():
    quick, slow = (
        Hardware(flops=1e9, bandwidth=1e15, launch=0.0, plain_flops=plain, recurrent_flops=plain / 2)
        for plain in (0.0, 1e8)
    )
    for graph, times in (
        (build_prefill_attention_graph(), 10),
        (build_delta_rule_graph(), 20),
        (build_matmul_chain_graph(DType.F32, 1, 8), 1),
    ):
        first, second = (plan_for_group(graph, [find_device("numpy:0")], hardware=h).cost.total for h in (quick, slow))
        assert second == pytest.approx(times * first, rel=0.01)


def test_a_plan_says_when_its_speeds_were_measured(capsys: pytest.CaptureFixture[str]):
    assert describe_speed_source(DEFAULT_HARDWARE) == "built in; hocket calibrate measures them"
    group = resolve_devices(ONE_DEVICE)
    document = json.loads(read_cached(write_speeds({format_saved_speeds_key(group): SPEEDS})) or b"")
    write_cached(
        make_saved_speeds_path(),
        json.dumps({**document, "dates": {format_saved_speeds_key(group): "1971-01-02"}}).encode(),
    )
    assert main(["plan", TINY]) == 0
    out = capsys.readouterr().out
    assert "speeds: calibrated 1971-01-02\n" in out
    answer = out.splitlines()[0]
    assert re.fullmatch(
        r"fits: [\d.]+ MiB of [\d.]+ GiB on cpu:0; [\d.,]+ tokens a second; first token of a prompt of 512 after .*s",
        answer,
    )


def test_speeds_of_several_dtypes_are_mixed_by_their_time():
    graph = build_matmul_chain_graph(DType.F16, 1, 1)
    assert SPEEDS.hardware_for(graph).bandwidth == pytest.approx(10e9), "what was not measured counts as the slowest"
    assert SPEEDS.hardware_for(build_launch_and_message_chain_graph(64)).flops == 1e9, "a graph without weights"


def _truncate_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def _foreign(file: Path) -> None:
    write_cached(file, json.dumps({"of": "another", "speeds": {}}).encode())


def _impossible(**figures: object):
    return lambda file: write_speeds({"cpu": replace(SPEEDS, **figures)})


IMPOSSIBLE = (
    *(
        {"launch": 10**400},
        {"bandwidth": {"f32": 0.0}},
        {"unpacking": {"f32": -1.0}},
        {"cached": {"f32": 0.0}},
        {"state_bandwidth": -1.0},
    ),
    *({"held": shares} for shares in ({"64": 1.1}, {"64": -0.1}, {"0": 0.5}, {"x": 0.5}, {"64": 0.5, "32": 0.6})),
)


@pytest.mark.parametrize("spoil", [_truncate_file, _foreign, *(_impossible(**figures) for figures in IMPOSSIBLE)])
def test_a_file_that_does_not_fit_is_left_aside_in_one_line(spoil, caplog: pytest.LogCaptureFixture):
    graph, group = build_launch_and_message_chain_graph(64), resolve_devices(ONE_DEVICE)
    write_speeds({format_saved_speeds_key(group): SPEEDS})
    assert read_speeds(make_saved_speeds_path()) == {format_saved_speeds_key(group): SPEEDS}
    spoil(make_saved_speeds_path())
    with caplog.at_level(logging.WARNING, "hocket.kernels"):
        assert choose_calibrated_or_built_in_hardware(graph, group) == DEFAULT_HARDWARE
        assert choose_calibrated_or_built_in_hardware(graph, group) == DEFAULT_HARDWARE
    (line,) = caplog.messages
    assert "hocket calibrate" in line


KNOWN = Hardware(
    900e9, 15e9, 2e-6, plain_flops=300e9, recurrent_flops=80e9, value_bandwidth=50e9, unpack_bandwidth=10e9
)


@pytest.mark.long
def test_what_a_clock_says_becomes_speeds_that_predict_it():
    """Known speeds give back themselves; attention and recurrences take three times as long in a first run."""
    before: list[object] = [None]

    def clock(runs):
        is_again = runs[0] is before[-1]
        before.append(runs[0])
        plan = runs[0].plan
        is_close_row = is_again and plan.graph.inputs[0].shape[0] in (FULL_UNPACK_ROWS, PROMPT_ROWS)
        bandwidth = KNOWN.value_bandwidth if is_close_row else KNOWN.bandwidth
        q = plan.graph.inputs[0]
        slow = 3 if q.node.name == "q" and q.shape[0] == PROMPT_ROWS and not is_again else 1
        return slow * plan_for_group(plan.graph, plan.group, hardware=replace(KNOWN, bandwidth=bandwidth)).cost.total

    speeds = measure_speeds([find_device("numpy:0")], clock, kinds=(DType.F32,), rounds=1)
    assert speeds.launch == pytest.approx(KNOWN.launch, rel=0.05)
    assert speeds.bandwidth["f32"] == pytest.approx(KNOWN.bandwidth, rel=0.02)
    assert speeds.flops["f32"] == pytest.approx(KNOWN.flops, rel=0.02)
    assert speeds.unpacking["f32"] == pytest.approx(KNOWN.unpack_bandwidth, rel=0.02)
    assert speeds.plain_flops == pytest.approx(KNOWN.plain_flops, rel=0.02)
    assert speeds.recurrent_flops == pytest.approx(KNOWN.recurrent_flops, rel=0.02)
    assert speeds.value_bandwidth == pytest.approx(KNOWN.value_bandwidth, rel=0.02)
    assert speeds.state_bandwidth == pytest.approx(KNOWN.bandwidth, rel=0.02)


@pytest.mark.long
def test_of_what_is_read_again_caches_hold_as_much_as_the_clock_says():
    """Check a clock with a cache that holds the last 110 MB, and reads them four times as quickly."""
    cache: list[tuple[object, int]] = []

    def clock(runs):
        plan = runs[0].plan
        size = sum(v.spec.nbytes for v in plan.graph.weights)
        is_cached = (runs[0], size) in cache
        if is_cached:
            cache.remove((runs[0], size))
        cache.append((runs[0], size))
        while sum(size for _, size in cache) > 110e6:
            del cache[0]
        bandwidth = KNOWN.bandwidth * (4 if is_cached else 1)
        return plan_for_group(plan.graph, plan.group, hardware=replace(KNOWN, bandwidth=bandwidth)).cost.total

    kinds = (DType.Q8_0, DType.F16, DType.F32)
    speeds = measure_speeds([find_device("numpy:0")], clock, kinds=kinds, rounds=1)
    assert [*speeds.bandwidth.values()] == pytest.approx([KNOWN.bandwidth] * 3, rel=0.02)
    assert [*speeds.cached.values()] == pytest.approx([4 * KNOWN.bandwidth] * 3, rel=0.05)
    assert {round(float(size) / 1e6): share for size, share in speeds.held.items()} == pytest.approx(
        {67: 1.0, 101: 1.0, 134: 0.0, 201: 0.0}, abs=0.03
    )
    again = {
        number: speeds.hardware_for(build_matmul_chain_graph(DType.F32, number, 1)).bandwidth
        for number in (1, 4, 12, 64)
    }
    assert again == pytest.approx({1: 60e9, 4: 60e9, 12: 15e9, 64: 15e9}, rel=0.05)


CACHE_SPEEDS = replace(SPEEDS, cached={"q8_0": 30e9}, held={"100e6": 0.8, "200e6": 0.2})


def test_the_share_that_caches_hold_falls_with_what_is_read():
    assert [CACHE_SPEEDS.estimate_cached_share(size) for size in (0, 50e6, 100e6, 150e6, 200e6)] == pytest.approx(
        [1, 0.9, 0.8, 0.5, 0.2]
    )
    assert CACHE_SPEEDS.estimate_cached_share(400e6) == pytest.approx(0.1), "as many bytes as of what was measured"
    assert SPEEDS.estimate_cached_share(1.0) == 0.0, "nothing is known of caches"
    assert CACHE_SPEEDS.hardware_for(build_matmul_chain_graph(DType.F32, 1, 1)).bandwidth == 20e9, (
        "no quicker than was measured"
    )


def test_of_a_table_rows_are_read_and_of_experts_in_the_end_all():
    """Rows push nothing out of caches; experts do, as many as are taken within some tokens."""
    table, ids = weight("table", (1 << 20, 64), "q8_0"), constant("ids", np.array([3], np.int32))
    dense, experts = weight("w", (1024, 1024), "q8_0"), weight("experts", (96, 1024, 1024), "q8_0")
    x, chosen = input("x", (1, 1024)), constant("chosen", np.array([[1, 5]], np.int32))

    def bandwidth(**outputs):
        return CACHE_SPEEDS.hardware_for(Graph(outputs)).bandwidth

    size = float(dense.spec.nbytes)
    alone, of_all = (
        s / 30e9 + (1 - s) / 10e9
        for s in (CACHE_SPEEDS.estimate_cached_share(size), CACHE_SPEEDS.estimate_cached_share(96 * size))
    )
    assert bandwidth(y=mul_mat(dense, x), z=get_rows(table, ids)) == pytest.approx(1 / alone, rel=1e-3)
    rows = reshape(x, shape=(1, 1, 1024))
    assert bandwidth(y=mul_mat_id(experts, rows, chosen)) == pytest.approx(1 / of_all, rel=1e-3)


def test_states_are_read_at_a_speed_of_their_own():
    seen = build_decode_attention_graph(1 << 20)
    speeds = replace(SPEEDS, value_bandwidth=1e15, plain_flops=1e15, launch=1e-12, state_bandwidth=2e9)
    seconds = plan_for_group(seen, [find_device("numpy:0")], hardware=speeds.hardware_for(seen)).cost.total
    assert seconds == pytest.approx(sum(v.spec.nbytes for v in seen.states) / 2e9, rel=0.01)


def test_measured_times_of_reading_and_arithmetic_add_up():
    hidden, added = replace(KNOWN, value_bandwidth=0.0), replace(KNOWN, launch=0.0)
    assert hidden.compute_seconds(9e9, 3e9, 3e9, launches=0) == pytest.approx(0.2), (
        "memory takes longer and hides arithmetic"
    )
    assert added.compute_seconds(9e9, 3e9, 3e9) == pytest.approx(0.01 + 0.2)
    assert added.compute_seconds(9e9, 3e9, 1.5e9) == pytest.approx(0.01 + 0.1 + 0.03), "values are nearer than weights"
    assert added.compute_seconds(9e9, 3e9, 2.5e9, activation_rows=1) == pytest.approx(2.5 / 15 + 0.01), (
        "a product's arithmetic hides them"
    )
    assert added.compute_seconds(9e9, 3e9, 1.5e9, activation_rows=1) == pytest.approx(0.1 + 0.03), (
        "as far as it takes as long"
    )


def test_weights_are_unpacked_for_many_rows_and_in_part_for_few():
    slow = replace(KNOWN, launch=0.0, unpack_bandwidth=5e9)
    works = [
        WorkCounter().count_work(build_matmul_chain_graph(DType.F32, 1, rows).outputs["y"].node)
        for rows in (1, FULL_UNPACK_ROWS // 2, FULL_UNPACK_ROWS)
    ]
    longer = [
        slow.compute_seconds(*work) - replace(slow, unpack_bandwidth=0.0).compute_seconds(*work) for work in works
    ]
    nbytes = build_matmul_chain_graph(DType.F32, 1, 1).weights[0].spec.nbytes
    whole = nbytes * (1 / 5e9 - 1 / 15e9)
    assert longer == pytest.approx([0.0, (FULL_UNPACK_ROWS // 2 - 1) / (FULL_UNPACK_ROWS - 1) * whole, whole])


def test_a_cache_with_new_rows_is_read_from_memory_like_any_state():
    cache, ids = state("cache", (64, 8)), constant("ids", np.arange(2, dtype=np.int32))
    new = set_rows(cache, input("rows", (2, 8)), ids)
    new_heads = reshape(new, shape=(64, 8, 1))
    assert find_memory_owner_node(new_heads) is cache.node
    assert find_memory_owner_node(input("rows", (2, 8))).op == "input"
    read, other = add(new_heads, new_heads).node, add(input("x", (64, 8)), input("x", (64, 8))).node
    assert WorkCounter().count_work(read).stored_bytes == 2 * cache.spec.nbytes
    assert WorkCounter().count_work(other).stored_bytes == 0


def test_runs_side_by_side_are_on_the_threads_of_a_session():
    """The first on the thread that asks, each other on one that stays, as `SideBySide` has them."""
    threads: list[dict[str, threading.Thread]] = []

    def run(name: str) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: threads[-1].update({name: threading.current_thread()}))

    watch, runs = ConcurrentTimer(2), [run("first"), run("second")]
    for _ in range(3):
        threads.append({})
        watch(runs)
    assert {id(of["first"]) for of in threads} == {id(threading.current_thread())}
    assert len({id(of["second"]) for of in threads}) == 1
    assert threads[0]["second"] is not threads[0]["first"]


def test_what_counts_of_times_is_their_middle():
    assert compute_trimmed_mean([3.0]) == 3.0
    assert compute_trimmed_mean([1.0, 2.0, 6.0]) == 3.0
    assert compute_trimmed_mean([90.0, 2.0, 1.0, 4.0]) == 3.0
    assert compute_trimmed_mean([2.0, 4.0, 90.0, 2.0, 4.0, 0.1, 4.0, 80.0]) == 3.5, (
        "now fast and now slow, and disturbed"
    )


@pytest.mark.long
def test_devices_that_work_together_synchronise_as_quickly_as_their_sums():
    """A clock that lets each sum take 3 us and each message 30 us more than the work between."""

    def clock(runs):
        plan = runs[0].plan
        ops = [i.op for i in plan.device_plans[0].program.instructions]
        communication_seconds = 3e-6 * ops.count("all_reduce") + 30e-6 * (ops.count("send") + ops.count("receive"))
        return max(run.plan.cost.compute for run in runs) + communication_seconds

    speeds = measure_speeds([find_device("numpy:0"), find_device("numpy:1")], clock, kinds=(DType.F32,), rounds=1)
    assert speeds.link_latency == pytest.approx(3e-6, rel=0.05)


@pytest.mark.long
def test_a_device_whose_fellows_wait_is_as_much_faster_as_the_clock_says():
    """Check a clock with two devices on one processor, and half of the memory bandwidth lost to contention."""

    def clock(runs):
        plan = runs[0].plan
        slower = (
            {1: 3.0, FULL_UNPACK_ROWS: 2.0, PROMPT_ROWS: 2.0}.get(plan.graph.inputs[0].shape[0], 1.0)
            if len(runs) > 1
            else 1.0
        )
        return slower * plan_for_group(plan.graph, plan.group, hardware=KNOWN).cost.total

    group = [find_device("numpy:0"), find_device("numpy:1")]
    speeds = measure_speeds(group, clock, kinds=(DType.F32,), rounds=1)
    assert (speeds.alone_flops, speeds.alone_bandwidth) == pytest.approx((2.0, 3.0), rel=0.05)
    write_speeds({format_saved_speeds_key(group): speeds})
    hardware = choose_calibrated_or_built_in_hardware(build_matmul_chain_graph(DType.F32, 1, 1), group)
    assert (hardware.alone_flops, hardware.alone_bandwidth) == (speeds.alone_flops, speeds.alone_bandwidth)
    assert hardware.solo_hardware.bandwidth == pytest.approx(KNOWN.bandwidth, rel=0.05)


def test_the_command_keeps_what_it_measures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibrate, "measure_speeds", lambda group, **_: CACHE_SPEEDS)
    assert main(["calibrate"]) == 0
    out, err = capsys.readouterr()
    assert "q8_0  a vector   10.0 GB/s, in caches   30.0 GB/s, a prompt     4.0 GFLOP/s, unpacked   2.0 GB/s" in out
    assert "of weights that each token reads caches hold 80% of 100 MB, 20% of 200 MB" in out
    assert str(make_saved_speeds_path()) in err
    known = read_speeds(make_saved_speeds_path())
    assert known is not None
    assert list(known.values()) == [CACHE_SPEEDS] * len(known)


def test_quick_measures_fewer_types_and_plans_say_so(monkeypatch: pytest.MonkeyPatch, capsys):
    calls = []
    monkeypatch.setattr(calibrate, "measure_speeds", lambda group, **options: calls.append(options) or SPEEDS)
    assert main(["calibrate"]) == main(["calibrate", "--quick"]) == 0
    whole, _, quick, _ = calls
    assert set(quick["kinds"]) < set(whole["kinds"])
    assert quick["rounds"] < whole["rounds"]
    assert main(["plan", TINY]) == 0
    assert re.search(r"speeds: calibrated \d{4}-\d\d-\d\d, quick\n", capsys.readouterr().out)


def test_speeds_that_cannot_be_saved_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
):
    monkeypatch.setattr(calibrate, "measure_speeds", lambda group, **_: SPEEDS)
    (folder / "speeds").write_text("a file where the folder has to be")
    assert main(["calibrate"]) == 2
    assert "speeds.json cannot be written" in capsys.readouterr().err


def test_predicted_stands_beside_measured():
    plan = plan_for_group(build_launch_and_message_chain_graph(64), [find_device("numpy:0")])
    steps = tuple(
        MeasuredInstruction("k", 2 * plan.instruction_costs[0].get_cost(at).seconds, 1) for at in range(CHAIN_STEPS)
    )
    lines = format_time_comparison_table(plan, 4 * plan.cost.total, MeasuredPlan("run", 1, 1.0, True, (steps,)))
    assert lines[1].split()[-3:] == ["-75%", "a", "run"]
    assert [line.split()[-2:] for line in lines[2:]] == [["-50%", "add"], ["-50%", "rms_norm"]]


@pytest.mark.long
def test_a_model_is_run_and_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", KERNELS)
    assert main(["plan", TINY, "--measure", "-c", "16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("speeds: ")
    assert "mul_mat" in out
    assert main(["plan", TINY, "--measure", "--json"]) == 2


def test_every_dtype_that_a_backend_keeps_is_measured():
    stored = {
        dtype
        for dtype in DType
        if (dtype.is_quantised or dtype.is_float)
        and CpuBackend().storage_spec(Spec((256, 256), dtype), "weight").dtype is dtype
    }
    assert len(stored) >= 28
    assert stored == set(PROBED_DTYPES)
