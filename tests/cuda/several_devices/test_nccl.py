"""Devices that meet with NCCL, over stand-ins for CuPy and for NCCL: results, graphs, and waits that end."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.collectives import hang_watchdog as watch
from hocket.backends.cupy.collectives import transport
from hocket.backends.cupy.collectives.transport import choose_transport
from hocket.graph import Graph, input, state, weight
from hocket.graph.errors import BackendError
from hocket.scheduler import load, plan_for_group

from ...given.devices.devices_meet import (
    CASES,
    CollectiveRig,
    DeviceStep,
    all_reduce_case,
    make_partial_sums,
    same,
    through_the_host,
)
from ...given.devices.emulation import needs_compiler
from ...given.fakes.fake_nccl import backend_of
from ...given.plans.grouped import everything_that_fits
from ...given.waits import WAIT_SECONDS, wait_until

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _time_to_give_up(monkeypatch):
    """Set the time to give up to an hour: patience limits only the wait for absent devices."""
    give_up = watch.HangWatchdog._abort_collectives_and_await_idle

    def without_haste(self):
        self.comm.timeout = WAIT_SECONDS
        give_up(self)

    monkeypatch.setattr(watch.HangWatchdog, "_abort_collectives_and_await_idle", without_haste)


@pytest.fixture
def nccl_backend(monkeypatch):
    """The backend of devices that only NCCL joins."""
    yield backend_of(monkeypatch, are_peers=False)
    cuda_driver._compile_and_load_module.cache_clear()


@pytest.fixture
def both(monkeypatch):
    """Build a backend of devices that also reach each other's memory, with a low limit for large sums."""
    monkeypatch.setattr(transport, "MIN_LIBRARY_BYTES", 1024)
    yield backend_of(monkeypatch, are_peers=True)
    cuda_driver._compile_and_load_module.cache_clear()


def assert_equal_results(found, expected):
    """Check results of all devices against the expected ones, except for the order of additions."""
    for own, others in zip(found, expected, strict=True):
        for x, y in zip(own, others, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-3)
            assert x.dtype == y.dtype


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_devices_that_nccl_joins_compute_what_the_host_does_in_one_graph(case, n, nccl_backend, monkeypatch):
    backend, nccl = nccl_backend
    parts = CASES[case](n)
    expected, rig = through_the_host(monkeypatch, parts), CollectiveRig(backend, parts)
    for _ in range(3):
        results = rig.run()
        is_sum = parts[0][0].op == "all_reduce"
        if n == 2 or not is_sum or parts[0][0].source.dtype.kind != "f":
            same(results, expected)
        assert_equal_results(results, expected)
        assert not is_sum or len({own[0].tobytes() for own in results}) == 1
    assert all(len(replay._calls) == 1 for replay in rig.replays)
    assert bool(nccl.calls) == (case != "none")
    del rig, backend, nccl_backend
    gc.collect()
    assert nccl.early == []


def test_operands_that_are_not_dense_are_packed(nccl_backend, monkeypatch):
    x = make_partial_sums(2, (4, 6))
    parts = [
        [DeviceStep("all_reduce", x[0], (4, 6), strides=(1, 4)), DeviceStep("all_reduce", x[0], (4, 6))],
        [DeviceStep("all_reduce", x[1], (4, 6)), DeviceStep("all_reduce", x[1], (4, 6))],
    ]
    rig = CollectiveRig(nccl_backend[0], parts)
    same(rig.run(), through_the_host(monkeypatch, parts))
    assert [len(replay._calls) for replay in rig.replays] == [1, 1]


def test_what_is_large_goes_with_nccl_and_what_is_small_over_peer_addresses(both, monkeypatch):
    backend, nccl = both
    parts = [
        [DeviceStep("all_reduce", x, (1003,)), DeviceStep("all_reduce", x[:9], (9,))]
        for x in make_partial_sums(2, (1003,))
    ]
    rig = CollectiveRig(backend, parts)
    for _ in range(3):
        same(rig.run(), through_the_host(monkeypatch, parts))
    assert nccl.calls == ["sum", "sum"]  # once, when they were recorded, on each device
    assert [len(replay._calls) for replay in rig.replays] == [1, 1]


def test_all_programs_of_a_group_share_one_communicator(nccl_backend):
    backend, nccl = nccl_backend
    rigs = [CollectiveRig(backend, all_reduce_case(2, (size,))) for size in (5, 6)]
    for rig in rigs * 2:
        rig.run()
    assert len(nccl.communicators) == 2


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("reporting_rank", [0, 2])
@pytest.mark.parametrize("links", ["nccl_backend", "both"])
def test_a_device_that_never_comes_is_named_and_the_group_is_lost(links, reporting_rank, request):
    backend, nccl = request.getfixturevalue(links)
    rig = CollectiveRig(backend, all_reduce_case(3, (400,)))
    rig.run()
    late = (
        rf"collective 10 on device {reporting_rank} of 3: device 1 did not arrive within 0\.3 s; "
        r"load the model anew to go on$"
    )
    with pytest.raises(BackendError, match=late) as caught:
        rig.run_without(1, reporting_rank=reporting_rank)
    assert "\n" not in str(caught.value)
    assert {rank for rank, _ in rig.failures} == {0, 2}
    with pytest.raises(BackendError, match=r"cuda:[02]: devices were lost in an earlier run; load the model anew"):
        rig.run()
    check_aborts(nccl, {0, 2})


