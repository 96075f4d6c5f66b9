"""The grammar of device names: a kind, an index, and optionally a part and a process.

``KIND[:INDEX][/MULTIPROCESSORS][.PART][@RANK]``, as in ``cpu``, ``cuda:1``, ``cuda:0.1``, ``cuda:0/64.1``, ``cpu:0@1``.
"""

from __future__ import annotations

import re

from ..graph.errors import BackendError
from ..graph.lazy_dataclass import dataclass
from ..graph.validation import format_value

DEVICE_KIND_PATTERN = re.compile(r"\w[\w.-]*", re.ASCII)
"""Pattern of a device kind, which is also the name of an entry point."""


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The parsed name of a device.

    - ``cuda:0.1`` is part 1 of a device; the parts share its multiprocessors.
    - ``cuda:0/64.1`` is part 1 of a device that is divided into parts of 64 multiprocessors each.
    - ``cpu:0@1`` is a device of process 1.
    """

    kind: str
    index: int
    part: int | None = None
    rank: int | None = None
    multiprocessors: int | None = None

    def __str__(self) -> str:
        division = "" if self.multiprocessors is None else f"/{self.multiprocessors}"
        part, rank = "" if self.part is None else f".{self.part}", "" if self.rank is None else f"@{self.rank}"
        return f"{self.kind}:{self.index}{division}{part}{rank}"

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parse a device name such as ``cuda:0.1``. The default index is 0. Raises `BackendError` for other text."""
        if not text:
            raise BackendError("the name of a device is empty; need a kind and a number, as in cpu:0")
        here, at, rank = text.partition("@")
        kind, _, numbers = here.partition(":")
        divided, dot, part = numbers.partition(".")
        index, slash, multiprocessors = divided.partition("/")
        if not DEVICE_KIND_PATTERN.fullmatch(kind):
            raise BackendError(
                f"device {format_value(text)}: a kind is letters, digits, '_', '-' and '.', "
                "and a number follows, as in cpu:0"
            )
        if at and not _is_decimal(rank):
            raise BackendError(
                f"device {format_value(text)}: after the @ comes the number of a process, as in {kind}:0@1"
            )
        if (numbers and not _is_decimal(index)) or (dot and not _is_decimal(part)):
            raise BackendError(
                f"device {format_value(text)}: after the colon comes a number, as in {kind}:0, or {kind}:0.1 for a part"
            )
        if slash and not (dot and _is_decimal(multiprocessors) and int(multiprocessors)):
            raise BackendError(
                f"device {format_value(text)}: after the / comes the multiprocessors of each part, and a part follows, "
                f"as in {kind}:0/64.1"
            )
        return cls(
            kind,
            int(index or 0),
            int(part) if dot else None,
            int(rank) if at else None,
            int(multiprocessors) if slash else None,
        )


def _is_decimal(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10
