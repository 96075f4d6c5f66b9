"""Faults planted in programs, in shares of experts and in placements, one by one: the verifier names each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from hocket import ops
from hocket.graph import DType, Graph, constant
from hocket.ops.collectives import all_reduce, send
from hocket.scheduler import Plan
from hocket.scheduler.ir.layout import Local, Shard

from ...given.plans.faults import (
    PlannedFault,
    again,
    at_offset,
    experts_plan,
    move_tensor,
    nodes,
    on,
    placed_plan,
    read_other_value,
    require_named,
    step,
    steps_exchanged,
    tensor_plan,
    with_leaf_layouts,
    with_placement_text,
    with_program_changes,
    with_refusing_device,
    without_step,
)


def make_shard(axis: int, *runs: tuple[tuple[int, int], ...]) -> Shard:
    return Shard(axis, runs)


def small_arena() -> Plan:
    arena, *rest = tensor_plan().device_plans[0].program.buffers
    return with_program_changes(tensor_plan(), 0, buffers=(dataclasses.replace(arena, nbytes=arena.nbytes - 64), *rest))


def other_buffer() -> Plan:
    buffers = list(tensor_plan().device_plans[1].program.buffers)
    at = next(i for i, b in enumerate(buffers) if b.name == "wo")
    whole = next(v.spec for v in tensor_plan().graph.weights if v.node.name == "wo")
    buffers[at] = dataclasses.replace(buffers[at], declared_spec=whole)
    return with_program_changes(tensor_plan(), 1, buffers=tuple(buffers))


def other_device() -> Plan:
    device = dataclasses.replace(tensor_plan().device_plans[1].device, kind="toy")
    device_plans = (tensor_plan().device_plans[0], dataclasses.replace(tensor_plan().device_plans[1], device=device))
    return dataclasses.replace(tensor_plan(), device_plans=device_plans)


def reuse() -> Plan:
    """The second of two products is written over the first, which the activation has still to read."""
    products = [i for i in tensor_plan().device_plans[0].program.instructions if i.node in ("gateed", "uped")]
    return step(tensor_plan(), 0, products[1].node, lambda i: at_offset(i, products[0].dst[0].offset))


PROGRAMS: Mapping[str, PlannedFault] = {
    "memory is reused while its value is still read": (
        r"step \d+ \(%act\): operand 1: reads %uped.* which holds %gateed",
        reuse,
    ),
    "a result overwrites its operand while it is read": (
        r"step \d+ \(%gateed\): overwrites its operand x while reading it",
        lambda: step(tensor_plan(), 0, "gateed", lambda i: at_offset(i, i.src[1].offset)),
    ),
    "scratch is outside the arena": (
        r"\(%attended\): its scratch: .* is outside its buffer of 896 bytes",
        lambda: step(
            tensor_plan(), 0, "attended", lambda i: dataclasses.replace(i, scratch=move_tensor(i.scratch, 832))
        ),
    ),
    "the arena is too small": (r"\(%attended\): result: .* is outside its buffer of 832 bytes", small_arena),
    "a buffer is for the whole weight": (
        r"device 1: .*declared_spec=f32\[8,16\].* is for weight %wo: f32\[8,8\]",
        other_buffer,
    ),
    "a view is read at another offset": (
        r"\(%new\.cache\.v\): operand 1: reads other entries of %kv.* than its view has",
        lambda: step(
            tensor_plan(),
            1,
            "new.cache.v",
            lambda i: dataclasses.replace(i, src=(i.src[0], move_tensor(i.src[1], -16), i.src[2])),
        ),
    ),
    "a view is read with other strides": (
        r"\(%new\.cache\.v\): operand 1: .* is not f32\[3, 4\] with strides \[8, 1\]",
        lambda: step(
            tensor_plan(),
            1,
            "new.cache.v",
            lambda i: dataclasses.replace(i, src=(i.src[0], dataclasses.replace(i.src[1], strides=(4, 1)), i.src[2])),
        ),
    ),
    "a step is missing": ("device 0: %act never runs", lambda: without_step(tensor_plan(), 0, "act")),
    "a device does not come to a meeting": (
        r"all_reduce 1 \(%z\.sum\) of device 0: device 1 does not call it",
        lambda: without_step(tensor_plan(), 1, "z.sum"),
    ),
    "a value is read before it is made": (
        r"\(%downed\): operand 1: reads %act.* which holds %gateed",
        lambda: steps_exchanged(1, "act", "downed"),
    ),
    "a program meets in another order": (
        r"\(%z\.sum\): operand 0: reads %z: .* which holds %mixed",
        lambda: steps_exchanged(1, "mixed.sum", "z.sum"),
    ),
    "a step has another attribute than its node": (
        r"\(%normed2\): rms_norm with \{'eps': 0\.5\} is not .*eps=1e-06",
        lambda: step(tensor_plan(), 1, "normed2", lambda i: dataclasses.replace(i, attrs={**i.attrs, "eps": 0.5})),
    ),
    "a step runs another op than its node": (
        r"\(%biased\): sub with \{\} is not %biased = add\(",
        lambda: step(tensor_plan(), 1, "biased", lambda i: dataclasses.replace(i, op="sub")),
    ),
    "a step has no scratch": (
        r"\(%attended\): needs 168 bytes of scratch",
        lambda: step(tensor_plan(), 0, "attended", lambda i: dataclasses.replace(i, scratch=None)),
    ),
    "a result is kept in another dtype": (
        r"\(%normed2\): result: .* stored as f32, is written to f16\[3,8\]",
        lambda: step(
            tensor_plan(),
            0,
            "normed2",
            lambda i: dataclasses.replace(i, dst=(dataclasses.replace(i.dst[0], dtype=DType.F16),)),
        ),
    ),
    "an output is read elsewhere": (
        r"device 0: at the end, output 'z': reads %z\.sum",
        lambda: with_program_changes(
            tensor_plan(),
            0,
            outputs={k: move_tensor(t, 64) for k, t in tensor_plan().device_plans[0].program.outputs.items()},
        ),
    ),
    "an input lies on another": (
        r"device 0: input %ids overlaps %x: f32\[3,8\]",
        lambda: with_program_changes(
            tensor_plan(),
            0,
            inputs={
                k: dataclasses.replace(t, offset=0) for k, t in tensor_plan().device_plans[0].program.inputs.items()
            },
        ),
    ),
    "a state is read before its new rows are written": (
        r"\(%attended\): operand 1: reads %new\.cache\.k.* which holds %cache\.k",
        lambda: without_step(tensor_plan(), 1, "new.cache.k"),
    ),
    "a program is for a device of another backend": (
        "device 1 is toy:1, but cpu names it cpu:1",
        lambda: other_device(),
    ),
}

TABLES = ("gate", "up", "bg", "down", "route", "bz")
FIRST, LAST = ((0, 3),), ((3, 3),)


def replace_experts(plan: Plan, device: int, source: int, *runs: tuple[tuple[int, int], ...]) -> Plan:
    """Give `device` of the mixture the experts that device `source` of `plan` has."""
    device_plans = list(experts_plan().device_plans)
    device_plans[device] = dataclasses.replace(plan.device_plans[source], device=device_plans[device].device)
    whole = dataclasses.replace(experts_plan(), device_plans=tuple(device_plans))
    return with_leaf_layouts(whole, **dict.fromkeys((*TABLES, "far"), make_shard(0, *runs)))


def exchange_experts(*tables: str, **products: int) -> Plan:
    """Exchange the experts of two devices in `tables`, with the first numbers of `products`."""
    broken = with_leaf_layouts(experts_plan(), **dict.fromkeys(tables, make_shard(0, LAST, FIRST)))
    for device, first in enumerate((3, 0)):
        broken = nodes(broken, device, **dict.fromkeys(products, again(first=first)))
    return broken


ROUTING: Mapping[str, PlannedFault] = {
    "an expert lies on two devices": (
        r"%combined\.sum .* devices 0 and 1 both have a term",
        lambda: replace_experts(experts_plan(2, 1), 0, 0, ((0, 4),), LAST),
    ),
    "an expert lies on no device": (
        "weight %down has 1 of 6 entries on no device",
        lambda: replace_experts(experts_plan(2, 1), 1, 1, FIRST, ((4, 2),)),
    ),
    "an expert that no device has is said to lie on one": (
        r"device 1: %down .* bound to entries \['\[3:6\]'",
        lambda: replace_experts(experts_plan(2, 1), 1, 1, FIRST, LAST),
    ),
    "numbers of experts are not shifted": (
        r"%gateed .* rows \[3:6\] of w are looked up as \[0:3\]",
        lambda: nodes(experts_plan(), 1, gateed=again(first=0)),
    ),
    "numbers of the last table are not shifted": (
        r"%downed .* rows \[3:6\] of w are looked up as \[0:3\]",
        lambda: nodes(experts_plan(), 1, downed=again(first=0)),
    ),
    "numbers of a bias are not shifted": (
        r"%biased .* rows \[3:6\] of b are looked up as \[0:3\]",
        lambda: nodes(experts_plan(), 1, biased=again(first=0)),
    ),
    "numbers are shifted by one": (
        r"%uped .* rows \[3:6\] of w are looked up as \[2:5\]",
        lambda: nodes(experts_plan(), 1, uped=again(first=2)),
    ),
    "a part of the experts is taken for all": (
        "%gateed .* looked up as 0 of 0, and in the graph as 0 of 6",
        lambda: nodes(experts_plan(), 0, gateed=again(first=0, total=0)),
    ),
    "there are said to be more experts": (
        "%gateed .* looked up as 3 of 7, and in the graph as 0 of 6",
        lambda: nodes(experts_plan(), 0, 1, gateed=again(total=7)),
    ),
    "gates are dealt otherwise than what they gate": (
        "%act .* not linear in gate and up, a partial sum that no all-reduce completes",
        lambda: exchange_experts("up", uped=1),
    ),
    "the last table is dealt otherwise than the first": (
        "%downed .* x is a partial sum over other terms than the rows of w on this device",
        lambda: exchange_experts("down", downed=1),
    ),
    "a bias is dealt otherwise than what it is added to": (
        "%act .* not linear in gate and up, a partial sum that no all-reduce completes",
        lambda: exchange_experts("bg", biased=1),
    ),
    "a bias of experts is added on one device only": (
        r"device 1: %act = swiglu\(%gateed, %uped\) .* no such node",
        lambda: nodes(experts_plan(), 1, biased=lambda n, s: s[0]),
    ),
    "what is whole is counted on each device with a bias": (
        r"%z\.sum .* devices \[1\] add to it",
        lambda: nodes(experts_plan(), 1, whole__zero=lambda n, s: s[0]),
    ),
    "something is made of zeros": (
        "%opened .* not linear in x, a partial sum that no all-reduce completes",
        lambda: on(experts_plan(), 0, 1, graph=read_other_value(opened="routed")),
    ),
    "something is made of zeros on one device": (
        r"all_reduce 1 \(%routed\.sum\) of device 0: device 1 does not call it",
        lambda: on(experts_plan(), 1, graph=read_other_value(opened="routed")),
    ),
    "answers are not summed": (
        "%normed .* not linear in x, a partial sum that no all-reduce completes",
        lambda: nodes(experts_plan(), 0, 1, combined__sum=lambda n, s: s[0]),
    ),
    "answers are not summed on one device": (
        r"all_reduce 0 \(%combined\.sum\) of device 0: device 1 does not call it",
        lambda: nodes(experts_plan(), 1, combined__sum=lambda n, s: s[0]),
    ),
    "answers are summed twice": (
        r"%combined\.sum = all_reduce\(%all_reduce.* devices \[1\] add to it",
        lambda: nodes(
            experts_plan(),
            *(0, 1),
            combined__sum=lambda n, s: all_reduce(all_reduce(s[0], **n.attrs), sequence=9, name="combined.sum"),
        ),
    ),
    "answers are summed before they are combined and after": (
        r"%combined\.sum .* devices \[1\] add to it",
        lambda: nodes(
            experts_plan(),
            0,
            1,
            combined__sum=again(sequence=8),
            downed=lambda n, s: all_reduce(again()(n, s), sequence=0),
        ),
    ),
    "experts are looked up by other numbers": (
        r"%gateed = mul_mat_id\(%gate, %x, %others.* no such node",
        lambda: on(experts_plan(), 0, 1, graph=lambda g: renumber_lookup(g, "gateed", "others")),
    ),
    "one device looks up by other numbers": (
        r"device 1: %fared = mul_mat_id\(%far, %x, %ids.* no such node",
        lambda: on(experts_plan(), 1, graph=lambda g: renumber_lookup(g, "fared", "ids")),
    ),
}


def renumber_lookup(graph: Graph, name: str, numbers: str) -> Graph:
    """Let one lookup read another input."""
    from ...given.plans.faults import rebuild_graph

    (leaf,) = (v for v in graph.inputs if v.node.name == numbers)
    return rebuild_graph(graph, {name: lambda n, s: ops.mul_mat_id(s[0], s[1], leaf, name=name, **n.attrs)})


def nothing(*shape: int):
    return ops.cont(ops.broadcast(constant("nothing", [0.0]), shape=shape))


PLACES: Mapping[str, PlannedFault] = {
    "what one device alone made is read elsewhere without a copy": (
        r"send 1 \(%act\.to\.0\) of device 1: device 0 does not receive it",
        lambda: nodes(placed_plan(), 0, act__from__1=lambda n, s: nothing(3, 12)),
    ),
    "other entries of it are read": (
        r"device 0: .*mul_mat\(%down, %slice.* different entries of k: \[0:6\] and \[1:7\]",
        lambda: nodes(
            placed_plan(),
            0,
            downed=lambda n, s: ops.mul_mat(s[0], ops.slice_(s[1].node.inputs[0], axis=1, start=1, stop=7)),
        ),
    ),
    "another value is copied to who reads it": (
        r"device 1: .*neg\(%act\) .* no such node with these operands",
        lambda: nodes(placed_plan(), 1, act__to__0=lambda n, s: send(ops.neg(s[0]), name="act.to.0", **n.attrs)),
    ),
    "its copy arrives in another dtype": (
        r"%act\.from\.1 = receive\(.*dtype=f16.* receives %act\.to\.0 = send\(",
        lambda: nodes(
            placed_plan(), 0, act__from__1=lambda n, s: ops.cast(again(dtype=DType.F16)(n, s), dtype=DType.F32)
        ),
    ),
    "it goes to nobody": (
        r"receive 1 \(%act\.from\.1\) of device 0: device 1 does not send it",
        lambda: on(placed_plan(), 1, graph=lambda g: without_output(g, "act.to.0")),
    ),
    "a device does not come where another alone needs the sum": (
        r"all_reduce 0 \(%mixed\.sum\) of device 1: device 0 does not call it",
        lambda: on(placed_plan(), 0, graph=lambda g: without_output(g, "mixed.sum")),
    ),
    "a placed weight is bound to the other device": (
        "device 1: weight %gate is not bound",
        lambda: with_leaf_layouts(placed_plan(), gate=Local((0,))),
    ),
    "a placed weight is bound in shards": (
        r"device 1: %up .* bound to entries \['\[6:12\]', '\[0:8\]'\]",
        lambda: with_leaf_layouts(placed_plan(), up=make_shard(0, ((0, 6),), ((6, 6),))),
    ),
    "a node runs on a device that cannot run it": (
        "device 1: %act .* cannot run on cpu:1: not here",
        lambda: with_refusing_device(placed_plan(), 1, "swiglu"),
    ),
    "a node is computed on another device than it is placed on": (
        r"%act is pinned to device 0, but computed on devices \[1\]",
        lambda: with_placement_text(placed_plan(), "act", "act", device=0),
    ),
    "a node is computed on two devices and placed on one": (
        r"%normed is pinned to device 1, but computed on devices \[0\]",
        lambda: with_placement_text(placed_plan(), "act", "act", "normed"),
    ),
    "a copied value is computed where it was not placed": (
        r"send 3 \(%normed3\.to\.1\) of device 0: device 1 does not receive it",
        lambda: nodes(placed_plan(), 1, normed3__from__0=lambda n, s: ops.neg(nothing(3, 8))),
    ),
    "a node is placed that there is not": (
        "node %nobody is pinned, but the graph does not have it",
        lambda: with_placement_text(placed_plan(), "act", "nobody"),
    ),
    "a node is placed on a device that there is not": (
        "nodes are pinned to device 2 of 2",
        lambda: with_placement_text(placed_plan(), "act", "act", device=2),
    ),
}


def without_output(graph: Graph, node: str) -> Graph:
    outputs = {name: v for name, v in graph.outputs.items() if v.node.name != node}
    assert len(outputs) < len(graph.outputs)
    return Graph(outputs, graph.updates)


FAULTS = {**PROGRAMS, **ROUTING, **PLACES}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_names_the_fault(fault):
    require_named(*FAULTS[fault])