def check_aborts(nccl, ranks):
    """The communicators that were aborted are gone, and no graph was in the way."""
    wait_until(lambda: all(c.is_over and not c.graphs for c in nccl.communicators if c.rank in ranks))


def test_a_device_that_fails_ends_the_waits_of_all_others(nccl_backend):
    backend, nccl = nccl_backend
    rig = CollectiveRig(backend, all_reduce_case(3, (5,)))
    rig.run()

    def fail_on_one_rank(rank):
        if rank == 2:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        rig.run(ahead=fail_on_one_rank)
    others = {str(why).partition(": ")[2] for rank, why in rig.failures if rank != 2}
    tail = "another device failed; load the model anew to go on"
    assert others == {f"collective 10 on device {rank} of 3: {tail}" for rank in (0, 1)}
    check_aborts(nccl, {0, 1})


@pytest.mark.parametrize("links", ["nccl_backend", "both"])
def test_a_device_that_breaks_is_named_and_ends_the_waits_of_all_others(links, request):
    """As after an illegal address: nothing of its stream runs any more, and every call says so."""
    backend, nccl = request.getfixturevalue(links)
    rig = CollectiveRig(backend, all_reduce_case(3, (400,)))
    rig.run()

    def breaks(rank):
        if rank == 1:
            backend.driver.stream(Device("cuda", 1)).put(lambda: 1 / 0)

    with pytest.raises(
        BackendError,
        match=r"^cuda:1 cannot end what was launched: division by zero; if that goes on, start the process anew$",
    ):
        rig.run(ahead=breaks)
    assert {rank for rank, _ in rig.failures} == {0, 1, 2}
    assert all("another device failed" in str(why) for rank, why in rig.failures if rank != 1)
    check_aborts(nccl, {0, 2})


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_device_that_never_stops_is_named_and_no_other_waits_for_it(stuck, nccl_backend):
    backend, _ = nccl_backend
    rig = CollectiveRig(backend, all_reduce_case(2, (9,)))
    rig.run()
    free = threading.Event()

    def hang(rank):
        if rank == stuck:
            rig.replays[stuck]._comm.timeout = 0.4
            backend.driver.stream(Device("cuda", stuck)).put(free.wait)

    with pytest.raises(BackendError, match=f"device {stuck} did not arrive within 0\\.4 s; load the model anew"):
        rig.run_without(stuck, reporting_rank=1 - stuck, patience=0.4, begin=True, ahead=hang)
    assert {str(why) for rank, why in rig.failures if rank == stuck} == {f"cuda:{stuck} does not stop; end the process"}
    free.set()


def test_a_device_that_does_not_come_to_the_first_run_costs_nothing_but_that_run(nccl_backend):
    rig = CollectiveRig(nccl_backend[0], all_reduce_case(2, (4,)))
    with pytest.raises(BackendError, match=r"device 1 did not arrive within 0\.3 s"):
        rig.run_without(1)
    rig.run()


@pytest.mark.long
def test_a_long_wait_for_the_device_itself_is_no_failure(nccl_backend):
    """Patience counts in collectives alone: it is over before the devices come to one."""
    backend, _ = nccl_backend
    rig = CollectiveRig(backend, all_reduce_case(2, (4,)))
    right = rig.run()
    free, waiting = threading.Event(), threading.Barrier(2)

    def hold_device(rank):
        rig.replays[rank]._comm.timeout = 0.1
        backend.driver.stream(Device("cuda", rank)).put(free.wait)
        if waiting.wait() == 0:
            threading.Timer(1, let_go).start()

    def let_go():
        for replay in rig.replays:
            replay._comm.timeout = WAIT_SECONDS
        free.set()

    same(rig.run(ahead=hold_device), right)


def test_sizes_that_do_not_match_are_refused_before_anything_hangs(nccl_backend):
    x = make_partial_sums(2, (4,))
    with pytest.raises(BackendError, match=r"the plans of the devices do not match|another device|did not end"):
        CollectiveRig(
            nccl_backend[0], [[DeviceStep("all_reduce", x[0], (4,))], [DeviceStep("all_reduce", x[1][:3], (3,))]]
        ).run()


def test_a_collective_that_never_ends_although_all_came_is_an_error(nccl_backend, monkeypatch):
    rig = CollectiveRig(nccl_backend[0], all_reduce_case(2, (4,)))
    rig.run()
    for c in nccl_backend[1].communicators:
        monkeypatch.setattr(c, "_sum", lambda *_, c=c: c._await(lambda: False))
    with pytest.raises(BackendError, match=r"collective 10 on device 1 of 2: it did not end within 0\.3 s"):
        rig.run_without(reporting_rank=1)


