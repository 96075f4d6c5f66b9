"""Records: `dataclasses.dataclass`, whose methods are compiled when they are first asked for.

The standard decorator compiles up to six methods of a class as it is imported.  A command imports a hundred such
classes and calls a few methods of half of them: to compile all took a seventh of its start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, init=True, repr=True, eq=True, frozen=False, slots=False, kw_only=False):
        """As `dataclasses.dataclass`, of whose options it has those that are in use."""
        asked = {"__init__": init, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}

        def record(cls):
            own = {name for name, value in vars(cls).items() if value is not None}
            extends = any(map(dataclasses.is_dataclass, cls.__bases__))  # then whether both are frozen is looked at
            bare = dataclasses.dataclass(
                init=False, repr=False, eq=False, frozen=frozen and extends, slots=slots, kw_only=kw_only
            )(cls)
            bare.__dataclass_params__.frozen = frozen
            for name in asked:
                if asked[name] and name not in own:
                    setattr(bare, name, _LazyMethod(bare, name, frozen))
            if eq and not frozen and "__hash__" not in own:
                bare.__hash__ = None
            if frozen and not extends:
                bare.__setattr__, bare.__delattr__ = _build_frozen_setters(bare)
            if frozen and slots:
                bare.__getstate__, bare.__setstate__ = _get_state, _set_state
            return bare

        return record if cls is None else record(cls)


class _LazyMethod(NamedTuple):
    """Stands in the place of a method until that is asked for, and then puts it there."""

    cls: type
    name: str
    is_frozen: bool

    def __get__(self, instance: object, owner: type) -> Any:
        method = _compile_method(self.cls, self.name, self.is_frozen)
        if vars(self.cls)[self.name] is self:
            setattr(self.cls, self.name, method)
        return method.__get__(instance, owner)


def _compile_method(cls: type, name: str, frozen: bool) -> Any:
    """One method of a dataclass with the fields of `cls`."""
    is_init = name == "__init__"
    namespace = {"__doc__": name} | ({"__post_init__": None} if hasattr(cls, "__post_init__") else {})
    twin = dataclasses.make_dataclass(
        cls.__name__,
        [(field.name, field.type, _copy_field_declaration(field)) for field in dataclasses.fields(cls)],
        namespace=namespace,  # with a text, as one would be made of the signature
        init=is_init,
        repr=name == "__repr__",
        eq=name == "__eq__",
        unsafe_hash=name == "__hash__",
        frozen=frozen and is_init,  # so that it assigns past what refuses to
        slots=is_init and "__slots__" in vars(cls),  # so that it assigns defaults that no class holds
    )
    method = vars(twin)[name]
    method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _copy_field_declaration(field: dataclasses.Field[Any]) -> Any:
    """A field as it was declared."""
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    return dataclasses.field(**{name: getattr(field, name) for name in names})


def _build_frozen_setters(cls: Any) -> tuple[Callable[[object, str, object], None], Callable[[object, str], None]]:
    """``__setattr__`` and ``__delattr__`` of a frozen class."""
    names = frozenset(field.name for field in dataclasses.fields(cls))

    def set_(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return set_, delete


def _get_state(self: Any) -> list[Any]:
    """What a copy of a frozen record without a ``__dict__`` is made from."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
