"""A `dataclass` decorator that compiles each generated method at its first call.

The standard decorator compiles up to six methods per class at import. A command imports a hundred such classes and
calls few of their methods. Compiling all of them took a seventh of the start time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls=None, /, *, init=True, repr=True, eq=True, frozen=False, slots=False, kw_only=False, weakref_slot=False
    ):
        """Return the class with the methods of `dataclasses.dataclass`, each compiled at its first call.

        The parameters are the options of `dataclasses.dataclass` that hocket uses.
        """
        enabled = {"__init__": init, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}

        def decorate(cls):
            own = {name for name, value in vars(cls).items() if value is not None}
            # The standard decorator has to compare `frozen` of a class and its base.
            extends = any(map(dataclasses.is_dataclass, cls.__bases__))
            bare = dataclasses.dataclass(
                init=False,
                repr=False,
                eq=False,
                frozen=frozen and extends,
                slots=slots,
                kw_only=kw_only,
                weakref_slot=weakref_slot,
            )(cls)
            bare.__dataclass_params__.frozen = frozen
            for name in enabled:
                if enabled[name] and name not in own:
                    setattr(bare, name, _LazilyCompiledMethod(bare, name, frozen))
            if eq and not frozen and "__hash__" not in own:
                bare.__hash__ = None
            if frozen and not extends:
                bare.__setattr__, bare.__delattr__ = _build_frozen_setattr_and_delattr(bare)
            if frozen and slots:
                bare.__getstate__, bare.__setstate__ = _list_field_values_for_pickle, _set_state
            return bare

        return decorate if cls is None else decorate(cls)


class _LazilyCompiledMethod(NamedTuple):
    """A descriptor that compiles a method at its first call and then replaces itself by the method."""

    cls: type
    name: str
    is_frozen: bool

    def __get__(self, instance: object, owner: type) -> Any:
        method = _compile_dataclass_method(self.cls, self.name, self.is_frozen)
        if vars(self.cls)[self.name] is self:
            setattr(self.cls, self.name, method)
        return method.__get__(instance, owner)


def _compile_dataclass_method(cls: type, name: str, frozen: bool) -> Any:
    """Compile one method that `dataclasses` generates for the fields of `cls`, such as ``__init__``."""
    is_init = name == "__init__"
    namespace = {"__doc__": name} | ({"__post_init__": None} if hasattr(cls, "__post_init__") else {})
    generated = dataclasses.make_dataclass(
        cls.__name__,
        [(field.name, field.type, _copy_field_declaration(field)) for field in dataclasses.fields(cls)],
        namespace=namespace,  # with a docstring, so that `dataclasses` does not format the signature
        init=is_init,
        repr=name == "__repr__",
        eq=name == "__eq__",
        unsafe_hash=name == "__hash__",
        frozen=frozen and is_init,  # so that it bypasses `__setattr__`
        slots=is_init and "__slots__" in vars(cls),  # so that it assigns defaults without class attributes
    )
    method = vars(generated)[name]
    method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _copy_field_declaration(field: dataclasses.Field[Any]) -> Any:
    """Return a new `dataclasses.field` with the options of an existing field, such as its default."""
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    return dataclasses.field(**{name: getattr(field, name) for name in names})


def _build_frozen_setattr_and_delattr(
    cls: Any,
) -> tuple[Callable[[object, str, object], None], Callable[[object, str], None]]:
    """Build ``__setattr__`` and ``__delattr__`` of a frozen class, which raise `FrozenInstanceError`."""
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


def _list_field_values_for_pickle(self: Any) -> list[Any]:
    """Return the values of all fields of a frozen instance with slots, as its ``__getstate__`` for pickle."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
