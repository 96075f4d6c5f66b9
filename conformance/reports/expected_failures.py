"""Failures a backend's author knows of: a text file of cases or patterns, strict in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ...graph.errors import BackendError
from ..checks.run_case import Outcome, Result


@dataclass(frozen=True, slots=True)
class ExpectedFailures:
    """Lines of an xfail file: a whole case, or a pattern with ``*``; after ``#`` why.

    >>> Expected(("mul_mat(w=q2_K*  # see our issue 7",)).expects("mul_mat(w=q2_K[6,256], x=f32[3,256])")
    True
    """

    lines: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        # A bracket is a shape here, never a set of characters.
        bare = (line.partition("#")[0].strip() for line in self.lines)
        return tuple(b.replace("[", "[[]") for b in bare if b)

    def expects(self, text: str) -> bool:
        return any(fnmatchcase(text, p) for p in self.patterns)

    def apply_expectation(self, result: Result) -> Result:
        """A failure that was expected is an xfail; a pass that was expected to fail is a failure."""
        if not self.expects(result.case.text):
            return result
        if result.outcome is Outcome.FAIL:
            return replace(result, outcome=Outcome.XFAIL)
        if result.outcome is Outcome.PASS:
            why = "it passes but is listed as an expected failure; take its line out"
            return replace(result, outcome=Outcome.FAIL, why=why)
        return result


def read_expected(path: Path) -> ExpectedFailures:
    """The file's lines.  Raises `BackendError` where it cannot be read."""
    try:
        return ExpectedFailures(tuple(path.read_text("utf-8").splitlines()))
    except OSError as why:
        raise BackendError(f"cannot read the expected failures in {path}: {why.strerror}") from None


def apply_requirement(results: Iterable[Result], tier: str) -> Iterable[Result]:
    """`results`, unsupported cases turned into failures: of ops that must be there, or of all for ``SHOULD``."""
    for result in results:
        needed = tier == "SHOULD" or (tier == "MUST" and result.case.op_declaration.is_required)
        if result.outcome is Outcome.UNSUPPORTED and needed:
            yield replace(result, outcome=Outcome.FAIL, why=f"unsupported, but {tier} is required: {result.why}")
        else:
            yield result
