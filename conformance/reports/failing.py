"""Failures by op, the smallest case first, and what the failing cases of an op share that its passing ones do not.

What can be said of a case is a list of traits, each a short sentence from its operands, dimensions, attributes and
settings.  A trait tells much if many failing cases have it and few passing ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...graph.attrs import format_attribute
from ...ops.declaration.signature import LeadingAxes
from ..judging.run import Outcome, Result
from ..trials.case import INPUTS, LAYOUTS, Case

LEAST_TELLING = 0.25
"""By how much the share of the failing cases that have a trait must exceed that of the passing ones, for it to be told;
half of what the best trait has is asked for, too."""
MOST_TRAITS = 3
LIMITS = tuple(2**n for n in range(3, 11))
"""Sizes at which kernels begin to do otherwise: a vector, a tile, a block of threads."""
USED_AGAIN: Mapping[LeadingAxes, str] = {LeadingAxes.TILED: "repeated", LeadingAxes.GROUPED: "used for several rows"}


@dataclass(frozen=True, slots=True)
class Trait:
    """Something that is true of so many failing and so many passing cases of an op."""

    text: str
    failing: int
    passing: int


@dataclass(frozen=True, slots=True)
class Failing:
    """The failures of one op, smallest first, how many of its cases passed, and the traits that tell both apart."""

    op: str
    results: tuple[Result, ...]
    passed: int
    traits: tuple[Trait, ...]

    def sentences(self) -> Iterator[str]:
        """How many fail, then what they share."""
        count = len(self.results)
        yield f"{count} of {count + self.passed} cases that ran fail"
        for trait in self.traits:
            yield f"{trait.failing} of {count} that fail and {trait.passing} of {self.passed} that pass: {trait.text}"


def failing(results: Iterable[Result]) -> list[Failing]:
    """The ops that have failures, in the order in which they came."""
    by_op: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_op[result.case.op].append(result)
    groups = []
    for op, of_op in by_op.items():
        bad = sorted((r for r in of_op if r.outcome is Outcome.FAIL), key=lambda r: simplicity(r.case))
        good = [r.case for r in of_op if r.outcome is Outcome.PASS]
        if bad:
            groups.append(Failing(op, tuple(bad), len(good), tuple(shared([r.case for r in bad], good))))
    return groups


def simplicity(case: Case) -> tuple[int, ...]:
    """A key that puts first what has the fewest elements, then the plainest check, layout and numbers."""
    plain = (case.check != "reference", LAYOUTS.index(case.layout), INPUTS.index(case.inputs))
    return (sum(s.size for _, s in case.operands), *plain, len(case.point))


def shared(bad: Sequence[Case], good: Sequence[Case]) -> list[Trait]:
    """The traits that most of `bad` have and few of `good`, the most telling first; of those that the same cases have,
    one.  None where nothing passes, since nothing tells the cases apart then."""
    if not good:
        return []
    having: dict[str, list[int]] = defaultdict(list)
    for number, case in enumerate(bad):
        for text in traits(case):
            having[text].append(number)
    passing = Counter(text for case in good for text in traits(case))
    telling = {text: len(numbers) / len(bad) - passing[text] / len(good) for text, numbers in having.items()}
    chosen: dict[tuple[int, ...], Trait] = {}
    least = max(LEAST_TELLING, max(telling.values()) / 2)
    for text in sorted(telling, key=lambda text: -telling[text]):
        if telling[text] >= least:
            chosen.setdefault(tuple(having[text]), Trait(text, len(having[text]), passing[text]))
    return list(chosen.values())[:MOST_TRAITS]


def traits(case: Case) -> Iterator[str]:
    """What can be said of a case, each once."""
    op, attrs, specs = case.declared, case.settled, case.specs
    operands = op.signature_for(attrs).operands
    batch = op.resolve_sizes([specs.get(o.name) for o in operands], attrs).leading
    for operand in operands:
        if (spec := specs.get(operand.name)) is None:
            yield f"`{operand.name}` is left out"
            continue
        leading = spec.shape[: len(spec.shape) - len(operand.dims)]
        if operand.leading in USED_AGAIN and math.prod(leading) < math.prod(batch):
            yield f"`{operand.name}` is {USED_AGAIN[operand.leading]}"
            aligned = zip(reversed(leading), reversed(batch), strict=False)
            if any(1 < own < whole for own, whole in aligned):
                yield f"`{operand.name}` is {USED_AGAIN[operand.leading]} along an axis where it has several entries"
        if operand.optional:
            yield f"`{operand.name}` is given"
        yield f"`{operand.name}` is {spec.dtype.text}"
        yield f"`{operand.name}` has {len(spec.shape)} axes"
        if not spec.size:
            yield f"`{operand.name}` has no elements"
    yield from (f"{name} is {format_attribute(value)}" for name, value in attrs.items())
    for name, size in case.sizes.items():
        if name not in attrs:
            yield from (f"dimension {name} {words}" for words in _said_of(size))
    yield f"layout is {case.layout}"
    yield f"inputs are {case.inputs}"
    yield f"check is {case.check}"


def _said_of(size: int) -> Iterator[str]:
    yield "is 1" if size == 1 else "is not 1"
    if size % 8:
        yield "is no multiple of 8"
    for least in LIMITS:
        if size > least:
            yield f"exceeds {least}"
