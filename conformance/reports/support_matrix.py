"""The support matrix: the dtypes of each op that every backend supports, from the registry and the backends alone."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...backends import find_backends_by_device_kind, find_device
from ...backends.base import Backend, Device
from ...backends.capabilities import STAND_IN, ListsKernels
from ...graph.errors import HocketError
from ...ops import REGISTRY, Op
from ..cases.case import Case
from ..cases.grow_shapes import grow_cases_from_samples
from ..cases.operand_layouts import list_packed_state_operands
from ..checks.case_graph import build_case_graph, build_verified_device_plan, find_unsupported_reason
from ..generate_cases import DeclarationFaultError, convert_errors_to_declaration_faults


@dataclass(frozen=True, slots=True)
class SupportRow:
    """The support of one op: its tier, the operand dtypes of its cases, and the supported dtypes of each device.

    `fault` is the reason why the op cannot be used or has no cases; then the other fields are empty.
    `support` has, by device and dtypes, the reason why the device does not support the op, or the empty text if it
    does. `stand_ins` has, by device, the dtypes for which the backend has no compiled kernel, so that NumPy computes
    the op.
    """

    op: str
    must: bool
    dtypes: tuple[str, ...]
    support: Mapping[str, Mapping[str, str]]
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fault: str = ""

    def format_cell(self, device: str) -> str:
        """Return the matrix cell of a device: ``all``, ``none`` or the supported dtypes, and a note about NumPy."""
        if self.fault:
            return "unknown"
        reasons = self.support.get(device, {})
        good = [d for d in self.dtypes if not reasons.get(d, "unknown")]
        supported = "all" if len(good) == len(self.dtypes) else ", ".join(good) or "none"
        in_numpy = self.stand_ins.get(device, ())
        if not in_numpy:
            return supported
        return f"{supported} (NumPy)" if len(in_numpy) == len(good) else f"{supported} (NumPy: {', '.join(in_numpy)})"


def support_matrix(devices: Sequence[str] | None = None) -> list[SupportRow]:
    """Return the support of all ops on devices.

    Args:
        devices: names such as ``cpu:0``; by default the first device of every backend that loads on this machine.

    Raises:
        HocketError: a named device does not exist.
    """
    loaded: dict[str, tuple[Backend, Device]] = {}
    for name in devices if devices is not None else find_backends_by_device_kind():
        try:
            loaded[name] = find_device(name)
        except HocketError:
            if devices is not None:
                raise
    rows = [_build_support_row(op, loaded) for op in REGISTRY.values()]
    return rows + [
        SupportRow(name, False, (), {}, fault=fault) for name, fault in REGISTRY.package_entry_faults.items()
    ]


def _build_support_row(op: Op[Any], loaded: Mapping[str, tuple[Backend, Device]]) -> SupportRow:
    """Build the row of an op: its support by each device; a row with a fault if its declaration is wrong."""
    by_dtype: dict[str, list[Case]] = {}
    try:
        with convert_errors_to_declaration_faults(op.name):
            for case in grow_cases_from_samples(op):
                by_dtype.setdefault(case.dtype_names, []).append(case)
            support = {
                name: {
                    dtypes: _find_unsupported_reason(cases[0], backend, device) for dtypes, cases in by_dtype.items()
                }
                for name, (backend, device) in loaded.items()
            }
    except DeclarationFaultError as why:
        return SupportRow(op.name, op.is_required, (), {}, fault=str(why))
    stand_ins = {
        name: tuple(
            dtypes
            for dtypes, cases in by_dtype.items()
            if not support[name][dtypes] and _computes_all_cases_with_numpy(cases, backend, device)
        )
        for name, (backend, device) in loaded.items()
    }
    return SupportRow(op.name, op.is_required, tuple(by_dtype), support, stand_ins)


def _computes_all_cases_with_numpy(cases: Sequence[Case], backend: Backend, device: Device) -> bool:
    """Return whether NumPy computes all supported cases, in a backend that otherwise compiles kernels.

    Quantised operands that may be states are states, as a KV cache is. Cases with empty results are ignored: they call
    no kernel.
    """
    if not isinstance(backend, ListsKernels):
        return False
    stands_in = False
    for case in cases:
        if case.op_declaration.is_view or _find_unsupported_reason(case, backend, device):
            continue
        has_states = list_packed_state_operands(case.op_declaration, case.specs, case.attributes_with_defaults)
        graph = build_case_graph(case.with_settings(layout="state") if has_states else case).graph
        calls = build_verified_device_plan(graph, backend, device).predicted_kernel_calls
        if calls and all(called.kernel != STAND_IN for called in calls):
            return False
        stands_in |= bool(calls)
    return stands_in


def _find_unsupported_reason(case: Case, backend: Backend, device: Device) -> str:
    """Return the reason why a device does not support a case; the empty text if the device does."""
    return find_unsupported_reason(build_case_graph(case).graph, backend, device)


def format_support_matrix(rows: Sequence[SupportRow], text_format: str) -> str:
    """Return the support matrix as text.

    Args:
        rows: rows of the matrix.
        text_format: format of the text: ``md`` (Markdown), ``json`` or ``html``.
    """
    devices = list(dict.fromkeys(device for row in rows for device in row.support))
    if text_format == "json":
        entries = [
            {
                "op": r.op,
                "tier": _find_must_or_should_tier(r),
                "dtypes": list(r.dtypes),
                "support": {d: r.format_cell(d) for d in devices},
                **({"fault": r.fault} if r.fault else {}),
            }
            for r in rows
        ]
        return json.dumps(entries, indent=1) + "\n"
    head = ["op", "tier", "meaning", *devices]
    body = [
        [
            r.op,
            _find_must_or_should_tier(r),
            _get_op_summary_or_fault(r),
            *map(r.format_cell, devices),
        ]
        for r in rows
    ]
    if text_format == "md":
        lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in body)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
    table = "".join(
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in line)}</tr>\n"
        for tag, line in [("th", head), *(("td", line) for line in body)]
    )
    return f"<!doctype html><meta charset=utf-8><title>hocket ops</title><table>\n{table}</table>\n"


def _get_op_summary_or_fault(row: SupportRow) -> str:
    """Return the first line of the documentation of an op, or its fault."""
    return row.fault or REGISTRY[row.op].documentation.partition("\n")[0]


def _find_must_or_should_tier(row: SupportRow) -> str:
    """Return ``MUST`` for an op that every backend must support, otherwise ``SHOULD``."""
    return "MUST" if row.must else "SHOULD"
