"""How far ahead weights are fetched: chosen by what is measured, once, and only where there is much to fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.backends.base import BufferSpec, Program
from hocket.backends.cpu import fetching
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec

DEFAULT = fetching.CHOICES[0]


class Measured:
    """Stands for `fetching.Product`: runs with one choice take as long as it is told."""

    nbytes = 1
    asked = 0
    times: tuple[float, ...] = ()

    def __init__(self, *_: object) -> None:
        type(self).asked += 1

    def seconds(self) -> list[float]:
        return [*self.times]


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fetching, "Product", Measured)
    monkeypatch.setattr(Measured, "asked", 0)
    monkeypatch.setattr(Measured, "times", (1.0, 1.0, 0.9, 0.8, 1.0))


def program(*rows: int) -> Program:
    specs = [Spec((n, 1024), DType.Q8_0) for n in rows]
    return Program(
        tuple(BufferSpec("weight", f"w{n}", s.nbytes, s, s) for n, s in zip(rows, specs, strict=True)), (), {}, {}
    )


def test_the_best_is_kept_for_its_type():
    fetching.choose(DType.Q8_0)
    assert fetching.ahead(DType.Q8_0) == fetching.CHOICES[3]
    assert fetching.ahead(DType.Q4_0) == DEFAULT


def test_what_is_hardly_better_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Measured, "times", (1.0, 0.98, 1.0, 1.0, 1.0))
    fetching.choose(DType.Q8_0)
    assert fetching.ahead(DType.Q8_0) == DEFAULT


def test_it_is_measured_once_and_for_many_weights_alone():
    fetching.measure_for(program(2048, 4096))
    assert Measured.asked == 0, "so few stay in a cache"
    fetching.measure_for(program(32768, 32769))
    fetching.measure_for(program(32768, 32769))
    assert Measured.asked == 1


def test_what_is_damaged_is_measured_again():
    fetching.choose(DType.Q8_0)
    file = fetching._file(DType.Q8_0)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert fetching.ahead(DType.Q8_0) == DEFAULT
    fetching.measure_for(program(65536))
    assert Measured.asked == 2
