"""Expected failures of a backend: a text file of cases or patterns. A listed case that passes is a failure, too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ...graph.errors import BackendError
from ..checks.run_case import Outcome, Result


@dataclass(frozen=True, slots=True)
class ExpectedFailures:
    """The lines of a file of expected failures: a case or a pattern with ``*`` on each line, then a reason after ``#``.

    >>> ExpectedFailures(("mul_mat(w=q2_K*  # see our issue 7",)).expects("mul_mat(w=q2_K[6,256], x=f32[3,256])")
    True
    """

    lines: tuple[str, ...] = ()

    @property
    def fnmatch_patterns(self) -> tuple[str, ...]:
        # A bracket is a shape here, never a set of characters.
        """The case or pattern of each line, as a pattern for `fnmatch`. The reason of a line is left out."""
        bare = (line.partition("#")[0].strip() for line in self.lines)
        return tuple(b.replace("[", "[[]") for b in bare if b)

    def expects(self, text: str) -> bool:
        """Return whether a line of the file matches the case with this text, so that its failure is expected."""
        return any(fnmatchcase(text, p) for p in self.fnmatch_patterns)

    def mark_expected_outcome(self, result: Result) -> Result:
        """Adjust a result to the list: a listed failure becomes xfail, and a listed case that passes becomes a failure.

        Other results are returned unchanged.
        """
        if not self.expects(result.case.text_without_seed):
            return result
        if result.outcome is Outcome.FAIL:
            return replace(result, outcome=Outcome.XFAIL)
        if result.outcome is Outcome.PASS:
            why = "it passes but is listed as an expected failure; take its line out"
            return replace(result, outcome=Outcome.FAIL, why=why)
        return result


def read_expected_failures(path: Path) -> ExpectedFailures:
    """Read the file of expected failures of a backend.

    Raises:
        BackendError: the file cannot be read.
    """
    try:
        return ExpectedFailures(tuple(path.read_text("utf-8").splitlines()))
    except OSError as why:
        raise BackendError(f"cannot read the expected failures in {path}: {why.strerror}") from None


def fail_required_unsupported(results: Iterable[Result], tier: str) -> Iterable[Result]:
    """Yield the results, in which unsupported cases of required ops are now failures.

    Args:
        results: results of cases.
        tier: ``MUST`` requires the ops that every backend must support, ``SHOULD`` all ops, the empty text none.
    """
    for result in results:
        needed = tier == "SHOULD" or (tier == "MUST" and result.case.op_declaration.is_required)
        if result.outcome is Outcome.UNSUPPORTED and needed:
            yield replace(result, outcome=Outcome.FAIL, why=f"unsupported, but {tier} is required: {result.why}")
        else:
            yield result
