"""Every sample of every op on both backends, judged by the conformance kit: guard zones, poison, derived tolerance."""

from __future__ import annotations

import pytest

from hocket.backends import find_device
from hocket.conformance.cases.case import make_case
from hocket.conformance.checks.run_case import Outcome, run_case
from hocket.conformance.generate_cases import select_relevant_layouts
from hocket.graph import parse_case
from hocket.ops import REGISTRY


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("layouts", ["in turn", pytest.param("every", marks=pytest.mark.nightly(cases=0))])
@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_backend_agrees_with_the_reference_on_every_sample(name, device, layouts):
    """In every layout that makes a difference, or in one of them in turn: the quick run has each layout of each dtype.

    Q8_1 and Q8_K have no reference: no op dequantises them.
    """
    backend, on = find_device(device)
    op = REGISTRY[name]
    for number, text in enumerate(op.samples):
        case = make_case(op, parse_case(text))
        relevant = select_relevant_layouts(case)
        for layout in relevant if layouts == "every" else (relevant[number % len(relevant)],):
            result = run_case(case.with_settings(layout=layout), backend, on)
            unknown = result.outcome is Outcome.NO_REFERENCE and {"q8_1", "q8_K"} & set(case.dtype_names.split("/"))
            assert result.outcome is Outcome.PASS or unknown, f"{result.case}: {result.outcome}: {result.why}"
