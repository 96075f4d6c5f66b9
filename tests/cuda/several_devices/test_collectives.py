"""Devices that meet within their launches, over each other's memory: the bits of the host's sums, and no hangs."""

from __future__ import annotations

import gc
import random
import time

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.collectives import program_collectives as meetings
from hocket.backends.cupy.collectives.transport import HOST_TRANSPORT
from hocket.backends.cupy.device.driver import KernelSource
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.kernel_table import BINDINGS
from hocket.backends.cupy.kernels import collective
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph import Graph, input, weight
from hocket.graph.errors import BackendError
from hocket.ops import op_of
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load, plan_for_group

from ...given.devices.devices_meet import (
    CASES,
    CollectiveRig,
    DeviceStep,
    all_reduce_case,
    make_partial_sums,
    reduce_scatter_case,
    same,
    send_receive_case,
    through_the_host,
)
from ...given.devices.emulation import needs_compiler, replace_and_compile
from ...given.fakes.fake_cupy import install_fake_cupy
from ...given.graphs.random_graphs import bindings, seeded_graph
from ...given.models.goldens import FIXTURES
from ...given.plans.grouped import everything_that_fits, weights_of
from ...given.waits import WAIT_SECONDS

pytestmark = needs_compiler


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_collectives_in_launches_give_the_bits_of_the_host(case, n, monkeypatch):
    parts = CASES[case](n)
    rig = CollectiveRig(EmulatedBackend(), parts)
    expected = through_the_host(monkeypatch, parts)
    for _ in range(5):
        same(rig.run(), expected)
    assert all(len(replay._calls) == 1 for replay in rig.replays)  # one recorded program


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integers_are_summed_by_every_algorithm(dtype, monkeypatch):
    """Pushed to all, by one block, by many, and in the parts that devices keep."""
    sizes = [60, 48 << 10, 72 << 10]
    sums = [all_reduce_case(3, (nbytes // np.dtype(dtype).itemsize,), dtype) for nbytes in sizes]
    for parts in (*sums, reduce_scatter_case(3, dtype)):
        rig = CollectiveRig(EmulatedBackend(), parts)
        same(rig.run(), through_the_host(monkeypatch, parts))
        assert all(len(replay._calls) == 1 for replay in rig.replays)  # one recorded program


def test_all_devices_have_the_same_bits_whoever_comes_last():
    rig = CollectiveRig(EmulatedBackend(), all_reduce_case(3, (5, 7)))
    for late in (0, 1, 2):
        results = rig.run(ahead=lambda rank, late=late: time.sleep(0.05 * (rank == late)))
        assert len({own[0].tobytes() for own in results}) == 1


def test_many_collectives_in_a_row_keep_their_order():
    parts = [
        [DeviceStep("all_reduce", x + k, (9,), inplace=k % 2 == 0) for k in range(20)]
        for x in make_partial_sums(3, (9,))
    ]
    rig = CollectiveRig(EmulatedBackend(), parts)
    for _ in range(3):
        same([rig.run()[0]], [[((parts[0][k].source + parts[1][k].source) + parts[2][k].source) for k in range(20)]])


def test_operands_that_are_not_dense_go_through_the_host_on_all_devices(monkeypatch):
    x = make_partial_sums(2, (4, 6))
    parts = [
        [DeviceStep("all_reduce", x[0], (4, 6), strides=(1, 4)), DeviceStep("all_reduce", x[0], (4, 6))],
        [DeviceStep("all_reduce", x[1], (4, 6)), DeviceStep("all_reduce", x[1], (4, 6))],
    ]
    rig = CollectiveRig(EmulatedBackend(), parts)
    same(rig.run(), through_the_host(monkeypatch, parts))
    assert len(rig.replays[0]._calls) == len(rig.replays[1]._calls) > 1


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("reporting_rank", [0, 2])
@pytest.mark.parametrize("size", [40, 40000])
def test_a_device_that_never_comes_is_named_and_all_others_stop(size, reporting_rank):
    rig = CollectiveRig(EmulatedBackend(), all_reduce_case(3, (size,)))
    right = rig.run()
    with pytest.raises(BackendError):
        rig.run_without(1, reporting_rank=reporting_rank)
    messages = {rank: str(why) for rank, why in rig.failures}
    assert messages.keys() == {0, 2}
    assert messages[reporting_rank].endswith(
        f"collective 10 on device {reporting_rank} of 3: device 1 did not arrive within 0.3 s"
    )
    assert messages[2 - reporting_rank].endswith((": another device failed", ": device 1 did not arrive within 3600 s"))
    same(rig.run(), right)


def test_a_device_that_does_not_come_to_the_first_run_is_an_error():
    rig = CollectiveRig(EmulatedBackend(), all_reduce_case(2, (4,)))
    with pytest.raises(BackendError, match=r"device 1 did not arrive within 0\.2 s"):
        rig.run_without(1, patience=0.2)
    rig.run()


def test_a_sender_that_never_sends_is_named():
    rig = CollectiveRig(EmulatedBackend(), send_receive_case(2))
    right = rig.run()
    with pytest.raises(BackendError, match=r"collective 0 on device 1 of 2: device 0 did not arrive within 0\.3 s"):
        rig.run_without(0, reporting_rank=1)
    same(rig.run(), right)


def test_a_device_that_fails_stops_all_others_and_the_next_run_is_right():
    rig = CollectiveRig(EmulatedBackend(), all_reduce_case(4, (5,)))
    right = rig.run()

    def fail_on_one_rank(rank):
        if rank == 2:
            raise RuntimeError("planted")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="planted"):
            rig.run(ahead=fail_on_one_rank)
        others = {str(why).partition(": ")[2] for rank, why in rig.failures if rank != 2}
        assert others == {f"collective 10 on device {rank} of 4: another device failed" for rank in (0, 1, 3)}
        same(rig.run(), right)


def test_plans_that_do_not_match_are_an_error():
    x = make_partial_sums(2, (4,))
    parts = [[DeviceStep("all_reduce", x[0], (4,))], [DeviceStep("all_reduce", x[1], (4,), {"sequence": 11})]]
    with pytest.raises(BackendError, match="the plans of the devices do not match"):
        CollectiveRig(EmulatedBackend(), parts).run()


def test_devices_at_different_collectives_are_an_error():
    _come_in_different_orders(WAIT_SECONDS)


def _come_in_different_orders(limit):
    """Both know both collectives."""
    x = make_partial_sums(2, (4,))
    orders = ((1, 2), (2, 1))
    parts = [[DeviceStep("all_reduce", x[d], (4,), {"sequence": s}) for s in orders[d]] for d in range(2)]
    with pytest.raises(BackendError, match=r"is at another one: the plans of the devices do not match|another device"):
        CollectiveRig(EmulatedBackend(), parts, limit).run()


# ------------------------------------------------------------------------------------------------------ whole plans


def _can_run(seed):
    computed = {n.op for n in seeded_graph(seed).nodes if not n.is_leaf and not op_of(n).is_view}
    return computed <= BINDINGS.keys()


SEEDS = [seed for seed in range(120) if _can_run(seed)][:12]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_graph_sharded_wherever_possible_gives_the_bits_of_the_host(seed, monkeypatch):
    graph, dice, backend = seeded_graph(seed), random.Random(seed), EmulatedBackend()
    group = [(backend, backend.device(d)) for d in range(dice.choice([2, 3, 4]))]
    plan = plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, dice))
    values = bindings(graph, np.random.default_rng(seed))
    feed = {v.node.name: values[v.node.name] for v in graph.inputs}

    def outputs():
        run = load(plan, weights_of(graph, values))
        return [{name: out.tobytes() for name, out in run.run(feed).items()} for _ in range(3)]

    over_peers = outputs()
    monkeypatch.setattr(meetings, "choose_group_transport", lambda comm, driver: HOST_TRANSPORT)
    assert over_peers == outputs()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "llama-moe", "qwen3", "qwen35", "qwen35moe"])
