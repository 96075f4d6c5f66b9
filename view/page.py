"""The page itself: one HTML file with style, code, layout library and data in it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..graph.files import write_text
from ..graph.graph import Graph
from ..scheduler.plan import Plan
from ..scheduler.running.trace import Trace
from ..scheduler.sharding.factors import Factors
from ..scheduler.telling.diff import difference
from ..scheduler.telling.measured import Measured, measured
from .graph_data import GraphData
from .passes_data import decisions, passes
from .plan_data import PlanData

CODE = (
    "data",
    "text",
    "elements",
    "rows",
    "plan",
    "layout",
    "drawing",
    "graph",
    "memory",
    "passes",
    "details",
    "search",
    "main",
)
"""The page's own files of code, in the order in which they use each other."""
_UNSAFE = re.compile("[<\u2028\u2029\ud800-\udfff]")
NOTEBOOK_HEIGHT = 640
"""Pixels of a page within a notebook."""


@dataclass(frozen=True, slots=True)
class Page:
    """A finished page: `html` is the whole file."""

    html: str

    def save(self, path: str | Path) -> None:
        """Write the file.  Raises `OSError`."""
        write_text(path, self.html)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own."""
        style = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


def view_graph(graph: Graph, *, title: str = "graph") -> Page:
    """The page of a graph alone; it need not have been verified."""
    return _page(title, [{"graph": GraphData(graph).document()}])


def view_plan(
    plan: Plan,
    *,
    before: Plan | None = None,
    trace: Trace | str | Path | None = None,
    tokens: int | None = None,
    title: str = "plan",
) -> Page:
    """The page of a plan; with `before` the two side by side, and what moved; with `trace` what its steps took.

    `tokens` says how many tokens a run computes, so that what crosses is told for each of them: no graph tells that of
    itself.  Raises `PlanError` for a trace of other plans.
    """
    planned = _planned(plan, None if trace is None else measured(plan, trace))
    shown = [planned] if before is None else [_planned(before), planned]
    return _page(title, shown, () if before is None else difference(before, plan), tokens)


def _planned(plan: Plan, times: Measured | None = None) -> dict[str, Any]:
    graph, factors = GraphData(plan.graph), Factors(plan.graph)
    drawn = PlanData(plan, graph, times).document()
    drawn["decided"] = decisions(plan, graph, factors)
    return {"graph": graph.document(), "plan": drawn, "passes": passes(plan, graph, factors)}


def _page(title: str, shown: list[dict[str, Any]], moved: Sequence[str] = (), tokens: int | None = None) -> Page:
    folder = files(__package__) / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    document = {"format": "hocket-page-1", "title": title, "shown": shown, "moved": list(moved), "tokens": tokens}
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "style": read("style.css"),
        "dagre": read("dagre/dagre.min.js").replace("//# sourceMappingURL=dagre.min.js.map", ""),
        "licence": html.escape(read("dagre/LICENSE")),
        "code": "\n".join(read(f"{name}.js") for name in CODE),
        "data": in_script(json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)),
    }
    pieces = read("page.html").split("<!--:")
    return Page(pieces[0] + "".join(parts[p[: p.index("-->")]] + p[p.index("-->") + 3 :] for p in pieces[1:]))


def in_script(text: str) -> str:
    """JSON as it may stand in a script element: no ``</script>`` or comment can begin in it, no surrogate is left."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
