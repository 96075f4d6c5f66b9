"""Rules for the repository as a whole: the cost of an import, and texts and calls that no file contains."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from enum import Enum

import pytest

import hocket

from .files import ROOT, list_files, list_sources, parse_matching

LINES = 450


def text_files() -> list[tuple[str, str]]:
    """Name and text of every file that is UTF-8."""
    lines = []
    for path in list_files():
        data = path.read_bytes()
        if b"\0" not in data:
            lines.append((path.relative_to(ROOT).as_posix(), data.decode("utf-8")))
    return lines


# ------------------------------------------------------------------------------------------------------- imports


def test_inside_the_package_imports_are_relative():
    for path, tree in parse_matching(r"^\s*(from|import)\s.*\bhocket\b", list_sources()):
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.split(".")[0] == "hocket"], path


def test_every_package_is_listed_and_has_an_init_file():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.relative_to(ROOT).parent for path in list_sources()}
    assert {".".join(("hocket", *folder.parts)) for folder in folders} == set(listed)
    assert not [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]


def test_files_that_tests_share_have_their_own_folder():
    """A test module imports from no other."""
    for path, tree in parse_matching(r"^\s*from\s.*\btest_", sorted((ROOT / "tests").rglob("*.py"))):
        modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not [m for m in modules if m.rpartition(".")[2].startswith("test_")], path


HEAVY = (
    "numba",
    "llvmlite",
    "networkx",
    "tokenizers",
    "jinja2",
    "gguf",
    "cupy",
    "mpi4py",
    "tqdm",
    "prompt_toolkit",
    "pytest",
)


def fresh(code: str) -> str:
    """Return the output of `code` in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent).stdout


