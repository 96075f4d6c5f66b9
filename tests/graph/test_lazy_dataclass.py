"""Lazy dataclasses behave as `dataclasses.dataclass` of the same class."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import field
from itertools import product
from typing import Any

import pytest

from hocket.graph import lazy_dataclass

OPTIONS = [
    {"frozen": frozen, "slots": slots, "eq": eq, "kw_only": kw_only}
    for frozen, slots, eq, kw_only in product((False, True), repeat=4)
]


def declare_class(decorator: Callable[..., Any], **options: bool) -> Any:
    @decorator(**options)
    class Point:
        """A place."""

        x: int
        y: int = 2
        names: list[str] = field(default_factory=list, compare=False)
        seen: int = field(default=7, init=False)
        hidden: str = field(default="h", repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError(f"x is {self.x}")

    return Point


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type and the text of its exception."""
    try:
        return call()
    except Exception as why:
        return type(why).__name__, str(why)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_record_behaves_as_the_dataclass(options):
    def describe(decorator):
        kind = declare_class(decorator, **options)
        one, same, other = (outcome(lambda y=y: kind(x=1, y=y)) for y in (2, 2, 3))

        def assign():
            one.x = 5
            return one.x

        def remove():
            del one.x
            return hasattr(one, "x")

        return [
            repr(one),
            (one == same, one == other, one == (1, 2), one != same),
            outcome(lambda: hash(one) == hash(same)),
            outcome(lambda: kind(1, 3).y),
            outcome(lambda: kind()),
            outcome(lambda: kind(x=1, z=1)),
            outcome(lambda: kind(x=-1)),
            repr(dataclasses.replace(one, x=9)),
            dataclasses.asdict(one),
            (kind.__match_args__, kind.__doc__, kind.__name__, kind.__qualname__, kind.__module__),
            str(inspect.signature(kind)),
            repr(copy.copy(one)),
            repr(copy.deepcopy(one)),
            hasattr(one, "__dict__"),
            outcome(assign),
            outcome(remove),
            options["slots"] or outcome(lambda: setattr(kind(x=1), "new", 1)),  # where Python 3.11 itself stumbles
        ]

    ours, theirs = describe(lazy_dataclass.dataclass), describe(dataclasses.dataclass)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == its


def test_what_a_class_defines_itself_stays():
    @lazy_dataclass.dataclass(frozen=True)
    class Own:
        x: int

        def __init__(self) -> None:
            object.__setattr__(self, "x", 3)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 4

    assert (Own().x, repr(Own()), Own() == 5, hash(Own())) == (3, "own", True, 4)


def test_one_record_extends_another():
    @lazy_dataclass.dataclass(frozen=True)
    class Base:
        x: int

    @lazy_dataclass.dataclass(frozen=True)
    class More(Base):
        y: int = 1

    class Plain(Base):
        pass

    assert repr(More(1)) == f"{More.__qualname__}(x=1, y=1)"
    assert More(1) == More(1, 1) != Base(1)
    assert hash(Plain(1)) == hash(Base(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plain(1).x = 2
    plain = Plain(1)
    plain.other = 2  # as a class that is no dataclass may
    assert plain.other == 2


@pytest.mark.parametrize("frozen", [*product((False, True), repeat=2)], ids=str)
@pytest.mark.parametrize("slots", [False, True])
def test_records_and_dataclasses_extend_each_other(frozen, slots):
    def describe(first, second):
        def extend():
            @first(frozen=frozen[0], slots=slots)
            class Base:
                x: int

            @second(frozen=frozen[1], slots=slots)
            class More(Base):
                y: int = 1

            more = More(1)
            refused = [outcome(lambda name=name: setattr(more, name, 3)) for name in ("x", "y")]
            return repr(more), repr(copy.copy(more)), refused, more.__dataclass_params__.frozen

        return outcome(extend)

    expected = describe(dataclasses.dataclass, dataclasses.dataclass)
    for pair in product((lazy_dataclass.dataclass, dataclasses.dataclass), repeat=2):
        assert describe(*pair) == expected


def test_methods_are_compiled_when_they_are_asked_for():
    kind = declare_class(lazy_dataclass.dataclass, frozen=True, slots=True)
    assert {type(vars(kind)[name]) for name in ("__init__", "__repr__", "__eq__", "__hash__")} == {
        lazy_dataclass._LazilyCompiledMethod
    }
    kind(1)
    assert inspect.isfunction(vars(kind)["__init__"])
    assert type(vars(kind)["__repr__"]) is lazy_dataclass._LazilyCompiledMethod
