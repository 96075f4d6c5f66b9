"""Mutations of plans: every field of every record that a plan reaches, with every kind of wrong value.

A `FieldSite` is one field of one record, found by introspection. `variants` yields the values that the field might hold
instead; `put` returns the plan with another value there. Nothing here knows the meaning of a field, so that fields that
are added later are mutated like the others.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hocket.backends.base import BufferSpec, Device, Instruction, Program, Tensor
from hocket.backends.numpy.backend import NumpyBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph import DType, Graph, Node, Spec, Value, input
from hocket.scheduler import Plan
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.ir.execution_plan import PinnedNodes
from hocket.scheduler.ir.layout import PARTIAL, REPLICATE, Local, Partial, Replicate, Shard

Path = tuple[tuple[str, Any], ...]
"""How to get from a plan to something in it: ``("field", name)``, ``("item", place)``, ``("key", key)``."""
LAYOUTS = (Replicate, Partial, Shard, Local)
MUTATED_DTYPES = (DType.F32, DType.F16, DType.BF16, DType.F64, DType.I8, DType.I32, DType.I64, DType.Q8_0)
BACKENDS = (ReferenceBackend(), NumpyBackend())
FOREIGN_RECORDS: Mapping[str, Any] = {
    "Tensor": Tensor(0, 0, (64,), (1,), DType.I8),
    "Spec": Spec((2, 2), DType.F32),
    "Hardware": Hardware(flops=-1.0),
    "BufferSpec": BufferSpec("state", "stranger", 64, Spec((16,), DType.F32), Spec((16,), DType.F32)),
    "Placed": PinnedNodes(0, "", ("stranger",)),
    "Instruction": Instruction("cont", (), (), {}, None, "stranger"),
    "Device": Device("stranger", 0),
    "Program": Program((), (), {}, {}),
    "Graph": Graph({"stranger": input("stranger", (2,))}),
    "Node": input("stranger", (2,)).node,
}
"""Records that no plan has, by their class: to put where others are, or nothing is."""


@dataclass(frozen=True)
class FieldSite:
    """A field of a record within a plan: the class that declares it, the path of the record, and the value of the
    field.
    """

    owner: str
    name: str
    hint: str
    path: Path
    value: Any

    @property
    def field(self) -> str:
        return f"{self.owner}.{self.name}"


def sites(plan: Plan) -> list[FieldSite]:
    """Every field of every record in `plan`; of graphs their nodes, each once."""
    return list(_sites(plan, ()))


def _sites(value: Any, path: Path) -> Iterator[FieldSite]:
    if isinstance(value, Graph):
        yield from (_site(value, name, path) for name in ("outputs", "updates"))
        for name, end in value.outputs.items():
            at = (*path, ("field", "outputs"), ("key", name))
            yield from (_site(end, f.name, at) for f in dataclasses.fields(end))
        for at, node in enumerate(value.nodes):
            yield from (_site(node, f.name, (*path, ("node", at))) for f in dataclasses.fields(node) if f.init)
            for number, spec in enumerate(node.specs):
                yield from _sites(spec, (*path, ("node", at), ("field", "specs"), ("item", number)))
    elif dataclasses.is_dataclass(value):
        for f in (f for f in dataclasses.fields(value) if f.init):  # callers cannot set the others
            yield _site(value, f.name, path)
            yield from _sites(getattr(value, f.name), (*path, ("field", f.name)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sites(item, (*path, ("key", key)))
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            yield from _sites(item, (*path, ("item", at)))


def _site(record: Any, name: str, path: Path) -> FieldSite:
    (hint,) = (str(f.type) for f in dataclasses.fields(record) if f.name == name)
    return FieldSite(type(record).__name__, name, hint, (*path, ("field", name)), getattr(record, name))


def put(record: Any, path: Path, value: Any) -> Any:
    """`record` with `value` at the end of `path`."""
    if not path:
        return value
    (kind, key), rest = path[0], path[1:]
    if kind == "field":
        return dataclasses.replace(record, **{key: put(getattr(record, key), rest, value)})
    if kind == "node":
        return replace_graph_node(record, key, put(record.nodes[key], rest, value))
    if kind == "key":
        return MappingProxyType({**record, key: put(record[key], rest, value)})
    return (*record[:key], put(record[key], rest, value), *record[key + 1 :])


def replace_graph_node(graph: Graph, at: int, changed: Node) -> Graph:
    """`graph` with another node in place of number `at`."""
    became: dict[Node, Node] = {}

    def new(value: Value | None) -> Value | None:
        return None if value is None else Value(became.get(value.node, value.node), value.index)

    for number, node in enumerate(graph.nodes):
        own = changed if number == at else node
        src = tuple(map(new, own.src))
        became[node] = own if src == own.src else own.with_src(src)
    outputs = {name: new(v) for name, v in graph.outputs.items()}
    return Graph(outputs, {new(old): new(v) for old, v in graph.updates.items()})


def everywhere(plan: Plan, site: FieldSite, value: Any) -> Plan:
    """`plan` with `value` at a site, and there in all devices that share the program, or the graph, of the site's."""
    if len(site.path) < 3 or site.path[0] != ("field", "device_plans"):
        return put(plan, site.path, value)
    part = site.path[2][1]
    own = getattr(plan.device_plans[site.path[1][1]], part)
    for number, device_plan in enumerate(plan.device_plans):
        if getattr(device_plan, part) is own:
            plan = put(plan, (site.path[0], ("item", number), *site.path[2:]), value)
    return plan


