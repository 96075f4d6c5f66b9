"""Each folder imports only rooms that `import_rules.toml` permits; circles of imports are known exceptions."""

from __future__ import annotations

import pytest

from . import imports
from .imports import ImportGraph, Rules


def make_rules(permitted: dict[str, tuple[str, ...]], *exceptions: imports.Import) -> Rules:
    return Rules(permitted, frozenset(exceptions), len(exceptions))


def build_graph(**sources: str) -> ImportGraph:
    """Return the graph of modules with their root and folders; `__` in a name stands for a dot."""
    paths = {f"{name.replace('__', '/')}.py": text for name, text in sources.items()}
    folders = {"", *("/".join(path.split("/")[:n]) + "/" for path in paths for n in range(1, path.count("/") + 1))}
    return ImportGraph.from_sources({**{f"{folder}__init__.py": "" for folder in folders}, **paths})


# ------------------------------------------------------------------------------------------------------ small graphs


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("from .. import ops", "ops"),
        ("from ..ops import norms", "ops.norms"),
        ("from ..ops import norms as n, RMS", "ops.norms"),
        ("from ..ops import RMS", "ops"),
        ("from ..ops.norms import RMS", "ops.norms"),
        ("from . import other", "graph.other"),
        ("def f():\n    from ..ops import norms", "ops.norms"),
        ("if TYPE_CHECKING:\n    from ..ops import norms", "ops.norms"),
        ("import hocket.ops.norms", "ops.norms"),
        ("from hocket.ops import norms", "ops.norms"),
    ],
)
def test_an_import_leads_to_the_module_that_it_names(line, target):
    graph = build_graph(graph__node=line, graph__other="", ops__norms="")
    assert ("graph.node", target) in graph.imports


@pytest.mark.parametrize("line", ["import os.path", "from numpy import ops", "'from ..ops import norms'"])
def test_imports_of_other_packages_and_texts_are_no_edges(line):
    assert not build_graph(graph__node=line, ops__norms="").imports


def test_an_import_of_the_own_folder_is_no_edge():
    assert not build_graph(graph__node="from . import Graph\nfrom ..graph import Node").imports


def test_a_circle_through_names_of_a_package_is_found():
    """Kernels ask `fetching` for a distance; `fetching` measures them, by `from .kernels import dense`."""
    graph = build_graph(cpu__fetching="from .kernels import dense", cpu__kernels__dense="from .. import fetching")
    folders, modules = graph.find_circles(graph.imports)
    assert folders == ["cpu.fetching", "cpu.kernels"]
    assert modules == ["cpu.fetching", "cpu.kernels.dense"]
    assert not graph.find_circles(graph.imports - {("cpu.fetching", "cpu.kernels.dense")})


def test_a_circle_of_folders_without_one_of_modules_is_found():
    graph = build_graph(a__x="from ..b import x", b__x="", b__y="from ..a import y", a__y="")
    assert graph.find_circles(graph.imports) == [["a", "b"]]


def test_a_circle_through_an_import_inside_a_function_is_found():
    graph = build_graph(a__x="from .y import f", a__y="def f():\n    from .x import g")
    assert graph.find_circles(graph.imports) == [["a.x", "a.y"]]


def test_a_folder_without_folders_is_one_room_and_others_have_a_room_for_each_module():
    graph = build_graph(ops__norms="", backends__base="", backends__cpu__words="")
    folders = {
        "ops.norms": "ops",
        "ops": "ops",
        "backends.base": "backends.base",
        "backends.cpu.words": "backends.cpu",
    }
    assert {module: graph.room_of(module) for module in folders} == folders


def test_an_import_that_no_rule_permits_is_named():
    graph = build_graph(a__x="from ..b.c import y\nfrom . import z", a__z="", b__c__y="")
    assert graph.find_forbidden(make_rules({})) == ["a.x imports b.c.y: a may not"]
    assert graph.find_forbidden(make_rules({"a": ("b",)}))
    assert not graph.find_forbidden(make_rules({"a": ("b.c",)}))
    assert not graph.find_forbidden(make_rules({"a": ("b.c.y",)}))
    assert not graph.find_forbidden(make_rules({}, ("a.x", "b.c.y")))


