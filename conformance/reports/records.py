"""Results as JSON lines, two such files compared, and the inputs of a failure as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from ...graph.errors import BackendError
from ..judging.run import Outcome, Result
from ..trials.case import Case
from ..trials.inputs import NoReference, as_stored, draw


def record(result: Result, backend: str) -> dict[str, object]:
    """One result as plain data."""
    difference = result.difference
    return {
        "case": str(result.case),
        "op": result.case.op,
        "dtypes": result.case.dtypes,
        "layout": result.case.column,
        "inputs": result.case.inputs,
        "check": result.case.check,
        "backend": backend,
        "outcome": result.outcome.value,
        "why": result.why,
        "nmse": difference.nmse,
        "nmse_limit": difference.nmse_limit,
        "ulp": difference.ulp,
        "ulp_limit": difference.ulp_limit,
        "seconds": round(result.seconds, 6),
    }


def json_lines(results: Iterable[Result], backend: str) -> str:
    return "".join(json.dumps(record(r, backend), ensure_ascii=False) + "\n" for r in results)


@dataclass(frozen=True, slots=True)
class Change:
    """A case whose outcome, or whose error by more than a factor, differs between two reports."""

    case: str
    before: str
    after: str


def read_records(path: Path) -> dict[str, dict[str, object]]:
    """Records by case.  Raises `BackendError` for a file that is none."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return {row["case"]: row for row in rows}
    except OSError as why:
        raise BackendError(f"cannot read the report {path}: {why.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BackendError(f"{path} is no report; make one with --json {path}") from None


def compare_records(one: Path, two: Path, factor: float = 4.0) -> list[Change]:
    """What changed from one report to the other: outcomes, cases that came or went, errors that grew or shrank."""
    before, after = read_records(one), read_records(two)
    changes = []
    for case in dict.fromkeys((*before, *after)):
        a, b = before.get(case), after.get(case)
        if a is None or b is None or a["outcome"] != b["outcome"]:
            changes.append(Change(case, _outcome(a), _outcome(b)))
            continue
        old, new = float(str(a["ulp"])), float(str(b["ulp"]))
        if max(old, new) > 1.0 and max(old, new) > factor * min(old, new):
            changes.append(Change(case, f"{old:.3g} ulp", f"{new:.3g} ulp"))
    return changes


def _outcome(row: dict[str, object] | None) -> str:
    return "absent" if row is None else str(row["outcome"])


def save_inputs(case: Case, folder: Path) -> Path:
    """Write the operands of a case as a file holds them, and the case itself, to ``<op>-<number>.npz``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.op}-{crc32(str(case).encode()):08x}.npz"
    try:
        operands = {f"operand_{n}": as_stored(a, case.specs[n]) for n, a in draw(case).items()}
    except NoReference:
        operands = {}
    np.savez(path, allow_pickle=False, case=np.array(str(case)), **operands)
    return path


def failures(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r.outcome is Outcome.FAIL]
