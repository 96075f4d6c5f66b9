"""What a run says: console summary, Markdown and HTML matrix op × dtype × layout, JUnit XML."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

from ..judging.run import Outcome, Result
from ..trials.case import LAYOUTS

COLUMNS = (*LAYOUTS, "zero-size")
SIGNS: Mapping[Outcome, str] = {
    Outcome.FAIL: "FAIL",
    Outcome.XFAIL: "xfail",
    Outcome.UNSUPPORTED: "—",
    Outcome.NO_REFERENCE: "?",
    Outcome.PASS: "ok",
}
"""Worst first: a cell shows the worst of its cases."""

Cells = dict[tuple[str, str], dict[str, Counter[Outcome]]]


def counts(results: Iterable[Result]) -> Counter[Outcome]:
    return Counter(r.outcome for r in results)


def reproduce(result: Result, backend: str) -> str:
    """The one line that runs a case again."""
    return f"hocket check --backend {backend} --case '{result.case}'"


def summary(results: Sequence[Result], backend: str, seconds: float, shown: int = 20) -> str:
    """Failures with their reproducers, then a line per op that did not pass whole, then the totals."""
    lines: list[str] = []
    failed = [r for r in results if r.outcome is Outcome.FAIL]
    for result in failed[:shown]:
        lines += [f"FAIL {result.case}", f"     {result.why}", f"     {reproduce(result, backend)}"]
    if len(failed) > shown:
        lines.append(f"     and {len(failed) - shown} more; --json or --html lists all of them")
    by_op: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_op[result.case.op].append(result)
    for op, mine in by_op.items():
        outcomes = counts(mine)
        if outcomes.keys() - {Outcome.PASS}:
            lines.append(f"{op:20} " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
    whys = Counter(r.why for r in results if r.outcome is Outcome.UNSUPPORTED)
    lines += [f"unsupported, {n} cases: {why}" for why, n in whys.most_common(5)]
    total = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts(results).items()))
    lines.append(f"{backend}: {len(results)} cases of {len(by_op)} ops in {seconds:.1f} s: {total or 'none'}")
    return "\n".join(lines)


def matrix(results: Iterable[Result]) -> Cells:
    """Outcomes by (op, dtypes) and layout."""
    cells: Cells = defaultdict(lambda: defaultdict(Counter))
    for result in results:
        cells[result.case.op, result.case.dtypes][result.case.column][result.outcome] += 1
    return cells


def cell_text(found: Counter[Outcome] | None) -> str:
    """The worst outcome of a cell, and how many of how many cases have it."""
    if not found:
        return ""
    worst = next(o for o in SIGNS if found[o])
    total = found.total()
    return f"{SIGNS[worst]} {total}" if found[worst] == total else f"{SIGNS[worst]} {found[worst]}/{total}"


def markdown(results: Sequence[Result], backend: str) -> str:
    """The matrix as a table."""
    lines = [f"# {backend}", "", f"| op | dtype | {' | '.join(COLUMNS)} |", "|" + "---|" * (2 + len(COLUMNS))]
    for (op, dtype), row in matrix(results).items():
        lines.append(f"| {op} | {dtype} | {' | '.join(cell_text(row.get(c)) for c in COLUMNS)} |")
    return "\n".join(lines) + "\n"


_STYLE = (
    "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{border:1px solid #8884;padding:2px 8px}"
    "th{position:sticky;top:0;background:Canvas}.pass{background:#3a35}.fail{background:#d33a}.xfail{background:#da35}"
    ".unsupported,.no{background:#8883}:root{color-scheme:light dark}code{white-space:pre-wrap}"
)


def html_page(results: Sequence[Result], backend: str) -> str:
    """The matrix and the failures as one self-contained page."""
    rows = []
    for (op, dtype), row in matrix(results).items():
        cells = "".join(_html_cell(row.get(c)) for c in COLUMNS)
        rows.append(f"<tr><td>{html.escape(op)}</td><td>{html.escape(dtype)}</td>{cells}</tr>")
    failures = "".join(
        f"<dt><code>{html.escape(reproduce(r, backend))}</code></dt><dd>{html.escape(r.why)}</dd>"
        for r in results
        if r.outcome is Outcome.FAIL
    )
    head = "".join(f"<th>{c}</th>" for c in ("op", "dtype", *COLUMNS))
    title = f"hocket conformance: {html.escape(backend)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><table><tr>{head}</tr>{''.join(rows)}</table><h2>Failures</h2><dl>{failures}</dl></html>\n"
    )


def _html_cell(found: Counter[Outcome] | None) -> str:
    if not found:
        return "<td></td>"
    worst = next(o for o in SIGNS if found[o])
    return f'<td class="{worst.value.split()[0]}">{html.escape(cell_text(found))}</td>'


def junit(results: Sequence[Result], backend: str) -> str:
    """JUnit XML, as CI systems read it."""
    outcomes = counts(results)
    skipped = (Outcome.UNSUPPORTED, Outcome.NO_REFERENCE, Outcome.XFAIL)
    suite = ElementTree.Element(
        "testsuite",
        name=f"hocket.conformance.{backend}",
        tests=str(len(results)),
        failures=str(outcomes[Outcome.FAIL]),
        skipped=str(sum(outcomes[o] for o in skipped)),
        time=f"{sum(r.seconds for r in results):.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=result.case.op, name=str(result.case), time=f"{result.seconds:.4f}"
        )
        if result.outcome is Outcome.FAIL:
            ElementTree.SubElement(case, "failure", message=result.why).text = reproduce(result, backend)
        elif result.outcome in skipped:
            ElementTree.SubElement(case, "skipped", message=f"{result.outcome}: {result.why}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
