"""The prefetch distance of weights: measured once, and only for programs with many weight bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.base import BufferSpec, Program
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.compilation import prefetch_distance
from hocket.backends.cpu.execution.program_binding import list_kernel_calls
from hocket.backends.cpu.kernels.matmul import tile_loops
from hocket.backends.cpu.tuning import prefetch_tuning
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec

DEFAULT = prefetch_distance.PREFETCH_DISTANCES[0]


class Measured:
    """A stand-in for `prefetch_tuning.TimedMatmul` with given times.

    In all runs except the last one, fast variants are disturbed most.
    """

    asked = 0
    read = 0
    times: Mapping[int, tuple[float, ...]] = {}

    def __init__(self, _: DType, matrices: Sequence[np.ndarray], threads: int, at_once: int) -> None:
        type(self).asked += 1
        type(self).read = self.nbytes = sum(matrix.nbytes for matrix in matrices)
        self.mine = self.times[at_once]
        self.left = prefetch_tuning.TUNING_ROUNDS

    def measure_seconds_by_distance(self) -> list[float]:
        self.left -= 1
        return [t if self.left < 0 else 2 - t for t in self.mine]


@pytest.fixture(autouse=True)
def _fake_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prefetch_tuning, "TimedMatmul", Measured)
    monkeypatch.setattr(Measured, "asked", 0)
    monkeypatch.setattr(Measured, "times", {1: (1.0, 1.0, 0.9, 0.8, 1.0), 4: (1.0, 1.0, 1.0, 0.9, 0.8)})


def measure(*rows: int) -> None:
    """Measure for a program with weights of these row counts. The weights share memory, which is never read here."""
    specs = [Spec((n, 1024), DType.Q8_0) for n in rows]
    memory = np.zeros(max(spec.nbytes for spec in specs) + 64, np.uint8)
    weights = tuple(BufferSpec("weight", f"w{n}", s.nbytes, s, s) for n, s in zip(rows, specs, strict=True))
    prefetch_tuning.tune_uncached_program_prefetch(Program(weights, (), {}, {}), [memory] * len(rows))


def choose() -> None:
    prefetch_tuning.tune_prefetch_distance(DType.Q8_0, [np.zeros((64, 34), np.uint8)])


def test_the_best_distance_is_stored_for_its_type():
    choose()
    assert prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q8_0) == prefetch_distance.PREFETCH_DISTANCES[3]
    assert prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q4_0) == DEFAULT


def test_several_rows_at_once_have_a_distance_of_their_own():
    choose()
    assert (
        prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q8_0, several=True)
        == prefetch_distance.PREFETCH_DISTANCES[4]
    )
    assert prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q4_0, several=True) == DEFAULT


@pytest.mark.parametrize(("tokens", "several"), [(1, False), (4, True)])
def test_a_product_fetches_as_far_as_its_rows_ask_for(tokens: int, several: bool, monkeypatch: pytest.MonkeyPatch):
    asked = list[bool]()
    monkeypatch.setattr(
        tile_loops, "find_l1_and_l2_prefetch_distances", lambda _, *, several: asked.append(several) or DEFAULT
    )
    w, x = hocket.weight("w", (64, 64), DType.Q8_0), hocket.input("x", (tokens, 64))
    experts, ids = hocket.weight("experts", (16, 64, 64), DType.Q8_0), hocket.input("ids", (tokens, 2), DType.I32)
    mixed = ops.mul_mat_id(experts, ops.reshape(x, shape=(tokens, 1, 64)), ids)
    graph, backend = hocket.Graph({"y": ops.mul_mat(w, x), "mixed": mixed}), CpuBackend()
    plan = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))])
    assert len([*list_kernel_calls(plan.device_plans[0].program, 1, str)]) > 2
    assert asked == [several, False], "slots are spread over more experts than there are slots"


def test_what_is_hardly_better_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        Measured, "times", dict.fromkeys(prefetch_distance.TUNED_ROW_COUNTS, (1.0, 0.98, 1.0, 1.0, 1.0))
    )
    choose()
    assert prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q8_0) == DEFAULT


def test_it_is_measured_once_and_for_many_weights_alone():
    measure(0, 2048, 4096)
    assert Measured.asked == 0, "so few stay in a cache"
    measure(32768, 32769)
    measure(32768, 32769)
    assert Measured.asked == len(prefetch_distance.TUNED_ROW_COUNTS)


def test_what_is_damaged_is_measured_again():
    choose()
    file = prefetch_distance.make_distance_cache_path(DType.Q8_0)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert prefetch_distance.find_l1_and_l2_prefetch_distances(DType.Q8_0) == DEFAULT
    measure(65536)
    assert Measured.asked == 2 * len(prefetch_distance.TUNED_ROW_COUNTS)


@pytest.mark.parametrize("rows", [(65536,), (100_000, 65536), (200_000,)])
def test_what_is_read_for_it_are_weights_of_the_program_up_to_a_bound(rows: tuple[int, ...]):
    measure(*rows)
    assert Measured.read <= min(prefetch_tuning.MAX_TUNING_BYTES + 64 * 1088, sum(rows) * 1088)
    assert Measured.read >= min(prefetch_tuning.MAX_TUNING_BYTES, sum(rows) * 1088) - 64 * 1088
