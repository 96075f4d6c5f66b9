"""A wrong op of another package is reported by its name; all other ops are listed and checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hocket.ops import REGISTRY

from ..given.models.goldens import ROOT

MODULE = """
from hocket.ops import op
from hocket.ops.declaration.scalar import Scalar


@op("x[...] -> [...]", samples=("x=f32[2,3]",))
def fine_op(x):
    return x + 1


@op("x[...] -> [...]", samples=("x=f32[2,3", ))
def unreadable_sample(x):
    return x


@op("x[...] -> [...]", samples=("y=f32[2,3]",))
def unknown_operand(x):
    return x


@op("x[..., 2] -> [...]", samples=("x=f32[2,3]",))
def illegal_sample(x):
    return x.sum(-1)


@op("x[...] -> [...]", samples="x=f32[2,3]")
def text_as_samples(x):
    return x


@op("x[...] -> [...]", samples=(5,))
def number_as_sample(x):
    return x


@op("x[...] -> [...]", samples=("x=f32[2]",), check=lambda **_: {}["missing"])
def raising_check(x):
    return x


@op("x[...] -> [...]", samples=("x=f32[2]",), inplace=lambda attrs: 1 / 0)
def raising_rule(x):
    return x


@op("x[...] -> [...]", samples=("x=f32[2]",))
def wrong_scalar(x: Scalar) -> Scalar:
    return 1.5


not_an_op = 7
"""
FAULTS = {
    "unreadable_sample": "sample 'x=f32[2,3'",
    "unknown_operand": "no operand or attribute y",
    "illegal_sample": "it must be 2",
    "text_as_samples": "sample 'x'",
    "number_as_sample": "sample 5",
    "raising_check": "KeyError: 'missing'",
    "raising_rule": "ZeroDivisionError",
    "wrong_scalar": "must be a Scalar of its operands, but is 1.5",
    "not_an_op": "op is 7",
    "absent_attribute": "AttributeError",
    "absent_module": "No module named",
    "broken_module": "ValueError: first second",
}
"""For each wrong op a part of its message."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with an installed package of one right op and several wrong ones."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "faulty_ops.py").write_text(MODULE, "utf-8")
    (folder / "faulty_module.py").write_text('raise ValueError("first\\nsecond")\n', "utf-8")
    info = folder / "faulty_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-ops\nVersion: 1.0\n", "utf-8")
    places = {"absent_module": "faulty_nothing:f", "broken_module": "faulty_module:f"}
    entries = [f"{name} = {places.get(name, f'faulty_ops:{name}')}\n" for name in (*FAULTS, "fine_op")]
    (info / "entry_points.txt").write_text("[hocket.ops]\n" + "".join(entries), "utf-8")
    return folder


def run(site, *arguments):
    """Run a command of hocket with the package installed."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT.parent)


@pytest.mark.long
def test_the_list_of_ops_has_a_row_for_every_op_and_names_each_wrong_one(site):
    done = run(site, "-m", "hocket", "ops", "--format", "json")
    assert done.returncode == 1, done.stderr
    rows = {row["op"]: row for row in json.loads(done.stdout)}
    assert rows["add"]["support"]["numpy"] == rows["fine_op"]["support"]["reference"] == "all"
    assert set(rows) == {*REGISTRY, "fine_op", *FAULTS}
    for name in REGISTRY:
        assert rows[name]["support"]["cpu"].startswith("all"), name
        assert rows[name]["support"]["reference"] == "all", name
    assert (rows["sin"]["support"]["cpu"], rows["ssm_scan"]["support"]["cpu"]) == ("all (NumPy)", "all")
    assert {rows[name]["tier"] for name in REGISTRY} == {"MUST", "SHOULD"}
    lines = done.stderr.splitlines()
    assert len(lines) == len(FAULTS)
    for name, problem in FAULTS.items():
        assert any(line.startswith("hocket ops: ") and name in line and problem in line for line in lines), name
        assert problem in rows[name]["fault"]
    assert not {name for name, row in rows.items() if "fault" in row} - set(FAULTS)


@pytest.mark.long
def test_the_kit_checks_the_right_op_and_each_wrong_one_is_one_failure(site):
    pattern = "|".join((*FAULTS, "fine_op"))
    done = run(site, "-m", "hocket", "check", "--backend", "reference", "--op", pattern, "--json", "-")
    assert done.returncode == 1, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["outcome"] for r in results if r["op"] == "fine_op"} == {"pass"}
    for name, problem in FAULTS.items():
        (result,) = (r for r in results if r["op"] == name)
        assert result["outcome"] == "fail"
        assert problem in result["why"], result


@pytest.mark.long
@pytest.mark.parametrize("name", ["unreadable_sample", "not_an_op", "broken_module"])
def test_only_the_use_of_a_wrong_op_fails(site, name):
    program = (
        "import hocket\n"
        "hocket.ops.fine_op(hocket.input('x', (2,)))\n"
        f"try: hocket.ops.{name}(hocket.input('x', (2,)))\n"
        "except hocket.HocketError as why: print(why)"
    )
    done = run(site, "-c", program)
    assert done.returncode == 0, done.stderr
    if name == "unreadable_sample":  # samples are for the kit
        assert not done.stdout
    else:
        assert FAULTS[name] in done.stdout
        assert done.stdout.count("\n") == 1
