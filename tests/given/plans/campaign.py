"""Thousands of plans with something wrong in them: each is refused by the verifier, or it runs right all the same."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hocket import ops
from hocket.backends.base import Program, Tensor
from hocket.graph import Graph, HocketError, Node, Value, input, state, weight
from hocket.graph.errors import PlanError
from hocket.scheduler import HostOffload, Plan, Store, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ..graphs.random_graphs import seeded_graph
from .chunked import chunked_plan, make_gated_layers
from .faults import SLOW, decoder, experts
from .grouped import cached_product, everything_that_fits
from .mutations import FieldSite, Pool, everywhere, put, sites, variants
from .oracle import Truth, faulty_group, run_faults, truth_of


def counters() -> Graph:
    """States that are copied at the end, exchanged, numbered by another and left alone, and an output of each kind."""
    a, b, at, unread = state("a", (4, 8)), state("b", (4, 8)), state("at", (1,), "i32"), state("kept", (8, 8))
    x = input("x", (4, 8))
    new = ops.add(ops.mul_mat(unread, x, name="read"), a, name="sum")
    rows = state("rows", (100, 8))
    set_ = ops.set_rows(rows, ops.slice_(x, axis=0, start=1, stop=2, name="row"), at, name="set")
    half = ops.mul_mat(weight("half", (8, 8), "f16"), x, name="halved")
    outputs = {"y": ops.neg(new, name="y"), "t": ops.transpose(half, name="turned"), "old": ops.mul(a, b, name="old")}
    return Graph(outputs, {a: new, b: a, rows: set_, at: input("next", (1,), "i32")})


def shard_by_seed(seed: int) -> Callable[..., Any]:
    return lambda graph, factors: everything_that_fits(graph, factors, random.Random(seed))


@cache
def plan_by_name(name: str) -> Plan:
    """A right plan by its name: one of `PLANS`, or ``random 7``."""
    return PLANS[name]() if name in PLANS else _random(int(name.removeprefix("random ")))


def _random(seed: int) -> Plan:
    dice = random.Random(seed)
    n, kind = dice.choice([1, 2, 3]), dice.choice(["reference", "numpy", "mixed"])
    group = faulty_group(n, kind)
    if dice.random() < 0.3:
        return plan_for_group(seeded_graph(seed), group, split_mode="layer")
    return plan_for_group(seeded_graph(seed), group, choose=shard_by_seed(seed) if n > 1 else None)


def with_host() -> Plan:
    """A device with too little memory, and the host that takes the rest."""
    (backend, device), (numpy, host) = faulty_group(2, "mixed")
    small = dataclasses.replace(device, memory=4000, memory_of="reference:0")
    return plan_for_group(
        decoder(), [(backend, small)], split_mode="layer", host=HostOffload(numpy, host, Hardware(flops=1e9))
    )


PLANS: dict[str, Callable[[], Plan]] = {
    "one device": lambda: plan_for_group(decoder(), faulty_group(1, "numpy")),
    "cut": lambda: dataclasses.replace(
        plan_for_group(decoder(), faulty_group(2), split_mode="tensor", hardware=SLOW),
        unused_devices=("reference:2", "reference:3"),
    ),
    "cut unevenly": lambda: plan_for_group(
        decoder(), faulty_group(3, "numpy"), choose=shard_by_seed(3), tensor_split=(2, 1, 1)
    ),
    "layers": lambda: plan_for_group(decoder(), faulty_group(2), split_mode="layer"),
    "layers mixed": lambda: plan_for_group(decoder(), faulty_group(3, "mixed"), split_mode="layer"),
    "placed": lambda: plan_for_group(
        decoder(),
        faulty_group(2),
        split_mode="tensor",
        hardware=SLOW,
        place=[("^(gate|up)", "reference:1"), ("normed3", "reference:0")],
    ),
    "experts": lambda: plan_for_group(experts(), faulty_group(2), choose=shard_by_seed(1)),
    "host": lambda: with_host(),
    "states": lambda: plan_for_group(counters(), faulty_group(1)),
    "states cut": lambda: plan_for_group(
        counters(), faulty_group(2, "mixed"), choose=shard_by_seed(2), tensor_split=(2, 1)
    ),
    "states layers": lambda: plan_for_group(counters(), faulty_group(2, "numpy"), split_mode="layer"),
    "cache": lambda: plan_for_group(cached_product(3), faulty_group(2), choose=shard_by_seed(5)),
    "dealt chunks": lambda: chunked_plan(make_gated_layers(512), faulty_group(2), 2, is_distributed=True),
}
BY_HAND = tuple(PLANS)
FEW = ("cut", "host", "states cut")
"""Plans that have every field between them: cut, in layers over two kinds of devices, with states of each kind."""


@cache
def truth(name: str) -> Truth:
    return truth_of(plan_by_name(name).graph, 1)


@cache
def sites_of(name: str) -> tuple[dict[str, list[FieldSite]], Pool]:
    """The sites of a plan by the field that they are of."""
    places = sites(plan_by_name(name))
    by_field: dict[str, list[FieldSite]] = {}
    for site in places:
        by_field.setdefault(site.field, []).append(site)
    return by_field, Pool(places)


@dataclass(frozen=True)
class Mutant:
    """A plan with a fault, and its description: the origin, the field or the kind of change, and the change.

    The plan is `None` if a record refuses the wrong value.
    """

    origin: str
    where: str
    how: str
    plan: Plan | None


# ------------------------------------------------------------------------------------------------------- mutations


def one_field(name: str, field_: str, dice: random.Random) -> Iterator[Mutant]:
    """One field of one record, in all ways in which it can be wrong."""
    by_field, pool = sites_of(name)
    site = dice.choice(by_field[field_])
    for how, value in variants(site, pool, dice):
        change = everywhere if dice.random() < 0.3 else _put
        plan = None
        with suppress(PlanError):
            plan = change(plan_by_name(name), site, value)
        yield Mutant(name, field_, how, plan)


def _put(plan: Plan, site: FieldSite, value: Any) -> Plan:
    return put(plan, site.path, value)


def move_value(name: str, dice: random.Random) -> Iterator[Mutant]:
    """A value lies elsewhere, for all who write and read it."""
    plan = plan_by_name(name)
    number = dice.randrange(len(plan.device_plans))
    program = plan.device_plans[number].program
    tensors = [t for i in program.instructions for t in (*i.src, *i.dst, i.scratch) if t is not None]
    if not tensors:
        return
    one, two = dice.choice(tensors), dice.choice(tensors)
    for offset in {one.offset + d for d in (64, -64, 4, 128, 512)} | {two.offset}:

        def move_tensor(t: Tensor | None, offset: int = offset) -> Tensor | None:
            is_it = t is not None and (t.buffer, t.offset) == (one.buffer, one.offset)
            return dataclasses.replace(t, offset=offset) if is_it else t

        def change(i, move_tensor=move_tensor):
            return dataclasses.replace(
                i,
                src=tuple(map(move_tensor, i.src)),
                dst=tuple(map(move_tensor, i.dst)),
                scratch=move_tensor(i.scratch),
            )

        new = Program(
            program.buffers,
            tuple(map(change, program.instructions)),
            {k: move_tensor(t) for k, t in program.inputs.items()},
            {k: move_tensor(t) for k, t in program.outputs.items()},
            tuple((at, change(i)) for at, i in program.undo),
        )
        yield Mutant(name, "memory", f"moved by {offset - one.offset}", with_program(plan, number, new))


def move_step(name: str, dice: random.Random) -> Iterator[Mutant]:
    """A step runs at another time; saves keep their undo."""
    plan = plan_by_name(name)
    number = dice.randrange(len(plan.device_plans))
    program = plan.device_plans[number].program
    steps = len(program.instructions)
    if steps < 2:
        return
    order = list(range(steps))
    order.insert(dice.randrange(steps), order.pop(dice.randrange(steps)))
    undo = sorted((order.index(at), back) for at, back in program.undo) if program.undo else ()
    instructions = tuple(program.instructions[at] for at in order)
    new = dataclasses.replace(program, instructions=instructions, undo=tuple(undo))
    if order != list(range(steps)):
        yield Mutant(name, "order", "another order", with_program(plan, number, new))


def edit_node_and_lower(name: str, dice: random.Random) -> Iterator[Mutant]:
    """A node of a device's graph has another attribute or reads other values; the program follows the graph."""
    plan = plan_by_name(name)
    number = dice.randrange(len(plan.device_plans))
    graph = plan.device_plans[number].graph
    inner = [n for n in graph.nodes if not n.is_leaf]
    if not inner:
        return
    node = dice.choice(inner)
    values = [v for n in graph.nodes if n is not node for v in n.results]
    for how, (src, attrs) in _edits(node, values, dice):
        try:
            yield Mutant(name, "graph", how, _with_node(plan, number, node, src, attrs, both=dice.random() < 0.5))
        except (HocketError, KeyError, TypeError, ValueError, IndexError, AssertionError, ZeroDivisionError):
            continue  # no such graph can be built or lowered


