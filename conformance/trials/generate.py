"""The cases of an op: its points under every layout and every kind of input; in full, or as a covering choice."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias
from zlib import crc32

from ...graph.attrs import format_attribute
from ...graph.spec import Spec
from ...ops import REGISTRY, Op
from ..judging import zeros
from ..judging.metamorphic import checks_for
from .case import Case
from .grow import FEW_ELEMENTS, distinct_axes, points
from .inputs import kinds_for
from .layouts import placed, twins

Operands: TypeAlias = tuple[tuple[str, Spec], ...]
PAIRS_OF_LAYOUT = 12
"""Points, at most, at which every layout meets every kind of input."""
QUICK_ELEMENTS = 1 << 15
MOST_QUICK = 400
"""Cases of one op in the quick run."""


def layouts_for(case: Case) -> tuple[str, ...]:
    """The layouts that make a difference to `case`."""
    op, attrs, layouts = case.declared, case.settled, ["contiguous"]
    for layout in ("offset", "sliced", "permuted", "broadcast"):
        if any(placed(s, layout, distinct_axes(op, attrs, name)) is not None for name, s in case.operands):
            layouts.append(layout)
    specs = case.specs
    if any(name in specs and specs[name].size for _, name in op.inplace_pairs(attrs)):
        layouts.append("inplace")
    if twins(op, specs, attrs) is not None:
        layouts.append("twin")
    return tuple(layouts)


@lru_cache(maxsize=256)
def full_cases(op: Op) -> tuple[Case, ...]:
    """All cases of one op, each once, in a fixed order."""
    cases: dict[Case, None] = {}
    crossed = 0
    for point in points(op):
        layouts, kinds = layouts_for(point), kinds_for(point)
        small = max((s.size for _, s in point.operands), default=0) <= FEW_ELEMENTS
        both = small and crossed < PAIRS_OF_LAYOUT
        crossed += both
        for layout in layouts:
            for inputs in kinds:
                if both or layout == "contiguous" or inputs == "normal":
                    cases[point.but(layout=layout, inputs=inputs)] = None
        if small:
            cases.update((point.but(check=check), None) for check in (*checks_for(point), *zeros.names_for(point)))
    return tuple(cases)


@lru_cache(maxsize=256)
def quick_cases(op: Op) -> tuple[Case, ...]:
    """A choice from the full run in which every dtype, layout, input kind, attribute value and metamorphic check of
    the op appears, and nearly every two of them that occur together anywhere do so here."""
    seen: set[object] = set()
    chosen: dict[Case, None] = {}
    ordered = sorted(full_cases(op), key=_order)
    for features in (_alone, _by_layout, _paired):
        for case in ordered:
            if case not in chosen and (new := features(case)) - seen and len(chosen) < MOST_QUICK:
                seen |= new | _alone(case) | _by_layout(case) | _paired(case)
                chosen[case] = None
    return tuple(chosen)


def _order(case: Case) -> tuple[int, int, int]:
    """Small cases before large, those with all operands first, otherwise shuffled in the same way each time."""
    size = sum(s.size for _, s in case.operands)
    return (size > QUICK_ELEMENTS) + 2 * (size <= 4 or case.is_empty), -len(case.operands), crc32(case.text.encode())


@lru_cache(maxsize=1024)
def _traits(op: Op, operands: Operands, attrs: tuple[tuple[str, str], ...]) -> tuple[tuple[object, ...], ...]:
    """Dtypes and attributes, as text, of a point, and which operands it has."""
    traits: list[tuple[object, ...]] = [("dtype", k, s.dtype) for k, s in operands]
    traits += [("attr", *attr) for attr in attrs]
    traits += [("default", k) for k in op.defaults if k not in dict(attrs)]
    return (*traits, ("operands", tuple(k for k, _ in operands)))


def _traits_of(case: Case) -> tuple[tuple[object, ...], ...]:
    attrs = tuple((k, format_attribute(v)) for k, v in case.attrs)
    return _traits(case.declared, case.operands, attrs)


def _alone(case: Case) -> set[object]:
    """What a case shows, each thing by itself; of a metamorphic check only that it is made."""
    if case.check != "reference":
        return {("check", case.check)}
    return {*_traits_of(case), *_shapes(case.operands), (case.layout, case.inputs)}


def _by_layout(case: Case) -> set[object]:
    """The cells of the matrix that reports show: which dtype of which operand under which layout."""
    if case.check != "reference":
        return set()
    return {(case.layout, ("dtype", k, s.dtype)) for k, s in case.operands}


def _paired(case: Case) -> set[object]:
    """What it shows in pairs."""
    traits = _traits_of(case)
    attrs = [t for t in traits if t[0] in ("attr", "default")]
    if case.check != "reference":
        return {(case.check, t) for t in attrs}
    shapes = [s for s in _shapes(case.operands) if s[0] in ("rank", "meet")]
    pairs: set[object] = {(setting, t) for setting in (case.layout, case.inputs) for t in traits}
    return pairs | {(case.layout, s) for s in shapes} | set(combinations(attrs, 2))


@lru_cache(maxsize=1024)
def _shapes(operands: Operands) -> tuple[tuple[object, ...], ...]:
    """Traits of the shapes: their ranks, axes of size 0 and 1, odd sizes, many rows; how operands compare."""
    traits: list[tuple[object, ...]] = []
    for name, spec in operands:
        shape = spec.shape
        last = shape[-1] if shape else -1
        traits.append(("rank", name, len(shape)))
        traits.append(("last", name, "0" if not last else "1" if last == 1 else last % 2, last > 64))
        traits.append(("tall", name, math.prod(shape[:-1]) > 4096, last > 1024, last > 4096))
        traits.append(("size", name, spec.size.bit_length() // 4, 1 in shape, 0 in shape))
    for (one, a), (two, b) in combinations(operands, 2):
        meet = tuple(
            "=" if n == m else "1" if 1 in (n, m) else "<" if n < m else ">"
            for n, m in zip(a.shape[::-1], b.shape[::-1], strict=False)
        )
        traits.append(("meet", one, two, meet))
    return tuple(traits)


def cases(pattern: str = "", *, full: bool = False, seed: int = 0, only: Sequence[str] | None = None) -> Iterator[Case]:
    """Cases of all ops whose name `pattern` matches (whole), or of the ops named `only`."""
    for name, op in REGISTRY.items():
        wanted = name in only if only is not None else not pattern or re.fullmatch(pattern, name)
        if wanted:
            for case in full_cases(op) if full else quick_cases(op):
                yield case.but(seed=seed) if seed else case
