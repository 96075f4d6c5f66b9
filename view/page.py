"""Pages: one HTML file with its style, scripts, layout library and data."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..graph.errors import HocketError
from ..graph.graph import Graph
from ..graph.storage.files import write_text
from ..graph.validation import FILE_KIND, validate_arguments
from ..scheduler.ir.execution_plan import Plan
from ..scheduler.reports.measured_steps import MeasuredPlan, read_measured_times_from_trace
from ..scheduler.reports.plan_diff import diff_plans
from ..scheduler.runtime.trace import Trace
from ..scheduler.sharding.factors import Factors
from .graph_data import GraphData
from .passes_data import build_sharding_factor_columns, list_search_reasons_by_node
from .plan_data import PlanData

SCRIPT_FILES = (
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
"""The scripts of the page in order; each script uses only earlier ones."""
_UNSAFE = re.compile("[<\u2028\u2029\ud800-\udfff]")
NOTEBOOK_HEIGHT = 640
"""The height of a page in a notebook, in pixels."""


@dataclass(frozen=True, slots=True)
class Page:
    """An HTML page; `html` is the text of the file."""

    html: str

    @validate_arguments(HocketError, path=FILE_KIND)
    def save(self, path: str | Path) -> None:
        """Save the page as an HTML file.

        Raises:
            OSError: the file cannot be written.
        """
        write_text(path, self.html)

    def _repr_html_(self) -> str:
        """Return the page in a frame as HTML, for a notebook."""
        style = f"width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


def view_graph(graph: Graph, *, title: str = "graph") -> Page:
    """Build the page that shows a graph. The graph may be invalid."""
    return _page(title, [{"graph": GraphData(graph).build_page_data()}])


def view_plan(
    plan: Plan,
    *,
    before: Plan | None = None,
    trace: Trace | str | Path | None = None,
    tokens: int | None = None,
    title: str = "plan",
    rename_arguments: Callable[[str], str] = str,
) -> Page:
    """Build the page that shows a plan with its graph, memory and timeline.

    Args:
        plan: The plan.
        before: Another plan of the same graph; the page compares both.
        trace: A trace of runs of `plan`, or its file; the page shows the measured time of each instruction.
        tokens: The token count of a run; the page shows transferred bytes per token.
        title: The title of the page.
        rename_arguments: Returns a placement hint with other names for the arguments of Python, such as flags.

    Raises:
        PlanError: the trace belongs to another plan.
    """
    times = None if trace is None else read_measured_times_from_trace(plan, trace)
    planned = _plan_page_data(plan, rename_arguments, times)
    documents = [planned] if before is None else [_plan_page_data(before, rename_arguments), planned]
    return _page(title, documents, () if before is None else diff_plans(before, plan), tokens)


def _plan_page_data(
    plan: Plan, rename_arguments: Callable[[str], str], times: MeasuredPlan | None = None
) -> dict[str, Any]:
    graph, factors = GraphData(plan.graph), Factors(plan.graph)
    drawn = PlanData(plan, graph, times).build_page_data()
    drawn["hinted"] = {number: rename_arguments(hint) for number, hint in drawn["hinted"].items()}
    drawn["decided"] = list_search_reasons_by_node(plan, graph, factors)
    return {
        "graph": graph.build_page_data(),
        "plan": drawn,
        "passes": build_sharding_factor_columns(plan, graph, factors),
    }


def _page(title: str, page_items: list[dict[str, Any]], moved: Sequence[str] = (), tokens: int | None = None) -> Page:
    folder = files(__package__) / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    document = {"format": "hocket-page-1", "title": title, "shown": page_items, "moved": list(moved), "tokens": tokens}
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "style": read("style.css"),
        "dagre": read("dagre/dagre.min.js").replace("//# sourceMappingURL=dagre.min.js.map", ""),
        "licence": html.escape(read("dagre/LICENSE")),
        "code": "\n".join(read(f"{name}.js") for name in SCRIPT_FILES),
        "data": escape_json_for_script(
            json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        ),
    }
    segments = read("page.html").split("<!--:")
    return Page(segments[0] + "".join(parts[p[: p.index("-->")]] + p[p.index("-->") + 3 :] for p in segments[1:]))


def escape_json_for_script(text: str) -> str:
    """Escape JSON text for an HTML script element: the result has no ``</script>``, comment or surrogate."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
