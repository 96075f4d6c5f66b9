"""The report of a run as a self-contained HTML page.

The page has the total, a legend, the failures by op, and a matrix with links to the cases.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from ..checks.run_case import Outcome, Result
from .failure_traits import OpFailures, group_failures_by_op_with_traits
from .text_report import (
    CELLS,
    COLUMNS,
    OUTCOME_MEANINGS,
    SIGNS,
    describe_unsupported_and_partly_supported_ops,
    find_worst_outcome,
    format_reproduction_command,
    format_run_total,
    format_worst_outcome_cell,
    rank_matrix_rows,
)

STYLE = (
    "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{border:1px solid #8884;padding:2px 8px}"
    "thead th{position:sticky;top:0;background:Canvas}.pass{background:#3a35}.fail{background:#d33a}"
    ".xfail{background:#da35}.unsupported,.no{background:#8883}:root{color-scheme:light dark}td a{color:inherit}"
    "code{white-space:pre-wrap}dd{margin:0 0 .7em 2em}dt:target{outline:2px solid #d33a}summary{cursor:pointer}"
)
"""The style sheet of the page."""
MAX_OPEN_CASES = 10
"""Failing cases of an op that are visible at once; the other cases unfold, since hundreds would hide the next op."""


def format_html_report(results: Sequence[Result], backend: str) -> str:
    """Return the report of a run as an HTML page."""
    title, groups = f"hocket conformance: {html.escape(backend)}", group_failures_by_op_with_traits(results)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1><p>{html.escape(format_run_total(results, backend))}.</p>",
        f"<h2>Legend</h2><table>{''.join(_format_legend_rows())}</table><p>{html.escape(CELLS)}</p>",
        *(f"<p>{html.escape(line)}</p>" for line in describe_unsupported_and_partly_supported_ops(results)),
        f"<h2>Failures</h2>{'' if groups else '<p>None.</p>'}",
        *chain.from_iterable(_format_op_failures(group, backend) for group in groups),
        f"<h2>Every op</h2><table>{''.join(_format_op_dtype_layout_rows(results))}</table></html>",
    ]
    return "\n".join(parts) + "\n"


def _format_legend_rows() -> Iterator[str]:
    """Yield the table rows that explain the signs of outcomes."""
    for outcome, sign in SIGNS.items():
        meaning = html.escape(OUTCOME_MEANINGS[outcome])
        yield f"<tr><td class={_choose_css_class(outcome)}>{sign}</td><td>{outcome}</td><td>{meaning}</td></tr>"


def _format_op_failures(group: OpFailures, backend: str) -> Iterator[str]:
    """Yield the lines about the failures of one op. The first case of each matrix cell has an anchor."""
    yield f'<h3 id="{group.op}">{group.op}</h3><ul>'
    yield from (f"<li>{html.escape(sentence)}</li>" for sentence in group.describe_failures())
    yield "</ul>"
    items, led = [], set()
    for result in group.results:
        place = _make_cell_anchor(group.op, result.case.dtype_names, result.case.layout_counted_in_reports)
        mark = "" if place in led else f' id="{html.escape(place)}"'
        led.add(place)
        line = html.escape(format_reproduction_command(result, backend))
        items.append(f"<dt{mark}><code>{line}</code></dt><dd>{html.escape(result.why)}</dd>")
    yield f"<dl>{''.join(items[:MAX_OPEN_CASES])}</dl>"
    if rest := items[MAX_OPEN_CASES:]:
        yield f"<details><summary>{len(rest)} more</summary><dl>{''.join(rest)}</dl></details>"


def _format_op_dtype_layout_rows(results: Sequence[Result]) -> Iterator[str]:
    """Yield the rows of the matrix of outcomes by op, dtypes and layout."""
    yield f"<thead><tr>{''.join(f'<th>{c}</th>' for c in ('op', 'dtype', *COLUMNS))}</tr></thead>"
    for (op, dtype), row in rank_matrix_rows(results):
        cells = "".join(_format_matrix_cell(row.get(c), _make_cell_anchor(op, dtype, c)) for c in COLUMNS)
        yield f"<tr><td>{html.escape(op)}</td><td>{html.escape(dtype)}</td>{cells}</tr>"


def _format_matrix_cell(cell: Counter[Outcome] | None, place: str) -> str:
    """Return a cell of the matrix as HTML, with a link to the first failure."""
    if not cell:
        return "<td></td>"
    worst, text = find_worst_outcome(cell), html.escape(format_worst_outcome_cell(cell))
    if worst is Outcome.FAIL:
        text = f'<a href="#{html.escape(place)}">{text}</a>'
    return f"<td class={_choose_css_class(worst)}>{text}</td>"


def _choose_css_class(outcome: Outcome) -> str:
    """Return the CSS class of an outcome."""
    return outcome.value.split()[0]


def _make_cell_anchor(op: str, dtypes: str, column: str) -> str:
    """Return the anchor name of a matrix cell within the page."""
    return f"{op}-{dtypes}-{column}".replace("/", "-")
