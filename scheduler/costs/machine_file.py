"""The reader of machine files for ``--simulate FILE.toml``, which describe the devices and links of a user.

```toml
simulate = "server:4,cable"  # the machine, as after --simulate

[kinds.server]
like = "rtx4090"             # a built-in kind, with the figures of the missing keys
memory_gib = 48

[links.cable]
gb_per_s = 40                # in one direction
latency_us = 8
```
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...backends.device_name import DEVICE_KIND_PATTERN
from ...graph.errors import PlanError
from ...graph.validation import TEXT, ArgumentKind, number_between, require
from .device_catalogue import CATALOGUE, GIB, DataSheet, DeviceAndLinkCatalogue, LinkSpeeds

MAX_FILE_BYTES = 1 << 20
"""The largest accepted size of a machine file, in bytes."""


class TableKeyRule(NamedTuple):
    """How one key of a table in a machine file (TOML) is checked and stored.

    Attributes:
        field_name: The field that the key sets.
        allowed_values: The test of the value.
        unit_factor: The factor from the unit of the key to the unit of the field; None for a value without a unit.
    """

    field_name: str
    allowed_values: ArgumentKind
    unit_factor: float | None = None


def _make_pattern_argument_kind(description: str, pattern: str) -> ArgumentKind:
    """Make a named test that accepts the texts which a regular expression matches as a whole.

    Args:
        description: The description of allowed texts, for messages.
        pattern: The regular expression.
    """
    return ArgumentKind(description, lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v, re.ASCII)))


def _make_choice_argument_kind(names: Mapping[str, object]) -> ArgumentKind:
    """Make a named test that accepts only the keys of `names`; its name lists them for messages."""
    return ArgumentKind(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names)


TABLE = ArgumentKind("a table", lambda v: isinstance(v, dict))
FILE_KEYS: Mapping[str, TableKeyRule] = MappingProxyType(
    {
        "simulate": TableKeyRule("simulate", TEXT),
        "kinds": TableKeyRule("kinds", TABLE),
        "links": TableKeyRule("links", TABLE),
    }
)
"""Keys of the file."""
LINK_KEYS: Mapping[str, TableKeyRule] = MappingProxyType(
    {
        "gb_per_s": TableKeyRule("bandwidth", number_between(1e-6, 1e6), 1e9),
        "latency_us": TableKeyRule("latency", number_between(1e-3, 1e9), 1e-6),
    }
)
"""Keys of a link; all of them are required."""
REQUIRED_KIND_KEYS: Mapping[str, TableKeyRule] = MappingProxyType(
    {
        "memory_gib": TableKeyRule("memory", number_between(1e-3, 1e6), GIB),
        "tb_per_s": TableKeyRule("bandwidth", number_between(1e-6, 1e6), 1e12),
        "tflops": TableKeyRule("flops", number_between(1e-6, 1e9), 1e12),
    }
)
"""Keys that a kind without ``like`` needs."""
KIND_KEYS: Mapping[str, TableKeyRule] = MappingProxyType(
    {
        "like": TableKeyRule("like", _make_choice_argument_kind(CATALOGUE.data_sheets)),
        **REQUIRED_KIND_KEYS,
        "launch_us": TableKeyRule("launch", number_between(1e-3, 1e6), 1e-6),
        "link": TableKeyRule("link", TEXT),
        "capability": TableKeyRule(
            "capability", _make_pattern_argument_kind("text such as '90' or 'gfx942'", r"\d{2,3}|gfx[0-9a-f]{3,4}")
        ),
        "backend": TableKeyRule("backend", _make_pattern_argument_kind("'cuda' or 'hip'", "cuda|hip")),
    }
)
"""Keys of a kind of device."""
DEFAULT_DATA_SHEET = DataSheet(flops=100e9, bandwidth=20e9, memory=64 * GIB, link="memory")
"""The figures of a kind without ``like``; the file replaces the required ones."""


def read_simulated_machine_file(path: Path) -> tuple[str, DeviceAndLinkCatalogue]:
    """Read a TOML file that describes simulated devices and their links.

    Returns:
        The description of the machine, as a text such as ``h200:8,nvlink``. The catalogue of all kinds of devices and
        links, both built in and from the file.

    Raises:
        PlanError: The file cannot be read or is no TOML, a key is unknown or missing, or a value is out of range. The
            message names the file and the key.
    """
    document = _read_toml_document(path)
    _read_table_fields(path, "", document, FILE_KEYS)
    if "simulate" not in document:
        raise PlanError(f"{path}: simulate is missing; name the devices, as simulate = 'h200:8,nvlink'")
    own = _list_user_tables(path, document, "links")
    links = {
        name: LinkSpeeds(**_read_table_fields(path, f"links.{name}.", table, LINK_KEYS, LINK_KEYS))
        for name, table in own
    }
    known = DeviceAndLinkCatalogue(CATALOGUE.data_sheets, MappingProxyType({**CATALOGUE.links, **links}))
    kinds = {
        name: _read_device_kind(path, f"kinds.{name}.", table, known)
        for name, table in _list_user_tables(path, document, "kinds")
    }
    return document["simulate"], replace(known, data_sheets=MappingProxyType({**CATALOGUE.data_sheets, **kinds}))


def _read_toml_document(path: Path) -> dict[str, Any]:
    """Read a TOML file, or raise `PlanError` if the file is missing, too large or malformed."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as why:
        raise PlanError(f"{path}: {why.strerror}; give a TOML file, or devices as h200:8,nvlink") from None
    if len(data) > MAX_FILE_BYTES:
        raise PlanError(f"{path}: the file has more than {MAX_FILE_BYTES:,} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as why:
        raise PlanError(f"{path}: the file is no TOML ({' '.join(str(why).split())[:120]})") from None


def _read_table_fields(
    path: Path,
    where: str,
    table: Mapping[str, Any],
    known: Mapping[str, TableKeyRule],
    needed: Mapping[str, TableKeyRule] | None = None,
) -> dict[str, Any]:
    """Return the fields that a TOML table sets, by field name, converted to the units of the fields.

    Args:
        path: The file, for messages.
        where: The name of the table with a final dot, for messages.
        table: The table.
        known: The rules of the allowed keys.
        needed: Keys that must be present.

    Raises:
        PlanError: A key is unknown or missing, or a value is wrong.
    """
    for key, value in table.items():
        if key not in known:
            raise PlanError(f"{path}: {where}{key[:60]!r} is unknown; known: {', '.join(known)}")
        require(PlanError, str(path), f"{where}{key}", value, known[key].allowed_values)
    for key in needed or ():
        if key not in table:
            raise PlanError(f"{path}: {where}{key} is missing")
    keys = [(known[key], value) for key, value in table.items()]
    return {key.field_name: value if key.unit_factor is None else value * key.unit_factor for key, value in keys}


def _list_user_tables(path: Path, document: Mapping[str, Any], group: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and tables of the kinds or links that a machine file adds to the built-in ones.

    Args:
        path: The file, for messages.
        document: The content of the file.
        group: ``kinds`` for tables ``[kinds.NAME]``, or ``links`` for tables ``[links.NAME]``.

    Raises:
        PlanError: A name is malformed or built in, or an entry is no table.
    """
    for name, table in document.get(group, {}).items():
        if not DEVICE_KIND_PATTERN.fullmatch(name):
            raise PlanError(
                f"{path}: {group}.{name[:60]!r} is no name; use letters, digits, and _ . - behind the first"
            )
        if name in CATALOGUE.data_sheets or name in CATALOGUE.links:
            raise PlanError(f"{path}: {group}.{name} is built in; choose another name")
        require(PlanError, str(path), f"{group}.{name[:60]}", table, TABLE)
    return list(document.get(group, {}).items())


def _read_device_kind(path: Path, where: str, table: Mapping[str, Any], known: DeviceAndLinkCatalogue) -> DataSheet:
    """Return the data sheet that a table of a machine file describes for a kind of device.

    For a missing key, the figure of the built-in kind that the key ``like`` names is used.
    """
    fields = _read_table_fields(path, where, table, KIND_KEYS, None if "like" in table else REQUIRED_KIND_KEYS)
    machine = replace(CATALOGUE.data_sheets[table["like"]] if "like" in table else DEFAULT_DATA_SHEET, **fields)
    require(PlanError, str(path), f"{where}link", machine.link, _make_choice_argument_kind(known.links))
    return replace(machine, memory=int(machine.memory))
