"""Reports as JSON lines, the comparison of two reports, and files with the arrays of failing cases."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from ...backends.base import Backend, Device
from ...graph.errors import BackendError
from ...graph.storage.files import replacing
from ..cases.inputs import NoReference, as_stored_weight
from ..checks.run_case import Outcome, Result, make_runnable_case_with_random_operands


def make_result_record(result: Result, backend: str) -> dict[str, object]:
    """Return one result as a dictionary of plain data for JSON."""
    difference = result.difference
    return {
        "case": str(result.case),
        "op": result.case.op,
        "dtypes": result.case.dtype_names,
        "layout": result.case.layout_counted_in_reports,
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


def format_json_lines(results: Iterable[Result], backend: str) -> str:
    """Return results as JSON, one line each."""
    return "".join(json.dumps(make_result_record(r, backend), ensure_ascii=False) + "\n" for r in results)


@dataclass(frozen=True, slots=True)
class OutcomeChange:
    """A case with different outcomes in two reports, or with errors that differ by more than a factor.

    `before` and `after` are the outcome, or the error in ULP, in each report.
    """

    case: str
    before: str
    after: str


def read_report_records(path: Path) -> dict[str, dict[str, object]]:
    """Read a JSON report, and return its records by case.

    Raises:
        BackendError: the file is no report, or cannot be read.
    """
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return {row["case"]: row for row in rows}
    except OSError as why:
        raise BackendError(f"cannot read the report {path}: {why.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BackendError(f"{path} is no report; make one with --json {path}") from None


def compare_reports(one: Path, two: Path, factor: float = 4.0) -> list[OutcomeChange]:
    """Compare two JSON reports, and return the cases that changed.

    Changes are other outcomes, new and missing cases, and errors that differ by more than a factor.

    Args:
        one: file of the first report.
        two: file of the second report.
        factor: minimum ratio of two errors that counts as a change.

    Raises:
        BackendError: a file is no report, or cannot be read.
    """
    before, after = read_report_records(one), read_report_records(two)
    changes = []
    for case in dict.fromkeys((*before, *after)):
        a, b = before.get(case), after.get(case)
        if a is None or b is None or a["outcome"] != b["outcome"]:
            changes.append(OutcomeChange(case, _read_record_outcome(a), _read_record_outcome(b)))
            continue
        old, new = float(str(a["ulp"])), float(str(b["ulp"]))
        if max(old, new) > 1.0 and max(old, new) > factor * min(old, new):
            changes.append(OutcomeChange(case, f"{old:.3g} ulp", f"{new:.3g} ulp"))
    return changes


def _read_record_outcome(row: dict[str, object] | None) -> str:
    """Return the outcome of a record, or ``absent``."""
    return "absent" if row is None else str(row["outcome"])


def save_failure_arrays(result: Result, folder: Path, backend: Backend, device: Device) -> Path:
    """Write the arrays of a failing case to the file ``<op>-<number>.npz`` in `folder`, and return the path.

    The file has these entries, if they are available:

    * ``case`` and ``why``: text.
    * ``operand_<name>``: in the storage format of a weight.
    * ``expected_<n>``: the results of the reference, float64 or integers.
    * ``got_<n>``: the results of another run on the device.
    """
    case = result.case
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.op}-{crc32(str(case).encode()):08x}.npz"
    arrays = {"case": np.array(str(case)), "why": np.array(result.why)}
    with suppress(NoReference, NotImplementedError):
        runnable_case = make_runnable_case_with_random_operands(case)
        arrays |= {f"operand_{n}": as_stored_weight(a, case.specs[n]) for n, a in runnable_case.units.items()}
        expected = runnable_case.compute_expected_result_by_reference(backend).arrays
        runnable_case.round_results_in_packed_states(expected, backend)
        arrays |= {f"expected_{n}": np.asarray(w) for n, w in enumerate(expected)}
        with suppress(Exception):  # a kernel under test may raise anything, and the failure is recorded already
            arrays |= {
                f"got_{n}": g for n, g in enumerate(runnable_case.run_and_make_comparison_masks(backend, device)[0])
            }
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


def select_failed_results(results: Sequence[Result]) -> list[Result]:
    """Return the failing results."""
    return [r for r in results if r.outcome is Outcome.FAIL]
