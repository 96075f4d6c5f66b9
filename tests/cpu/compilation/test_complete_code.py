"""Assembly in which LLVM has removed code is refused, before a kernel of it runs forever."""

from __future__ import annotations

import pytest

from hocket.backends.cpu.compilation.complete_code import require_complete_code
from hocket.graph.errors import BackendError

LOOP = """
more:                                             ; preds = %more, %entry
  %at = phi i64 [ 0, %entry ], [ %next, %more ]
  %next = add i64 %at, 1
  br i1 %ends, label %end, label %more

join:                                             ; preds = %more
  br label %end
"""


def test_loops_and_jumps_are_code():
    require_complete_code("rows.add", LOOP)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (
            "B7.i.i:                ; preds = %B7.i.i, %more\n  br label %B7.i.i\n",
            "rows.add would not end: LLVM removed",
        ),
        ("B7:\n  br label %B7\n", "rows.add would not end: LLVM removed"),
        ("end:\n  unreachable\n", "rows.add would not end: LLVM removed"),
        ("  call void @numba_do_raise(ptr %error)\n", "rows.add may raise, and nothing would catch it"),
    ],
)
def test_code_that_is_removed_or_raises_is_refused(rest: str, message: str):
    with pytest.raises(BackendError, match=message):
        require_complete_code("rows.add", LOOP + rest)
