"""What people see of a run from the command line: traces."""

from __future__ import annotations

from hocket.cli import main

from ..given.models import TINY


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
