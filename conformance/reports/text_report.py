"""Reports of a run as text, Markdown and JUnit XML; failures come first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from xml.etree import ElementTree

from ...graph.errors import format_count
from ..cases.case import LAYOUTS
from ..checks.run_case import Outcome, Result
from .failure_traits import group_failures_by_op_with_traits

COLUMNS = (*LAYOUTS, "zero-size")
"""Columns of the matrix of outcomes."""
SIGNS: Mapping[Outcome, str] = {
    Outcome.FAIL: "FAIL",
    Outcome.XFAIL: "xfail",
    Outcome.UNSUPPORTED: "—",
    Outcome.NO_REFERENCE: "?",
    Outcome.PASS: "ok",
}
"""The sign of each outcome in a cell, the worst outcome first: a cell has the sign of its worst case."""
OUTCOME_MEANINGS: Mapping[Outcome, str] = {
    Outcome.FAIL: "the backend gives something else than the op means",
    Outcome.XFAIL: "it fails, and a line of the --xfail file says so",
    Outcome.UNSUPPORTED: "the backend says that it has no kernel for this",
    Outcome.NO_REFERENCE: "the kit does not know what the result must be",
    Outcome.PASS: "right in every case",
}
"""The explanation of each outcome in a legend."""
CELLS = "A cell shows the worst outcome of its cases; 3/7 means that 3 of 7 cases have it, a lone number that all have."
"""The explanation of a cell in a legend."""

Cells = dict[tuple[str, str], dict[str, Counter[Outcome]]]
"""The number of each outcome, by (op, dtypes) and then by layout."""


def count_outcomes(results: Iterable[Result]) -> Counter[Outcome]:
    """Count the results of each outcome."""
    return Counter(r.outcome for r in results)


def format_reproduction_command(result: Result, backend: str) -> str:
    """Return the command line that runs the case of a result again."""
    return f"hocket check --backend {backend} --case '{result.case}'"


def format_run_total(results: Sequence[Result], backend: str, seconds: float | None = None) -> str:
    """Return one line about a run: the number of cases and ops, the seconds, and the number of each outcome."""
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count_outcomes(results).items()))
    ops = len({r.case.op for r in results})
    took = "" if seconds is None else f" in {seconds:.1f} s"
    return f"{backend}: {format_count(len(results), 'case')} of {format_count(ops, 'op')}{took}: {outcomes or 'none'}"


def describe_unsupported_and_partly_supported_ops(results: Iterable[Result]) -> Iterator[str]:
    """Yield a line with unsupported ops, and a line with partly supported ops and their case counts."""
    by_op: dict[str, Counter[Outcome]] = defaultdict(Counter)
    for result in results:
        by_op[result.case.op][result.outcome] += 1
    left_out = {op: c for op, c in by_op.items() if c[Outcome.UNSUPPORTED]}
    whole = [op for op, c in left_out.items() if c[Outcome.UNSUPPORTED] == c.total()]
    partly = [f"{op} ({c[Outcome.UNSUPPORTED]} of {c.total()} cases)" for op, c in left_out.items() if op not in whole]
    if whole:
        yield f"unsupported: {', '.join(whole)}"
    if partly:
        yield f"unsupported in part: {', '.join(partly)}"


def format_failure_traits_report(results: Sequence[Result], backend: str, seconds: float, max_failures: int = 3) -> str:
    """Return the text report: the traits and smallest failures of each op, unsupported ops, and the total.

    Args:
        results: results of the run.
        backend: name of the backend.
        seconds: seconds of the run.
        max_failures: maximum failing cases in the report for each op.
    """
    lines: list[str] = []
    for group in group_failures_by_op_with_traits(results):
        first, *others = group.describe_failures()
        lines += [f"FAIL {group.op}: {first}", *(f"     {sentence}" for sentence in others)]
        for result in group.results[:max_failures]:
            lines += [f"  {result.why}", f"  {format_reproduction_command(result, backend)}"]
        if len(group.results) > max_failures:
            lines.append(
                f"  and {len(group.results) - max_failures} more; --json, --markdown or --html lists all of them"
            )
    for line in describe_unsupported_and_partly_supported_ops(results):
        lines += wrap(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    whys = Counter(r.why for r in results if r.outcome is Outcome.UNSUPPORTED)
    lines += [f"  {format_count(n, 'case')}: {why}" for why, n in whys.most_common(5)]
    return "\n".join([*lines, format_run_total(results, backend, seconds)])


def count_outcomes_by_dtypes_and_layout(results: Iterable[Result]) -> Cells:
    """Count the outcomes of each cell of the matrix: by (op, dtypes) and layout."""
    cells: Cells = defaultdict(lambda: defaultdict(Counter))
    for result in results:
        cells[result.case.op, result.case.dtype_names][result.case.layout_counted_in_reports][result.outcome] += 1
    return cells


def rank_matrix_rows(results: Iterable[Result]) -> list[tuple[tuple[str, str], dict[str, Counter[Outcome]]]]:
    """Return the rows of the matrix of outcomes, worst outcomes first, then in the order of the registry."""
    worst = list(SIGNS)
    return sorted(
        count_outcomes_by_dtypes_and_layout(results).items(),
        key=lambda row: min(worst.index(o) for c in row[1].values() for o in c),
    )


def format_worst_outcome_cell(cell: Counter[Outcome] | None) -> str:
    """Return a cell of the matrix as text: the sign of the worst outcome, its count, and the number of cases."""
    if not cell:
        return ""
    worst, count = find_worst_outcome(cell), cell.total()
    return f"{SIGNS[worst]} {count}" if cell[worst] == count else f"{SIGNS[worst]} {cell[worst]}/{count}"


def find_worst_outcome(cell: Counter[Outcome]) -> Outcome:
    """Return the worst outcome in a cell."""
    return next(o for o in SIGNS if cell[o])


def format_markdown_report(results: Sequence[Result], backend: str) -> str:
    """Return the Markdown report of a run.

    It has the total, a legend, the failures of each op with their traits, and the matrix.
    """
    lines = [f"# Conformance of {backend}", "", f"{format_run_total(results, backend)}.", ""]
    lines += ["| sign | outcome | meaning |", "|---|---|---|"]
    lines += [f"| {sign} | {outcome} | {OUTCOME_MEANINGS[outcome]} |" for outcome, sign in SIGNS.items()]
    lines += ["", CELLS, "", *describe_unsupported_and_partly_supported_ops(results), ""]
    for group in group_failures_by_op_with_traits(results):
        lines += [f"## {group.op}", "", *(f"- {sentence}" for sentence in group.describe_failures()), "", "```"]
        for result in group.results:
            lines += [f"# {result.why}", format_reproduction_command(result, backend)]
        lines += ["```", ""]
    lines += ["## Every op", "", f"| op | dtype | {' | '.join(COLUMNS)} |", "|" + "---|" * (2 + len(COLUMNS))]
    failed = {group.op for group in group_failures_by_op_with_traits(results)}
    for (op, dtype), row in rank_matrix_rows(results):
        name = f"[{op}](#{op})" if op in failed else op
        lines.append(f"| {name} | {dtype} | {' | '.join(format_worst_outcome_cell(row.get(c)) for c in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def format_junit_report(results: Sequence[Result], backend: str) -> str:
    """Return the results as JUnit XML for CI systems."""
    outcomes = count_outcomes(results)
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
            ElementTree.SubElement(case, "failure", message=result.why).text = format_reproduction_command(
                result, backend
            )
        elif result.outcome in skipped:
            ElementTree.SubElement(case, "skipped", message=f"{result.outcome}: {result.why}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
