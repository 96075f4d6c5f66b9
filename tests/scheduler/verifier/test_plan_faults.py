"""Faults planted in correct plans, one by one: the verifier finds every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest

from hocket import ops
from hocket.graph import DType, Graph, PlanError, constant
from hocket.ops.collective import all_gather, all_reduce, send
from hocket.scheduler import Plan
from hocket.scheduler.layout import PARTIAL, REPLICATE, Local, Shard
from hocket.scheduler.verifier.plan import plan_faults, verify_plan

from ...given.plans.faults import (
    again,
    at_offset,
    ending,
    experts_plan,
    gather_plan,
    laid,
    layer_plan,
    moved,
    nodes,
    on,
    placed_plan,
    programmed,
    reading,
    refusing,
    renumbered,
    said,
    step,
    steps_exchanged,
    tensor_plan,
    without_step,
)

Fault = Callable[[], Plan]


def cut(axis: int, *runs: tuple[tuple[int, int], ...]) -> Shard:
    return Shard(axis, runs)


def without_updates(graph: Graph) -> Graph:
    return Graph(graph.outputs, {})


def exchanged_updates(graph: Graph) -> Graph:
    (a, x), (b, y) = graph.updates.items()
    return Graph(graph.outputs, {a: y, b: x})


def twice_reduced(node, src):
    return all_reduce(all_reduce(src[0], sequence=node.attrs["sequence"]), sequence=2, name=node.name)


SUMS: Mapping[str, Fault] = {
    "a sum is missing on one device": lambda: nodes(tensor_plan(), 1, mixed__sum=lambda n, s: s[0]),
    "a sum is missing on all devices": lambda: nodes(tensor_plan(), 0, 1, z__sum=lambda n, s: s[0]),
    "a sum is taken twice": lambda: nodes(tensor_plan(), 0, 1, z__sum=twice_reduced),
    "a whole value is summed": lambda: nodes(
        tensor_plan(), 0, 1, normed3=lambda n, s: all_reduce(ops.rms_norm(s[0]), sequence=2)
    ),
    "a norm reads a sum that is owed": lambda: on(tensor_plan(), 0, 1, graph=reading(normed2="mixed")),
    "a norm reads a sum that is owed on one device": lambda: on(tensor_plan(), 1, graph=reading(normed3="z")),
    "an activation reads a sum that is owed": lambda: nodes(
        tensor_plan(), 0, 1, downed=lambda n, s: ops.silu(ops.mul_mat(*s))
    ),
    "a bias is counted on two devices": lambda: nodes(tensor_plan(), 1, bo__zero=lambda n, s: s[0]),
    "a bias is counted on none": lambda: nodes(
        tensor_plan(), 0, biased=lambda n, s: ops.add(s[0], ops.scale(s[1], scale=0.0), name="biased")
    ),
    "a residual is counted on two devices": lambda: nodes(tensor_plan(), 1, x__zero=lambda n, s: s[0]),
    "a residual is counted half on each device": lambda: nodes(
        tensor_plan(), 1, x__zero=lambda n, s: ops.scale(s[0], scale=0.5)
    ),
    "a residual is counted on none": lambda: nodes(
        tensor_plan(), 0, mixed=lambda n, s: ops.add(ops.scale(s[0], scale=0.0), s[1], name="mixed")
    ),
    "a residual is counted again where it was whole": lambda: on(tensor_plan(), 0, 1, graph=reading(z="mixed__sum")),
    "one device takes the whole residual, one its part": lambda: on(tensor_plan(), 0, graph=reading(z="mixed__sum")),
    "two devices have the same terms": lambda: laid(tensor_plan(), down=cut(1, ((0, 6),), ((0, 6),))),
    "devices have terms in common": lambda: laid(tensor_plan(), down=cut(1, ((0, 6),), ((3, 6),))),
    "some terms are missing": lambda: nodes(
        tensor_plan(),
        1,
        downed=lambda n, s: ops.mul_mat(*(ops.slice_(v, axis=1, start=0, stop=3) for v in s), name="downed"),
    ),
    "a term is there twice": lambda: nodes(
        tensor_plan(), 1, downed=lambda n, s: ops.mul_mat(*(ops.concat(v, v, axis=1) for v in s), name="downed")
    ),
    "terms of weight and activation belong to others": lambda: laid(tensor_plan(), wo=cut(1, ((8, 8),), ((0, 8),))),
}

MEETINGS: Mapping[str, Fault] = {
    "two meetings are exchanged on one device": lambda: renumbered(tensor_plan(), 1, {0: 1, 1: 0}),
    "a meeting has another number on one device": lambda: renumbered(tensor_plan(), 1, {1: 9}),
    "two meetings have one number": lambda: renumbered(renumbered(tensor_plan(), 1, {1: 0}), 0, {1: 0}),
    "a gather puts shards in another order": lambda: nodes(
        gather_plan(), 0, 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))
    ),
    "devices gather into different runs": lambda: nodes(gather_plan(), 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))),
    "a gather interleaves what is contiguous": lambda: nodes(
        gather_plan(), 0, 1, h__whole=again(runs=(((0, 2), (4, 1)), ((2, 2), (5, 1))))
    ),
    "a device does not come to a gather": lambda: nodes(
        gather_plan(), 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)
    ),
    "nobody gathers": lambda: nodes(gather_plan(), 0, 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)),
    "one device gathers another value": lambda: nodes(
        gather_plan(), 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)
    ),
    "all devices gather another value": lambda: nodes(
        gather_plan(), 0, 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)
    ),
    "a sum is gathered": lambda: nodes(
        tensor_plan(),
        *(0, 1),
        mixed__sum=lambda n, s: all_gather(
            ops.slice_(s[0], axis=0, start=0, stop=3), axis=0, runs=(((0, 3),), ((0, 3),)), sequence=0
        ),
    ),
    "a value is sent and not received": lambda: nodes(
        layer_plan(), 1, o__from__0=lambda n, s: ops.cont(ops.broadcast(constant("nothing", [0.0]), shape=(3, 8)))
    ),
    "a value is received and not sent": lambda: on(layer_plan(), 0, graph=lambda g: Graph({}, g.updates)),
    "a value is received under another number": lambda: renumbered(layer_plan(), 1, {0: 5}),
    "another value is sent": lambda: nodes(
        layer_plan(), 0, o__to__1=lambda n, s: send(ops.neg(s[0]), name="o.to.1", **n.attrs)
    ),
    "a value is sent to another device": lambda: nodes(layer_plan(), 0, o__to__1=again(to=0)),
    "a value is received from another device": lambda: nodes(layer_plan(), 1, o__from__0=again(source=1)),
    "a value is received in another shape": lambda: nodes(
        layer_plan(),
        1,
        o__from__0=lambda n, s: ops.reshape(again(shape=(8, 3))(n, s), shape=(3, 8)),
    ),
}


LAYOUTS: Mapping[str, Fault] = {
    "shards of a fused weight are exchanged": lambda: laid(
        tensor_plan(), wkv=cut(0, ((4, 4), (12, 4)), ((0, 4), (8, 4)))
    ),
    "a fused weight is cut in halves": lambda: laid(tensor_plan(), wkv=cut(0, ((0, 8),), ((8, 8),))),
    "parts of a fused weight are in another order": lambda: laid(
        tensor_plan(), wkv=cut(0, ((8, 4), (0, 4)), ((12, 4), (4, 4)))
    ),
    "query heads follow another key head": lambda: laid(tensor_plan(), wq=cut(0, ((0, 4), (8, 4)), ((4, 4), (12, 4)))),
    "heads are shifted by half a head": lambda: laid(tensor_plan(), wq=cut(0, ((2, 8),), ((10, 6), (0, 2)))),
    "a cache lies the other way round": lambda: laid(tensor_plan(), cache__k=cut(1, ((4, 4),), ((0, 4),))),
    "the head's shards are exchanged": lambda: laid(tensor_plan(), head=cut(0, ((5, 5),), ((0, 5),))),
    "a weight is cut along another axis": lambda: laid(tensor_plan(), wkv=cut(1, ((0, 8),), ((0, 8),))),
    "some rows of a weight lie nowhere": lambda: laid(tensor_plan(), gate=cut(0, ((0, 6),), ((0, 6),))),
    "runs of a weight lie outside it": lambda: laid(tensor_plan(), head=cut(0, ((0, 5),), ((6, 5),))),
    "runs of a weight are too short": lambda: laid(tensor_plan(), head=cut(0, ((0, 6),), ((6, 4),))),
    "a weight is bound whole": lambda: laid(tensor_plan(), gate=REPLICATE),
    "a whole weight is bound in shards": lambda: laid(tensor_plan(), norm=cut(0, ((0, 4),), ((4, 4),))),
    "a weight is bound as a sum": lambda: laid(tensor_plan(), bo=PARTIAL),
    "a weight has no layout": lambda: laid(tensor_plan(), gate=None),
    "an input is bound in shards": lambda: laid(tensor_plan(), x=cut(0, ((0, 3),), ())),
    "a weight lies on the other device": lambda: laid(layer_plan(), wo=Local((1,))),
    "a state lies on the other device": lambda: laid(layer_plan(), cache__v=Local((1,))),
    "an output's shards are exchanged": lambda: ending(tensor_plan(), logits=cut(1, ((5, 5),), ((0, 5),))),
    "a cut output is said to be whole": lambda: ending(tensor_plan(), logits=REPLICATE),
    "a whole output is said to be cut": lambda: ending(tensor_plan(), z=cut(1, ((0, 4),), ((4, 4),))),
    "an output is said to lie on the other device": lambda: ending(layer_plan(), z=Local((0,))),
    "an output is said to be a sum": lambda: ending(tensor_plan(), z=PARTIAL),
    "an output is another value": lambda: on(
        tensor_plan(), 0, 1, graph=lambda g: Graph({**g.outputs, "z": ops.neg(g.outputs["z"])}, g.updates)
    ),
    "an output is missing on one device": lambda: on(
        tensor_plan(), 1, graph=lambda g: Graph({"z": g.outputs["z"]}, g.updates)
    ),
    "a device has an output of its own": lambda: on(
        tensor_plan(), 1, graph=lambda g: Graph({**g.outputs, "mine": g.outputs["z"]}, g.updates)
    ),
    "a state is not updated on one device": lambda: on(tensor_plan(), 1, graph=without_updates),
    "two states' new values are exchanged": lambda: on(tensor_plan(), 0, 1, graph=exchanged_updates),
}

NODES: Mapping[str, Fault] = {
    "a slice begins too late": lambda: nodes(tensor_plan(), 1, k=again(start=1, stop=5)),
    "a slice of the user's graph is not made local": lambda: nodes(tensor_plan(), 1, v=again(start=3, stop=7)),
    "keys and values are exchanged": lambda: nodes(
        tensor_plan(), 0, k=again(start=4, stop=8), v=again(start=0, stop=4)
    ),
    "head entries are in another order": lambda: nodes(
        tensor_plan(), 1, flat=lambda n, s: ops.reshape(ops.permute(s[0], axes=(0, 2, 1)), shape=(3, 8))
    ),
    "an operand is read twice instead of another": lambda: nodes(
        tensor_plan(), 0, act=lambda n, s: ops.swiglu(s[0], s[0], name="act")
    ),
    "operands are exchanged": lambda: nodes(tensor_plan(), 1, act=lambda n, s: ops.swiglu(s[1], s[0], name="act")),
    "another weight is read": lambda: on(tensor_plan(), 0, 1, graph=reading(uped="gate")),
    "an attribute differs on one device": lambda: nodes(tensor_plan(), 1, normed2=again(eps=0.1)),
    "an attribute differs on all devices": lambda: nodes(tensor_plan(), 0, 1, attended=again(scale=0.25)),
    "a mask sees other cells": lambda: nodes(tensor_plan(), 0, mask=again(window=2)),
    "another op is run": lambda: nodes(tensor_plan(), 1, biased=lambda n, s: ops.sub(*s, name="biased")),
    "a node is run twice": lambda: nodes(tensor_plan(), 0, 1, normed=lambda n, s: ops.mul(ops.mul(*s), s[1])),
    "a copy rounds": lambda: nodes(
        layer_plan(),
        0,
        o__to__1=lambda n, s: send(ops.cast(ops.cast(s[0], dtype=DType.F16), dtype=DType.F32), **n.attrs),
    ),
    "a cache row is set from another value": lambda: on(tensor_plan(), 1, graph=_rows_of_keys),
}


def _rows_of_keys(graph: Graph) -> Graph:
    from ...given.plans.faults import rebuilt

    keys = {}

    def note(node, src):
        keys["k"] = ops.slice_(*src, name="k", **node.attrs)
        return keys["k"]

    return rebuilt(
        graph, {"k": note, "new.cache.v": lambda n, s: ops.set_rows(s[0], keys["k"], s[2], name="new.cache.v")}
    )


def small_arena() -> Plan:
    arena, *rest = tensor_plan().lanes[0].program.buffers
    return programmed(tensor_plan(), 0, buffers=(dataclasses.replace(arena, nbytes=arena.nbytes - 64), *rest))


def other_buffer() -> Plan:
    buffers = list(tensor_plan().lanes[1].program.buffers)
    at = next(i for i, b in enumerate(buffers) if b.name == "wo")
    whole = next(v.spec for v in tensor_plan().graph.weights if v.node.name == "wo")
    buffers[at] = dataclasses.replace(buffers[at], declared=whole)
    return programmed(tensor_plan(), 1, buffers=tuple(buffers))


def other_device() -> Plan:
    device = dataclasses.replace(tensor_plan().lanes[1].device, kind="toy")
    lanes = (tensor_plan().lanes[0], dataclasses.replace(tensor_plan().lanes[1], device=device))
    return dataclasses.replace(tensor_plan(), lanes=lanes)


def reuse() -> Plan:
    """The second of two products is written over the first, which the activation has still to read."""
    products = [i for i in tensor_plan().lanes[0].program.instructions if i.node in ("gateed", "uped")]
    return step(tensor_plan(), 0, products[1].node, lambda i: at_offset(i, products[0].dst[0].offset))


PROGRAMS: Mapping[str, Fault] = {
    "memory is reused while its value is still read": reuse,
    "a result overwrites its operand while it is read": lambda: step(
        tensor_plan(), 0, "gateed", lambda i: at_offset(i, i.src[1].offset)
    ),
    "the arena is too small": small_arena,
    "a buffer is for the whole weight": other_buffer,
    "a view is read at another offset": lambda: step(
        tensor_plan(),
        1,
        "new.cache.v",
        lambda i: dataclasses.replace(i, src=(i.src[0], moved(i.src[1], -16), i.src[2])),
    ),
    "a view is read with other strides": lambda: step(
        tensor_plan(),
        1,
        "new.cache.v",
        lambda i: dataclasses.replace(i, src=(i.src[0], dataclasses.replace(i.src[1], strides=(4, 1)), i.src[2])),
    ),
    "a step is missing": lambda: without_step(tensor_plan(), 0, "act"),
    "a device does not come to a meeting": lambda: without_step(tensor_plan(), 1, "z.sum"),
    "a value is read before it is made": lambda: steps_exchanged(1, "act", "downed"),
    "a program meets in another order": lambda: steps_exchanged(1, "mixed.sum", "z.sum"),
    "a step has another attribute than its node": lambda: step(
        tensor_plan(), 1, "normed2", lambda i: dataclasses.replace(i, attrs={**i.attrs, "eps": 0.5})
    ),
    "a step runs another op than its node": lambda: step(
        tensor_plan(), 1, "biased", lambda i: dataclasses.replace(i, op="sub")
    ),
    "a step has no scratch": lambda: step(tensor_plan(), 0, "attended", lambda i: dataclasses.replace(i, scratch=None)),
    "a result is kept in another dtype": lambda: step(
        tensor_plan(),
        0,
        "normed2",
        lambda i: dataclasses.replace(i, dst=(dataclasses.replace(i.dst[0], dtype=DType.F16),)),
    ),
    "an output is read elsewhere": lambda: programmed(
        tensor_plan(), 0, outputs={k: moved(t, 64) for k, t in tensor_plan().lanes[0].program.outputs.items()}
    ),
    "an input lies on another": lambda: programmed(
        tensor_plan(),
        0,
        inputs={k: dataclasses.replace(t, offset=0) for k, t in tensor_plan().lanes[0].program.inputs.items()},
    ),
    "a state is written before it was read for the last time": lambda: without_step(tensor_plan(), 1, "new.cache.k"),
    "a program is for a device of another backend": lambda: other_device(),
}

TABLES = ("gate", "up", "bg", "down", "route", "bz")
FIRST, LAST = ((0, 3),), ((3, 3),)


def other_lane(plan: Plan, device: int, lane: int, *runs: tuple[tuple[int, int], ...]) -> Plan:
    """The mixture of which one device has other experts, as in `plan`."""
    lanes = list(experts_plan().lanes)
    lanes[device] = dataclasses.replace(plan.lanes[lane], device=lanes[device].device)
    whole = dataclasses.replace(experts_plan(), lanes=tuple(lanes))
    return laid(whole, **dict.fromkeys((*TABLES, "far"), cut(0, *runs)))


def exchanged(*tables: str, **products: int) -> Plan:
    """The two devices' experts exchanged in some tables, and the nodes that look them up told so."""
    broken = laid(experts_plan(), **dict.fromkeys(tables, cut(0, LAST, FIRST)))
    for device, first in enumerate((3, 0)):
        broken = nodes(broken, device, **dict.fromkeys(products, again(first=first)))
    return broken


