"""The definitions that a table renames, and the types of expressions that mypy infers."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mypy import build, nodes, types
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list
from mypy.options import Options

ROOT = Path(__file__).resolve().parents[2] / ".build" / "editable" / "hocket"
Span = tuple[int, int, int, int]
SKIPPED = ("torch", "transformers", "onnx", "sympy", "scipy", "selenium", "google", "mpi4py", "llguidance", "numba",
           "torchvision", "mkdocs", "cupy", "viztracer", "llvmlite", "gguf", "tokenizers", "networkx", "jinja2",
           "setuptools", "ml_dtypes")  # fmt: skip
"""Libraries that mypy does not read: their types are not needed, and take minutes."""


@dataclass(frozen=True)
class Row:
    """One row of the table: a definition, by its module and its qualified name, and its new last part."""

    kind: str
    module: str
    old: str
    new: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.old}"

    @property
    def new_part(self) -> str:
        return self.new.rpartition(".")[2]


@dataclass(frozen=True)
class Edit:
    """Replace `old` at a position (line from 1, column in characters from 0) by `new`."""

    line: int
    column: int
    old: str
    new: str


def read_table(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text().splitlines()[1:]:
        kind, file, old, new = line.split("\t")[:4]
        rows.append(Row(kind, module_of(file), old, new))
    return rows


def read_hints(path: Path) -> list[tuple[re.Pattern[str], str]]:
    """Rows ``pattern of "module receiver"``, ``full name of a class``, separated by tabs."""
    if not path.exists():
        return []
    rows = (line.split("\t") for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return [(re.compile(pattern), class_name) for pattern, class_name in rows]


def module_of(file: str) -> str:
    parts = ["hocket", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def build_types(root: Path, config: str) -> build.BuildResult:
    options = Options()
    parse_config_file(options, lambda: None, config)
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.namespace_packages = options.explicit_package_bases = True
    options.incremental = False
    options.mypy_path = [str(root.parent)]
    options.exclude = [r"\.build/", r"docs/site"]
    os.chdir(root.parent)
    return build.build(create_source_list([root.name], options), options)


NOT_CHILDREN = {
    "node", "info", "type", "names", "mro", "def_info", "original_def", "var", "analyzed", "type_annotation",
    "unanalyzed_type", "typeddict_type", "tuple_type", "definition", "alias_tvars", "plugin_deps", "imports",
}  # fmt: skip
"""Attributes of a node of mypy that refer to other trees, or to types."""


def expressions_by_span(tree: nodes.MypyFile) -> dict[Span, list[nodes.Expression]]:
    """The expressions of a module by their span."""
    found: dict[Span, list[nodes.Expression]] = defaultdict(list)
    seen: set[int] = set()
    stack: list[Any] = list(tree.defs)
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        if not isinstance(item, nodes.Node) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nodes.Expression) and item.end_line is not None and item.end_column is not None:
            found[item.line, item.column, item.end_line, item.end_column].append(item)
        for attr in attributes_of(type(item)):
            value = getattr(item, attr, None)
            if isinstance(value, nodes.Node | list | tuple | dict):
                stack.append(value)
    return found


@functools.cache
def attributes_of(kind: type) -> tuple[str, ...]:
    names = {name for base in kind.__mro__ for name in getattr(base, "__mypyc_attrs__", ())}
    return tuple(sorted(names - NOT_CHILDREN))


def span(node: ast.expr) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


class Renamer:
    """All sources, their types and the renames."""

    def __init__(
        self, root: Path, result: build.BuildResult, rows: Iterable[Row], hints: Iterable[tuple[re.Pattern[str], str]]
    ) -> None:
        self.root, self.result, self.hints = root, result, tuple(hints)
        self.globals: dict[str, str] = {}
        self.members: dict[tuple[str, str], str] = {}
        self.accepted_guesses: frozenset[str] = frozenset()
        self.missing: list[Row] = []
        for row in rows:
            owner, _, name = row.old.rpartition(".")
            tree = result.files.get(row.module)
            if tree is None:
                self.missing.append(row)
            elif not owner:
                if name in tree.names:
                    self.globals[row.full_name] = row.new_part
                else:
                    self.missing.append(row)
            else:
                info = self.find_class(row.module, owner)
                if info is not None and name in info.names:
                    if name != row.new_part:
                        self.members[info.fullname, name] = row.new_part
                else:
                    self.missing.append(row)
        self.globals = {name: new for name, new in self.globals.items() if name.rpartition(".")[2] != new}
        self.problems: list[str] = []
        self.untyped: list[str] = []
        self.classes = list(self.all_classes())
        self.spread_to_overrides()
        self.new_by_attr: dict[str, set[str | None]] = defaultdict(set)
        for info in self.classes:
            for name in info.names:
                self.new_by_attr[name].add(self.members.get((info.fullname, name)))

    def find_class(self, module: str, qualified: str) -> nodes.TypeInfo | None:
        table = self.result.files[module].names
        info: nodes.TypeInfo | None = None
        for part in qualified.split("."):
            symbol = table.get(part)
            if symbol is None or not isinstance(symbol.node, nodes.TypeInfo):
                return None
            info = symbol.node
            table = info.names
        return info

    def all_classes(self) -> Iterator[nodes.TypeInfo]:
        for tree in self.result.files.values():
            if tree.fullname.partition(".")[0] == "hocket":
                for _, symbol, _owner in tree.local_definitions():
                    if isinstance(symbol.node, nodes.TypeInfo):
                        yield symbol.node

    def spread_to_overrides(self) -> None:
        """A member of a subclass that overrides a renamed one, and a base member that a renamed one overrides."""
        changed = True
        while changed:
            changed = False
            for info in self.classes:
                bases = [base for base in info.mro[1:] if base.fullname.startswith("hocket.")]
                for name in info.names:
                    own = self.members.get((info.fullname, name))
                    for base in bases:
                        if name not in base.names:
                            continue
                        inherited = self.members.get((base.fullname, name))
                        if inherited and not own:
                            own = self.members[info.fullname, name] = inherited
                            changed = True
                        elif own and not inherited:
                            self.members[base.fullname, name] = own
                            changed = True
                        elif own != inherited and own and inherited:
                            self.problems.append(
                                f"{info.fullname}.{name}: becomes {own}, but {base.fullname}.{name} {inherited}"
                            )
                            own = self.members[info.fullname, name] = inherited
            for info in self.classes:
                if not info.is_protocol:
                    continue
                required = set(info.protocol_members)
                for other in self.classes:
                    if other is info or other.is_protocol or not required <= set(names_with_bases(other)):
                        continue
                    for name in required:
                        new = self.members.get((info.fullname, name))
                        for base in other.mro:
                            if name in base.names and base.fullname.startswith("hocket."):
                                have = self.members.get((base.fullname, name))
                                if new and not have:
                                    self.members[base.fullname, name] = new
                                    changed = True
                                elif have and not new and len(required) > 1:
                                    self.problems.append(
                                        f"{base.fullname}.{name}: becomes {have}, but protocol {info.fullname} keeps it"
                                    )
                                break

    def hinted_type(self, module: str, receiver: str, attr: str) -> types.Type | None:
        """The class that the table of hints gives for the text of a receiver that mypy cannot type."""
        for pattern, class_name in self.hints:
            if pattern.fullmatch(f"{module} {receiver}"):
                owner, _, name = class_name.rpartition(".")
                info = self.find_class(owner, name)
                if info is not None and any(attr in base.names for base in info.mro):
                    return types.Instance(info, [])
        return None

    def new_member(self, receiver: types.Type | None, name: str) -> tuple[bool, str | None]:
        """Whether the type of the receiver says which member `name` is, and its new name, if it gets one."""
        if receiver is None:
            return False, None
        receiver = types.get_proper_type(receiver)
        if isinstance(receiver, types.UnionType):
            found = [self.new_member(item, name) for item in receiver.items
                     if not isinstance(types.get_proper_type(item), types.NoneType)]  # fmt: skip
            known = [new for is_known, new in found if is_known]
            news = set(known)
            if len(news) == 1 and known:
                return True, news.pop()
            return False, None
        if isinstance(receiver, types.TypeVarType):
            return self.new_member(receiver.upper_bound, name)
        if isinstance(receiver, types.TupleType):
            return self.new_member(receiver.partial_fallback, name)
        if isinstance(receiver, types.TypedDictType | types.LiteralType):
            return self.new_member(receiver.fallback, name)
        if isinstance(receiver, types.TypeType):
            return self.new_member(receiver.item, name)
        if isinstance(receiver, types.FunctionLike) and receiver.is_type_obj():
            return self.new_of_class(receiver.type_object(), name)
        if isinstance(receiver, types.CallableType | types.Overloaded):
            return True, None
        if isinstance(receiver, types.Instance):
            return self.new_of_class(receiver.type, name)
        return False, None

    def new_of_class(self, info: nodes.TypeInfo, name: str) -> tuple[bool, str | None]:
        for base in info.mro:
            if name in base.names:
                return True, self.members.get((base.fullname, name))
        return info.fallback_to_any is False, None


def names_with_bases(info: nodes.TypeInfo) -> Iterator[str]:
    for base in info.mro:
        yield from base.names


def defined_name(node: nodes.SymbolNode, fallback: str) -> str:
    return node.fullname or fallback


def all_args(args: ast.arguments) -> list[ast.arg]:
    extra = [arg for arg in (args.vararg, args.kwarg) if arg]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a function binds itself, without its inner functions."""
    found = {arg.arg for arg in all_args(function.args)}
    outer: set[str] = set()
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            stack.extend(getattr(node, "decorator_list", ()))
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        if isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            pass  # names of a comprehension count as local: a name that they hide is not renamed within the function
        stack.extend(ast.iter_child_nodes(node))
    return found - outer
