"""Documentation that is generated, or that names things, stays true."""

from __future__ import annotations

import importlib
import re
import runpy
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import program_binding
from hocket.backends.kernel_tables import merge_disjoint_tables
from hocket.backends.numpy import kernel_table
from hocket.backends.numpy.backend import NumpyBackend
from hocket.conformance import parse_case, run_case
from hocket.frontends import models
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models.inputs.family import FamilyTraits
from hocket.frontends.run_config import RUN_OPTIONS
from hocket.ops.page import build_op_reference
from hocket.scheduler import SPLIT_MODE_NAMES
from hocket.scheduler.planning import planner

from ..given.models.goldens import ROOT, allowed_nmse, golden, nmse, open_fixture
from ..repository.files import list_files

DOCS = ROOT / "docs"


def test_the_op_reference_is_up_to_date():
    assert (DOCS / "ops.md").read_text("utf-8") == build_op_reference(), "run python -m hocket.ops.page > docs/ops.md"


@pytest.mark.parametrize("path", sorted(DOCS.glob("write_*.py")), ids=lambda p: p.stem)
def test_a_page_that_is_written_from_the_code_is_up_to_date(path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no number of a machine's may show
    writer = runpy.run_path(str(path))
    written = writer["pages"]() if "pages" in writer else {writer["PAGE"]: writer["page"]()}
    assert written
    for page_path, text in written.items():
        assert page_path.read_text("utf-8") == text, f"run python docs/{path.name}"


def test_a_page_with_another_text_than_the_stored_fact_is_found():
    insert_facts = runpy.run_path(str(DOCS / "write_facts.py"))["insert_facts"]
    page = "on <!--fact:gpus-->one\nH100<!--/fact-->."
    assert insert_facts(page, {"gpus": "one H100"}) == page
    assert insert_facts(page, {"gpus": "two H100"}) == "on <!--fact:gpus-->two H100<!--/fact-->."
    with pytest.raises(KeyError):
        insert_facts(page, {})


def test_docstrings_and_help_state_how_equal_devices_are():
    facts = runpy.run_path(str(DOCS / "write_facts.py"))["STORED_FACTS"]
    texts = [str(hocket.Model.__doc__), str(DeviceGroup.__doc__), RUN_OPTIONS["exact"].help]
    for name in ("equality", "equality-exact"):
        assert all(facts[name]["text"] in " ".join(text.split()) for text in texts), name


@pytest.mark.parametrize("package", ["hocket", "hocket.scheduler"])
def test_the_stub_of_a_package_has_the_names_of_its_table(package):
    writer = runpy.run_path(str(DOCS / "write_stubs.py"))
    text = writer["PACKAGES"][package].read_text("utf-8")
    assert text == writer["build_stub"](package), "run python docs/write_stubs.py"
    exports = re.findall(r"^from \S+ import (\w+) as \1$", text, re.MULTILINE)
    module = importlib.import_module(package)
    assert {*module.LAZY_NAMES} <= {*exports}
    assert all(getattr(module, name) is not None for name in exports)


def test_everything_public_is_on_the_page_of_python():
    headings = re.findall(r"^### `hocket\.(\w+)`$", (DOCS / "python.md").read_text("utf-8"), re.MULTILINE)
    names = {name for name in dir(hocket) if not name.startswith("_")}  # before a name brings its module with it
    assert {*headings} == {name for name in names if not isinstance(getattr(hocket, name), ModuleType)}


def test_the_worked_example_of_the_map_is_what_the_passes_make():
    """Each line of a block stands in the golden that the block names, in that order."""
    text = (DOCS / "architecture.md").read_text("utf-8")
    blocks = re.findall(r'```text title="(\S+)"\n(.*?)```', text, re.DOTALL)
    assert len(blocks) > 5
    for name, block in blocks:
        golden = iter((DOCS.parent / "tests/goldens/passes/hybrid" / name).read_text("utf-8").splitlines())
        for line in block.splitlines():
            assert any(line == written[: len(line)] for written in golden), f"{name}: {line}"


KINDS_OF_CHANGES = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
AREAS = {"chat", "command line", "conformance", "CPU", "CUDA", "embeddings", "files", "generation", "GGUF", "grammars"}
AREAS |= {"docs", "graphs", "ONNX", "planner", "Python", "PyTorch", "ranks", "serving", "view"}


def test_changes_since_the_last_version_have_a_kind_an_area_and_one_sentence():
    """The form of Keep a Changelog; a kind without changes says `Nothing.`"""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (version, newest), *_ = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    assert re.match(r"Unreleased|\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d$", version)
    sections = re.findall(r"^### (.*)\n\n((?:(?!### ).*\n)*)", newest, re.MULTILINE)
    assert [kind for kind, _ in sections] == KINDS_OF_CHANGES
    for _, section in sections:
        entries = [" ".join(entry.split()) for entry in re.split(r"^- ", section, flags=re.MULTILINE)]
        assert entries == ["Nothing."] or (not entries.pop(0) and entries)
        for entry in entries[entries == ["Nothing."] :]:
            match = re.fullmatch(r"([\w ]+): [A-Z`[](?:[^.]|\.(?! [A-Z]))*\.", entry)
            assert match, entry
            assert match[1] in AREAS, entry


PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/*/*.md"), *ROOT.glob("examples/*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(path):
    for target, anchor in LINK.findall(without_code(path)):
        place = path.parent / target if target else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def without_code(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the link targets of a page: the anchors of its headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_op_of_the_guide_can_be_declared_as_it_is_written():
    centre = run_guide("add-an-op.md")["centre"]
    assert isinstance(centre, ops.Op)
    assert centre.samples[0] == "x=f32[7]"
    assert run_guide("add-an-op.md")["share"].expression.format({}) == "x / row_sum(x)"


def test_an_op_of_the_guide_runs_where_the_guide_says(monkeypatch):
    """Without a kernel an op runs on `numpy` and `cpu`; `cuda` refuses it, except on a device list with `cpu`."""
    page = " ".join((DOCS / "add-an-op.md").read_text("utf-8").split())
    rows = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2
    expected = {"centre": rows - rows.mean(-1, keepdims=True), "share": rows / rows.sum(-1, keepdims=True)}
    for name, result in expected.items():
        monkeypatch.setitem(ops.REGISTRY._ops, name, run_guide("add-an-op.md")[name])
        graph = hocket.Graph({"y": ops.REGISTRY[name](hocket.input("x", rows.shape))})
        for devices in ("numpy:0", "cpu:0", "cuda-emulated:0,cpu:0"):
            np.testing.assert_allclose(hocket.run(graph, {"x": rows}, devices=devices)["y"], result, rtol=1e-5)
        with pytest.raises(hocket.HocketError, match=f"backends/cupy has no kernel for {name}$"):
            hocket.plan(graph, "cuda-emulated:0")
    assert "`backends/cupy has no kernel for centre`" in page


def run_guide(name: str) -> dict[str, Any]:
    """Run the Python blocks of a guide, and return the names that they define."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text("utf-8"), re.DOTALL)
    head = [
        "from hocket.ops.declaration.op import Array, op",
        "from hocket.ops.declaration.samples import expand_template",
        "import numpy as np",
    ]
    space: dict[str, Any] = {"__name__": "guide"}
    exec(compile("\n".join([*head, *map(textwrap.dedent, code)]), name, "exec"), space)
    return space


def test_the_numpy_kernel_of_the_guide_passes_the_kit(monkeypatch):
    (kernel,) = run_guide("add-an-op.md")["KERNELS"].values()
    monkeypatch.setattr(kernel_table, "BUILTIN_KERNELS", {"leaky_relu": kernel})
    monkeypatch.setattr(kernel_table, "find_or_make_binding", kernel_table.find_or_make_binding.__wrapped__)
    backend = NumpyBackend()
    cases = [parse_case(f"leaky_relu(x={x}, negative_slope={slope})") for x in LEAKY_OPERANDS for slope in (0.1, 2.0)]
    results = [run_case(case, backend, backend.device(0)) for case in cases]
    assert [result.outcome for result in results] == ["pass"] * len(cases), results


LEAKY_OPERANDS = ("f32[7]", "f32[3,64]", "f16[2,5]", "f32[0,5]")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_cpu_kernel_of_the_guide_works_as_it_is_written(threads, monkeypatch):
    text = (DOCS / "add-a-cpu-kernel.md").read_text("utf-8")
    code = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    space: dict[str, object] = {"__name__": "guide"}
    exec(compile("\n".join(code), "add-a-cpu-kernel.md", "exec"), space)
    others = {name: bind for name, bind in program_binding.BINDINGS.items() if name not in space["BINDINGS"]}
    monkeypatch.setattr(program_binding, "BINDINGS", merge_disjoint_tables(others, space["BINDINGS"]))
    x = hocket.input("x", (301, 77))
    graph, backend = hocket.Graph({"y": ops.leaky_relu(x, negative_slope=0.1)}), CpuBackend(threads)
    run = hocket.load(planner.plan_for_group(graph, [(backend, backend.device(0))]), {})
    assert run.list_kernel_names() == ["guide.leaky"]
    array = np.random.default_rng(1).standard_normal((301, 77)).astype(np.float32)
    expected = np.where(array > 0, array, array * np.float32(0.1))
    assert np.array_equal(run.run({"x": array})["y"], expected)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(path):
    assert not list_missing_paths(path.read_text("utf-8"))


def test_a_path_that_does_not_exist_is_found():
    page = "`graph/graph.py`, `runtime/store.py`, `registry.py`, `ops.matmul`, `GB/s`, `NAME.toml`, `kernels/`, "
    assert list_missing_paths(page + "`running/store.py`, `kept.py`, `scheduler/gone/`") == [
        "running/store.py",
        "kept.py",
        "scheduler/gone/",
    ]


def list_missing_paths(page: str) -> list[str]:
    """List the paths in backquotes that end no path of the repository; a path begins with a folder or is a module."""
    known, folders = list_path_ends()
    named = re.findall(r"(?<=`)(?:[\w.-]+/)+[\w.-]*(?=`)|(?<=`)\w+\.py(?=`)", page)
    candidates = [name for name in named if "NAME" not in name and name not in OTHER_PATHS]
    return [
        name
        for name in candidates
        if not {name.strip("/"), f"{name}.py"} & known
        and (name.endswith(".py") or name.strip("/").partition("/")[0] in folders or name.strip("/").count("/") > 1)
    ]


OTHER_PATHS = {
    *("docs/multi-gpu.md", "docs/runtime.md", "docs/developer/"),  # llama.cpp, tinygrad
    *("tools/server/tests", "models/templates"),  # llama.cpp
    *("family.py", ".build/editable", "speeds/speeds.json"),  # made by a reader
}


@cache
def list_path_ends() -> tuple[set[str], set[str]]:
    """Return the ends of all paths of files and folders of the repository, and the names of its folders."""
    wholes = {path.relative_to(ROOT) for path in list_files()}
    folders = {folder for path in wholes for folder in path.parents if folder.name}
    ends = {"/".join(path.parts[i:]) for path in wholes | folders for i in range(len(path.parts))}
    return ends, {folder.name for folder in folders}


def test_the_split_mode_of_the_guide_works_as_it_is_written(monkeypatch):
    assert tuple(planner.SPLIT_MODES) == SPLIT_MODE_NAMES
    monkeypatch.setattr(planner, "SPLIT_MODES", dict(planner.SPLIT_MODES))
    code = re.findall(r"```python\n(.*?)```", (DOCS / "add-a-split.md").read_text("utf-8"), re.DOTALL)
    space: dict[str, object] = {"print": lambda *_: None}
    exec(compile("\n".join(code), "add-a-split.md", "exec"), space)
    new_plan = space["plan"]
    assert isinstance(new_plan, hocket.Plan)
    assert {name: str(layout) for name, layout in new_plan.leaves.items()} == {"x": "R", "w": "S0(128|128)"}


def test_the_row_of_the_guide_gives_the_logits_of_llama_cpp_and_another_does_not(monkeypatch):
    row = re.search(r'"qwen3": (FamilyTraits\(.*?\)),\n', (DOCS / "add-a-model.md").read_text("utf-8"))[1]
    written = eval(row, {"FamilyTraits": FamilyTraits})
    tokens, want = golden("qwen3")
    for family, is_right in ((written, True), (replace(written, qk_norm="after"), False)):
        monkeypatch.setattr(models, "ARCHITECTURES", {"qwen3": family})
        session = Session(models.load_model(open_fixture("qwen3")), on=DeviceGroup(exact=True))
        got = session.evaluate([tokens], every_position=True)[0]
        assert (nmse(got, want) <= allowed_nmse("qwen3")) == is_right


def test_the_site_shows_a_pipe_in_the_code_of_a_table_without_a_backslash():
    code = (DOCS / "site.py").read_text("utf-8").replace("from mkdocs.structure.files import File, Files\n", "")
    space: dict[str, Any] = {"__name__": "site_hooks", "__file__": str(DOCS / "site.py")}
    exec(compile(code, "site.py", "exec"), space)
    assert space["keep_pipes_in_tables"](r"| `S0(1\|2)` | `x` |") == "| <code>S0(1&#124;2)</code> | `x` |"
    assert space["keep_pipes_in_tables"](r"text `a\|b`") == r"text `a\|b`"


def test_the_graphs_on_the_page_of_formats_are_read():
    text = (ROOT / "docs" / "formats.md").read_text("utf-8")
    (dumped,), (as_json,) = re.findall(r"```\n(%x.*?)```", text, re.S), re.findall(r"```json\n(.*?)```", text, re.S)
    for graph in (hocket.parse(dumped), hocket.from_json(as_json)):
        hocket.verify(graph)
        assert list(graph.outputs) == ["y"]
