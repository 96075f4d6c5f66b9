"""Failures by op, the smallest case first, with the traits that distinguish failing from passing cases.

A trait is a short sentence about the operands, dimensions, attributes or settings of a case. A useful trait is frequent
among failing cases and rare among passing ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...graph.attrs import format_attribute
from ...graph.errors import format_count
from ...ops.declaration.signature import LeadingAxesBroadcast
from ..cases.case import DECLARATION_CHECK, INPUTS, LAYOUTS, Case
from ..checks.run_case import Outcome, Result

MIN_TRAIT_CONTRAST = 0.25
"""The minimum contrast of a reported trait: its fraction of failing cases minus its fraction of passing cases.

A reported trait also has at least half of the largest contrast.
"""
MAX_TRAITS = 3
"""Maximum reported traits of an op."""
SIZE_THRESHOLDS = tuple(2**n for n in range(3, 11))
"""Sizes at which kernels change: a vector, a tile, a thread block."""
BROADCAST_TRAITS: Mapping[LeadingAxesBroadcast, str] = {
    LeadingAxesBroadcast.TILED: "repeated",
    LeadingAxesBroadcast.GROUPED: "used for several rows",
}
"""The trait of an operand that is broadcast over leading axes, by the kind of broadcast."""


@dataclass(frozen=True, slots=True)
class TraitFailureCounts:
    """A trait as text, with the number of failing cases and of passing cases of an op that have it."""

    text: str
    failing: int
    passing: int


@dataclass(frozen=True, slots=True)
class OpFailures:
    """The failures of one op, with the traits that distinguish them from passed cases.

    The smallest failure comes first. `passed_count` is the number of passed cases.
    """

    op: str
    results: tuple[Result, ...]
    passed_count: int
    traits: tuple[TraitFailureCounts, ...]

    def describe_failures(self) -> Iterator[str]:
        """Yield sentences about the failures: their number, then each distinguishing trait with its counts."""
        count = len(self.results)
        yield f"{count} of {count + self.passed_count} cases that ran fail"
        for trait in self.traits:
            failing, passing = f"{trait.failing} of {count}", f"{trait.passing} of {self.passed_count}"
            yield f"{failing} that fail and {passing} that pass: {trait.text}"


def group_failures_by_op_with_traits(results: Iterable[Result]) -> list[OpFailures]:
    """Group failing results by op, in the order of the results, each op with its distinguishing traits."""
    by_op: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_op[result.case.op].append(result)
    groups = []
    for op, of_op in by_op.items():
        bad = sorted((r for r in of_op if r.outcome is Outcome.FAIL), key=lambda r: compute_simplicity_key(r.case))
        good = [r.case for r in of_op if r.outcome is Outcome.PASS]
        if bad:
            groups.append(
                OpFailures(op, tuple(bad), len(good), tuple(rank_distinguishing_traits([r.case for r in bad], good)))
            )
    return groups


def compute_simplicity_key(case: Case) -> tuple[int, ...]:
    """Return the sort key of a failing case: fewest elements first, then the simplest check, layout and input kind."""
    plain = (case.check != "reference", LAYOUTS.index(case.layout), INPUTS.index(case.inputs))
    return (sum(s.size for _, s in case.operands), *plain, len(case.operand_text))


def rank_distinguishing_traits(bad: Sequence[Case], good: Sequence[Case]) -> list[TraitFailureCounts]:
    """Find the traits that separate failing from passing cases best, largest contrast first.

    The contrast of a trait is its fraction of the failing cases minus its fraction of the passing cases. If several
    traits have the same failing cases, one is returned. Without passing cases the result is empty.

    Args:
        bad: failing cases of one op.
        good: passing cases of the op.
    """
    if not good:
        return []
    having: dict[str, list[int]] = defaultdict(list)
    for number, case in enumerate(bad):
        for text in describe_case_traits(case):
            having[text].append(number)
    passing = Counter(text for case in good for text in describe_case_traits(case))
    contrast = {text: len(numbers) / len(bad) - passing[text] / len(good) for text, numbers in having.items()}
    chosen: dict[tuple[int, ...], TraitFailureCounts] = {}
    threshold = max(MIN_TRAIT_CONTRAST, max(contrast.values()) / 2)
    for text in sorted(contrast, key=lambda text: -contrast[text]):
        if contrast[text] >= threshold:
            chosen.setdefault(tuple(having[text]), TraitFailureCounts(text, len(having[text]), passing[text]))
    return list(chosen.values())[:MAX_TRAITS]


def describe_case_traits(case: Case) -> Iterator[str]:
    """Yield the traits of a case as text: facts about its operands, dimensions, attributes and settings."""
    if case.check == DECLARATION_CHECK:
        return
    op, attrs, specs = case.op_declaration, case.attributes_with_defaults, case.specs
    operands = op.signature_for(attrs).operands
    batch = op.resolve_sizes([specs.get(o.name) for o in operands], attrs).leading
    for operand in operands:
        if (spec := specs.get(operand.name)) is None:
            yield f"`{operand.name}` is left out"
            continue
        leading = spec.shape[: len(spec.shape) - len(operand.dims)]
        if operand.leading in BROADCAST_TRAITS and math.prod(leading) < math.prod(batch):
            broadcast = BROADCAST_TRAITS[operand.leading]
            yield f"`{operand.name}` is {broadcast}"
            aligned = zip(reversed(leading), reversed(batch), strict=False)
            if any(1 < own < whole for own, whole in aligned):
                yield f"`{operand.name}` is {broadcast} along an axis where it has several entries"
        if operand.optional:
            yield f"`{operand.name}` is given"
        yield f"`{operand.name}` is {spec.dtype.text}"
        yield f"`{operand.name}` has {format_count(len(spec.shape), 'axis', 'axes')}"
        if not spec.size:
            yield f"`{operand.name}` has no elements"
    yield from (f"{name} is {format_attribute(value)}" for name, value in attrs.items())
    for name, size in case.dimension_sizes.items():
        if name not in attrs:
            yield from (f"dimension {name} {words}" for words in _describe_size_traits(size))
    yield f"layout is {case.layout}"
    yield f"inputs are {case.inputs}"
    yield f"check is {case.check}"


def _describe_size_traits(size: int) -> Iterator[str]:
    """Yield the traits of a dimension size as text."""
    yield "is 1" if size == 1 else "is not 1"
    if size % 8:
        yield "is no multiple of 8"
    for threshold in SIZE_THRESHOLDS:
        if size > threshold:
            yield f"exceeds {threshold}"
