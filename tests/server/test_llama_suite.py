"""The quick tests of llama-server's own suite, and the program that runs them."""

from __future__ import annotations

import json
import os
import runpy
import tarfile
from pathlib import Path

import pytest

from ..given.models.goldens import ROOT
from . import llama_suite
from .llama_suite import Outcome, Table, compare_outcomes, format_counts, map_flags, read_table, run_suite

SUITE = os.environ.get("HOCKET_LLAMA_SUITE", "")
"""A folder with ``tools/server/tests`` and ``models/templates`` of llama.cpp."""


@pytest.mark.nightly(cases=0)
@pytest.mark.skipif(not Path(SUITE, "tools").is_dir(), reason="HOCKET_LLAMA_SUITE names no folder with llama.cpp")
def test_the_quick_tests_of_llama_server_have_the_expected_outcomes(tmp_path: Path) -> None:
    table, log = read_table(), tmp_path / "log"
    outcomes = run_suite(Path(SUITE, "tools", "server", "tests"), table.quick_tests, log=log)
    text = log.read_text(encoding="utf-8", errors="replace")
    assert len(outcomes) >= table.quick_count, text[-3000:]
    assert compare_outcomes(outcomes, table) == [], text[-20_000:]


def test_the_table_has_a_reason_for_each_entry() -> None:
    table = read_table()
    assert all(len(reason) > 10 for reason in (*table.unsupported_files.values(), *table.failures.values()))
    assert all("::" in test for test in table.failures)
    assert not {test.partition("::")[0] for test in table.failures} & table.unsupported_files.keys()


def test_outcomes_are_compared_with_the_table() -> None:
    table = Table({}, {"test_a.py::test_x": "no such endpoint", "test_a.py::test_y": "no web page"})
    outcomes = [
        Outcome("test_a.py::test_x", "failed", "assert 404 == 200"),
        Outcome("test_a.py::test_y", "passed"),
        Outcome("test_b.py::test_z", "failed", "assert 1 == 2"),
        Outcome("test_b.py::test_w", "passed"),
        Outcome("test_b.py::test_v", "skipped"),
    ]
    assert compare_outcomes(outcomes, table) == [
        "test_a.py::test_y passes, but is listed: no web page",
        "test_b.py::test_z fails and is not listed: assert 1 == 2",
    ]
    assert "2 passed    2 failed    1 skipped" in format_counts(outcomes)


def test_flags_of_llama_server_are_mapped(tmp_path: Path) -> None:
    words = "--port 8080 --host ::1 --temp 0.5 --seed 42 --ctx-size 512 --parallel 2 --n-predict 64 --no-slots"
    flags, variables = map_flags([*words.split(), "--alias", "b,a", "--api-key", "k", "--reasoning", "off"], tmp_path)
    text = " ".join(flags)
    assert "--host ::1 --port 8080 --parallel 2 --ctx-size 256 --temp 0.5 --seed 42 " in text
    assert "--default-max-tokens 64 --alias a --alias b " in text
    assert json.loads(flags[flags.index("--chat-template-kwargs") + 1]) == {"enable_thinking": False}
    assert {"--no-slots", "--no-metrics"} <= set(flags)
    assert variables == {"HOCKET_API_KEY": "k"}
    whole, _ = map_flags([*words.split(), "--kv-unified"], tmp_path)
    assert whole[whole.index("--ctx-size") + 1] == "512"


@pytest.mark.long
def test_a_run_reports_the_outcomes_of_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = tmp_path / "llama.cpp" / "tools" / "server" / "tests"
    (tests / "unit").mkdir(parents=True)
    (tests / "utils.py").write_text("class ServerPreset:\n    pass\n")
    source = (
        "import os, wget\n\ndef test_a():\n    assert os.environ['PORT']\n\ndef test_b():\n    wget.download('u')\n"
    )
    (tests / "unit" / "test_basic.py").write_text(source)
    assert llama_suite.main([str(tests), "test_basic.py", "--log", str(tmp_path / "log")]) == 1
    out = capsys.readouterr().out
    assert "1 passed    1 failed    0 skipped" in out
    assert "test_basic.py::test_b fails and is not listed: OSError: tests download nothing: u" in out


def test_the_archive_of_llama_cpp_python_gives_the_suite(tmp_path: Path) -> None:
    program = runpy.run_path(str(ROOT / ".ci" / "llama_suite.py"))
    (tmp_path / "file").write_text("text")
    prefix = "llama_cpp_python-1/vendor/llama.cpp"
    names = ("tools/server/tests/unit/test_a.py", "models/templates/a.jinja", "models/b", "tools/server/tests/../../c")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in names:
            archive.add(tmp_path / "file", f"{prefix}/{name}")
    assert program["extract_suite"](tmp_path / "a.tar.gz", tmp_path / "out") == 2
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()) == [
        "models/templates/a.jinja",
        "tools/server/tests/unit/test_a.py",
    ]
