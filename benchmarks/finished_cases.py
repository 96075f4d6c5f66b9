"""The record of a benchmark: its result rows and the cases that have ended, so that a later run can continue it.

The record is the JSON file of the result. A run reads the file of an earlier run with `read_record`, skips the finished
cases, and writes the rows of both runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hocket.benchmarks import results_file as results
from hocket.graph.errors import HocketError

SAME_FACTS = ("device", "gpu", "tiny")
"""Facts about a run that its continuation must share."""
OUTCOMES = ("measured", "failed", "left out")
"""The ends of a case.

A continued run tries a case again that was left out, because its library or file may be there by then.
"""

STATE_CASE = "at the end"
"""The name of rows with the state of the device after a part."""


class RecordError(HocketError):
    """An error in the file of an earlier run: it is no result file, or it belongs to another device."""


@dataclass
class BenchmarkRecord:
    """The rows of a benchmark, its finished cases, and its finished steps.

    - `about`: the circumstances of this run. ``earlier`` has the circumstances of the runs that it continues.
    - `ends`: for each part and case its outcome, its seconds, and the number of its run; failed ones have a reason.
    - `finished_steps`: the parts, with the pattern of their cases, in which every case has been measured or has failed.
    - `used_seconds`: the seconds of all runs so far.
    """

    about: dict[str, object]
    rows: list[dict[str, object]] = field(default_factory=list)
    ends: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)
    finished_steps: set[tuple[str, str]] = field(default_factory=set)
    used_seconds: float = 0.0

    @property
    def run_number(self) -> int:
        """The number of runs that this one continues."""
        earlier = self.about.get("earlier", [])
        assert isinstance(earlier, list)
        return len(earlier)

    def list_ended_cases(self, part: str) -> list[str]:
        """Return the cases of a part that have ended; no step of this run begins them again."""
        return [case for of, case in self.ends if of == part]

    def add_end(self, part: str, case: str, outcome: str, seconds: float, reason: str = "") -> None:
        """Record the end of a case; `reason` is one line for a case that failed or was left out."""
        why = {"reason": reason} if reason else {}
        self.ends[part, case] = {"outcome": outcome, "seconds": round(seconds, 2), "run": self.run_number, **why}

    def is_whole(self, part: str) -> bool:
        """Whether no case of a part was left out."""
        return all(end["outcome"] != OUTCOMES[2] for (of, _), end in self.ends.items() if of == part)

    def continue_run(self, earlier: BenchmarkRecord) -> None:
        """Take over the rows and the finished cases of an earlier run; drop the rows of cases that it did not finish.

        Raises:
            RecordError: The earlier run measured another device.
        """
        for name in SAME_FACTS:
            own, other = self.about.get(name), earlier.about.get(name)
            if own != other:
                raise RecordError(
                    f"the earlier run: its {name} is {other}, this one has {own}; "
                    "continue it on an equal device, or leave out --resume"
                )
        before = earlier.about.pop("earlier", [])
        assert isinstance(before, list)
        self.about["earlier"] = [*before, earlier.about]
        self.ends = {key: end for key, end in earlier.ends.items() if end["outcome"] != OUTCOMES[2]}
        self.rows = [
            row for row in earlier.rows if row["case"] == STATE_CASE or (row["part"], row["case"]) in self.ends
        ]
        self.finished_steps, self.used_seconds = set(earlier.finished_steps), earlier.used_seconds

    def forget_failures(self) -> None:
        """Drop the failed cases and their rows, so that this run tries them again."""
        failed = {key for key, end in self.ends.items() if end["outcome"] == "failed"}
        self.ends = {key: end for key, end in self.ends.items() if key not in failed}
        self.rows = [row for row in self.rows if (row["part"], row["case"]) not in failed]
        parts = {part for part, _ in failed}
        self.finished_steps = {step for step in self.finished_steps if step[0] not in parts}

    def save(self, stem: Path, text: str) -> None:
        """Write ``stem.json`` and ``stem.md``; each file is replaced only after its new content is complete."""
        finished = [{"part": part, "case": case, **end} for (part, case), end in self.ends.items()]
        steps = [list(step) for step in sorted(self.finished_steps)]
        progress = {"seconds": round(self.used_seconds, 1), "finished": finished, "steps": steps}
        results.write_result(stem, {**self.about, **progress}, self.rows, text)


def read_record(path: Path) -> BenchmarkRecord:
    """Read the record of an earlier run from its JSON file.

    Raises:
        RecordError: The file cannot be read, or it is no file of `BenchmarkRecord.save`.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        about, rows = dict(content["about"]), [_require_row(row) for row in content["rows"]]
        seconds, steps, finished = about.pop("seconds"), about.pop("steps"), about.pop("finished")
        ends = {}
        for end in finished:
            case = _require_row(end)
            outcome, taken, run = end["outcome"], float(end["seconds"]), int(end["run"])
            if outcome not in OUTCOMES:
                raise ValueError(f"the outcome {outcome!r}")
            why = {"reason": str(end["reason"])} if "reason" in end else {}
            ends[str(case["part"]), str(case["case"])] = {"outcome": outcome, "seconds": taken, "run": run, **why}
        if not isinstance(about.get("earlier", []), list):
            raise ValueError("no list of earlier runs")
        return BenchmarkRecord(about, rows, ends, {(str(part), str(cases)) for part, cases in steps}, float(seconds))
    except OSError as why:
        raise RecordError(f"{path}: {why.strerror}; give the JSON file of an earlier run") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as why:
        reason = " ".join(str(why).split())
        raise RecordError(
            f"{path}: is no record of a benchmark ({reason}); give the JSON file that run_gpu.py --save wrote"
        ) from None


def _require_row(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row as a dict. Raises `ValueError` unless it names its part and its case."""
    if not (isinstance(row, dict) and isinstance(row.get("part"), str) and isinstance(row.get("case"), str)):
        raise ValueError("a row without part and case")
    return row
