"""Rows of a benchmark as Markdown, JSON, CSV or SQL, by the names that scripts for llama-bench read."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

Row = Mapping[str, object]
"""What is known of one test on so many threads.  All rows have the same names."""
HEAD = ("model", "devices", "threads", "test", "tok/s", "median", "GB/s", "of bandwidth")
TABLE = "llama_bench"
"""The name that llama.cpp's scripts ask for."""
SQL_TYPES: Mapping[type, str] = {bool: "INTEGER", int: "INTEGER", str: "TEXT"}


def written(rows: Iterable[Row], form: str) -> Iterator[str]:
    """The lines of one of `FORMS`, as the rows come; JSON is one list at the end."""
    return FORMS[form](rows)


def _json(rows: Iterable[Row]) -> Iterator[str]:
    yield json.dumps(list(rows), indent=1)


def _csv(rows: Iterable[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        columns = _flat(row)
        if not number:
            yield _quoted(columns)
        yield _quoted(columns.values())


def _quoted(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return line.getvalue()


def _sql(rows: Iterable[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        columns = _flat(row)
        if not number:
            types = ", ".join(f"{name} {SQL_TYPES.get(type(value), 'REAL')}" for name, value in columns.items())
            yield f"CREATE TABLE IF NOT EXISTS {TABLE} ({types});"
        values = ", ".join(map(_literal, columns.values()))
        yield f"INSERT INTO {TABLE} ({', '.join(columns)}) VALUES ({values});"


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _flat(row: Row) -> dict[str, object]:
    """What fits a column: all but the single samples."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def _markdown(rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---|--:|---|--:|--:|--:|--:|"
    for r in rows:
        read, share = r["weight_bytes_per_second"], r["share_of_bandwidth"]
        cells = [Path(str(r["model_filename"])).name, r["devices"], r["n_threads"], r["test"]]
        cells += [f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}", f"{r['median_ts']:.2f}"]
        cells += [f"{read / 1e9:.1f}" if isinstance(read, float) else "", "" if share is None else f"{share:.0%}"]
        yield f"| {' | '.join(map(str, cells))} |"


FORMS: Mapping[str, Callable[[Iterable[Row]], Iterator[str]]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": lambda rows: map(json.dumps, rows),
    "csv": _csv,
    "sql": _sql,
}
