"""The script for a machine with a GPU, every part of it on emulated devices, and through a stand-in for CuPy."""

from __future__ import annotations

import json
import math
import shutil
import sys

import pytest

from hocket.backends.base import Device
from hocket.backends.cupy import cuda
from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.emulation.emulated import EmulatedDriver
from hocket.backends.cupy.table import SOURCES

from ..given.devices.emulation import needs_compiler
from ..given.devices.fake_cupy import fake_cupy
from ..given.models.goldens import ROOT
from ..given.waits import HOUR

BENCHMARKS = str(ROOT / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    import gpu
    from on_gpu import foretold
    from on_gpu.bench import Bench
    from on_gpu.machine import CudaMachine, machine_for
finally:
    sys.path.remove(BENCHMARKS)

PARTS = sorted(gpu.PARTS)
THROUGH_CUPY = ("device", "compile", "delta-decode", "products", "models", "sharded")
"""Parts that use all of what the stand-in does; the others make the same calls."""


def rows_of(part: str, bench: Bench) -> list[dict[str, object]]:
    rows = list(gpu.run_part(gpu.PARTS[part], bench))
    assert rows[-1].get("ends") is not None, rows[-2:]
    return [row for row in rows[:-1] if "begins" not in row]


def judged(part: str, rows: list[dict[str, object]]) -> None:
    """Every case says something, nothing fails, and times and errors are such."""
    assert rows
    for row in rows:
        assert "error" not in row, row
        assert all(value > 0 for name, value in row.items() if name.endswith(("µs", "GB/s")) and name != "±µs"), row
        assert row.get("right", True), row
        assert row.get("fail", 0) == 0, row
        assert row.get("NMSE", 0) <= (1e-7 if row.get("mode") != "fast" else 1e-3), row
        assert row.get("NMSE against one", 0) <= 1e-3, row
    assert part == "peers" or not [row for row in rows if "left out" in row]


@pytest.mark.long(every=3)
@needs_compiler
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_on_the_emulation(part, tmp_path):
    driver = EmulatedDriver(0)
    bench = Bench(driver, machine_for(driver, driver.device(0)), driver.device(0), tiny=True, folder=tmp_path)
    judged(part, rows_of(part, bench))


@pytest.mark.parametrize("part", PARTS)
def test_every_case_of_full_size_has_a_name_of_its_own(part):
    driver = EmulatedDriver(0)
    on = Device("cuda-emulated", 0)
    titles = [case.title for case in gpu.PARTS[part].cases(Bench(driver, machine_for(driver, on), on))]
    assert len(set(titles)) == len(titles) > 0


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy that emulates launches."""
    made = fake_cupy(SOURCES)
    monkeypatch.setattr(cuda, "_cupy", lambda: made)
    monkeypatch.setattr(cuda, "cubin", lambda source, arch: (str(SOURCES.index(source)), {n: n for n in source.names}))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    which = shutil.which  # a real nvidia-smi would speak of another device
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else which(name))
    cuda._module.cache_clear()
    yield made
    cuda._module.cache_clear()


@pytest.mark.long(every=3)
@needs_compiler
@pytest.mark.parametrize("part", THROUGH_CUPY)
def test_parts_make_the_calls_of_cupy_that_there_are(part, tmp_path, cupy):
    driver = cuda.CudaDriver()
    machine = machine_for(driver, driver.device(0), cupy)
    assert isinstance(machine, CudaMachine)
    rows = rows_of(part, Bench(driver, machine, driver.device(0), tiny=True, folder=tmp_path))
    judged(part, rows)
    in_turn = [row for row in rows if str(row.get("what")).endswith("launches in turn")]
    assert bool(in_turn) is (part == "models")


# ------------------------------------------------------------------------------------------------------ the runner

BROKEN = f"""
import os, sys, time
sys.path.insert(0, {BENCHMARKS!r})
import gpu

def fail():
    yield {{"x": 1.5}}
    raise ValueError("no such\\nthing")

def cases(bench):
    yield gpu.Case("good", lambda: [{{"x": 1}}])
    yield gpu.Case("fails", fail)
    yield gpu.Case("dies", lambda: os._exit(3))
    yield gpu.Case("hangs", lambda: time.sleep(3600))
    yield gpu.Case("left out", lambda: (_ for _ in ()).throw(gpu.LeftOut("not here")))
    yield gpu.Case("last", lambda: [{{"x": 2}}])

gpu.PARTS["broken"] = gpu.Part(cases, 1)
gpu.main()
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN, "utf-8")
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "STARTUP", HOUR)
    return Patient()


