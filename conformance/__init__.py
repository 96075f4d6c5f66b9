"""The conformance kit: check that a backend computes each op correctly, for every dtype, layout and kind of input.

    hocket check --backend NAME                            python -m hocket.conformance --backend NAME
    pytest --pyargs hocket.conformance --backend NAME      the same cases, one test each

All cases are derived from the registry of ops. Each case is a line of text that reproduces it. A case runs three times
on guarded memory, and its results are compared row by row with the float64 reference. Metamorphic checks need no
reference: the joined results of shards equal the whole result, and the results of tokens in turn equal the batch.
"""

from .cases.case import Case
from .cases.case import parse_test_case as parse_case
from .checks.run_case import Outcome, Result, run_case
from .generate_cases import generate_cases_of_matching_ops
from .reports.support_matrix import SupportRow, support_matrix
from .suite import Suite, run_cases_of_suite

Row, cases, check = SupportRow, generate_cases_of_matching_ops, run_cases_of_suite
"""Names until 0.3."""

__all__ = [
    "Case",
    "Outcome",
    "Result",
    "Suite",
    "SupportRow",
    "generate_cases_of_matching_ops",
    "parse_case",
    "run_case",
    "run_cases_of_suite",
    "support_matrix",
]