def _edits(node: Node, values: list[Value], dice: random.Random) -> Iterator[tuple[str, Any]]:
    from .mutations import _of

    for key, value in node.attrs.items():
        for how, other in _of(value, "", dice):
            yield f"{node.op}: {key} {how}", (node.src, {**node.attrs, key: other})
    for at, source in enumerate(node.src):
        candidates = [v for v in values if source is not None and v.spec == source.spec and v != source]
        if candidates:
            src = (*node.src[:at], dice.choice(candidates), *node.src[at + 1 :])
            yield f"{node.op}: operand {at} is another", (src, dict(node.attrs))
    if len(node.src) > 1:
        yield f"{node.op}: operands turned", (node.src[::-1], dict(node.attrs))


def _with_node(plan: Plan, number: int, node: Node, src: Any, attrs: Any, *, both: bool) -> Plan:
    """`plan` with a node of a device made anew, in all devices that share the graph if `both`, and lowered again."""
    graph = plan.device_plans[number].graph
    became: dict[Value, Value] = {}
    after = False
    waiting = []
    for own in graph.nodes:
        if own is node:
            after = True
        sources = src if own is node else own.src
        if after and any(s is not None and s not in became for s in sources):
            waiting.append(own)
            raise ValueError("it reads what comes later")
        new_src = tuple(None if s is None else became[s] for s in sources)
        if own.is_leaf:
            new_value: Any = Value(own)
        else:
            new_value = ops.op_of(own)(*new_src, name=own.name, **(attrs if own is node else own.attrs))
        results = new_value if isinstance(new_value, tuple) else (new_value,)
        became.update(zip(own.results, results, strict=True))
    changed = Graph(
        {k: became[v] for k, v in graph.outputs.items()}, {became[o]: became[v] for o, v in graph.updates.items()}
    )
    device_plans = list(plan.device_plans)
    for at, device_plan in enumerate(plan.device_plans):
        if at == number or (both and device_plan.graph is graph):
            new_graph, program = lower_graph(changed, device_plan.backend, device_plan.device)
            device_plans[at] = dataclasses.replace(device_plan, graph=new_graph, program=program)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def with_program(plan: Plan, number: int, program: Program) -> Plan:
    device_plans = list(plan.device_plans)
    device_plans[number] = dataclasses.replace(device_plans[number], program=program)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


