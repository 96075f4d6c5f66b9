"""All reports of a plan count the same nodes and the same steps, as docs/glossary.md defines them."""

from __future__ import annotations

import json
import re

import pytest

from hocket.cli import main

from ...given.models.goldens import TINY

PLANS = ([], ["--devices", "cpu:0,cpu:1", "-sm", "layer"], ["--devices", "numpy:0,numpy:1", "-sm", "tensor"])


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.nightly(cases=2)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("words", PLANS, ids=lambda words: words[-1] if words else "none")
def test_all_reports_count_the_same_nodes_and_steps(words, capsys, tmp_path):
    report = run_command(capsys, "plan", TINY, *words)
    (nodes,) = re.findall(r"(\d+) nodes, ", report)
    lines = run_command(capsys, "dump", TINY).splitlines()
    dump = json.loads(run_command(capsys, "dump", TINY, "--format", "json"))
    assert int(nodes) == sum(line.startswith("%") for line in lines) == len(dump["nodes"])
    main(["view", TINY, *words, "-o", str(tmp_path / "plan.html")])
    assert f"{nodes} nodes, " in (tmp_path / "plan.html").read_text("utf-8")
    assert re.search(r"^stage +where +steps ", report, re.MULTILINE)
    if not words:
        (steps,) = re.findall(r"(\d+) steps on cpu:0; ", report)
        assert re.search(rf"^ +0 +cpu:0 +{steps} ", report, re.MULTILINE)