def test_a_model_split_over_two_devices_gives_the_bits_of_the_host(name, monkeypatch):
    folder = FIXTURES / name
    tokens = np.load(folder / "tokens.npy").tolist()[:6]

    def logits():
        session = Session(
            open_model(folder / "model.gguf"),
            on=DeviceGroup(devices=("cuda-emulated:0", "cuda-emulated:1"), split_mode="tensor"),
        )
        return [session.evaluate([part])[0].tobytes() for part in (tokens[:4], tokens[4:5], tokens[5:])]

    over_peers = logits()
    monkeypatch.setattr(meetings, "choose_group_transport", lambda comm, driver: HOST_TRANSPORT)
    assert over_peers == logits()


def test_a_plan_of_several_devices_is_one_recorded_program_each():
    w = {"up": np.ones((12, 8), np.float32), "down": np.ones((8, 12), np.float32)}
    hidden = ops.relu(ops.mul_mat(weight("up", (12, 8)), input("x", (5, 8))))
    graph = Graph({"y": ops.mul_mat(weight("down", (8, 12)), hidden)})
    backend, dice = EmulatedBackend(), random.Random(0)
    group = [(backend, backend.device(d)) for d in range(2)]
    run = load(plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, dice)), w)
    assert any(i.op in COLLECTIVES for i in run.plan.device_plans[0].program.instructions)
    assert (run.run({"x": np.ones((5, 8), np.float32)})["y"] == 96).all()
    assert [len(replay._calls) for replay in run._program_runners.values()] == [1, 1]