def test_an_update_adds_folders_and_keeps_narrower_rules():
    graph = build_graph(a__x="from ..b import y\nfrom ..c import z", b__y="", c__z="")
    rules = make_rules({"a": ("b.y", "d")})
    assert graph.update_permitted(rules) == {"a": ("b.y", "c"), "b": (), "c": ()}
    known = make_rules({"a": ()}, ("a.x", "c.z"))
    assert graph.update_permitted(known)["a"] == ("b",)


def test_a_table_of_rules_is_read_as_it_is_written():
    rules = make_rules({"a": tuple(f"folder_{n:03}" for n in range(30)), "b": ()}, ("a.x", "c.z"), ("a.x", "c.y"))
    assert imports.read_rules(imports.format_rules(rules)) == rules


# ----------------------------------------------------------------------------------------------------------- package

PRESENT_RULES = imports.read_rules(imports.IMPORT_RULES.read_text("utf-8"))


@pytest.mark.long
def test_a_folder_imports_only_what_its_rule_permits():
    assert not imports.read_package().find_forbidden(PRESENT_RULES)


def test_nothing_is_imported_in_a_circle_except_where_it_is_known():
    """Imports inside functions and for types count."""
    graph = imports.read_package()
    assert not graph.find_circles(graph.imports - PRESENT_RULES.exceptions)


@pytest.mark.long
def test_every_exception_is_needed_and_their_number_is_known():
    """Without it a circle of modules or of rooms appears; one that is no longer needed leaves the table."""
    graph = imports.read_package()
    assert not PRESENT_RULES.exceptions - graph.imports, "python tests/repository/imports.py --update"
    right = graph.imports - PRESENT_RULES.exceptions
    assert not [known for known in sorted(PRESENT_RULES.exceptions) if not graph.find_circles(right | {known})]
    assert len(PRESENT_RULES.exceptions) == PRESENT_RULES.exception_count


def test_every_folder_has_its_rule_and_every_entry_is_used():
    present = imports.read_package().update_permitted(PRESENT_RULES)
    unused = {
        folder: set(entries) - set(present.get(folder, ())) for folder, entries in PRESENT_RULES.permitted.items()
    }
    assert set(present) == set(PRESENT_RULES.permitted), "python tests/repository/imports.py --update"
    assert not {folder: entries for folder, entries in unused.items() if entries}


INDEPENDENT = {
    "scheduler.verifier": ("sharding", "planning", "lowering", "runtime"),
    "scheduler.lowering": ("sharding", "planning", "verifier", "runtime"),
    "scheduler.planning": ("runtime", "reports"),
}
"""Rooms of the scheduler that must never import these others, for any table."""


@pytest.mark.parametrize("folder", INDEPENDENT)
def test_the_verifier_lowering_and_choosing_stay_independent(folder):
    """A proof is worth something only if the verifier shares no code with the planner."""
    graph = imports.read_package()
    others = tuple(f"scheduler.{name}." for name in INDEPENDENT[folder])
    inside = {pair for pair in graph.imports if f"{pair[0]}.".startswith(f"{folder}.")}
    assert inside
    assert not [pair for pair in sorted(inside) if f"{pair[1]}.".startswith(others)]


PLANTED_IMPORTS = {
    ("scheduler.verifier.values.facts", "scheduler.planning.planner"): True,
    ("graph.node", "ops.reduction.norms"): True,
    ("graph.attrs", "graph.node"): False,
}
"""Imports that close a circle in the package, and whether the rule of the folder forbids them, too."""


@pytest.mark.parametrize("planted", PLANTED_IMPORTS, ids=lambda pair: pair[0])
def test_a_planted_import_is_found_in_the_package(planted):
    graph = imports.read_package()
    assert set(planted) <= graph.modules, "plant an import between modules that exist"
    broken = graph._replace(imports=graph.imports | {planted})
    assert bool(broken.find_forbidden(PRESENT_RULES)) == PLANTED_IMPORTS[planted]
    assert broken.find_circles(broken.imports - PRESENT_RULES.exceptions)
