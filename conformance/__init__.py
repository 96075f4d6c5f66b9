"""Does a backend compute what hocket's ops mean?  One command tells, for every op, dtype, layout and kind of input.

    hocket check --backend NAME                            python -m hocket.conformance --backend NAME
    pytest --pyargs hocket.conformance --backend NAME      the same cases, one test each

Cases come from the registry of ops alone, and every one is a line of text that reproduces it.  A case runs on guarded
memory, three times, and is compared row by row with the float64 reference; what must hold between runs (parts make
the whole, tokens in turn make the batch) is checked without one.
"""

from .judging.run import Outcome as Outcome
from .judging.run import Result as Result
from .judging.run import run_case as run_case
from .reports.matrix import Row as Row
from .reports.matrix import support_matrix as support_matrix
from .suite import Suite as Suite
from .suite import check as check
from .trials.case import Case as Case
from .trials.case import parse as parse_case
from .trials.generate import cases as cases

__all__ = ["Case", "Outcome", "Result", "Row", "Suite", "cases", "check", "parse_case", "run_case", "support_matrix"]
