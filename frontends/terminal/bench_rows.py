"""Benchmark rows as Markdown, JSON, CSV or SQL, with the column names of llama-bench."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, object]
"""Results of one test by column name. All rows have the same columns."""
TABLE_HEAD = ("model", "devices", "threads", "test", "tok/s", "median", "GB/s", "of bandwidth")
TEXT_COLUMNS = ("model", "devices", "test")
"""Columns with text, which Markdown aligns to the left."""
SQL_TYPES: Mapping[type, str] = {bool: "INTEGER", int: "INTEGER", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class BenchRowFormat:
    """How benchmark rows of one kind are printed.

    - `name`: the name of the SQL table.
    - `head`: the head of the Markdown table.
    - `cells`: returns the Markdown cells of a row.
    """

    name: str
    head: Sequence[str]
    cells: Callable[[Row], Sequence[object]]


def _format_cells(row: Row) -> list[object]:
    read, share = row["weight_bytes_per_second"], row["share_of_bandwidth"]
    cells = [Path(str(row["model_filename"])).name, row["devices"], row["n_threads"], row["test"]]
    cells += [f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}", f"{row['median_ts']:.2f}"]
    return [*cells, f"{read / 1e9:.1f}" if isinstance(read, float) else "", "" if share is None else f"{share:.0%}"]


BENCH_TABLE = BenchRowFormat("llama_bench", TABLE_HEAD, _format_cells)
"""The row format of llama-bench, which scripts of llama.cpp read."""


def format_benchmark_rows(rows: Iterable[Row], format: str, table: BenchRowFormat = BENCH_TABLE) -> Iterator[str]:
    """Yield the lines of benchmark rows in a format of `ROW_FORMATS`, such as ``md`` or ``csv``."""
    return ROW_FORMATS[format](rows, table)


def _format_json(rows: Iterable[Row], table: BenchRowFormat) -> Iterator[str]:
    yield json.dumps(list(rows), indent=1)


def _format_csv(rows: Iterable[Row], table: BenchRowFormat) -> Iterator[str]:
    for number, row in enumerate(rows):
        columns = _drop_sample_lists(row)
        if not number:
            yield _quote_cells(columns)
        yield _quote_cells(columns.values())


def _quote_cells(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return line.getvalue()


def _format_sql(rows: Iterable[Row], table: BenchRowFormat) -> Iterator[str]:
    for number, row in enumerate(rows):
        columns = _drop_sample_lists(row)
        if not number:
            types = ", ".join(f"{name} {SQL_TYPES.get(type(value), 'REAL')}" for name, value in columns.items())
            yield f"CREATE TABLE IF NOT EXISTS {table.name} ({types});"
        values = ", ".join(map(_format_literal, columns.values()))
        yield f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({values});"


def _format_literal(value: object) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _drop_sample_lists(row: Row) -> dict[str, object]:
    """Return the scalar columns of a row, without the lists of samples."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def _format_markdown(rows: Iterable[Row], table: BenchRowFormat) -> Iterator[str]:
    for number, row in enumerate(rows):
        cells = table.cells(row)
        if not number:
            yield f"| {' | '.join(table.head)} |"
            yield f"|{'|'.join('---' if name in TEXT_COLUMNS else '--:' for name in table.head)}|"
        yield f"| {' | '.join(map(str, cells))} |"


ROW_FORMATS: Mapping[str, Callable[[Iterable[Row], BenchRowFormat], Iterator[str]]] = {
    "md": _format_markdown,
    "json": _format_json,
    "jsonl": lambda rows, table: map(json.dumps, rows),
    "csv": _format_csv,
    "sql": _format_sql,
}