# --------------------------------------------------------------------------------------------------------- wrong values


class Pool:
    """The values of the fields of a plan by field: wrong values that look right."""

    def __init__(self, found: Sequence[FieldSite]) -> None:
        self.by_field: dict[str, list[Any]] = defaultdict(list)
        for site in found:
            self.by_field[site.field].append(site.value)

    def other(self, field: str, dice: random.Random) -> Any:
        return dice.choice(self.by_field[field])


def variants(site: FieldSite, pool: Pool, dice: random.Random) -> list[tuple[str, Any]]:
    """Return other values for a site, each with a word for the kind of error."""
    wrong = [*_of(site.value, site.hint, dice), ("that of another", pool.other(site.field, dice))]
    if site.hint.endswith("| None"):
        wrong.append(("missing", None))
    return [(word, value) for word, value in wrong if not _same(value, site.value)]


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and (one is two or one == two)


def _of(value: Any, hint: str, dice: random.Random) -> list[tuple[str, Any]]:
    if value is None:
        words = hint.replace("|", " ").split()
        strangers = [("not missing", other) for word, other in FOREIGN_RECORDS.items() if word in words]
        return strangers + [("not missing", other) for other in (3, -3) if "int" in words]
    if isinstance(value, bool):
        return [("the contrary", not value)]
    if isinstance(value, int):
        changed = {"one more": value + 1, "one less": value - 1, "negative": -value - 1, "zero": 0, "huge": 2**40}
        return [*changed.items(), ("a line more", value + 64), ("a line less", value - 64), ("four more", value + 4)]
    if isinstance(value, float):
        return [("twice", 2 * value), ("negative", -value - 1.0), ("zero", 0.0), ("nan", math.nan), ("inf", math.inf)]
    if isinstance(value, str):
        return [("longer", value + "~"), ("shorter", value[:-1]), ("empty", "")]
    if isinstance(value, DType):
        return [(f"as {dtype}", dtype) for dtype in MUTATED_DTYPES]
    if isinstance(value, LAYOUTS):
        return [("another layout", other) for other in (REPLICATE, PARTIAL, Local((0,)), Local((1,)), Local((0, 1)))]
    if isinstance(value, tuple):
        return _of_tuple(value, hint, dice)
    if isinstance(value, Mapping):
        return _of_mapping(value, hint, dice)
    if isinstance(value, frozenset):
        return _of_set(value, dice)
    if dataclasses.is_dataclass(value):  # its own fields are sites
        return [("a stranger", other) for word, other in FOREIGN_RECORDS.items() if word == type(value).__name__]
    return [("another", other) for other in BACKENDS] if hasattr(value, "compile") else []


def _of_tuple(value: tuple[Any, ...], hint: str, dice: random.Random) -> list[tuple[str, Any]]:
    wrong: list[tuple[str, Any]] = [("empty", ())]
    if not value:
        first = hint.removeprefix("tuple[").split(",")[0].split(" ")[0].rstrip("]")
        return [("more", (FOREIGN_RECORDS[first],))] if first in FOREIGN_RECORDS else []
    one, two = dice.randrange(len(value)), dice.randrange(len(value))
    swapped = list(value)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    wrong += [("without one", (*value[:one], *value[one + 1 :])), ("exchanged", tuple(swapped))]
    wrong += [("one again", (*value[:one], value[two], *value[one:])), ("one twice", (*value, value[one]))]
    wrong += [("reversed", value[::-1]), ("one for another", (*value[:one], value[two], *value[one + 1 :]))]
    inner = _of(value[one], "", dice)
    return wrong + [(f"one {word}", (*value[:one], other, *value[one + 1 :])) for word, other in inner]


def _of_mapping(value: Mapping[Any, Any], hint: str, dice: random.Random) -> list[tuple[str, Any]]:
    if not value:
        return []
    one, two = dice.choice(list(value)), dice.choice(list(value))
    less = {k: v for k, v in value.items() if k != one}
    wrong = [("empty", {}), ("without one", less), ("exchanged", {**value, one: value[two], two: value[one]})]
    wrong += [("one for another", {**value, one: value[two]})]
    if isinstance(one, str):
        wrong += [("renamed", {**less, f"{one}~": value[one]}), ("one more", {**value, f"{one}~": value[one]})]
    inner = _of(value[one], "", dice)
    wrong += [(f"one {word}", {**value, one: other}) for word, other in inner]
    return [(word, MappingProxyType(other)) for word, other in wrong]


def _of_set(value: frozenset[Any], dice: random.Random) -> list[tuple[str, Any]]:
    if not value:
        return [("one more", frozenset({("stranger", 0, 0, 0)}))]
    one = dice.choice(sorted(value))
    inner = [(f"one {word}", value - {one} | {other}) for word, other in _of(one, "", dice)]
    return [("empty", frozenset()), ("without one", value - {one}), *inner]
