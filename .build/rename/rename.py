"""Applies a table of renames to the code base, with the types that mypy infers.

``python .build/rename/rename.py .build/rename/renames.tsv [--only MODULE ...] [--write]`` renames every definition of
the table that still has its old name, and every reference to it.  A row is ``kind, file, old name, new name``,
separated by tabs; the file is relative to the root of the repository.  A row without its old name is skipped, so a
second run changes nothing.

1. mypy builds all sources and keeps the type of each expression.
2. Each name, attribute, import, keyword argument and class pattern is resolved to its definition.
3. A reference to a renamed definition becomes an edit: file, position, new name.
4. Overrides of a renamed member, and members of implementers of a renamed protocol, are renamed with it.
5. A reference that mypy cannot type is printed, and is left for a person. `--guess` names those to rename, if all
   definitions agree on one new name.

A new name that exists in the same scope, or that a function hides with a local variable, is a collision.  Nothing is
written while there are collisions.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from definitions import (
    ROOT,
    Edit,
    Renamer,
    all_args,
    build_types,
    defined_name,
    expressions_by_span,
    local_names,
    read_hints,
    read_table,
    span,
)
from mypy import build, nodes, types


class ModuleEdits(ast.NodeVisitor):
    """The edits of one module."""

    def __init__(self, renamer: Renamer, module: str, tree: nodes.MypyFile, text: str) -> None:
        self.renamer, self.module, self.tree, self.text = renamer, module, tree, text
        self.lines = text.splitlines(keepends=True)
        self.expressions = expressions_by_span(tree)
        self.edits: set[Edit] = set()
        self.owners: list[nodes.TypeInfo | None] = []
        self.scopes: list[set[str]] = []
        self.in_all = False

    def collect(self) -> list[Edit]:
        self.visit(ast.parse(self.text))
        return sorted(self.edits, key=lambda edit: (edit.line, edit.column))

    # -- resolution

    def type_of(self, node: ast.expr) -> types.Type | None:
        for expression in self.expressions.get(span(node), ()):
            found = self.renamer.result.types.get(expression)
            if found is not None:
                return found
            if isinstance(expression, nodes.RefExpr) and isinstance(expression.node, nodes.TypeInfo):
                return types.TypeType.make_normalized(types.Instance(expression.node, []))
            if isinstance(expression, nodes.RefExpr) and isinstance(expression.node, nodes.Var):
                return expression.node.type
        return None

    def global_name(self, node: ast.expr) -> str | None:
        """The full name of the definition that `node` refers to, if it is a global one."""
        for expression in self.expressions.get(span(node), ()):
            if isinstance(expression, nodes.RefExpr) and expression.fullname and expression.node is not None:
                return defined_name(expression.node, expression.fullname)
        return None

    def replace(self, line: int, byte_column: int, old: str, new: str) -> None:
        text = self.lines[line - 1]
        column = len(text.encode()[:byte_column].decode())
        if text[column : column + len(old)] != old:
            self.renamer.problems.append(f"{self.module}:{line}: expected {old} at {column} in {text.strip()[:60]}")
            return
        self.edits.add(Edit(line, column, old, new))

    def replace_in_text(self, line: int, last_line: int, byte_column: int, old: str, new: str) -> None:
        """The first whole word `old` behind a position."""
        for number in range(line, last_line + 1):
            text = self.lines[number - 1]
            start = len(text.encode()[:byte_column].decode()) if number == line else 0
            found = re.compile(rf"\b{re.escape(old)}\b").search(text, start)
            if found:
                self.edits.add(Edit(number, found.start(), old, new))
                return
        self.renamer.problems.append(f"{self.module}:{line}: no {old} found")

    # -- definitions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.rename_definition(node, node.name)
        info = self.class_info(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.owners.append(info)
        for statement in node.body:
            self.visit(statement)
        self.owners.pop()

    def class_info(self, name: str) -> nodes.TypeInfo | None:
        owner = self.owners[-1] if self.owners else None
        table = owner.names if owner else self.tree.names
        symbol = table.get(name)
        if symbol is not None and isinstance(symbol.node, nodes.TypeInfo):
            return symbol.node
        return None

    def rename_definition(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        new = self.new_of_definition(name)
        if new:
            self.replace_in_text(node.lineno, node.body[0].lineno, node.col_offset, name, new)

    def new_of_definition(self, name: str) -> str | None:
        if self.owners and self.owners[-1] is not None:
            return self.renamer.members.get((self.owners[-1].fullname, name))
        if not self.owners:
            return self.renamer.globals.get(f"{self.module}.{name}")
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.rename_definition(node, node.name)
        for part in node.decorator_list:
            self.visit(part)
        self.visit(node.args)
        if node.returns:
            self.visit(node.returns)
        self.owners.append(None)
        self.scopes.append(local_names(node))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()
        self.owners.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append({arg.arg for arg in all_args(node.args)})
        self.generic_visit(node)
        self.scopes.pop()

    # -- references

    def visit_Name(self, node: ast.Name) -> None:
        if self.owners and self.owners[-1] is not None:
            new = self.renamer.members.get((self.owners[-1].fullname, node.id))
            if new:
                self.replace(node.lineno, node.col_offset, node.id, new)
                return
        if any(node.id in scope for scope in self.scopes):
            return
        name = self.global_name(node)
        if name is None:
            symbol = self.tree.names.get(node.id)
            if symbol is None or symbol.node is None:
                return
            name = defined_name(symbol.node, symbol.fullname or "")
        new = self.renamer.globals.get(name)
        if new and name.rpartition(".")[2] == node.id:
            self.check_hidden(node.lineno, new)
            self.replace(node.lineno, node.col_offset, node.id, new)

    def check_hidden(self, line: int, new: str) -> None:
        if any(new in scope for scope in self.scopes):
            self.renamer.problems.append(f"{self.module}:{line}: a local variable hides {new}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        new = self.new_of_attribute(node)
        if new:
            line = node.end_lineno or 0
            self.replace(line, (node.end_col_offset or 0) - len(node.attr.encode()), node.attr, new)

    def receiver_type(self, node: ast.Attribute) -> types.Type | None:
        for expression in self.expressions.get(span(node), ()):
            if isinstance(expression, nodes.SuperExpr) and expression.info is not None:
                bases = [base for base in expression.info.mro[1:] if node.attr in base.names]
                if bases:
                    return types.Instance(bases[0], [])
        found = self.type_of(node.value)
        if found is None or isinstance(types.get_proper_type(found), types.AnyType):
            return self.renamer.hinted_type(self.module, ast.unparse(node.value), node.attr)
        return found

    def new_of_attribute(self, node: ast.Attribute) -> str | None:
        name = self.global_name(node)
        if name is not None:
            new = self.renamer.globals.get(name)
            if new:
                return new if name.rpartition(".")[2] == node.attr else None
        known, new = self.renamer.new_member(self.receiver_type(node), node.attr)
        if known:
            return new
        if name is not None and self.type_of(node.value) is None and not self.renamer.new_by_attr.get(node.attr):
            return None
        news = self.renamer.new_by_attr.get(node.attr, {None})
        if news != {None} and name is None:
            choices = sorted(new or node.attr for new in news)
            place = f"{self.module}:{node.lineno}: {ast.unparse(node)[:70]}"
            self.renamer.untyped.append(f"{place} -> {', '.join(choices)}")
            if len(news) == 1 and f"{self.module}:{node.attr}" in self.renamer.accepted_guesses:
                return next(iter(news))
        return None

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self.visit_named_attribute(node)
        named = [keyword for keyword in node.keywords if keyword.arg]
        if not named:
            return
        info = self.called_class(node)
        if info is None:
            return
        for keyword in named:
            for base in info.mro:
                new = self.renamer.members.get((base.fullname, keyword.arg or ""))
                if new:
                    self.replace(keyword.lineno, keyword.col_offset, keyword.arg or "", new)
                    break

    def called_class(self, node: ast.Call) -> nodes.TypeInfo | None:
        """The class that a call constructs or copies: keyword arguments of the call are its fields."""
        name = self.global_name(node.func)
        if name in ("dataclasses.replace", "copy.replace") and node.args:
            receiver = types.get_proper_type(self.type_of(node.args[0]))
            return receiver.type if isinstance(receiver, types.Instance) else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "_replace":
            receiver = types.get_proper_type(self.type_of(node.func.value))
            if isinstance(receiver, types.TupleType):
                return receiver.partial_fallback.type
            return receiver.type if isinstance(receiver, types.Instance) else None
        called = self.type_of(node.func)
        called = types.get_proper_type(called) if called is not None else None
        if isinstance(called, types.FunctionLike) and called.is_type_obj():
            return called.type_object()
        if isinstance(called, types.TypeType) and isinstance(called.item, types.Instance):
            return called.item.type
        return None

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.generic_visit(node)
        name = self.global_name(node.cls)
        symbol = self.tree.names.get(node.cls.id) if isinstance(node.cls, ast.Name) else None
        info = symbol.node if symbol is not None else None
        if not isinstance(info, nodes.TypeInfo):
            if any((attr in self.renamer.new_by_attr) for attr in node.kwd_attrs):
                self.renamer.untyped.append(f"{self.module}:{node.lineno}: pattern of {name}")
            return
        for attr, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            known, new = self.renamer.new_of_class(info, attr)
            if known and new:
                line = self.lines[pattern.lineno - 1].encode()[: pattern.col_offset].decode()
                column = line.rindex(attr)
                self.edits.add(Edit(pattern.lineno, column, attr, new))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            is_package = self.tree.path.endswith("__init__.py")
            parts = self.module.split(".")
            parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
            source = ".".join([*parts, source] if source else parts)
        for alias in node.names:
            tree = self.renamer.result.files.get(source)
            symbol = tree.names.get(alias.name) if tree else None
            if symbol is None or symbol.node is None:
                continue
            name = defined_name(symbol.node, symbol.fullname or "")
            new = self.renamer.globals.get(name)
            if new and name.rpartition(".")[2] == alias.name:
                self.replace(alias.lineno, alias.col_offset, alias.name, new)
                if alias.asname == alias.name and alias.end_lineno and alias.end_col_offset:  # a re-export
                    self.replace(alias.end_lineno, alias.end_col_offset - len(alias.name), alias.name, new)
                if not alias.asname and new in self.tree.names:
                    self.renamer.problems.append(f"{self.module}:{alias.lineno}: {new} exists here already")

    def visit_Constant(self, node: ast.Constant) -> None:
        """A string that names a definition: a dotted path, or a name in ``__all__`` or in a table of lazy imports."""
        if not isinstance(node.value, str) or node.lineno != node.end_lineno:
            return
        path = re.fullmatch(r"(hocket(?:\.\w+)+)[.:](\w+)", node.value)
        if path:
            self.rename_string(node, path[2], self.renamer.globals.get(f"{path[1]}.{path[2]}"))
        elif node.value.isidentifier() and not self.owners and ("__getattr__" in self.tree.names or self.in_all):
            symbol = self.tree.names.get(node.value)
            if symbol is not None and symbol.node is not None:
                name = defined_name(symbol.node, symbol.fullname or "")
                if name.rpartition(".")[2] == node.value:
                    self.rename_string(node, node.value, self.renamer.globals.get(name))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.in_all = any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        self.generic_visit(node)
        self.in_all = False

    def rename_string(self, node: ast.Constant, old: str, new: str | None) -> None:
        """Replace `old` at the end of the string."""
        if new:
            line = self.lines[node.lineno - 1]
            end = len(line.encode()[: node.end_col_offset].decode()) - 1
            while end > 0 and line[end - len(old) : end] != old:
                end -= 1
            if end > 0:
                self.edits.add(Edit(node.lineno, end - len(old), old, new))

    def visit_named_attribute(self, node: ast.Call) -> None:
        """``getattr(value, "name")``, ``monkeypatch.setattr(value, "name", ...)`` and their relatives."""
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called not in ("getattr", "setattr", "hasattr", "delattr", "object", "__setattr__") or len(node.args) < 2:
            return
        value, name = node.args[:2]
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier()):
            return
        module = self.module_of_expression(value)
        if module is not None:
            symbol = module.names.get(name.value)
            full_name = defined_name(symbol.node, symbol.fullname or "") if symbol and symbol.node else ""
            self.rename_string(name, name.value, self.renamer.globals.get(full_name))
            return
        known, new = self.renamer.new_member(self.type_of(value), name.value)
        if known:
            self.rename_string(name, name.value, new)
        elif self.renamer.new_by_attr.get(name.value, {None}) != {None}:
            self.renamer.untyped.append(f"{self.module}:{node.lineno}: {ast.unparse(node)[:80]} -> string")

    def module_of_expression(self, node: ast.expr) -> nodes.MypyFile | None:
        for expression in self.expressions.get(span(node), ()):
            if isinstance(expression, nodes.RefExpr) and isinstance(expression.node, nodes.MypyFile):
                return expression.node
        return None

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            new = self.renamer.globals.get(f"{self.module}.{name}")
            if new:
                self.replace_in_text(node.lineno, node.lineno, node.col_offset, name, new)


def find_edits(renamer: Renamer, module: str) -> list[Edit]:
    """The edits of one module, in order."""
    tree = renamer.result.files[module]
    return ModuleEdits(renamer, module, tree, Path(tree.path).read_text()).collect()


def check_collisions(renamer: Renamer) -> None:
    for full_name, new in renamer.globals.items():
        module, _, old = full_name.rpartition(".")
        names = renamer.result.files[module].names
        if new in names and f"{module}.{new}" not in renamer.globals:
            renamer.problems.append(f"{module}: {old} -> {new}, which exists already")
    targets: dict[tuple[str, str], str] = {}
    for full_name, new in renamer.globals.items():
        module = full_name.rpartition(".")[0]
        if (module, new) in targets:
            renamer.problems.append(f"{module}: two definitions become {new}")
        targets[module, new] = full_name
    for (class_name, old), new in renamer.members.items():
        info = next(info for info in renamer.classes if info.fullname == class_name)
        for base in info.mro:
            if new in base.names and (base.fullname, new) not in renamer.members:
                renamer.problems.append(f"{class_name}: {old} -> {new}, which {base.fullname} has already")


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.column), reverse=True):
        line = lines[edit.line - 1]
        lines[edit.line - 1] = line[: edit.column] + edit.new + line[edit.column + len(edit.old) :]
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="a folder called hocket, which is the package")
    parser.add_argument("--hints", type=Path, default=Path(__file__).with_name("receivers.tsv"))
    parser.add_argument("--config", default=str(Path(__file__).with_name("mypy.ini")))
    parser.add_argument("--only", nargs="*", default=(), help="module prefixes: rows of other modules wait")
    parser.add_argument("--guess", nargs="*", default=(), help="MODULE:ATTRIBUTE of untyped references to rename")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    arguments.table, arguments.hints = arguments.table.absolute(), arguments.hints.absolute()  # mypy changes the folder
    result = build_types(arguments.root.absolute(), str(Path(arguments.config).absolute()))
    return rename(arguments, result)


def rename(arguments: argparse.Namespace, result: build.BuildResult) -> int:
    rows = [row for row in read_table(arguments.table)
            if not arguments.only or row.module.startswith(tuple(arguments.only))]  # fmt: skip
    renamer = Renamer(arguments.root, result, rows, read_hints(arguments.hints))
    renamer.accepted_guesses = frozenset(arguments.guess)
    check_collisions(renamer)
    changed: dict[Path, str] = {}
    count = 0
    for module, tree in sorted(result.files.items()):
        if module.partition(".")[0] != "hocket" or not tree.path.endswith(".py"):
            continue
        edits = find_edits(renamer, module)
        if edits:
            path = Path(tree.path)
            changed[path.absolute()] = apply_edits(path.read_text(), edits)
            count += len(edits)
    for row in renamer.missing:
        print(f"missing: {row.kind} {row.full_name}")
    for line in sorted(set(renamer.untyped)):
        print(f"untyped: {line}")
    for line in sorted(set(renamer.problems)):
        print(f"problem: {line}")
    counts = {
        "globals": renamer.globals, "members": renamer.members, "files": changed, "problems": set(renamer.problems),
        "untyped": set(renamer.untyped), "missing": renamer.missing,
    }  # fmt: skip
    print(f"{count} edits", *(f"{len(found)} {name}" for name, found in counts.items()), sep=", ")
    if renamer.problems:
        return 1
    if arguments.write:
        for path, text in changed.items():
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
