"""All cases of an op, in every layout and with every input kind, or a covering selection of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias
from zlib import crc32

from ..graph.attrs import format_attribute
from ..graph.spec import Spec
from ..graph.validation import describe_exception
from ..ops import REGISTRY, Op
from .cases.case import DECLARATION_CHECK, Case, get_tested_op, list_tested_op_names
from .cases.grow_shapes import FEW_ELEMENTS, LONG_AXIS, count_axes_with_distinct_ids, grow_cases_from_samples
from .cases.inputs import select_relevant_input_kinds
from .cases.operand_layouts import (
    find_in_place_operand_and_duplicate,
    find_layout_by_name,
    list_packed_state_operands,
)
from .checks import zero_propagation
from .checks.metamorphic import list_metamorphic_checks

Operands: TypeAlias = tuple[tuple[str, Spec], ...]
PAIRS_OF_LAYOUT = 12
"""Maximum grown calls of an op at which every layout is combined with every input kind."""
QUICK_ELEMENTS = 1 << 15
"""Operand elements above which the quick run prefers other cases."""
MAX_QUICK_CASES = 400
"""Maximum cases of one op in the quick run."""


def select_relevant_layouts(case: Case) -> tuple[str, ...]:
    """Return the operand layouts that make a difference for `case`. ``contiguous`` comes first."""
    op, attrs, layouts = case.op_declaration, case.attributes_with_defaults, ["contiguous"]
    for layout in ("offset", "sliced", "permuted", "broadcast"):
        if any(
            find_layout_by_name(s, layout, count_axes_with_distinct_ids(op, attrs, name)) is not None
            for name, s in case.operands
        ):
            layouts.append(layout)
    specs = case.specs
    if any(name in specs and specs[name].size for _, name in op.inplace_pairs(attrs)):
        layouts.append("inplace")
    if find_in_place_operand_and_duplicate(op, specs, attrs) is not None:
        layouts += ["twin", "overlap"]
    if list_packed_state_operands(op, specs, attrs):
        layouts.append("state")
    return tuple(layouts)


@lru_cache(maxsize=4)
def generate_full_cases(op: Op) -> tuple[Case, ...]:
    """Return all cases of one op, each once, in a fixed order.

    Each grown call is tested in every layout and with every input kind, except the one with a long axis. Small calls
    are tested with every metamorphic check.
    """
    cases: dict[Case, None] = {}
    crossed = 0
    for point in grow_cases_from_samples(op):
        layouts, kinds = select_relevant_layouts(point), select_relevant_input_kinds(point)
        largest = max((s.size for _, s in point.operands), default=0)
        small = largest <= FEW_ELEMENTS
        if largest >= LONG_AXIS:
            layouts, kinds = layouts[:1], kinds[:1]
        both = small and crossed < PAIRS_OF_LAYOUT
        crossed += both
        for layout in layouts:
            for inputs in kinds:
                if both or layout == "contiguous" or inputs == "normal":
                    cases[point.with_settings(layout=layout, inputs=inputs)] = None
        if small:
            cases.update(
                (point.with_settings(check=check), None)
                for check in (*list_metamorphic_checks(point), *zero_propagation.list_zero_checks(point))
            )
    return tuple(cases)


@lru_cache(maxsize=256)
def select_quick_cases(op: Op, *, covers_pairs: bool = True) -> tuple[Case, ...]:
    """Select few cases of the full run that still cover every dtype, layout, input kind, attribute value and check.

    Nearly every pair of these that occurs in the full run also occurs in the selection, unless `covers_pairs` is false.
    """
    seen: set[object] = set()
    chosen: dict[Case, None] = {}
    ordered = sorted(generate_full_cases(op), key=_compute_selection_order)
    rounds = (_list_single_traits, _list_layout_operand_dtype_traits, _list_trait_pairs)
    for features in rounds if covers_pairs else rounds[:2]:
        for case in ordered:
            if case not in chosen and (new := features(case)) - seen and len(chosen) < MAX_QUICK_CASES:
                seen |= (
                    new | _list_single_traits(case) | _list_layout_operand_dtype_traits(case) | _list_trait_pairs(case)
                )
                chosen[case] = None
    return tuple(chosen)


def _compute_selection_order(case: Case) -> tuple[int, int, int]:
    """Return the sort key of a case for the quick selection.

    Cases of moderate size come first, then cases with all operands, then a fixed shuffled order.
    """
    size = sum(s.size for _, s in case.operands)
    return (
        (size > QUICK_ELEMENTS) + 2 * (size <= 4 or case.has_empty_operand),
        -len(case.operands),
        crc32(case.text_without_seed.encode()),
    )


@lru_cache(maxsize=1024)
def _list_call_operand_and_attribute_traits(
    op: Op, operands: Operands, attrs: tuple[tuple[str, str], ...]
) -> tuple[tuple[object, ...], ...]:
    """Return the operand dtypes, attribute values and operand names of a call as traits."""
    traits: list[tuple[object, ...]] = [("dtype", k, s.dtype) for k, s in operands]
    traits += [("attr", *attr) for attr in attrs]
    traits += [("default", k) for k in op.defaults if k not in dict(attrs)]
    return (*traits, ("operands", tuple(k for k, _ in operands)))


def _list_case_operand_and_attribute_traits(case: Case) -> tuple[tuple[object, ...], ...]:
    """Return the operand dtypes, attribute values and operand names of a case as traits."""
    attrs = tuple((k, format_attribute(v)) for k, v in case.attrs)
    return _list_call_operand_and_attribute_traits(case.op_declaration, case.operands, attrs)


def _list_single_traits(case: Case) -> set[object]:
    """Return the single traits of a case, which the quick run covers first.

    A trait is a property that a fault may depend on, such as a dtype. A metamorphic check has only its name as a trait.
    """
    if case.check != "reference":
        return {("check", case.check)}
    return {
        *_list_case_operand_and_attribute_traits(case),
        *_list_shape_traits(case.operands),
        (case.layout, case.inputs),
    }


def _list_layout_operand_dtype_traits(case: Case) -> set[object]:
    """Return the combinations of layout, operand and dtype of a case; none for a metamorphic check."""
    if case.check != "reference":
        return set()
    return {(case.layout, ("dtype", k, s.dtype)) for k, s in case.operands}


def _list_trait_pairs(case: Case) -> set[object]:
    """Return all pairs of traits of a case; the quick run covers pairs after all single traits."""
    traits = _list_case_operand_and_attribute_traits(case)
    attrs = [t for t in traits if t[0] in ("attr", "default")]
    if case.check != "reference":
        return {(case.check, t) for t in attrs}
    shapes = [s for s in _list_shape_traits(case.operands) if s[0] in ("rank", "meet")]
    pairs: set[object] = {(setting, t) for setting in (case.layout, case.inputs) for t in traits}
    return pairs | {(case.layout, s) for s in shapes} | set(combinations(attrs, 2))


@lru_cache(maxsize=1024)
def _list_shape_traits(operands: Operands) -> tuple[tuple[object, ...], ...]:
    """Return the traits of the operand shapes.

    These are ranks, axes of size 0 and 1, odd lengths and many rows, and the comparison of the shapes of two operands.
    """
    traits: list[tuple[object, ...]] = []
    for name, spec in operands:
        shape = spec.shape
        last = shape[-1] if shape else -1
        traits.append(("rank", name, len(shape)))
        traits.append(("last", name, "0" if not last else "1" if last == 1 else last % 2, last > 64))
        traits.append(("tall", name, math.prod(shape[:-1]) > 4096, last > 1024, last > 4096))
        traits.append(("size", name, spec.size.bit_length() // 4, 1 in shape, 0 in shape))
    for (one, a), (two, b) in combinations(operands, 2):
        comparisons = tuple(
            "=" if n == m else "1" if 1 in (n, m) else "<" if n < m else ">"
            for n, m in zip(a.shape[::-1], b.shape[::-1], strict=False)
        )
        traits.append(("meet", one, two, comparisons))
    return tuple(traits)


def generate_cases_of_matching_ops(
    pattern: str = "", *, full: bool = False, seed: int = 0, only: Sequence[str] | None = None
) -> Iterator[Case]:
    """Yield the quick or all cases of the ops with a name that `pattern` matches completely.

    An op with a fault in its declaration has one case, which fails with the reason.

    Args:
        pattern: regular expression of op names; the empty text matches all ops.
        full: yield all cases, not only the quick ones.
        seed: seed of all random numbers.
        only: names of ops, in place of the pattern.
    """
    for name in (*list_tested_op_names(), *REGISTRY.package_entry_faults):
        is_selected = name in only if only is not None else not pattern or re.fullmatch(pattern, name)
        if is_selected:
            for case in _generate_cases_or_failing_case(name, full):
                yield case.with_settings(seed=seed) if seed else case


def _generate_cases_or_failing_case(name: str, full: bool) -> Sequence[Case]:
    """Return the cases of an op; for an op with a fault in its declaration, one case that fails with the reason."""
    generate = generate_full_cases if full else select_quick_cases
    try:
        with convert_errors_to_declaration_faults(name):
            return generate(get_tested_op(name))
    except DeclarationFaultError:
        return (Case(name, (), check=DECLARATION_CHECK),)


def find_declaration_fault(name: str) -> str:
    """Return why an op has no cases, as one line; the empty text if it has cases."""
    if name in REGISTRY.package_entry_faults:
        return REGISTRY.package_entry_faults[name]
    try:
        with convert_errors_to_declaration_faults(name):
            select_quick_cases(get_tested_op(name))
    except DeclarationFaultError as why:
        return str(why)
    return ""


class DeclarationFaultError(Exception):
    """The declaration of an op is wrong; the message is one line that names the op."""


@contextmanager
def convert_errors_to_declaration_faults(name: str) -> Iterator[None]:
    """Convert any error in this context to `DeclarationFaultError`; the context uses the declaration of op `name`.

    The op may be of another package. Its functions and samples may raise anything, which must not stop other ops.
    """
    try:
        yield
    except Exception as why:  # by functions of another package
        raise DeclarationFaultError(f"{name}: {describe_exception(why)}") from None
