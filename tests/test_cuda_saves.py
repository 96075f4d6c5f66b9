"""States that a step overwrites are saved in one launch on CUDA devices, ahead of all else; a step that fails is taken
back with what was saved."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Tensor
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated import EmulatedDriver
from hocket.backends.cupy.kernels.moves import launch_copies
from hocket.backends.cupy.launches import Launches
from hocket.backends.operands import Operand
from hocket.graph import DType, Graph, input, state, weight
from hocket.graph.errors import BackendError
from hocket.scheduler import load, plan_for
from hocket.scheduler.verify import verify_plan

from .emulation import needs_compiler
from .test_cuda_product_faults import PlantedDriver

pytestmark = needs_compiler


class Counted(EmulatedDriver):
    """Keeps the names of the kernels that it launches."""

    def __init__(self) -> None:
        super().__init__(0)
        self.names: list[list[str]] = []

    def record(self, launches, on):
        self.names.append([launch.kernel.name for launch in launches])
        return super().record(launches, on)


def model(backend):
    """Three states that are added to, one that numbers the rows of a cache, and a look-up that may fail."""
    updates, size = {}, {"a": (3, 40), "b": (5,), "c": (2, 7, 9)}
    for name, shape in size.items():
        old = state(name, shape)
        updates[old] = ops.add(old, input(f"new.{name}", shape))
    at, cache = state("at", (1,), DType.I32), state("cache", (4, 8))
    updates[cache] = ops.set_rows(cache, input("row", (1, 8)), at, name="new.cache")
    updates[at] = input("next", (1,), DType.I32)
    y = ops.get_rows(weight("table", (4, 2)), input("ids", (1,), DType.I32), name="looked.up")
    graph = Graph({"y": y}, updates=updates)
    run = load(plan_for(graph, [(backend, backend.device(0))]), {"table": np.zeros((4, 2), np.float32)})
    rng = np.random.default_rng(0)
    for name, shape in {**size, "cache": (4, 8)}.items():
        run.store.state(name)[...] = rng.standard_normal(shape).astype(np.float32)
    feed = {f"new.{n}": rng.standard_normal(s).astype(np.float32) for n, s in size.items()}
    return run, {**feed, "row": np.ones((1, 8), np.float32), "next": [3]}


def held(run):
    return {name: np.array(run.store.state(name)) for name in ("a", "b", "c", "at", "cache")}


def test_whole_states_are_saved_first_and_in_one_launch():
    driver = Counted()
    run, feed = model(DriverBackend(driver))
    program = run.plan.lanes[0].program
    verify_plan(run.plan)
    assert [i.node for i in program.instructions[:3]] == ["a.save", "b.save", "c.save"]
    saved = [program.instructions[at].node for at, _ in program.undo]
    assert saved.index("cache.save") < saved.index("at.save"), "what numbers rows is put back before them"
    run.run({**feed, "ids": [0]})
    (launches,) = (names for names in driver.names if "copied_together" in names)
    assert launches.index("copied_together") == 0
    assert launches.count("copied_together") == 1
    assert sum(name.startswith("copied<") for name in launches) <= 2, "of what numbers rows, and its new value"


def test_a_step_that_fails_leaves_every_state_as_it_was():
    run, feed = model(DriverBackend(EmulatedDriver()))
    before = held(run)
    for _ in range(4):
        with pytest.raises(BackendError, match="id 9 names no row"):
            run.run({**feed, "ids": [9]})
        assert all(np.array_equal(before[name], array) for name, array in held(run).items())
    run.run({**feed, "ids": [1]})
    after = held(run)
    assert after["at"] == 3
    assert (after["cache"][0] == 1).all()
    for name in "abc":
        assert np.array_equal(after[name], before[name] + feed[f"new.{name}"])


# ------------------------------------------------------------------------------------------------------- the kernel

SIZES = (1, 2, 31, 32, 33, 1023, 1024, 1025, 4095, 4096, 4097, 100_003)


def copied_right(sizes, shift, backend=None):
    """Whether pieces of so many numbers, `shift` behind a multiple of 16 bytes, are copied, and nothing beside them."""
    driver = backend.driver if backend else EmulatedDriver()
    device, pairs, arrays = driver.device(0), [], []
    for size in sizes:
        both = [driver.alloc(4 * (size + shift), device) for _ in range(2)]
        x, out = (b.view(np.float32)[: size + shift] for b in both)
        x[:], out[:] = np.random.default_rng(size).standard_normal(size + shift), 7.0
        arrays.append((x, out))
        tensors = [Tensor(2 * len(pairs) + i, 4 * shift, (size,), (1,), DType.F32) for i in range(2)]
        pairs.append(tuple(Operand(driver.address(b) + 4 * shift, t) for b, t in zip(both, tensors, strict=True)))
    launches = Launches(keep=lambda array: 0)
    launch_copies(launches, pairs)
    driver.record(launches.items, device)()
    return all(np.array_equal(o[shift:], x[shift:]) and (o[:shift] == 7.0).all() for x, o in arrays)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sizes", [(), SIZES, SIZES[::-1], (5, 70_000) * 33], ids=len)
def test_pieces_of_any_size_are_copied_together(sizes, shift):
    assert copied_right(sizes, shift)


PLANTS = {
    "the piece before": ("a.of[piece + 1].first <= blockIdx.x", "a.of[piece + 1].first < blockIdx.x"),
    "the end of a piece is left": (
        "for (i64 i = 16 * vectors + threadIdx.x",
        "for (i64 i = 16 * vectors + threadIdx.x + 1",
    ),
    "every block copies the first run": ("(blockIdx.x - a.of[piece].first) * RUN", "0 * RUN"),
    "vectors where nothing is aligned": ("(((u64)from | (u64)to) & 15) == 0 ? size / 16 : 0", "size / 16"),
    "a vector too many": ("i + threadIdx.x < vectors) store", "i + threadIdx.x <= vectors) store"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_the_copies_is_found(name):
    try:
        backend = DriverBackend(PlantedDriver("moves.cu", *PLANTS[name]))
        assert not all(copied_right(SIZES, shift, backend) for shift in (0, 1))
    except BackendError:
        return
