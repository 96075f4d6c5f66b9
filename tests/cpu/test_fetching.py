"""How far ahead weights are fetched: chosen by what is measured, once, and only where there is much to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.base import BufferSpec, Program
from hocket.backends.cpu import fetching
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec

DEFAULT = fetching.CHOICES[0]


class Measured:
    """Stands for `fetching.Product`: runs with one choice take as long as it is told."""

    asked = 0
    read = 0
    times: tuple[float, ...] = ()

    def __init__(self, _: DType, matrices: Sequence[np.ndarray], threads: int) -> None:
        type(self).asked += 1
        type(self).read = self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def seconds(self) -> list[float]:
        return [*self.times]


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fetching, "Product", Measured)
    monkeypatch.setattr(Measured, "asked", 0)
    monkeypatch.setattr(Measured, "times", (1.0, 1.0, 0.9, 0.8, 1.0))


def measure(*rows: int) -> None:
    """For a program with weights of so many rows, which lie in one another: nobody reads them here."""
    specs = [Spec((n, 1024), DType.Q8_0) for n in rows]
    memory = np.zeros(max(spec.nbytes for spec in specs) + 64, np.uint8)
    weights = tuple(BufferSpec("weight", f"w{n}", s.nbytes, s, s) for n, s in zip(rows, specs, strict=True))
    fetching.measure_for(Program(weights, (), {}, {}), [memory] * len(rows))


def choose() -> None:
    fetching.choose(DType.Q8_0, [np.zeros((64, 34), np.uint8)])


def test_the_best_is_kept_for_its_type():
    choose()
    assert fetching.ahead(DType.Q8_0) == fetching.CHOICES[3]
    assert fetching.ahead(DType.Q4_0) == DEFAULT


def test_what_is_hardly_better_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Measured, "times", (1.0, 0.98, 1.0, 1.0, 1.0))
    choose()
    assert fetching.ahead(DType.Q8_0) == DEFAULT


def test_it_is_measured_once_and_for_many_weights_alone():
    measure(0, 2048, 4096)
    assert Measured.asked == 0, "so few stay in a cache"
    measure(32768, 32769)
    measure(32768, 32769)
    assert Measured.asked == 1


def test_what_is_damaged_is_measured_again():
    choose()
    file = fetching._file(DType.Q8_0)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert fetching.ahead(DType.Q8_0) == DEFAULT
    measure(65536)
    assert Measured.asked == 2


@pytest.mark.parametrize("rows", [(65536,), (100_000, 65536), (200_000,)])
def test_what_is_read_for_it_are_weights_of_the_program_up_to_a_bound(rows: tuple[int, ...]):
    measure(*rows)
    assert Measured.read <= min(fetching.MOST + 64 * 1088, sum(rows) * 1088)
    assert Measured.read >= min(fetching.MOST, sum(rows) * 1088) - 64 * 1088