class Patient:
    """A part whose fourth case alone may take no more than two seconds."""

    def __init__(self):
        self.limits = iter([HOUR, HOUR, HOUR, 2.0, HOUR, HOUR])

    @property
    def limit(self):
        return next(self.limits)


@pytest.mark.long
@needs_compiler
def test_a_case_that_fails_dies_or_hangs_costs_no_other(broken, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "broken", broken)
    rows = list(gpu.rows_of("broken", ["--kind", "cuda-emulated"], math.inf))
    assert rows == [
        {"case": "good", "x": 1},
        {"case": "fails", "x": 1.5},
        {"case": "fails", "error": "ValueError: no such thing"},
        {"case": "dies", "error": "the process ended: exit code 3"},
        {"case": "hangs", "error": "nothing for 2 s"},
        {"case": "left out", "left out": "not here"},
        {"case": "last", "x": 2},
    ]


@needs_compiler
def test_a_part_ends_when_its_time_is_over(broken, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "broken", broken)
    rows = list(gpu.rows_of("broken", ["--kind", "cuda-emulated"], 0.0))
    assert rows == [{"case": "start", "left out": "the time of the part is over"}]


@needs_compiler
def test_rows_are_saved_as_they_come(tmp_path, monkeypatch, capsys):
    words = [
        "gpu.py",
        "device",
        "--kind",
        "cuda-emulated",
        "--tiny",
        "--save",
        str(tmp_path / "out"),
        "--seconds",
        "300",
    ]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    saved = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert saved["about"]["tiny"] is True
    assert {row["part"] for row in saved["rows"]} == {"device"}
    assert "launch of one element, how plain" in capsys.readouterr().out
    assert (tmp_path / "out.md").read_text("utf-8").count("| launch of one element |") == 4


def test_without_the_device_the_script_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "device"])
    monkeypatch.setattr(cuda.CudaDriver, "_count", lambda self: 0)
    with pytest.raises(SystemExit, match=r"gpu.py: there is no device cuda:0"):
        gpu.main()


def test_what_was_predicted_stands_beside_what_is_measured():
    (title, times), *_ = json.loads(foretold.FILE.read_text("utf-8")).items()
    assert foretold.kind_of("NVIDIA H200 NVL") == "h200"
    assert foretold.kind_of("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert foretold.kind_of("none: emulated") == ""
    near, far = {"case": title, "µs": times["h200"] * 1.2}, {"case": title, "µs": times["h200"] / 2}
    rows = [foretold.beside(row, title, "h200") for row in (near, far)]
    assert [row["predicted µs"] for row in rows] == [times["h200"]] * 2
    assert list(foretold.wrong(rows)) == [f"{title}: predicted 2.00 times what was measured"]
    assert "## Predicted wrongly" in gpu.written([{"part": "products", **row} for row in rows])
    for other in ({"µs": 1.0, "ours": False}, {"error": "none"}):
        assert foretold.beside(other, title, "h200") == other
    assert foretold.beside(near, "another case", "h200") == near
    assert foretold.beside(near, title, "") == near


def test_shapes_that_are_predicted_are_cases_that_are_measured():
    driver, on = EmulatedDriver(0), Device("cuda-emulated", 0)
    bench = Bench(driver, machine_for(driver, on), on)
    titles = {case.title for part in gpu.PARTS.values() for case in part.cases(bench)}
    known = json.loads(foretold.FILE.read_text("utf-8")).keys()
    assert len(known & titles) >= 6