# -------------------------------------------------------------------------------------------------------- judging


FAULTS_THAT_AFFECT_UNDO = {
    "Program.undo",
    "Program.instructions",
    "Tensor.buffer",
    "Tensor.offset",
    "memory",
    "order",
    "graph",
}
"""Changes after which steps also fail: they may have changed the undo programs."""


@dataclass
class CampaignCounts:
    """Counts of mutants by the place of the change: refused, or right all the same; and the missed ones."""

    refused: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def check_mutant(self, mutant: Mutant) -> None:
        description = f"{mutant.origin}: {mutant.where} {mutant.how}"
        if mutant.plan is None:
            self.refused[mutant.where] += 1
            return
        try:
            why = next(find_plan_faults(mutant.plan), None)
        except Exception as error:  # a verifier that raises is a finding, too
            self.raised.append(f"{description}: {type(error).__name__}: {error}")
            return
        if why is not None:
            self.refused[mutant.where] += 1
            return
        try:
            Store([(device_plan.backend, device_plan.device) for device_plan in mutant.plan.device_plans])
        except PlanError:  # devices of processes that are not there
            self.refused[mutant.where] += 1
            return
        if _runs_as(mutant.plan, plan_by_name(mutant.origin)):
            self.harmless[mutant.where] += 1
            return
        known = truth(mutant.origin)
        if mutant.plan.graph is not known.graph:
            known = Truth(mutant.plan.graph, known.values, truth_of(mutant.plan.graph, 1).results)
        wrong = run_faults(mutant.plan, known, failing=4 if mutant.where in FAULTS_THAT_AFFECT_UNDO else 0)
        if wrong is None:
            self.harmless[mutant.where] += 1
        else:
            self.missed.append(f"{description}: {wrong}")


def _runs_as(one: Plan, two: Plan) -> bool:
    """Whether nothing that the executor reads differs."""
    parts = [
        (
            plan.graph,
            plan.leaves,
            plan.outputs,
            [(str(v.device), v.backend, v.graph, v.program) for v in plan.device_plans],
        )
        for plan in (one, two)
    ]
    return parts[0] == parts[1]


def campaign(names: list[str], rounds: int, seed: int) -> CampaignCounts:
    """Mutate each plan `rounds` times in every field and by every kind of change; return the counts."""
    tally, dice = CampaignCounts(), random.Random(seed)
    for name in names:
        for _ in range(rounds):
            for field_ in sites_of(name)[0]:
                for mutant in one_field(name, field_, dice):
                    tally.check_mutant(mutant)
            for kind in (move_value, move_step, edit_node_and_lower):
                for mutant in kind(name, dice):
                    tally.check_mutant(mutant)
    return tally