ROUTING: Mapping[str, Fault] = {
    "an expert lies on two devices": lambda: other_lane(experts_plan(2, 1), 0, 0, ((0, 4),), LAST),
    "an expert lies on no device": lambda: other_lane(experts_plan(2, 1), 1, 1, FIRST, ((4, 2),)),
    "an expert that no device has is said to lie on one": lambda: other_lane(experts_plan(2, 1), 1, 1, FIRST, LAST),
    "numbers of experts are not shifted": lambda: nodes(experts_plan(), 1, gateed=again(first=0)),
    "numbers of the last table are not shifted": lambda: nodes(experts_plan(), 1, downed=again(first=0)),
    "numbers of a bias are not shifted": lambda: nodes(experts_plan(), 1, biased=again(first=0)),
    "numbers are shifted by one": lambda: nodes(experts_plan(), 1, uped=again(first=2)),
    "a part of the experts is taken for all": lambda: nodes(experts_plan(), 0, gateed=again(first=0, total=0)),
    "there are said to be more experts": lambda: nodes(experts_plan(), 0, 1, gateed=again(total=7)),
    "gates are dealt otherwise than what they gate": lambda: exchanged("up", uped=1),
    "the last table is dealt otherwise than the first": lambda: exchanged("down", downed=1),
    "a bias is dealt otherwise than what it is added to": lambda: exchanged("bg", biased=1),
    "a bias of experts is added on one device only": lambda: nodes(experts_plan(), 1, biased=lambda n, s: s[0]),
    "what is whole is counted on each device with a bias": lambda: nodes(
        experts_plan(), 1, whole__zero=lambda n, s: s[0]
    ),
    "something is made of zeros": lambda: on(experts_plan(), 0, 1, graph=reading(opened="routed")),
    "something is made of zeros on one device": lambda: on(experts_plan(), 1, graph=reading(opened="routed")),
    "answers are not summed": lambda: nodes(experts_plan(), 0, 1, combined__sum=lambda n, s: s[0]),
    "answers are not summed on one device": lambda: nodes(experts_plan(), 1, combined__sum=lambda n, s: s[0]),
    "answers are summed twice": lambda: nodes(
        experts_plan(),
        *(0, 1),
        combined__sum=lambda n, s: all_reduce(all_reduce(s[0], **n.attrs), sequence=9, name="combined.sum"),
    ),
    "answers are summed before they are combined and after": lambda: nodes(
        experts_plan(), 0, 1, combined__sum=again(sequence=8), downed=lambda n, s: all_reduce(again()(n, s), sequence=0)
    ),
    "experts are looked up by other numbers": lambda: on(
        experts_plan(), 0, 1, graph=lambda g: _numbered(g, "gateed", "others")
    ),
    "one device looks up by other numbers": lambda: on(experts_plan(), 1, graph=lambda g: _numbered(g, "fared", "ids")),
}


