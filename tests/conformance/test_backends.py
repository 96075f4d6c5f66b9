"""Every sample of every op and composite op, judged by the kit: guard zones, poison, derived tolerance."""

from __future__ import annotations

import pytest

from hocket.backends import find_device
from hocket.conformance.cases.case import get_tested_op, list_tested_op_names, make_case, parse_test_case
from hocket.conformance.checks import case_graph
from hocket.conformance.checks.run_case import Outcome, run_case
from hocket.conformance.generate_cases import select_relevant_layouts
from hocket.graph import parse_case
from hocket.graph.errors import GraphError
from hocket.ops import COMPOSITE_OPS, scale


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("layouts", ["in turn", pytest.param("every", marks=pytest.mark.nightly(cases=0))])
@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
@pytest.mark.parametrize("name", list_tested_op_names())
def test_a_backend_agrees_with_the_reference_on_every_sample(name, device, layouts):
    """In every layout that makes a difference, or in one of them in turn: the quick run has each layout of each dtype.

    Q8_1 and Q8_K have no reference: no op dequantises them.
    """
    backend, on = find_device(device)
    op = get_tested_op(name)
    for number, text in enumerate(op.samples):
        case = make_case(op, parse_case(text))
        relevant = select_relevant_layouts(case)
        for layout in relevant if layouts == "every" else (relevant[number % len(relevant)],):
            result = run_case(case.with_settings(layout=layout), backend, on)
            unknown = result.outcome is Outcome.NO_REFERENCE and {"q8_1", "q8_K"} & set(case.dtype_names.split("/"))
            assert result.outcome is Outcome.PASS or unknown, f"{result.case}: {result.outcome}: {result.why}"


@pytest.mark.parametrize("name", COMPOSITE_OPS)
def test_a_composite_op_that_computes_something_else_fails(name, monkeypatch):
    case = make_case(get_tested_op(name), parse_case(get_tested_op(name).samples[-1]))
    assert run_case(case, *find_device("reference:0")).outcome is Outcome.PASS
    build = COMPOSITE_OPS[name]
    wrong = {name: lambda *values, **settings: scale(build(*values, **settings), scale=1.0001)}
    monkeypatch.setattr(case_graph, "COMPOSITE_OPS", wrong)
    assert run_case(case, *find_device("reference:0")).outcome is Outcome.FAIL


def test_a_case_of_a_composite_op_is_refused_as_its_graph_is():
    for text, message in (
        ("convolution(x=f32[2,3,5], w=f32[4,3,9], stride=(1,))", "windows span"),
        ('pool(x=f32[2,3,5], kind="median", size=(2,))', "kind is 'median'"),
        ("convolutoin(x=f32[2,3,5])", "did you mean convolution"),
    ):
        with pytest.raises(GraphError, match=message):
            run_case(parse_test_case(text), *find_device("reference:0"))
