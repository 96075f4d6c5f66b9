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
from ...graph.validation import describe_exception
from .field_types import describe_field_fault

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class _FaultsOfRecord:
    """A context in which an error of Python is replaced by a `PlanError` that names the fault of a record."""

    def __init__(self, subject: str, record: Any) -> None:
        self._subject, self._record = subject, record

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(why, Exception) and not isinstance(why, HocketError):
            fault = describe_field_fault(self._record) or f"its records do not match: {describe_exception(why)}"
            raise PlanError(f"{self._subject}: self: {fault}") from why


def blame_illegal_record(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Return the method with a `PlanError` in place of errors of Python; it names the fault of the record."""

    @wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        with _FaultsOfRecord(method.__qualname__, args[0]):
            return method(*args, **kwargs)

    return call
