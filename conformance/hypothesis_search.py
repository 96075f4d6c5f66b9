"""A search for failing cases of random shapes, which Hypothesis chooses and shrinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..backends.base import Backend, Device
from ..graph.parse import parse_case
from ..ops import Op
from .cases.case import INPUTS, LAYOUTS, Case, make_case
from .cases.grow_shapes import (
    OpCall,
    find_dimensions_avoiding_size_two,
    is_legal_call,
    resize_call,
    resolve_call_sizes,
)
from .cases.inputs import select_relevant_input_kinds
from .checks.run_case import Outcome, Result, run_case
from .generate_cases import select_relevant_layouts

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

DEFAULT_EXAMPLES = 50
"""Default number of cases per op."""


def search_random_shapes(
    op: Op, backend: Backend, device: Device, seed: int, max_examples: int = DEFAULT_EXAMPLES
) -> Iterator[Result]:
    """Run cases of an op with random shapes, and yield their results.

    Of failing cases, only the smallest found is yielded.

    Args:
        op: the op under test.
        backend: the backend under test.
        device: a device of the backend.
        seed: seed of Hypothesis.
        max_examples: maximum number of cases.
    """
    from hypothesis import HealthCheck, Phase, given, settings, strategies
    from hypothesis import seed as seeded

    bases = [parse_case(text) for text in op.samples if resolve_call_sizes(op, parse_case(text)) is not None]
    if not bases:
        return
    results: dict[Case, Result] = {}
    failed: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.data())
    def search(data: strategies.DataObject) -> None:
        case = _draw_random_case(op, bases, data)
        if case not in results:
            results[case] = run_case(case, backend, device)
        if results[case].outcome is Outcome.FAIL:
            failed.append(case)  # hypothesis ends by running the smallest once more
            raise AssertionError(results[case].why)

    with suppress(AssertionError):
        search()
    yield from (r for r in results.values() if r.outcome is not Outcome.FAIL)
    if failed:
        yield results[failed[-1]]


def _draw_random_case(op: Op, bases: Sequence[OpCall], data: DataObject) -> Case:
    """Draw a sample of the op with random dimensions, layout and input kind."""
    from hypothesis import assume, strategies

    size = strategies.integers(0, 40) | strategies.sampled_from((63, 65, 127, 129, 255, 257))
    parts = data.draw(strategies.sampled_from(bases))
    known = resolve_call_sizes(op, parts)
    assert known is not None
    coupled = find_dimensions_avoiding_size_two(known[2])
    named = {k: data.draw(size.filter(lambda n: n != 2) if k in coupled else size) for k in known[1].by_name}
    leading = tuple(data.draw(strategies.lists(strategies.integers(0, 9), max_size=3)))
    grown = resize_call(op, parts, named, leading, data.draw(strategies.sampled_from(("keep", "whole", "one"))))
    assume(is_legal_call(op, grown))
    case = make_case(op, grown)
    return case.with_settings(
        layout=data.draw(strategies.sampled_from([x for x in LAYOUTS if x in select_relevant_layouts(case)])),
        inputs=data.draw(strategies.sampled_from([x for x in INPUTS if x in select_relevant_input_kinds(case)])),
    )
