"""The plans for 10, 20 and 30 minutes on a GPU: their order, their whole course, and how a run is continued."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from unittest.mock import MagicMock

import pytest

from hocket.backends.base import Device
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.benchmarks import run_gpu as gpu
from hocket.benchmarks.finished_cases import BenchmarkRecord, RecordError, read_record
from hocket.benchmarks.gpu.harness import BenchmarkDevice
from hocket.benchmarks.gpu.machine import CudaMachine, make_machine
from hocket.benchmarks.gpu.time_plan import RESERVED_SECONDS, TIME_PLANS, PlanStep, compute_step_seconds

from ..given.devices.emulation import needs_compiler
from ..given.waits import WAIT_SECONDS, wait_until

PARTS_OF_OTHERS = ("peers", "llama.cpp", "counters")
"""Parts that need packages that are not installed here."""


def titles_of_full_size(part: str) -> list[str]:
    driver, on = EmulatedDriver(0), Device("cuda-emulated", 0)
    return [case.title for case in gpu.PARTS[part].cases(BenchmarkDevice(driver, make_machine(driver, on), on))]


def select_titles(steps: tuple[PlanStep, ...]) -> set[tuple[str, str]]:
    """The cases that a plan runs, and an assertion that every step adds some."""
    selected: set[tuple[str, str]] = set()
    for step in steps:
        own = {(step.part, title) for title in titles_of_full_size(step.part) if re.search(step.cases, title)}
        assert own - selected, f"{step} adds no case"
        selected |= own
    return selected


@pytest.mark.parametrize("minutes", TIME_PLANS)
def test_every_step_of_a_plan_adds_cases_and_fits_its_minutes(minutes):
    steps = TIME_PLANS[minutes]
    select_titles(steps)
    assert sum(step.seconds for step in steps) + RESERVED_SECONDS <= 60 * minutes
    assert [step.part for step in steps[:2]] == ["device", "peers"]


def test_a_longer_plan_continues_the_shorter_one_and_the_longest_runs_every_case():
    for short, long in ((10, 20), (20, 30)):
        assert TIME_PLANS[long][: len(TIME_PLANS[short])] == TIME_PLANS[short]
    assert select_titles(TIME_PLANS[30]) == {(part, title) for part in gpu.PARTS for title in titles_of_full_size(part)}


def test_steps_share_the_time_by_their_seconds():
    steps = (PlanStep("device", 20), PlanStep("peers", 60))
    assert compute_step_seconds(steps, 160.0) == 40.0
    assert compute_step_seconds(steps[1:], 160.0) == 160.0
    assert compute_step_seconds(steps, -1.0) == 0.0


# -------------------------------------------------------------------------------------------------- the whole course


FIRST_CASES = """
import itertools
from dataclasses import replace
from hocket.benchmarks import run_gpu as gpu

for name, part in tuple(gpu.PARTS.items()):
    gpu.PARTS[name] = replace(part, cases=lambda bench, make=part.cases: itertools.islice(make(bench), 1))
gpu.main()
"""
"""A script with the first case of every part."""


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("minutes", "cases"), [(min(TIME_PLANS), "first"), (min(TIME_PLANS), "all"), (max(TIME_PLANS), "all")]
)
def test_the_whole_course_of_a_plan_runs_on_the_emulation(minutes, cases, tmp_path, monkeypatch):
    """The longest plan begins with all others; a test above checks it. Other tests run the other cases of each part."""
    if cases == "first":
        script = tmp_path / "first.py"
        script.write_text(FIRST_CASES, "utf-8")
        monkeypatch.setattr(gpu, "__file__", str(script))
    stem = tmp_path / "out"
    words = ["--minutes", str(minutes), "--seconds", str(WAIT_SECONDS), "--kind", "cuda-emulated", "--tiny"]
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", *words, "--save", str(stem), "--scratch", str(tmp_path)])
    gpu.main()
    record = read_record(stem.with_name("out.json"))
    assert not [row for row in record.rows if "error" in row]
    left_out = {part for (part, _), end in record.ends.items() if end["outcome"] == "left out"}
    assert left_out <= set(PARTS_OF_OTHERS)
    parts = {step.part for step in TIME_PLANS[minutes]}
    assert {part for part, _ in record.ends} == parts
    assert {part for part, _ in record.finished_steps} == parts - left_out
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))["about"]["finished"]
    assert max(Counter((end["part"], end["case"]) for end in written).values()) == 1


def test_a_library_that_does_not_load_is_left_out_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "flash_qla.py").write_text("raise RuntimeError('no driver\\nfor this compiler')", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    driver, on = EmulatedDriver(0), Device("cuda-emulated", 0)
    cases = gpu.PARTS["peers"].cases(BenchmarkDevice(driver, make_machine(driver, on), on))
    case = next(case for case in cases if case.title.startswith("FlashQLA"))
    message = r"FlashQLA is not installed, or another version \(RuntimeError: no driver for this compiler\)"
    with pytest.raises(gpu.NothingToMeasure, match=message):
        list(case.rows())


def test_a_device_that_does_not_answer_has_no_state(monkeypatch):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", hang)
    assert CudaMachine(MagicMock(), Device("cuda", 0), MagicMock()).read_state() == {}


# -------------------------------------------------------------------------------------------------- continued runs

SMALL_BENCHMARK = """
import os, pathlib, sys, time
from hocket.benchmarks import run_gpu as gpu

