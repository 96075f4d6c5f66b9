"""The Python parts of `.ci/run`: missing optional parts, skips over their budget, and crashed workers."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from ..given.models.goldens import ROOT

CI = ROOT / ".ci"

LOG = """
..s.                                                                     [100%]
=========================== short test summary info ============================
SKIPPED [2] tests/ops/test_x.py:12: onnx is not installed
SKIPPED [1] tests/frontends/test_y.py:13: onnx is not installed
SKIPPED [3] tests/cpu/test_z.py: gcc: is not installed (Debian has it)
4 passed, 6 skipped in 1.00s
"""


@pytest.fixture(scope="module")
def ci_parts():
    return runpy.run_path(str(CI / "parts.py"))


@pytest.fixture(scope="module")
def skips():
    return runpy.run_path(str(CI / "skips.py"))


class Commands:
    """A registry: which of its commands pass, by a word that they have."""

    def __init__(self, **passes: bool) -> None:
        self.passes, self.run_words = passes, []

    def __call__(self, command, seconds: int) -> bool:
        assert seconds > 0
        self.run_words.append(command)
        return next(passes for word, passes in self.passes.items() if word in command)


@pytest.mark.parametrize(
    ("passes", "outcome"),
    [
        ({"install": True}, "INSTALLED"),
        ({"install": False, "index": True}, "FAILED"),
        ({"install": False, "index": False}, "NO_ANSWER"),
    ],
)
def test_a_part_of_pip_fails_only_where_the_registry_answers(ci_parts, passes, outcome):
    part = ci_parts["OptionalPart"]("ONNX", ("onnx",))
    assert ci_parts["install_part"](part, Commands(**passes)).name == outcome


def test_a_part_that_cannot_fetch_its_rest_is_removed(ci_parts):
    part = ci_parts["OptionalPart"]("pyright", ("pyright",), fetch=("fetch",))
    commands = Commands(uninstall=True, install=True, fetch=False)
    assert ci_parts["install_part"](part, commands).name == "NO_ANSWER"
    assert "uninstall" in commands.run_words[-1]


@pytest.mark.parametrize(
    ("passes", "may_use_apt", "outcome"),
    [
        ({"update": True, "install": True}, True, "INSTALLED"),
        ({"update": True, "install": False}, True, "FAILED"),
        ({"update": False}, True, "NO_ANSWER"),
        ({}, False, "NOT_ALLOWED"),
    ],
)
def test_a_system_part_fails_only_where_root_reaches_the_registry(ci_parts, passes, may_use_apt, outcome):
    part = ci_parts["OptionalPart"]("QEMU", ("qemu",), system=True, has="no-such-program-anywhere")
    assert ci_parts["install_part"](part, Commands(**passes), may_use_apt=may_use_apt).name == outcome


@pytest.mark.long
def test_a_command_that_fails_or_hangs_or_is_not_there_does_not_pass(ci_parts, capsys):
    run = ci_parts["run_command"]
    assert run(("sh", "-c", "exit 0"), 60)
    assert not run(("sh", "-c", "echo the reason; exit 1"), 60)
    assert not run(("sleep", "60"), 1)
    assert not run(("no-such-program-anywhere",), 1)
    output = capsys.readouterr().out
    assert "the reason" in output
    assert "sleep 60: not done within 1 s" in output


def test_skips_are_counted_by_reason(skips):
    assert skips["count_skips"](LOG) == {"onnx is not installed": 3, "gcc: is not installed (Debian has it)": 3}


@pytest.mark.parametrize(
    ("max_count", "missing", "excess"),
    [
        (3, [], []),
        (2, [], ["3 tests skip, 2 may: onnx is"]),
        (0, ["ONNX"], []),
        (0, ["PyTorch"], ["3 tests skip, 0 may: onnx is"]),
    ],
)
def test_a_reason_has_a_budget_unless_its_part_is_missing(skips, max_count, missing, excess):
    budgets = [skips["Budget"]("onnx is", max_count, "ONNX"), skips["Budget"]("gcc", 3)]
    assert skips["find_excess"](skips["count_skips"](LOG), budgets, missing) == excess


def test_a_reason_that_is_not_listed_is_over_its_budget(skips):
    budgets = [skips["Budget"]("onnx is", 3)]
    (line,) = skips["find_excess"](skips["count_skips"](LOG), budgets, [])
    assert line.endswith("skips.toml does not list: gcc: is not installed (Debian has it)")


def test_the_exit_status_says_whether_a_budget_is_exceeded(skips, tmp_path: Path, capsys):
    log, missing = tmp_path / "pytest.log", tmp_path / "missing.txt"
    log.write_text("SKIPPED [1] tests/x.py:1: onnx is not installed\n", encoding="utf-8")
    assert skips["main"]([str(log), str(missing)]) == 1
    missing.write_text("ONNX\n", encoding="utf-8")
    assert skips["main"]([str(log), str(missing)]) == 0
    assert "1  onnx is not installed" in capsys.readouterr().out


def test_every_part_of_a_budget_is_installed_by_ci(ci_parts, skips):
    part_names = {part.name for part in ci_parts["PARTS"]}
    assert {budget.part for budget in skips["read_budgets"](CI / "skips.toml")} - {""} <= part_names


def test_hosted_ci_runs_the_same_command_on_the_oldest_and_a_new_python():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]
    versions = re.findall(r"3\.\d+", re.search(r"python: \[(.*)\]", workflow)[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f">={versions[0]}" == project["requires-python"]
    assert versions == ["3.11", "3.13"]
    assert "fetch-depth: 0" in workflow
    limit = int(re.search(r"timeout-minutes: (\d+)", workflow)[1])
    assert limit * 60 >= 5400, "see run_tests of .ci/run"


@pytest.fixture(scope="module")
def crash_script():
    return runpy.run_path(str(CI / "crashed.py"))


CRASHED = """....Fatal Python error: Aborted