def test_importing_hocket_loads_no_heavy_module():
    loaded = fresh(f"import sys, hocket; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_importing_hocket_loads_little_more_than_numpy():
    """Check the modules of hocket and of the standard library; `python -X importtime` prints their cost."""
    names = fresh("import sys, numpy; n = set(sys.modules); import hocket; print(*(set(sys.modules) - n))").split()
    ours = [name for name in names if name.startswith("hocket")]
    assert len(ours) <= 60, ours
    assert len(names) - len(ours) <= 15, names


# -------------------------------------------------------------------------------------------------------- content

# Spelled apart, so that this file obeys its own rule.
FOLDERS = "|".join(("wo" + "rk", "ho" + "me", "Us" + "ers", "tm" + "p", "ro" + "ot", "mn" + "t", "va" + "r"))
MACHINE_PATH = re.compile(rf"(?<![\w.~<>*}}\-/])/(?:{FOLDERS})/[\w.]|(?<![\w/])[A-Za-z]:[\\/]{{1,2}}[A-Z]\w+[\\/]")
REGISTRY = re.compile("|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "index" + "-url", "art" + "ifactory")))


@pytest.mark.long
@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["path", "registry"])
def test_no_file_names_a_path_of_a_machine_or_a_package_registry(pattern):
    wrong = [f"{name}: {found[0]}" for name, text in text_files() for found in [pattern.search(text)] if found]
    assert not wrong


def test_the_pattern_of_paths_finds_paths_and_nothing_else():
    slash = "/"
    for path in (f"{slash}wo" + "rk/x", f'"{slash}ho' + 'me/me"', "C:" + r"\Data\x", f"={slash}Us" + "ers/a"):
        assert MACHINE_PATH.search(path), path
    for text in ("https://x.org/home/a", f"a{slash}tm" + "p/b", "f32[/..., n]", "`~/home/x`", "blk:/a", "x = a /work"):
        assert not MACHINE_PATH.search(text), text


def test_no_code_of_the_package_runs_text_or_unpickles():
    words = "eval|exec|__import__|allow_pickle|pickle|cPickle|dill|marshal|shelve"
    for path, tree in parse_matching(rf"\b({words})\b", list_sources()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cPickle", "dill", "marshal", "shelve"} & {m.split(".")[0] for m in modules}, path


WRITERS = {
    "graph/storage/files.py": {"open", "os.fdopen", "os.link", "os.open", "os.replace"},
    "cli.py": {"os.open"},  # /dev/null in place of a closed stdout.
    "frontends/terminal/rank_command.py": {"open"},  # /dev/null in place of a terminal.
    "frontends/terminal/chat_loop.py": {"file.open"},  # Messages are appended by prompt_toolkit.
    "frontends/commands/embed.py": {"np.save"},  # It writes to memory.
    "backends/cupy/device/disassembly.py": {"file.write_bytes"},  # It writes for nvdisasm, in a temporary folder.
    "backends/cupy/emulation/compile_host.py": {"open", ".touch"},  # A lock.
}
"""Calls that write or rename files: of the one module for it, and of others for the reasons given."""
WRITING = re.compile(
    r".*\.(write_text|write_bytes|touch|tofile|symlink_to|hardlink_to)|os\.(replace|renames?|link|symlink|open)|"
    r"np\.(savez?|savez_compressed|savetxt|memmap)|shutil\.(copy\w*|move)|(tempfile\.)?(\w*TemporaryFile|mkstemp)"
)
OPENING = re.compile(r"(.*\.)?(open|fdopen|ZipFile|GzipFile|TarFile|FileIO)")


POSSIBLY_WRITING = (
    r"write_(text|bytes)|touch\(|tofile|(sym|hard)link_to|os\.|np\.(save|memmap)|shutil|TemporaryFile|mkstemp|"
    r"\b(fd)?open\(|(Zip|Gzip|Tar)File|FileIO"
)
"""A pattern that every source with a result of `writing_calls` matches."""


def writing_calls(tree: ast.Module) -> set[str]:
    """The calls of a source that write or rename files, except those for files of `replacing`."""
    items = [i for node in ast.walk(tree) if isinstance(node, ast.With) for i in node.items if i.optional_vars]
    safe = {ast.unparse(i.optional_vars) for i in items if ast.unparse(i.context_expr).startswith("replacing(")}
    found = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        arguments = [*call.args, *(k.value for k in call.keywords)]
        modes = [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        name = re.sub(r"^\(.*\)(?=\.\w+$)", "", ast.unparse(call.func))
        opens = OPENING.fullmatch(name) and any(re.fullmatch(r"(?=.*[wax+])[rwaxbt+]{1,3}", mode) for mode in modes)
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        if (opens or WRITING.fullmatch(name)) and not safe & set(map(ast.unparse, (*arguments, *owner))):
            found.add(name)
    return found


@pytest.mark.parametrize("call", ["open(p, 'w')", "p.open(mode='xb')", "gzip.open(p, 'wt')", "np.savez(p)"])
def test_a_call_that_writes_a_file_is_seen(call):
    assert re.search(POSSIBLY_WRITING, call)
    assert writing_calls(ast.parse(call))
    others = "with replacing(path) as p:\n    np.savez(p)\nopen(q, 'rb')\nnp.replace('w', 'x')"
    assert not writing_calls(ast.parse(others))


@pytest.mark.long
def test_one_module_writes_files():
    """It replaces plain files alone, follows links, and leaves no half of a file."""
    trees = parse_matching(POSSIBLY_WRITING, list_sources())
    found = {path.relative_to(ROOT).as_posix(): writing_calls(tree) for path, tree in trees}
    assert {name: calls for name, calls in found.items() if calls and name.split("/")[0] != "tools"} == WRITERS


def test_a_file_is_named_for_what_it_holds():
    vague = {"manager", "helper", "helpers", "utils", "util", "ctx", "info", "misc", "common"}
    names = {p: set(re.split(r"[\W_]+", p.relative_to(ROOT).as_posix().lower())) for p in list_files()}
    assert not [str(p) for p, words in names.items() if words & vague]


def test_no_python_file_is_longer_than_its_idea():
    long = {str(p.relative_to(ROOT)): p.read_text("utf-8").count("\n") for p in list_files() if p.suffix == ".py"}
    assert not {name: lines for name, lines in long.items() if lines > LINES}


@pytest.mark.long
def test_every_module_of_the_package_says_what_it_is():
    """A docstring, unless the file is empty."""
    assert not [p for p in list_sources() if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_bytes()))]


@pytest.mark.long
def test_what_is_needed_at_run_time_is_declared():
    """Every top-level import of the package is of the standard library, of ours, or of a dependency or extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *extras["cuda12"],
        *extras["mpi"],
        *extras["torch"],
        *extras["onnx"],
        *extras["test"],
        *extras["grammar"],
    ]
    declared = {re.match(r"[\w-]+", t)[0].lower() for t in texts}  # type: ignore[index]
    declared = {"cupy" if d.startswith("cupy") else d for d in declared} | {
        "llvmlite",
        "google",
    }  # numba's compiler, protobuf
    used = set()
    for path in list_sources():
        for node in ast.walk(ast.parse(path.read_bytes())):
            used |= {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            used |= {node.module or ""} if isinstance(node, ast.ImportFrom) and not node.level else set()
    assert {u.split(".")[0] for u in used} - sys.stdlib_module_names - {"hocket"} <= declared


def test_the_installed_package_is_this_one():
    assert (
        importlib.metadata.version("hocket")
        == tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    )


def test_attributes_of_public_classes_say_their_types():
    """Check that attributes have declared types: pyright cannot infer untyped assignments of `__init__`, nor
    their users.
    """
    packages = (hocket, hocket.scheduler)
    public = {f for room in packages for n in dir(room) if isinstance(f := getattr(room, n), type) and _is_ours(f)}
    assert {hocket.Executor, hocket.Store} <= public
    untold = []
    for kind in public:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        declared = {ast.unparse(n.target).removeprefix("self.") for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)}
        for target in (t for line in ast.walk(tree) if isinstance(line, ast.Assign) for t in line.targets):
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self" and one.attr[0] != "_":
                    untold += [f"{kind.__name__}.{one.attr}"] if one.attr not in declared else []
    assert not untold


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("hocket.") and not issubclass(kind, Enum)


# ----------------------------------------------------------------------------------------------------------- clocks

CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}


def reads_clock(node: ast.AST, known: set[str]) -> bool:
    """Return whether an expression reads a clock, or a name with the result of one."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name) | ast.Name(id=name)) if (
                name in CLOCKS
            ):
                return True
            case ast.Name(id=name) if name in known:
                return True
    return False


