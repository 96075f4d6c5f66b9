"""The views of a run on the command line: traces, watched values, comparisons with another device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hocket.backends.host.bindings import Binding
from hocket.backends.numpy import kernel_table
from hocket.cli import main

from ...given.models.goldens import TINY


@pytest.mark.long
def test_a_run_is_traced_and_its_page_shows_what_was_measured(tmp_path, capsys):
    trace, out = str(tmp_path / "trace.json"), tmp_path / "page.html"
    split = ["--devices", "cpu:0,cpu:1", "--split-mode", "tensor"]
    assert main(["run", TINY, "-p", "It is", "-n", "5", "--temp", "0", "--trace", trace, *split]) == 0
    assert "trace.json: 5 runs; open it in ui.perfetto.dev" in capsys.readouterr().err
    assert main(["view", TINY, "--trace", trace, "-o", str(out), *split]) == 0
    assert '"runs":4,' in out.read_text("utf-8")
    assert main(["view", TINY, "--trace", trace, "-o", str(out)]) == 2
    assert "none of its 2 plans has the steps of this one" in capsys.readouterr().err
    assert main(["perplexity", TINY, str(tmp_path), "--trace", str(tmp_path / "no" / "such")]) == 2


@pytest.mark.long
def test_watched_values_are_reported_after_each_step_and_equal_on_three_devices(capsys):
    tables = []
    for more in ([], ["--devices", "cpu:0,cpu:1,cpu:2", "--split-mode", "tensor"]):
        words = ["run", TINY, "-p", "It is a", "-n", "2", "--temp", "0", "--exact", "--watch", r"blk\.1\.\w+$"]
        assert main([*words, *more]) == 0
        lines = capsys.readouterr().err.splitlines()[:-1]
        assert [line.split("  ")[0] for line in lines if line.startswith("token")] == ["tokens 0 to 2", "token 3"]
        tables.append([line.split() for line in lines if line.startswith("%")])
    one, three = tables
    assert len(one) > 20
    for a, b in zip(one, three, strict=True):
        assert (a[:2], a[-1]) == (b[:2], b[-1])
        tolerance, norm = 1e-5 * float(a[5]), float(a[5])
        assert [float(x) for x in b[2:6]] == pytest.approx([float(x) for x in a[2:6]], rel=1e-5, abs=tolerance), norm


@pytest.mark.long
def test_the_first_wrong_kernel_is_named_with_the_graph_around_it(capsys, monkeypatch):
    words = ["run", TINY, "-p", "It is a", "--exact", "--compare", "reference:0"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 tokens: 255 values as on reference:0; nearest to its limit is %")
    assert "\n1 token: 255 values as on reference:0" in out
    wrong = Binding(lambda call: [partial(np.multiply, call.operand(0), 0.5, out=call.out)], lambda node: 0)
    kernel = kernel_table.find_or_make_binding
    monkeypatch.setattr(kernel_table, "find_or_make_binding", lambda op: wrong if op == "sigmoid" else kernel(op))
    assert main([*words, "--devices", "numpy:0,numpy:1,numpy:2", "--split-mode", "tensor"]) == 1
    out = capsys.readouterr().out
    assert "2 tokens: the first value that reference:0 has otherwise is\n%14 = sigmoid: " in out
    assert "\n> %14 = sigmoid(%blk.0.ssm_beta)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--watch", "nobody"], "no value has 'nobody' in its name"),
        (["--compare", "nowhere:0"], "no backend for device kind 'nowhere'"),
        (["--compare", "reference:0", "--chat"], "--compare writes no text, so --chat has no meaning"),
    ],
)
def test_what_cannot_be_seen_is_one_line(words, message, capsys):
    assert main(["run", TINY, "-p", "It is", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
