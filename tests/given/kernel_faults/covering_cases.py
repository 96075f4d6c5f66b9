"""The cases of the quick run that every test run tries: they find each planted fault."""

from __future__ import annotations

from typing import Any

from hocket.conformance.cases.case import Case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.ops import Op


def choose_covering_cases(op: Op[Any]) -> list[Case]:
    """Choose the cases that cover every trait, and every second one of the others, which cover pairs of traits."""
    traits = select_quick_cases(op, covers_pairs=False)
    covering = set(traits)
    return [*traits, *[case for case in select_quick_cases(op) if case not in covering][1::2]]