# --------------------------------------------------------------------------------------------- the driver of devices


@pytest.fixture(params=[True, False], ids=["peers", "no peers"])
def devices(request, monkeypatch):
    """The backend of real devices, over a stand-in for CuPy that emulates launches."""
    cupy = install_fake_cupy(monkeypatch, are_peers=request.param)
    yield cuda_driver.CudaBackend(), cupy.cuda.runtime, request.param
    cuda_driver._compile_and_load_module.cache_clear()


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_real_devices_run_collectives_in_one_graph_where_they_reach_each_other(case, n, devices, monkeypatch):
    backend, runtime, are_peers = devices
    parts = CASES[case](n)
    rig = CollectiveRig(backend, parts)
    for _ in range(2):
        same(rig.run(), through_the_host(monkeypatch, parts))
    assert runtime.enabled == {(a, b) for a in range(n) for b in range(n) if a != b and are_peers}
    assert len(runtime.pinned) == are_peers
    assert not are_peers or all(len(replay._calls) == 1 for replay in rig.replays)
    del rig
    deadline = time.monotonic() + 10
    while runtime.pinned and time.monotonic() < deadline:  # the thread of a device may still be ending
        gc.collect()
        time.sleep(0.01)
    assert not runtime.pinned


# ------------------------------------------------------------------------------------------------------------ faults

_START = """            decltype(widened(pack.at[0])) total[N];
#pragma unroll
            for (int e = 0; e < N; e++) total[e] = widened(pack.at[e]);
            """
