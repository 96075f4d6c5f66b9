"""The code blocks of a page of the documentation: their output, and lines without numbers."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
OF_THE_MACHINE = re.compile(r" *[\d.]+ [KMGT]iB$", re.MULTILINE)
"""The free memory of a device, the last column of `explain`."""


def as_it_prints(page: str) -> str:
    """Return a page with the output below each block, when all run in order as one program."""
    space: dict[str, object] = {"__name__": "page"}

    def rewritten(block: re.Match[str]) -> str:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(block["code"], "page", "exec"), space)
        text = printed.getvalue()
        same = OF_THE_MACHINE.sub("", text) == OF_THE_MACHINE.sub("", block["printed"] or "")
        expected_lines = block["printed"] or "" if same else text
        return f"```python\n{block['code']}```\n" + (f"\n```text\n{expected_lines}```\n" if expected_lines else "")

    return BLOCK.sub(rewritten, page)


NUMBER = re.compile(r"[+-]?\d[\d,.]*( ?([num]?s|µs|[KMGT]i?B|[KMGT]B/s|[KMGT]?FLOP/s))?\b")


def without_numbers(line: str) -> str:
    """A line of output without numbers, their units and its padding."""
    return " ".join(NUMBER.sub("N", line).split())
