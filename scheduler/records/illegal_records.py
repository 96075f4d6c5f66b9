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
ERRORS_OF_WRONG_RECORDS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""The errors of Python that a record with wrong values can cause. A full memory or disk is not among them."""


class IllegalRecordError(PlanError):
    """A record of a plan has a value of a wrong type.

    If a caller built the record, it is a plan error like others. If the planner built it, hocket is at fault, so the
    search for the fastest plan does not leave the candidate aside.
    """


class _FaultsOfRecord:
    """A context in which an error of Python is replaced by an `IllegalRecordError` that names the fault of a record.

    If all types are right, it is a `HocketError`, which the search for the fastest plan does not catch. Then either the
    records do not belong together, or hocket is at fault.
    """

    def __init__(self, subject: str, record: Any) -> None:
        self._subject, self._record = subject, record

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(why, ERRORS_OF_WRONG_RECORDS) and not isinstance(why, HocketError):
            if fault := describe_field_fault(self._record):
                raise IllegalRecordError(f"{self._subject}: self: {fault}") from why
            reason = f"its records do not belong together, or hocket is at fault: {describe_exception(why)}"
            raise HocketError(f"{self._subject}: self: {reason}") from why


def blame_illegal_record(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Return the method with a `HocketError` in place of errors of Python; it names the fault of the record."""

    @wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        with _FaultsOfRecord(method.__qualname__, args[0]):
            return method(*args, **kwargs)

    return call