# The text in the file and its replacement.
PLANTS = {
    "nobody waits for the operands": (
        "|| !meet(a.group, 0)) return;",
        ") return;",
    ),
    "nobody waits for the results": (
        "    sum_part(a, threadIdx.x, THREADS);\n    meet(a.group, 1);",
        "    sum_part(a, threadIdx.x, THREADS);",
    ),
    "a device tells only itself that it has come": (
        "&g.signals[peer][words + APART * g.rank], mine",
        "&g.signals[g.rank][words + APART * peer], mine",
    ),
    "a device signs as another": (
        "[words + APART * g.rank], mine",
        "[words + APART * ((g.rank + 1) % g.devices)], mine",
    ),
    "tickets do not tell runs apart": (
        "return g.signals[g.rank][RUN] << 32 | ",
        "return ",
    ),
    "tickets do not tell collectives apart": (
        "(u64)(g.sequence + 1) << 1 | has_results",
        "(u64)has_results",
    ),
    "every device does the part of the next": (
        "packs * a.group.rank / devices, high = packs * (a.group.rank + 1) / devices",
        "packs * (a.group.rank + 1) / devices, high = packs * (a.group.rank + 2) / devices",
    ),
    "the rest behind the last pack is left out": (
        "for (i64 i = p * N; i < a.count; i++) {",
        "for (i64 i = p * N; i + 1 < a.count; i++) {",
    ),
    "sums go to the device itself alone": (
        "for (int d = 0; d < devices; d++) ((Pack<T> *)a.target[d])[p] = pack;",
        "((Pack<T> *)a.target[a.group.rank])[p] = pack;",
    ),
    "summands come in an order of their own": (
        "Pack<T> pack = ((const Pack<T> *)a.source[0])[p];\n" + _START + "for (int d = 1; d < devices; d++) {",
        "Pack<T> pack = ((const Pack<T> *)a.source[devices - 1])[p];\n"
        + _START
        + "for (int d = devices - 2; d >= 0; d--) {",
    ),
    "nobody waits for what is pushed": (
        "if (!meet(a.group, 0, PUSHED + a.turn)) return;",
        "",
    ),
    "what is pushed goes to the slot of another": (
        "(a.inbox[d] + rank * a.slot + first) = pack;",
        "(a.inbox[d] + (rank + 1) % devices * a.slot + first) = pack;",
    ),
    "a device pushes to itself alone": (
        "for (int d = 0; d < devices; d++) *(Pack<T> *)(a.inbox[d] + rank",
        "*(Pack<T> *)(a.inbox[rank] + rank",
    ),
    "the rest behind the last pushed pack is left out": (
        "for (int e = 0; first + e < a.count; e++) pack.at[e]",
        "for (int e = 0; first + e + 1 < a.count; e++) pack.at[e]",
    ),
    "a wait that has failed is forgotten": (
        "    return !is_stopped(g.signals[g.rank]);",
        "    return true;",
    ),
    "no wait ends by itself": (
        "if (now - since > (u64)g.patience)",
        "if (now - since > 100 * (u64)g.patience)",
    ),
    "a device that waits does not look whether another failed": (
        "if (failed) return stop(g, OTHER_FAILED, who), 0;",
        "",
    ),
}


def _right(parts, limit=WAIT_SECONDS):
    """Check that sums are right in any order of devices and threads.

    A device that does not come, or that fails, is reported, and no result is written then. A fault may hang: a run
    that takes longer than `limit` seconds ends.
    """
    rig = CollectiveRig(EmulatedBackend(), parts, limit)
    expected = [parts[0][k].source + parts[1][k].source + parts[2][k].source for k in range(len(parts[0]))]
    for run in range(9):
        _forget(rig)
        same(rig.run(ahead=lambda rank, run=run: time.sleep(0.05 * (rank == run % 3))), [expected] * 3)
    _forget(rig)
    with pytest.raises(BackendError):
        rig.run_without(2)
    assert "device 2 did not arrive within 0.3 s" in str(dict(rig.failures)[0])
    assert all(np.isnan(target).all() for rank in (0, 1) for target in _targets(rig, rank))
    same(rig.run(), [expected] * 3)
    _come_in_different_orders(limit)
    with pytest.raises(ZeroDivisionError):
        rig.run(ahead=lambda rank: 1 / (rank - 2))
    assert all("another device failed" in str(why) for rank, why in rig.failures if rank != 2)
    same(rig.run(), [expected] * 3)


def _targets(rig, rank):
    return [rig.backend.view(rig.buffers[rank][0], target) for _, target in rig.tensors[rank]]


def _forget(rig):
    for rank in range(3):
        for target in _targets(rig, rank):
            target[...] = np.nan


SIZES = (1003, 12_003)
"""Elements of a sum that is pushed, and of one that is not."""


def _all_right(limit=WAIT_SECONDS):
    for size in SIZES:
        _right(
            [[DeviceStep("all_reduce", x + k, (size,)) for k in range(3)] for x in make_partial_sums(3, (size,))],
            limit,
        )


@pytest.mark.long
def test_what_is_right_is_found_right():
    _all_right()


@pytest.mark.nightly(cases=6)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_that_is_planted_in_a_collective_is_found(name, monkeypatch):
    names = ("all_reduce<float>", "all_reduce_pushed<float>", "begin_run", "meet_all", "tell_one", "await_one")
    monkeypatch.setattr(collective, "SOURCE", replace_and_compile(KernelSource("collective.cu", names), *PLANTS[name]))
    with pytest.raises((AssertionError, BackendError, pytest.fail.Exception)):
        _all_right(limit=2)
