"""Moves the modules of ``ops/`` into folders and rewrites all imports: ``python .build/rename/move_ops.py``.

1. Definitions that several families share get modules of their own (`SHARED`).
2. Files move by `MOVES`, and statements `from ... import` in all files follow.

A second run changes nothing.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOVES = {
    "arrange": "movement.arrange",
    "attend": "matrix.attention",
    "choosing": "elementwise.comparisons",
    "chunks": "chunked_delta_rule",
    "collective": "collectives",
    "compositions": "decompositions",
    "declaring": "declaration",
    "declaring.attributes": "declaration.attributes",
    "declaring.calling": "declaration.call_signature",
    "declaring.links": "declaration.axis_links",
    "declaring.op": "declaration.op",
    "declaring.oracle": "reference_run",
    "declaring.registry": "registry",
    "declaring.samples": "declaration.samples",
    "declaring.signature": "declaration.signature",
    "elementwise": "elementwise.binary",
    "experts": "matrix.experts",
    "gated": "elementwise.gated_units",
    "generators": "elementwise.generators",
    "indexer": "matrix.sparse_indexer",
    "integers": "elementwise.integers",
    "lookups": "movement.gather_scatter",
    "moves": "movement.rows",
    "norms": "reduction.norms",
    "products": "matrix.matmul",
    "quants": "quantisation",
    "recurrent": "recurrent.gated_delta_net",
    "reductions": "reduction.reductions",
    "rotary": "matrix.rope",
    "routing": "movement.sharded_tables",
    "scans": "recurrent.linear_attention",
    "sliding": "movement.sliding_windows",
    "sorting": "reduction.sorting",
    "states": "recurrent.state_pools",
    "triangular": "movement.triangular",
    "unary": "elementwise.unary",
    "views": "movement.views",
}
SHARED = {
    ("views", "first_spec"): "declaration.shape_rules",
    ("views", "integers_attribute"): "declaration.shape_rules",
    ("views", "integer_attribute"): "declaration.shape_rules",
    ("views", "axis_attribute"): "declaration.shape_rules",
    ("elementwise", "tile_to_shape"): "declaration.broadcasting",
    ("products", "repeat_leading_axes"): "declaration.broadcasting",
    ("states", "require_row_numbers"): "movement.sharded_tables",
}


def module_of(path: Path) -> tuple[str, bool]:
    """The name of a module of this repository, ``hocket.ops.norms``, and whether it is a package."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return ".".join(["hocket", *(parts[:-1] if is_package else parts)]), is_package


def new_name(module: str, name: str = "") -> str:
    """The new name of a module, or of the module that has `name` now."""
    short = module.removeprefix("hocket.ops.")
    if short == module:
        return module
    if (short, name) in SHARED:
        return f"hocket.ops.{SHARED[short, name]}"
    return f"hocket.ops.{MOVES[short]}" if short in MOVES else module


def relative(target: str, module: str, is_package: bool) -> str:
    """`target` as `module` imports it, ``..graph.attrs``."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    there = target.split(".")
    same = 0
    while same < min(len(here), len(there)) and here[same] == there[same]:
        same += 1
    return "." * (len(here) - same + 1) + ".".join(there[same:])


def rewritten(path: Path, text: str) -> str:
    """The text of a file with its imports as they are after the moves."""
    module, is_package = module_of(path)
    own = new_name(module)
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda n: -getattr(n, "lineno", 0)):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = node.module or ""
        if node.level:
            here = module.split(".")
            here = here[: len(here) - node.level + is_package]
            source = ".".join([*here, source] if source else here)
        if not source.startswith("hocket") or (own == module and not source.startswith("hocket.ops.")):
            continue
        by_source: dict[str, list[str]] = {}
        for alias in node.names:
            text_of = alias.name + (f" as {alias.asname}" if alias.asname else "")
            by_source.setdefault(new_name(source, alias.name), []).append(text_of)
        if own == module and list(by_source) == [source]:
            continue
        indent = " " * node.col_offset
        end = node.end_lineno or node.lineno
        comment = lines[end - 1].encode()[node.end_col_offset or 0 :].decode().strip()
        statements = [
            f"{indent}from {relative(new, own, is_package) if node.level else new} import {', '.join(names)}"
            for new, names in by_source.items()
            if new != own
        ]
        lines[node.lineno - 1 : end] = [f"{s}  {comment}".rstrip() + "\n" for s in statements]
    return "".join(lines)


def main() -> None:
    if not (ROOT / "ops" / "views.py").exists():
        return
    files = subprocess.run(["git", "ls-files", "*.py", "*.pyi"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.split():
        path = ROOT / name
        if not name.startswith((".build/", "ops/__init__.pyi")):
            text = path.read_text()
            new = rewritten(path, text)
            if new != text:
                path.write_text(new)
    for folder in ("declaration", "elementwise", "matrix", "movement", "recurrent", "reduction"):
        (ROOT / "ops" / folder).mkdir()
    for old, new in MOVES.items():
        source = "ops/declaring/__init__.py" if old == "declaring" else f"ops/{old.replace('.', '/')}.py"
        target = "ops/declaration/__init__.py" if old == "declaring" else f"ops/{new.replace('.', '/')}.py"
        subprocess.run(["git", "mv", source, target], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
