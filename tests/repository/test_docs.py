"""Documentation that is generated, or that names things, stays true."""

from __future__ import annotations

import re
import runpy
import textwrap
from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu import binding
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.table import merged
from hocket.frontends import models
from hocket.frontends.models.family import Family
from hocket.frontends.session import Group, Session
from hocket.ops.page import page
from hocket.scheduler import planner

from ..given.models import ROOT, golden, limit, nmse, opened

DOCS = ROOT / "docs"


def test_the_op_reference_is_up_to_date():
    assert (DOCS / "ops.md").read_text("utf-8") == page(), "run python -m hocket.ops.page > docs/ops.md"


def test_the_list_of_modules_is_up_to_date():
    code = runpy.run_path(str(DOCS / "write_map.py"))
    assert (DOCS / "modules.md").read_text("utf-8") == code["page"](), "run python docs/write_map.py"


def test_the_list_of_commands_is_up_to_date(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no number of a machine's may show
    code = runpy.run_path(str(DOCS / "write_cli.py"))
    assert (DOCS / "cli.md").read_text("utf-8") == code["page"](), "run python docs/write_cli.py"


def test_the_list_of_architectures_is_up_to_date():
    code = runpy.run_path(str(DOCS / "write_models.py"))
    assert (DOCS / "models.md").read_text("utf-8") == code["page"](), "run python docs/write_models.py"


def test_the_worked_example_of_the_map_is_what_the_passes_make():
    """Each line of a block stands in the golden that the block names, in that order."""
    text = (DOCS / "architecture.md").read_text("utf-8")
    blocks = re.findall(r"```text (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 5
    for name, block in blocks:
        golden = iter((DOCS.parent / "tests/goldens/passes/hybrid" / name).read_text("utf-8").splitlines())
        for line in block.splitlines():
            assert any(line == written[: len(line)] for written in golden), f"{name}: {line}"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_links_of_a_page_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    assert not [t for t in targets if not (path.parent / t).exists()]


def test_the_op_of_the_guide_can_be_declared_as_it_is_written():
    code = re.search(r"```python\n(.*?)```", (DOCS / "add-an-op.md").read_text("utf-8"), re.DOTALL)[1]
    space: dict[str, object] = {}
    lines = [line.removeprefix("   ") for line in code.splitlines()]
    head = ["from hocket.ops.op import Array, op", "from hocket.ops.samples import grid", "import numpy as np"]
    exec(compile("\n".join([*head, *lines]), "add-an-op.md", "exec"), space)
    centre = space["centre"]
    assert isinstance(centre, ops.Op)
    assert centre.samples[0] == "x=f32[7]"


@pytest.mark.parametrize("threads", [1, 2])
def test_the_cpu_kernel_of_the_guide_works_as_it_is_written(threads, monkeypatch):
    text = (DOCS / "add-a-cpu-kernel.md").read_text("utf-8")
    code = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    space: dict[str, object] = {"__name__": "guide"}
    exec(compile("\n".join(code), "add-a-cpu-kernel.md", "exec"), space)
    monkeypatch.setattr(binding, "BINDINGS", merged(binding.BINDINGS, space["BINDINGS"]))
    x = hocket.input("x", (301, 77))
    graph, backend = hocket.Graph({"y": ops.leaky_relu(x, negative_slope=0.1)}), CpuBackend(threads)
    run = hocket.load(planner.plan_for(graph, [(backend, backend.device(0))]), {})
    assert run.kernels() == ["guide.leaky"]
    given = np.random.default_rng(1).standard_normal((301, 77)).astype(np.float32)
    wanted = np.where(given > 0, given, given * np.float32(0.1))
    assert np.array_equal(run.run({"x": given})["y"], wanted)


@pytest.mark.parametrize(
    "name", ["add-an-op.md", "add-a-backend.md", "add-a-cpu-kernel.md", "add-a-cuda-kernel.md", "environment.md"]
)
def test_files_that_a_page_names_exist(name):
    text = (DOCS / name).read_text("utf-8")
    root = DOCS.parent
    for path in re.findall(r"`((?:ops|tests|backends|examples|docs|scheduler)/[\w./-]+)`", text):
        assert (root / path).exists(), path


def test_the_split_mode_of_the_guide_works_as_it_is_written(monkeypatch):
    monkeypatch.setattr(planner, "SPLIT_MODES", dict(planner.SPLIT_MODES))
    code = re.findall(r"```python\n(.*?)```", (DOCS / "add-a-split.md").read_text("utf-8"), re.DOTALL)
    space: dict[str, object] = {"print": lambda *_: None}
    exec(compile("\n".join(code), "add-a-split.md", "exec"), space)
    made = space["plan"]
    assert isinstance(made, hocket.Plan)
    assert {name: str(layout) for name, layout in made.leaves.items()} == {"x": "R", "w": "S0(128|128)"}


def test_the_row_of_the_guide_gives_the_logits_of_llama_cpp_and_another_does_not(monkeypatch):
    row = re.search(r'"qwen3": (Family\(.*?\)),\n', (DOCS / "add-a-model.md").read_text("utf-8"))[1]
    written = eval(row, {"Family": Family})
    tokens, want = golden("qwen3")
    for family, is_right in ((written, True), (replace(written, qk_norm="after"), False)):
        monkeypatch.setattr(models, "ARCHITECTURES", {"qwen3": family})
        session = Session(models.load_model(opened("qwen3")), on=Group(exact=True))
        got = session.evaluate([tokens], every_position=True)[0]
        assert (nmse(got, want) <= limit("qwen3")) == is_right


def test_the_graphs_on_the_page_of_formats_are_read():
    text = (ROOT / "docs" / "formats.md").read_text("utf-8")
    (dumped,), (as_json,) = re.findall(r"```\n(%x.*?)```", text, re.S), re.findall(r"```json\n(.*?)```", text, re.S)
    for graph in (hocket.parse(dumped), hocket.from_json(as_json)):
        hocket.verify(graph)
        assert list(graph.outputs) == ["y"]