FOLDER = pathlib.Path(__file__).parent

def log(name):
    with (FOLDER / "log").open("a") as file:
        file.write(name + "\\n")

def simple(name):
    log(name)
    yield {"x": 1}

def fails():
    log("fails")
    yield {"x": 2}
    if not (FOLDER / "mended").exists():
        raise ValueError("no such\\nthing")

def needs():
    log("needs")
    if not (FOLDER / "library").exists():
        raise gpu.NothingToMeasure("the library is not installed")
    yield {"x": 3}

def slow():
    log("slow")
    yield {"x": 4}
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    yield {"x": 5}

def first(bench):
    yield gpu.Case("a", lambda: simple("a"))
    yield gpu.Case("fails", fails)
    yield gpu.Case("needs", needs)

def second(bench):
    yield gpu.Case("b", lambda: simple("b"))
    yield gpu.Case("slow", slow)
    yield gpu.Case("c", lambda: simple("c"))

gpu.PARTS.clear()
gpu.PARTS.update(first=gpu.BenchmarkPart(first, 1, 3600.0), second=gpu.BenchmarkPart(second, 1, 3600.0))
gpu.STARTUP_SECONDS = 3600.0
gpu.__file__ = __file__
gpu.main()
"""


class Runner:
    """A benchmark of two parts in a folder; it logs each case that begins."""

    def __init__(self, folder):
        self.folder, self.script = folder, folder / "script.py"
        self.script.write_text(SMALL_BENCHMARK, "utf-8")

    def begin(self, *words):
        words = ("--kind", "cuda-emulated", "--tiny", "--seconds", str(WAIT_SECONDS), *words)
        return subprocess.Popen(
            [sys.executable, str(self.script), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *words):
        """Run to the end, and return the last line of errors."""
        _, errors = self.begin(*words).communicate()
        return errors.strip().rpartition("\n")[2]

    def take_log(self):
        """The cases that have begun since the last call."""
        path = self.folder / "log"
        lines = path.read_text("utf-8").split() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def has_logged(self, name):
        path = self.folder / "log"
        return path.exists() and name in path.read_text("utf-8").split()

    def permit(self, name):
        (self.folder / name).touch()


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


def outcomes_of(record: BenchmarkRecord) -> dict[str, object]:
    return {case: end["outcome"] for (_, case), end in record.ends.items()}


@pytest.mark.long
@needs_compiler
def test_a_run_that_was_killed_goes_on_where_it_ended(runner, tmp_path):
    """Killed in a case: the finished cases are in the file, and only the interrupted one runs twice."""
    process = runner.begin("--save", str(tmp_path / "one"))
    wait_until(lambda: runner.has_logged("slow") or process.poll() is not None)
    wait_until(lambda: '"x": 4' in (tmp_path / "one.json").read_text("utf-8"))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    runner.permit("go")  # the worker has lost its pipe and ends too
    assert runner.take_log() == ["a", "fails", "needs", "b", "slow"]
    record = read_record(tmp_path / "one.json")
    assert outcomes_of(record) == {"a": "measured", "fails": "failed", "needs": "left out", "b": "measured"}
    assert record.ends["first", "fails"]["reason"] == "ValueError: no such thing"
    runner.permit("library")
    assert runner.run("--save", str(tmp_path / "two"), "--resume", str(tmp_path / "one.json")) == ""
    assert runner.take_log() == ["needs", "slow", "c"]
    record = read_record(tmp_path / "two.json")
    assert [(row["case"], row["x"]) for row in record.rows if "x" in row] == [
        ("a", 1),
        ("fails", 2),
        ("b", 1),
        ("needs", 3),
        ("slow", 4),
        ("slow", 5),
        ("c", 1),
    ]
    assert {case: end["run"] for (_, case), end in record.ends.items()} == {
        **dict.fromkeys(("a", "fails", "b"), 0),
        **dict.fromkeys(("needs", "slow", "c"), 1),
    }
    assert record.finished_steps == {("first", ""), ("second", "")}
    assert runner.run("--save", str(tmp_path / "three"), "--resume", str(tmp_path / "two.json")) == ""
    assert runner.take_log() == []
    runner.permit("mended")
    words = ("--save", str(tmp_path / "four"), "--resume", str(tmp_path / "three.json"), "--retry")
    assert runner.run(*words) == ""
    assert runner.take_log() == ["fails"]
    record = read_record(tmp_path / "four.json")
    assert set(outcomes_of(record).values()) == {"measured"}
    assert not [row for row in record.rows if "error" in row]
    assert len(record.about["earlier"]) == 3


@pytest.mark.long
@needs_compiler
def test_only_the_cases_with_such_titles_run(runner):
    assert runner.run("--cases", "^[ac]$") == ""
    assert runner.take_log() == ["a", "c"]


def test_arguments_that_do_not_fit_are_named(monkeypatch, capsys):
    for words, message in (
        (["--minutes", "10", "device"], "--minutes chooses the parts and their cases; leave out PART and --cases"),
        (["--minutes", "11"], "invalid choice: 11"),
        (["--cases", "("], "--cases '(' is no regular expression"),
    ):
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--kind", "cuda-emulated", *words])
        with pytest.raises(SystemExit):
            gpu.main()
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- the record

CIRCUMSTANCES = {"device": "cuda", "gpu": "H200", "tiny": False, "date": "2026-11-29", "commit": "abc", "shared": False}
CIRCUMSTANCES |= {"cpu": "some", "cores": 16, "load": 0.1}


def make_record(**about) -> BenchmarkRecord:
    record = BenchmarkRecord({**CIRCUMSTANCES, **about})
    record.rows.append({"part": "p", "case": "a", "x": 1})
    record.add_end("p", "a", "measured", 1.0)
    return record


@pytest.mark.parametrize(("name", "value"), [("device", "hip"), ("gpu", "H100"), ("tiny", True)])
def test_rows_of_another_device_are_not_continued(name, value):
    with pytest.raises(RecordError, match=f"the earlier run: its {name} is {value}, this one has"):
        BenchmarkRecord(dict(CIRCUMSTANCES)).continue_run(make_record(**{name: value}))


@pytest.mark.parametrize("fault", ["replace", "fsync"])
def test_an_outage_while_writing_leaves_the_former_file(fault, tmp_path, monkeypatch):
    record = make_record()
    record.save(tmp_path / "out", "text")
    before = (tmp_path / "out.json").read_bytes()
    record.add_end("p", "b", "measured", 1.0)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fault, fail)
    with pytest.raises(OSError, match="No space left"):
        record.save(tmp_path / "out", "text")
    assert (tmp_path / "out.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100000,
        '{"about": 1, "rows": []}',
        '{"about": {}, "rows": []}',
        '{"about": {"seconds": 1, "steps": [], "finished": []}, "rows": [1]}',
        '{"about": {"seconds": 1, "steps": [1], "finished": []}, "rows": []}',
        '{"about": {"seconds": "x", "steps": [], "finished": []}, "rows": []}',
        '{"about": {"seconds": 1, "steps": [], "finished": [], "earlier": 3}, "rows": []}',
        '{"about": {"seconds": 1, "steps": [], "finished": [{"part": "p", "case": "a"}]}, "rows": []}',
        '{"about": {"seconds": 1, "steps": [], "finished": [{"part": "p", "case": "a", "outcome": "no", "seconds": 1,'
        ' "run": 0}]}, "rows": []}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_no_record_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "out.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecordError, match=r"out\.json: is no record of a benchmark \(") as error:
        read_record(path)
    assert "\n" not in str(error.value)


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"none\.json: No such file or directory; give the JSON file"):
        read_record(tmp_path / "none.json")