def test_what_nccl_notes_of_itself_ends_the_run(nccl_backend, monkeypatch):
    rig = CollectiveRig(nccl_backend[0], all_reduce_case(2, (4,)))
    rig.run()

    def raise_nccl_error():
        raise nccl_backend[1].NcclError("unhandled system error")

    first = nccl_backend[1].communicators[0]
    monkeypatch.setattr(first, "check_async_error", raise_nccl_error)
    with pytest.raises(BackendError, match="unhandled system error"):
        rig.run_without(1 - first.rank, reporting_rank=first.rank, patience=WAIT_SECONDS)


def test_a_communicator_that_others_do_not_join_is_an_error_in_time(nccl_backend):
    joins = threading.Event()
    with pytest.raises(BackendError, match=r"NCCL 2\.27\.3, joining: it did not end within 0\.1 s"):
        watch.call_with_timeout(0.1, joins.wait, "NCCL 2.27.3, joining")
    joins.set()


def test_a_device_that_comes_too_late_leaves_the_states_as_they_were(nccl_backend):
    backend, _ = nccl_backend
    old = state("old", (2, 8))
    y = ops.mul_mat(weight("down", (8, 8)), ops.mul_mat(weight("up", (8, 8)), input("x", (2, 8))))
    graph = Graph({"y": y}, {old: ops.add(old, y)})
    group = [(backend, backend.device(d)) for d in range(2)]
    eye = np.eye(8, dtype=np.float32)
    plan = plan_for_group(graph, group, choose=lambda g, f: everything_that_fits(g, f, random.Random(0)))
    run = load(plan, {"up": eye, "down": eye})
    run.run({"x": np.ones((2, 8))})
    before = np.array(run.store.state("old"))
    assert (before == 1).all()
    first, second = run._program_runners[0], run._program_runners[1]
    first._comm.timeout, second._comm.timeout = 0.3, WAIT_SECONDS
    giving = run._output_runners
    run._output_runners = {
        0: giving[0],
        1: lambda: wait_until(lambda: run._device_threads.rendezvous.failure) or giving[1](),
    }
    with pytest.raises(BackendError, match=r"device 1 did not arrive within 0\.3 s"):
        run.run({"x": np.ones((2, 8))})
    run._output_runners = giving
    assert (np.array(run.store.state("old")) == before).all()
    with pytest.raises(BackendError, match="load the model anew"):
        run.run({"x": np.ones((2, 8))})
    assert (np.array(run.store.state("old")) == before).all()


# -------------------------------------------------------------------------------------------- choice of the transport


def words(backend, names=((0, None), (1, None))):
    return choose_transport([Device("cuda", index, part=part) for index, part in names], backend.driver).description


def test_the_transport_of_devices_is_reported_with_its_reason(monkeypatch):
    none = {"nccl": None}
    assert words(backend_of(monkeypatch, True)[0]) == (
        "over each other's memory; values of 8 MiB and more with NCCL 2.27.3"
    )
    assert words(backend_of(monkeypatch, True, **none)[0]) == "over each other's memory"
    assert words(backend_of(monkeypatch, False)[0]) == "with NCCL 2.27.3: they do not reach each other's memory"
    assert words(backend_of(monkeypatch, False, **none)[0]) == (
        "through memory of the host: they do not reach each other's memory, and this CuPy has no NCCL "
        "(on Linux: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12)"
    )
    assert words(backend_of(monkeypatch, True)[0], ((0, 0), (0, 1))).startswith(
        "through memory of the host: kernels of parts of one"
    )
    assert words(backend_of(monkeypatch, True)[0], [(0, n) for n in range(9)]) == (
        "through memory of the host: they are more than 8, and NCCL joins no parts of one device"
    )


def test_nccl_that_does_not_load_is_reported(monkeypatch):
    def missing():
        raise ImportError("libnccl.so.2: cannot open\nshared object file")

    backend, _ = backend_of(monkeypatch, False)
    monkeypatch.setattr(cuda_driver, "_nccl", missing)
    assert words(backend).endswith("NCCL does not load: libnccl.so.2: cannot open shared object file")


def test_nccl_that_refuses_a_device_is_one_line(monkeypatch):
    backend, _ = backend_of(monkeypatch, False)
    nccl = backend.driver.find_collective_library([Device("cuda", 0), Device("cuda", 1)])

    class Refused(SimpleNamespace):
        NcclError = RuntimeError

        def NcclCommunicator(self, *_):
            raise RuntimeError("unhandled cuda error")

    nccl.nccl = Refused()
    with pytest.raises(BackendError, match=r"^cuda:1 cannot join a group of 2 devices with NCCL 2\.27\.3: unhandled"):
        nccl.join_group(np.zeros(128, np.int64), 1, 2, Device("cuda", 1))
