"""Does a backend compute what hocket's ops mean?  One command tells, for every op, dtype, layout and kind of input.

    hocket check --backend NAME                            python -m hocket.conformance --backend NAME
    pytest --pyargs hocket.conformance --backend NAME      the same cases, one test each

Cases come from the registry of ops alone, and every one is a line of text that reproduces it.  A case runs on guarded
memory, three times, and is compared row by row with the float64 reference; what must hold between runs (parts make
the whole, tokens in turn make the batch) is checked without one.
"""

from .case import Case as Case
from .case import parse as parse_case
from .generate import cases as cases
from .matrix import Row as Row
from .matrix import support_matrix as support_matrix
from .run import Outcome as Outcome
from .run import Result as Result
from .run import run_case as run_case
from .suite import Suite as Suite
from .suite import check as check

__all__ = ["Case", "Outcome", "Result", "Row", "Suite", "cases", "check", "parse_case", "run_case", "support_matrix"]
