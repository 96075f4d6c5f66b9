"""Devices of several processes: with NCCL where they are apart, on their devices where a team is of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.backend import RecordedProgram
from hocket.backends.cupy.collectives.transport import choose_transport
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.graph import Graph, input, state, weight
from hocket.graph.errors import BackendError
from hocket.scheduler import Executor, PipelinedPlan, Store, load, plan_for_group, run_pipelined

from ...given.devices.emulation import needs_compiler
from ...given.fakes.fake_nccl import backend_of
from ...given.ranks.thread_link import in_threads
from ...given.waits import WAIT_SECONDS, wait_until

pytestmark = needs_compiler
WIDTH = 64
RNG = np.random.default_rng(5)
WEIGHTS = {
    f"{name}{k}": RNG.standard_normal((WIDTH, WIDTH), np.float32) / 8 for k in range(4) for name in ("up", "down")
}
X = RNG.standard_normal((3, WIDTH), np.float32)


@pytest.fixture
def only_nccl(monkeypatch):
    """NCCL; devices of the backend have no other way to meet."""
    yield backend_of(monkeypatch, are_peers=False)[1]
    cuda_driver._compile_and_load_module.cache_clear()


def layers():
    """Build four layers. Each ends with a sum where it is sharded, and with a state that grows by the result."""
    x = input("x", X.shape)
    for k in range(4):
        up = ops.mul_mat(weight(f"up{k}", (WIDTH, WIDTH)), x, name=f"layer.{k}.up")
        x = ops.add(x, ops.mul_mat(weight(f"down{k}", (WIDTH, WIDTH)), ops.silu(up), name=f"layer.{k}.down"))
    old = state("old", X.shape)
    return Graph({"y": x}, {old: ops.add(old, x)})


def plan_on(backend, ranks, mode):
    group = [(backend, replace(backend.device(d), rank=rank if any(ranks) else None)) for d, rank in enumerate(ranks)]
    return plan_for_group(layers(), group, split_mode=mode)


def make_store(plan, world):
    store = Store(plan.group, world)
    for value in plan.graph.weights:
        name = value.node.name
        store.bind(name, WEIGHTS[name], value.spec, plan.leaves[name])
    return store


def executor_of(plan, world):
    return Executor(plan, make_store(plan, world), timeout=WAIT_SECONDS)


def expected_outputs():
    run = load(plan_for_group(layers(), [(EmulatedBackend(), Device("cuda-emulated", 0))]), WEIGHTS)
    return [run.run({"x": X})["y"] for _ in range(2)]


def assert_close_results(results):
    for result, right in zip(results, expected_outputs(), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_devices_of_two_ranks_run_nccl_in_one_graph(only_nccl):
    def run(world):
        executor = executor_of(plan_on(cuda_driver.CudaBackend(), (0, 1), "tensor"), world)
        results = [executor.run({"x": X})["y"] for _ in range(2)]
        assert [len(replay._calls) for replay in executor._program_runners.values()] == [1]
        return results

    first, second = in_threads(2, run)
    assert np.array_equal(first, second)
    assert_close_results(first)
    assert "sum" in only_nccl.calls


@pytest.mark.parametrize("fails", ["in the next run", "while the last one ends"])
def test_who_waits_for_a_device_of_a_rank_that_failed_stops(fails, only_nccl):
    heard = []

    def run(world):
        executor = executor_of(plan_on(cuda_driver.CudaBackend(), (0, 1), "tensor"), world)
        executor.run({"x": X})
        if world.rank:
            raise ArithmeticError("planted")
        if fails == "while the last one ends":
            wait_until(lambda: world.failure is not None)
            executor._device_threads.rendezvous.clear_messages_and_failures()
        with pytest.raises(BackendError) as caught:
            executor.replay()
        heard.append(str(caught.value))
        raise caught.value

    with pytest.raises(BackendError):
        in_threads(2, run)
    assert heard == ["rank 1 on machine0: planted"]
    assert all(c.is_over for c in only_nccl.communicators if c.rank == 0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=["one process", "two"])
def test_groups_run_collectives_on_their_devices_and_send_messages_through_the_host(ranks, monkeypatch):
    real_method, through_host = RecordedProgram._bind_host_collective, []
    monkeypatch.setattr(
        RecordedProgram, "_bind_host_collective", lambda self, i: through_host.append(i.op) or real_method(self, i)
    )

    def run(world):
        executor = executor_of(plan_on(EmulatedBackend(), ranks, "layer,tensor"), world)
        results = [executor.run({"x": X})["y"] for _ in range(2)]
        assert all("all_reduce" in replay.kernels() for replay in executor._program_runners.values())
        pipeline = PipelinedPlan(executor.plan, make_store(executor.plan, world))
        follow = [run["y"] for run in run_pipelined([(pipeline, {"x": X})] * 7)]
        assert all(np.array_equal(one, results[0]) for one in follow)
        return results

    for results in in_threads(ranks[-1] + 1, run):
        assert_close_results(results)
    assert set(through_host) == {"send", "receive"}


def test_missing_abilities_of_several_processes_are_reported():
    two = [Device("cuda-emulated", 0, rank=rank) for rank in (0, 1)]
    assert choose_transport(two, EmulatedBackend().driver).description == (
        "through memory of the host: they are of several processes, and emulated devices need no library"
    )