Thread 0x2 (most recent call first):
  File "world.py", line 2

Current thread 0x1 (most recent call first):
  File "nvrtc.py", line 3
worker 'gw0' crashed while running 'tests/a.py::test_b[few<Q4_K, 1>]'
FAILED tests/a.py::test_b[few<Q4_K, 1>] - worker 'gw0' cra...
1 failed, 3 passed in 2.00s
"""


@pytest.mark.parametrize(("passes", "status"), [(True, 0), (False, 1)])
def test_the_test_of_a_crashed_worker_runs_again_alone(crash_script, passes, status, tmp_path: Path, capsys):
    log, run_tests = tmp_path / "pytest.log", []
    log.write_text(CRASHED, encoding="utf-8")

    def run(test: str) -> bool:
        run_tests.append(test)
        return passes

    assert crash_script["main"]([str(log)], run) == status
    assert run_tests == ["tests/a.py::test_b[few<Q4_K, 1>]"]
    printed = capsys.readouterr().out
    assert "Fatal Python error: Aborted\n" in printed
    assert '(most recent call first):\n  File "nvrtc.py"' in printed


@pytest.mark.parametrize("log", ["FAILED tests/a.py::test_c - assert 1 == 2\n" + CRASHED, "3 passed in 2.00s\n", ""])
def test_no_test_runs_again_beside_another_failure(crash_script, log, tmp_path: Path):
    file = tmp_path / "pytest.log"
    file.write_text(log, encoding="utf-8")
    assert crash_script["main"]([str(file)], pytest.fail) == 1


@pytest.mark.long
def test_a_test_that_aborts_alone_does_not_pass(crash_script):
    assert not crash_script["run_alone"]("no_such_file.py::test_x")


def test_a_nightly_run_writes_its_counts_and_the_steps_that_failed():
    page = runpy.run_path(str(CI / "nightly_page.py"))
    last = "2 failed, 16597 passed, 354 skipped, 1 error in 53.18s (0:53:18)"
    log = f"FAILED tests/a.py::b - 3 passed in the message\n{last}\n"
    counts = page["count_outcomes"](log)
    assert counts == {"failed": 2, "passed": 16597, "skipped": 354, "error": 1}
    text = page["format_nightly_page"](counts, "abc1234 with uncommitted changes", 3198, ["tests", "mypy"])
    assert "| 16,597 | 2 | 1 | 354 |" in text
    assert ", abc1234 with uncommitted changes.\n- Duration: 53 min 18 s.\n- Steps that failed: tests, mypy." in text
    assert page["count_outcomes"]("a worker crashed") == {}
    assert "no summary" in page["format_nightly_page"]({}, "abc1234", 5, [])
    run = (CI / "run").read_text("utf-8")
    assert run.index("HOCKET_CI_NIGHTLY", run.index('step "mypy"')) < run.index("nightly_page.py")
