"""Which op every backend says it supports, by dtype: the answer comes from the registry and the backends alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backends import find, registered
from ..backends.base import Backend, Device
from ..graph.errors import HocketError
from ..ops import REGISTRY
from .build import build
from .case import Case
from .grow import points


@dataclass(frozen=True, slots=True)
class Row:
    """One op: its tier, the dtypes of its samples, and for each backend the dtypes it supports or why none.

    `support` maps a device to {dtypes: reason why not}, an empty reason meaning that it can.
    """

    op: str
    must: bool
    dtypes: tuple[str, ...]
    support: Mapping[str, Mapping[str, str]]

    def cell(self, device: str) -> str:
        """``all``, ``none``, or the dtypes that work."""
        found = self.support.get(device, {})
        good = [d for d in self.dtypes if not found.get(d, "unknown")]
        return "all" if len(good) == len(self.dtypes) else ", ".join(good) or "none"


def support_matrix(devices: Sequence[str] | None = None) -> list[Row]:
    """Rows for all ops on `devices`, or on the first device of every backend that loads here."""
    found: dict[str, tuple[Backend, Device]] = {}
    for name in devices if devices is not None else registered():
        try:
            found[name] = find(name)
        except HocketError:
            if devices is not None:
                raise
    rows = []
    for op in REGISTRY.values():
        by_dtype: dict[str, Case] = {}
        for case in points(op):
            by_dtype.setdefault(case.dtypes, case)
        support = {
            name: {dtypes: _why_not(case, backend, device) for dtypes, case in by_dtype.items()}
            for name, (backend, device) in found.items()
        }
        rows.append(Row(op.name, op.must, tuple(by_dtype), support))
    return rows


def _why_not(case: Case, backend: Backend, device: Device) -> str:
    support = backend.supports(build(case).node, device)
    return "" if support.ok else support.why or "no reason given"