def timed_asserts(tree: ast.Module) -> list[int]:
    """The lines of assertions about seconds: a clock is asked in them, or for a name in them."""
    lines = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            known: set[str] = set()
            for node in ast.walk(function):  # breadth first: in the order of lines, except for blocks
                if isinstance(node, ast.Assign) and reads_clock(node.value, known):
                    known |= {n.id for n in ast.walk(ast.Tuple(node.targets)) if isinstance(n, ast.Name)}
            lines += [n.lineno for n in ast.walk(function) if isinstance(n, ast.Assert) and reads_clock(n.test, known)]
    return lines


@pytest.mark.parametrize(
    "line", ["assert time.monotonic() - start < 5", "spent = perf_counter()\n    assert spent < 5"]
)
def test_an_assertion_about_seconds_is_seen(line):
    assert timed_asserts(ast.parse(f"def test():\n    {line}\n"))
    assert not timed_asserts(ast.parse("def test():\n    while time.time() < 5:\n        assert calls < 5\n"))


def test_no_test_asserts_how_many_seconds_something_takes():
    """They depend on the host: count calls (``given/calls.py``), or measure in ``benchmarks``."""
    tests = [p for p in list_files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("tests", "conformance")]
    trees = parse_matching(rf"\b({'|'.join(CLOCKS)})\(", tests)
    assert not {path: lines for path, tree in trees for lines in [timed_asserts(tree)] if lines}


LEFT_TO_NIGHTLY = {
    "test_the_quick_tests_of_llama_server_have_the_expected_outcomes",
    "test_a_killed_rank_ends_all_with_one_line",
}
"""Test functions without a case in `.ci/run`. They need a checkout of llama.cpp, and MPI."""


def test_every_function_has_a_case_in_each_run_on_a_change():
    """The run without ``--all`` leaves long functions out, so the run on a change must try them all."""
    tests = [path for path in list_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "tests"]
    left_out = {
        node.name
        for _, tree in parse_matching(r"nightly\(cases=0\)", tests)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "pytest.mark.nightly(cases=0)" for decorator in node.decorator_list)
    }
    assert left_out == LEFT_TO_NIGHTLY


def test_no_result_names_a_file_of_the_machine_it_was_measured_on():
    results = {name: text for name, text in text_files() if name.startswith("benchmarks/results/")}
    assert results
    named = r"(?<![\w.)])/(?:opt|home|root|tmp|work|Users)/\S+"
    assert not {name: re.findall(named, text) for name, text in results.items() if re.search(named, text)}