def _numbered(graph: Graph, name: str, numbers: str) -> Graph:
    """One lookup by another input."""
    from ...given.plans.faults import rebuilt

    (leaf,) = (v for v in graph.inputs if v.node.name == numbers)
    return rebuilt(graph, {name: lambda n, s: ops.mul_mat_id(s[0], s[1], leaf, name=name, **n.attrs)})


def nothing(*shape: int):
    return ops.cont(ops.broadcast(constant("nothing", [0.0]), shape=shape))


PLACES: Mapping[str, Fault] = {
    "what one device alone made is read elsewhere without a copy": lambda: nodes(
        placed_plan(), 0, act__from__1=lambda n, s: nothing(3, 12)
    ),
    "other entries of it are read": lambda: nodes(
        placed_plan(),
        0,
        downed=lambda n, s: ops.mul_mat(s[0], ops.slice_(s[1].node.inputs[0], axis=1, start=1, stop=7)),
    ),
    "another value is copied to who reads it": lambda: nodes(
        placed_plan(), 1, act__to__0=lambda n, s: send(ops.neg(s[0]), name="act.to.0", **n.attrs)
    ),
    "its copy arrives in another dtype": lambda: nodes(
        placed_plan(), 0, act__from__1=lambda n, s: ops.cast(again(dtype=DType.F16)(n, s), dtype=DType.F32)
    ),
    "it goes to nobody": lambda: on(placed_plan(), 1, graph=lambda g: without_output(g, "act.to.0")),
    "a device does not come where another alone needs the sum": lambda: on(
        placed_plan(), 0, graph=lambda g: without_output(g, "mixed.sum")
    ),
    "a placed weight is bound to the other device": lambda: laid(placed_plan(), gate=Local((0,))),
    "a placed weight is bound in shards": lambda: laid(placed_plan(), up=cut(0, ((0, 6),), ((6, 6),))),
    "a node runs on a device that cannot run it": lambda: refusing(placed_plan(), 1, "swiglu"),
    "a node is computed on another device than it is placed on": lambda: said(placed_plan(), "act", "act", device=0),
    "a node is computed on two devices and placed on one": lambda: said(placed_plan(), "act", "act", "normed"),
    "a copied value is computed where it was not placed": lambda: nodes(
        placed_plan(), 1, normed3__from__0=lambda n, s: ops.neg(nothing(3, 8))
    ),
    "a node is placed that there is not": lambda: said(placed_plan(), "act", "nobody"),
    "a node is placed on a device that there is not": lambda: said(placed_plan(), "act", "act", device=2),
}


def without_output(graph: Graph, node: str) -> Graph:
    kept = {name: v for name, v in graph.outputs.items() if v.node.name != node}
    assert len(kept) < len(graph.outputs)
    return Graph(kept, graph.updates)


FAULTS = {**SUMS, **MEETINGS, **LAYOUTS, **NODES, **PROGRAMS, **ROUTING, **PLACES}


@pytest.mark.parametrize("made", [tensor_plan, layer_plan, gather_plan, experts_plan, placed_plan])
def test_the_plans_in_which_faults_are_planted_are_right(made):
    assert not list(plan_faults(made()))


def test_there_are_many_kinds_of_faults():
    assert len(FAULTS) >= 100


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_finds_that(fault):
    broken = FAULTS[fault]()
    faults = list(plan_faults(broken))
    assert faults
    with pytest.raises(PlanError):
        verify_plan(broken)
