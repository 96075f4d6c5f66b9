"""Work counted in calls: tests of cost use it, since seconds depend on the host."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def count_calls(work: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of `work`, and the number of calls, of Python and of C, in this thread."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, count
