"""Checks of the values in the fields of a record against the annotations of the fields, at any depth.

Planning builds many records, so `Tensor`, `Instruction`, `Program` and the layouts accept any values. Public functions
that receive a plan or a program check all of its records at once, before they read a field.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Protocol, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from ...backends.base import BACKEND_KIND, Backend
from ...graph.attrs import ATTRS_KIND
from ...graph.errors import format_count
from ...graph.graph import Graph
from ...graph.repeated_runs import ShortenedGraph
from ...graph.validation import BOOL, NONE, TEXT, ArgumentKind, format_value, instance_of

MAX_INTEGER = 2**63 - 1


class PlainAttributes(Protocol):
    """Stands for the recursive type alias `Attrs` in annotations that are evaluated at run time.

    Python cannot evaluate a recursive alias, so the checks of record fields use this class instead.
    """


class FieldFault(NamedTuple):
    """A field of a record with a value of a wrong type.

    - `path`: the way to the value, such as ``.instructions[3].src[0].shape``.
    - `field`: the record class and its field, such as ``Tensor.shape``; empty outside a record.
    - `value`, `need`: the value, and a description of the values that the field accepts.
    """

    path: str
    field: str
    value: object
    need: str


FieldCheck: TypeAlias = Callable[[Any, set[int]], FieldFault | None]
"""Finds the first fault in a value. The set has the identities of checked records, which programs often share."""
LEAF_KINDS: Mapping[object, ArgumentKind] = {
    int: ArgumentKind("an integer below 2^63", lambda v: type(v) is int and abs(v) <= MAX_INTEGER),
    float: ArgumentKind(
        "a finite number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= sys.float_info.max,
    ),
    **{bool: BOOL, str: TEXT, type(None): NONE, Backend: BACKEND_KIND, PlainAttributes: ATTRS_KIND},
    **{kind: instance_of(kind) for kind in (Graph, ShortenedGraph)},  # their own constructors check them
}
"""The argument kinds of the types without fields that need a check."""


def describe_field_fault(record: object, checked: Iterable[object] = ()) -> str:
    """Describe the first field with a value of a wrong type, in a record such as a plan or in records inside it.

    The text names the record class, the field, the value, the need and the path. It is empty if all types are right.

    Args:
        record: The record.
        checked: Records below it that are left out.
    """
    fault = _build_check_of_annotation(cast(Hashable, type(record)))(record, set(map(id, checked)))
    if fault is None:
        return ""
    return f"{fault.field} is {format_value(fault.value)} at {fault.path[1:]}; it must be {fault.need}"


def record_kind(*classes: type, description: str = "") -> ArgumentKind:
    """Return the argument kind (a named test) for records with values of the right types in all fields."""
    kind = instance_of(*classes, description=description)
    return ArgumentKind(
        kind.description,
        lambda v: kind.accepts(v) and not describe_field_fault(v),
        lambda v: describe_field_fault(v) if kind.accepts(v) else "",
    )


@cache
def _build_check_of_annotation(annotation: Any) -> FieldCheck:
    """Return the function that checks values against a type annotation, such as ``tuple[int, ...]`` or a record."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in LEAF_KINDS:
        return _make_leaf_check(LEAF_KINDS[annotation])
    if origin in (Union, UnionType):
        return _make_union_check([_build_check_of_annotation(option) for option in arguments])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _make_fixed_tuple_check([_build_check_of_annotation(entry) for entry in arguments])
    if origin in (tuple, frozenset):
        return _make_collection_check(origin, _build_check_of_annotation(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _make_mapping_check(*map(_build_check_of_annotation, arguments))
    if dataclasses.is_dataclass(annotation):
        return _make_record_check(cast(type, annotation))
    classes = (c for c in (annotation, origin) if isinstance(c, type) and c is not Any)
    return _make_leaf_check(instance_of(next(classes, object)))  # only a subclass outside the package needs `object`


def _make_leaf_check(kind: ArgumentKind) -> FieldCheck:
    return lambda value, seen: None if kind.accepts(value) else FieldFault("", "", value, kind.description)


def _make_union_check(options: list[FieldCheck]) -> FieldCheck:
    """Make the check for a union of types.

    If the value is a record of one of the types, the fault inside this record is reported.
    """

    def check(value: Any, seen: set[int]) -> FieldFault | None:
        faults = []
        for option in options:
            fault = option(value, seen)
            if fault is None or fault.field:
                return fault
            faults.append(fault)
        return FieldFault("", "", value, " or ".join(fault.need for fault in faults))

    return check


def _make_fixed_tuple_check(entries: list[FieldCheck]) -> FieldCheck:
    def check(value: Any, seen: set[int]) -> FieldFault | None:
        if not isinstance(value, tuple) or len(value) != len(entries):
            return FieldFault("", "", value, f"a tuple of {format_count(len(entries), 'entry', 'entries')}")
        for number, (entry, item) in enumerate(zip(entries, value, strict=True)):
            if fault := entry(item, seen):
                return fault._replace(path=f"[{number}]{fault.path}")
        return None

    return check


def _make_collection_check(cls: type[tuple[Any, ...] | frozenset[Any]], entry: FieldCheck) -> FieldCheck:
    def check(value: Any, seen: set[int]) -> FieldFault | None:
        if not isinstance(value, cls):
            return FieldFault("", "", value, f"a {cls.__name__}")
        for number, item in enumerate(value):
            if fault := entry(item, seen):
                return fault._replace(path=f"[{number}]{fault.path}")
        return None

    return check


def _make_mapping_check(key: FieldCheck, entry: FieldCheck) -> FieldCheck:
    def check(value: Any, seen: set[int]) -> FieldFault | None:
        if not isinstance(value, Mapping):
            return FieldFault("", "", value, "a mapping")
        for name, item in value.items():
            if fault := key(name, seen) or entry(item, seen):
                return fault._replace(path=f"[{format_value(name)}]{fault.path}")
        return None

    return check


def _make_record_check(cls: type) -> FieldCheck:
    """Make the check for the instances of a record class; it checks each field.

    A field that the record computes at its first access is skipped until then.
    """

    @cache
    def find_field_checks() -> list[tuple[str, FieldCheck]]:
        hints = get_type_hints(cls, localns={"Attrs": PlainAttributes})
        return [(field.name, _build_check_of_annotation(hints[field.name])) for field in dataclasses.fields(cls)]

    need = instance_of(cls).description

    def check(value: Any, seen: set[int]) -> FieldFault | None:
        if not isinstance(value, cls):
            return FieldFault("", "", value, need)
        if id(value) in seen:
            return None
        known = getattr(value, "__dict__", None)
        for name, check_field in find_field_checks():
            if (known is None or name in known) and (fault := check_field(getattr(value, name), seen)):
                field = fault.field or f"{cls.__name__}.{name}"
                return fault._replace(path=f".{name}{fault.path}", field=field)
        seen.add(id(value))
        return None

    return check
