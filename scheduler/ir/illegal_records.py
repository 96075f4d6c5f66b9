"""Errors for methods of hand-built records: a method that fails on an illegal record raises the fault of the record.

Records check nothing when they are made, and a check before each method would slow planning. So the record is checked
after a method has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ...graph.errors import HocketError, PlanError
from .field_types import describe_field_fault

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class _FaultsOfRecord:
    """A context in which an error of Python is replaced by a `PlanError` if the record is illegal."""

    def __init__(self, subject: str, record: Any, verify: Callable[[Any], None]) -> None:
        self._subject, self._record, self._verify = subject, record, verify

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(why, Exception) or isinstance(why, HocketError):
            return
        if fault := describe_field_fault(self._record):
            raise PlanError(f"{self._subject}: self: {fault}") from why
        self._verify(self._record)


def blame_illegal_record(
    verify: Callable[[Any], None],
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Return a decorator of methods: if a method fails on an illegal record, the fault of the record is raised.

    The error is a `PlanError`. Errors on legal records stay as they are.

    Args:
        verify: Raises a `PlanError` if a record is illegal whose fields have values of the right types.
    """

    def decorate(method: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @wraps(method)
        def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            with _FaultsOfRecord(method.__qualname__, args[0], verify):
                return method(*args, **kwargs)

        return call

    return decorate
