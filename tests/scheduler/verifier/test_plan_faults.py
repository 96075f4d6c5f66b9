"""Faults planted in correct plans, one by one: the verifier names each of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hocket import ops
from hocket.graph import DType, Graph, constant
from hocket.ops.collectives import all_gather, all_reduce, send
from hocket.scheduler.ir.layout import PARTIAL, REPLICATE, Local, Shard
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.plans.faults import (
    PlannedFault,
    again,
    experts_plan,
    gather_plan,
    layer_plan,
    nodes,
    on,
    placed_plan,
    read_other_value,
    renumber_collectives,
    require_named,
    tensor_plan,
    with_leaf_layouts,
    with_output_layouts,
)


def shard(axis: int, *runs: tuple[tuple[int, int], ...]) -> Shard:
    return Shard(axis, runs)


def without_updates(graph: Graph) -> Graph:
    return Graph(graph.outputs, {})


def exchanged_updates(graph: Graph) -> Graph:
    (a, x), (b, y) = graph.updates.items()
    return Graph(graph.outputs, {a: y, b: x})


def twice_reduced(node, src):
    return all_reduce(all_reduce(src[0], sequence=node.attrs["sequence"]), sequence=2, name=node.name)


SUMS: Mapping[str, PlannedFault] = {
    "a sum is missing on one device": (
        r"all_reduce 0 \(%mixed\.sum\) of device 0: device 1 does not call it",
        lambda: nodes(tensor_plan(), 1, mixed__sum=lambda n, s: s[0]),
    ),
    "a sum is missing on all devices": (
        "%normed3 .* not linear in x, a partial sum that no all-reduce completes",
        lambda: nodes(tensor_plan(), 0, 1, z__sum=lambda n, s: s[0]),
    ),
    "a sum is taken twice": (
        r"%z\.sum .* device 0 has the complete value, and devices \[1\] add to it",
        lambda: nodes(tensor_plan(), 0, 1, z__sum=twice_reduced),
    ),
    "a whole value is summed": (
        r"all_reduce\(%rms_norm.* device 0 has the complete value, and devices \[1\] add to it",
        lambda: nodes(tensor_plan(), 0, 1, normed3=lambda n, s: all_reduce(ops.rms_norm(s[0]), sequence=2)),
    ),
    "a norm reads a sum that is owed": (
        "%normed2 .* not linear in x, a partial sum that no all-reduce completes",
        lambda: on(tensor_plan(), 0, 1, graph=read_other_value(normed2="mixed")),
    ),
    "a norm reads a sum that is owed on one device": (
        "device 1: %normed3 .* not linear in x, a partial sum that no all-reduce completes",
        lambda: on(tensor_plan(), 1, graph=read_other_value(normed3="z")),
    ),
    "an activation reads a sum that is owed": (
        r"silu\(%mul_mat\) .* no such node with these operands",
        lambda: nodes(tensor_plan(), 0, 1, downed=lambda n, s: ops.silu(ops.mul_mat(*s))),
    ),
    "a bias is counted on two devices": (
        r"%mixed\.sum .* devices \[1\] add to it",
        lambda: nodes(tensor_plan(), 1, bo__zero=lambda n, s: s[0]),
    ),
    "a bias is counted on none": (
        r"%mixed\.sum .* no device has a term",
        lambda: nodes(tensor_plan(), 0, biased=lambda n, s: ops.add(s[0], ops.scale(s[1], scale=0.0), name="biased")),
    ),
    "a residual is counted on two devices": (
        r"%mixed\.sum .* devices \[1\] add to it",
        lambda: nodes(tensor_plan(), 1, x__zero=lambda n, s: s[0]),
    ),
    "a residual is counted half on each device": (
        r"device 1: .*scale\(%x, scale=0\.5.* no such node with these operands",
        lambda: nodes(tensor_plan(), 1, x__zero=lambda n, s: ops.scale(s[0], scale=0.5)),
    ),
    "a residual is counted on none": (
        r"%mixed\.sum .* no device has a term",
        lambda: nodes(tensor_plan(), 0, mixed=lambda n, s: ops.add(ops.scale(s[0], scale=0.0), s[1], name="mixed")),
    ),
    "a residual is counted again where it was whole": (
        r"%z\.sum .* devices \[1\] add to it",
        lambda: on(tensor_plan(), 0, 1, graph=read_other_value(z="mixed__sum")),
    ),
    "one device takes the whole residual, one its part": (
        r"%z\.sum .* devices \[1\] add to it",
        lambda: on(tensor_plan(), 0, graph=read_other_value(z="mixed__sum")),
    ),
    "two devices have the same terms": (
        "weight %down has 6 of 12 entries on no device",
        lambda: with_leaf_layouts(tensor_plan(), down=shard(1, ((0, 6),), ((0, 6),))),
    ),
    "devices have terms in common": (
        "weight %down has 3 of 12 entries on no device",
        lambda: with_leaf_layouts(tensor_plan(), down=shard(1, ((0, 6),), ((3, 6),))),
    ),
    "some terms are missing": (
        r"%z\.sum .* 3 of 12 terms are missing",
        lambda: nodes(
            tensor_plan(),
            1,
            downed=lambda n, s: ops.mul_mat(*(ops.slice_(v, axis=1, start=0, stop=3) for v in s), name="downed"),
        ),
    ),
    "a term is there twice": (
        r"device 1: .*concat\(%act, %act.* no such node with these operands",
        lambda: nodes(
            tensor_plan(), 1, downed=lambda n, s: ops.mul_mat(*(ops.concat(v, v, axis=1) for v in s), name="downed")
        ),
    ),
    "terms of weight and activation belong to others": (
        r"device 0: %o .* different entries of k: \[8:16\] and \[0:8\]",
        lambda: with_leaf_layouts(tensor_plan(), wo=shard(1, ((8, 8),), ((0, 8),))),
    ),
}

COLLECTIVE_FAULTS: Mapping[str, PlannedFault] = {
    "two meetings are exchanged on one device": (
        r"all_reduce 0 \(%z\.sum\) of device 1 runs after all_reduce 1 \(%mixed\.sum\)",
        lambda: renumber_collectives(tensor_plan(), 1, {0: 1, 1: 0}),
    ),
    "a meeting has another number on one device": (
        r"all_reduce 9 \(%z\.sum\) of device 1: device 0 does not call it",
        lambda: renumber_collectives(tensor_plan(), 1, {1: 9}),
    ),
    "two meetings have one number": (
        r"all_reduce 0 \(%z\.sum\) of device 0 is called twice",
        lambda: renumber_collectives(renumber_collectives(tensor_plan(), 1, {1: 0}), 0, {1: 0}),
    ),
    "a gather puts shards in another order": (
        r"%n .* c must be whole, but the device has \[3:6, 0:3\] of 6",
        lambda: nodes(gather_plan(), 0, 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))),
    ),
    "devices gather into different runs": (
        r"does not match all_gather 0 \(%h\.whole\) of device 1",
        lambda: nodes(gather_plan(), 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))),
    ),
    "a gather interleaves what is contiguous": (
        r"%n .* c must be whole, but the device has \[0:2, 3:5, 2:3, 5:6\] of 6",
        lambda: nodes(gather_plan(), 0, 1, h__whole=again(runs=(((0, 2), (4, 1)), ((2, 2), (5, 1))))),
    ),
    "a device does not come to a gather": (
        r"all_gather 0 \(%h\.whole\) of device 0: device 1 does not call it",
        lambda: nodes(gather_plan(), 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)),
    ),
    "nobody gathers": (
        r"concat\(%h, %h.* no such node with these operands",
        lambda: nodes(gather_plan(), 0, 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)),
    ),
    "one device gathers another value": (
        r"device 1: .*neg\(%h\) .* no such node with these operands",
        lambda: nodes(gather_plan(), 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)),
    ),
    "all devices gather another value": (
        r"device 0: .*neg\(%h\) .* no such node with these operands",
        lambda: nodes(gather_plan(), 0, 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)),
    ),
    "a sum is gathered": (
        r"all_gather\(%slice.* it is a partial sum that no all-reduce completes",
        lambda: nodes(
            tensor_plan(),
            *(0, 1),
            mixed__sum=lambda n, s: all_gather(
                ops.slice_(s[0], axis=0, start=0, stop=3), axis=0, runs=(((0, 3),), ((0, 3),)), sequence=0
            ),
        ),
    ),
    "a value is sent and not received": (
        r"send 0 \(%o\.to\.1\) of device 0: device 1 does not receive it",
        lambda: nodes(
            layer_plan(), 1, o__from__0=lambda n, s: ops.cont(ops.broadcast(constant("nothing", [0.0]), shape=(3, 8)))
        ),
    ),
    "a value is received and not sent": (
        r"receive 0 \(%o\.from\.0\) of device 1: device 0 does not send it",
        lambda: on(layer_plan(), 0, graph=lambda g: Graph({}, g.updates)),
    ),
    "a value is received under another number": (
        r"receive 5 \(%o\.from\.0\) of device 1: device 0 does not send it",
        lambda: renumber_collectives(layer_plan(), 1, {0: 5}),
    ),
    "another value is sent": (
        r"device 0: .*neg\(%o\) .* no such node with these operands",
        lambda: nodes(layer_plan(), 0, o__to__1=lambda n, s: send(ops.neg(s[0]), name="o.to.1", **n.attrs)),
    ),
    "a value is sent to another device": (
        r"send 0 \(%o\.to\.1\) of device 0: device 0 does not receive it",
        lambda: nodes(layer_plan(), 0, o__to__1=again(to=0)),
    ),
    "a value is received from another device": (
        r"receive 0 \(%o\.from\.0\) of device 1: device 1 does not send it",
        lambda: nodes(layer_plan(), 1, o__from__0=again(source=1)),
    ),
    "a value is received in another shape": (
        r"sends f32\[3,8\], but receive 0 \(%o\.from\.0\) of device 1 receives f32\[8,3\]",
        lambda: nodes(
            layer_plan(),
            1,
            o__from__0=lambda n, s: ops.reshape(again(shape=(8, 3))(n, s), shape=(3, 8)),
        ),
    ),
}


LAYOUTS: Mapping[str, PlannedFault] = {
    "shards of a fused weight are exchanged": (
        r"%new\.cache\.k .* different entries of d: \[0:4\] and \[4:8\]",
        lambda: with_leaf_layouts(tensor_plan(), wkv=shard(0, ((4, 4), (12, 4)), ((0, 4), (8, 4)))),
    ),
    "a fused weight is cut in halves": (
        r"device 0: %new\.cache\.v .* no such node with these operands",
        lambda: with_leaf_layouts(tensor_plan(), wkv=shard(0, ((0, 8),), ((8, 8),))),
    ),
    "parts of a fused weight are in another order": (
        r"device 0: .*reshape\(%k.* no such node with these operands",
        lambda: with_leaf_layouts(tensor_plan(), wkv=shard(0, ((8, 4), (0, 4)), ((12, 4), (4, 4)))),
    ),
    "query heads follow another key head": (
        r"%attended .* \[0:1, 2:3\] is not a product \(kv_heads query_heads\)",
        lambda: with_leaf_layouts(tensor_plan(), wq=shard(0, ((0, 4), (8, 4)), ((4, 4), (12, 4)))),
    ),
    "heads are shifted by half a head": (
        r"reshape\(%q.* \[2:10\] cannot be split along the axes of \[4, 4\]",
        lambda: with_leaf_layouts(tensor_plan(), wq=shard(0, ((2, 8),), ((10, 6), (0, 2)))),
    ),
    "a cache lies the other way round": (
        r"%new\.cache\.k .* different entries of d: \[4:8\] and \[0:4\]",
        lambda: with_leaf_layouts(tensor_plan(), cache__k=shard(1, ((4, 4),), ((0, 4),))),
    ),
    "the head's shards are exchanged": (
        r"output 'logits' on device 0 should be .*'\[0:5\]'\] .* and is .*'\[5:10\]'\]",
        lambda: with_leaf_layouts(tensor_plan(), head=shard(0, ((5, 5),), ((0, 5),))),
    ),
    "a weight is cut along another axis": (
        r"%wkv .* bound to entries \['\[0:16\]', '\[0:8\]'\]",
        lambda: with_leaf_layouts(tensor_plan(), wkv=shard(1, ((0, 8),), ((0, 8),))),
    ),
    "some rows of a weight lie nowhere": (
        "weight %gate has 6 of 12 entries on no device",
        lambda: with_leaf_layouts(tensor_plan(), gate=shard(0, ((0, 6),), ((0, 6),))),
    ),
    "runs of a weight lie outside it": (
        "weight %head has index ranges outside its 10 entries",
        lambda: with_leaf_layouts(tensor_plan(), head=shard(0, ((0, 5),), ((6, 5),))),
    ),
    "runs of a weight are too short": (
        r"device 0: %head .* bound to entries \['\[0:6\]', '\[0:8\]'\]",
        lambda: with_leaf_layouts(tensor_plan(), head=shard(0, ((0, 6),), ((6, 4),))),
    ),
    "a weight is bound whole": (
        r"device 0: %gate .* bound to entries \['\[0:12\]', '\[0:8\]'\]",
        lambda: with_leaf_layouts(tensor_plan(), gate=REPLICATE),
    ),
    "a whole weight is bound in shards": (
        r"device 1: %norm .* bound to entries \['\[4:8\]'\]",
        lambda: with_leaf_layouts(tensor_plan(), norm=shard(0, ((0, 4),), ((4, 4),))),
    ),
    "a weight is bound as a sum": ("weight %bo has the layout P", lambda: with_leaf_layouts(tensor_plan(), bo=PARTIAL)),
    "a weight has no layout": (
        "its layouts are for other leaves than the graph has",
        lambda: with_leaf_layouts(tensor_plan(), gate=None),
    ),
    "an input is bound in shards": (
        r"input %x must be whole on every device, but its layout is S0\(3\|0\)",
        lambda: with_leaf_layouts(tensor_plan(), x=shard(0, ((0, 3),), ())),
    ),
    "a weight lies on the other device": (
        "device 0: weight %wo is not bound",
        lambda: with_leaf_layouts(layer_plan(), wo=Local((1,))),
    ),
    "a state lies on the other device": (
        r"device 0: state %cache\.v is not bound",
        lambda: with_leaf_layouts(layer_plan(), cache__v=Local((1,))),
    ),
    "an output's shards are exchanged": (
        r"output 'logits' on device 0 should be .*'\[5:10\]'\] .* and is .*'\[0:5\]'\]",
        lambda: with_output_layouts(tensor_plan(), logits=shard(1, ((5, 5),), ((0, 5),))),
    ),
    "a cut output is said to be whole": (
        r"output 'logits' on device 0 should be .*'\[0:10\]'\] .* and is .*'\[0:5\]'\]",
        lambda: with_output_layouts(tensor_plan(), logits=REPLICATE),
    ),
    "a whole output is said to be cut": (
        r"output 'z' on device 1 should be .*'\[4:8\]'\] .* and is .*'\[0:8\]'\]",
        lambda: with_output_layouts(tensor_plan(), z=shard(1, ((0, 4),), ((4, 4),))),
    ),
    "an output is said to lie on the other device": (
        "output 'z' is missing on device 0",
        lambda: with_output_layouts(layer_plan(), z=Local((0,))),
    ),
    "an output is said to be a sum": (
        "output 'z' has the layout P",
        lambda: with_output_layouts(tensor_plan(), z=PARTIAL),
    ),
    "an output is another value": (
        r"device 0: .*neg\(%z\.sum\) .* no such node with these operands",
        lambda: on(tensor_plan(), 0, 1, graph=lambda g: Graph({**g.outputs, "z": ops.neg(g.outputs["z"])}, g.updates)),
    ),
    "an output is missing on one device": (
        "output 'logits' is missing on device 1",
        lambda: on(tensor_plan(), 1, graph=lambda g: Graph({"z": g.outputs["z"]}, g.updates)),
    ),
    "a device has an output of its own": (
        "device 1 has an output 'mine', which the graph does not have",
        lambda: on(tensor_plan(), 1, graph=lambda g: Graph({**g.outputs, "mine": g.outputs["z"]}, g.updates)),
    ),
    "a state is not updated on one device": (
        r"device 1 does not update its part of state %cache\.v",
        lambda: on(tensor_plan(), 1, graph=without_updates),
    ),
    "two states' new values are exchanged": (
        r"state %cache\.k on device 0 should be .* of %new\.cache\.k.* and is another value",
        lambda: on(tensor_plan(), 0, 1, graph=exchanged_updates),
    ),
}

NODES: Mapping[str, PlannedFault] = {
    "a slice begins too late": (
        r"device 1: .*reshape\(%k.* no such node with these operands",
        lambda: nodes(tensor_plan(), 1, k=again(start=1, stop=5)),
    ),
    "a slice of the user's graph is not made local": (
        r"device 1: %new\.cache\.v = set_rows\(%cache\.v, %v.* no such node",
        lambda: nodes(tensor_plan(), 1, v=again(start=3, stop=7)),
    ),
    "keys and values are exchanged": (
        r"device 0: %new\.cache\.v = set_rows\(%cache\.v, %v.* no such node",
        lambda: nodes(tensor_plan(), 0, k=again(start=4, stop=8), v=again(start=0, stop=4)),
    ),
    "head entries are in another order": (
        r"device 1: .*permute\(%attended.* no such node with these operands",
        lambda: nodes(tensor_plan(), 1, flat=lambda n, s: ops.reshape(ops.permute(s[0], axes=(0, 2, 1)), shape=(3, 8))),
    ),
    "an operand is read twice instead of another": (
        r"swiglu\(%gateed, %gateed\) .* no such node with these operands",
        lambda: nodes(tensor_plan(), 0, act=lambda n, s: ops.swiglu(s[0], s[0], name="act")),
    ),
    "operands are exchanged": (
        r"swiglu\(%uped, %gateed\) .* no such node with these operands",
        lambda: nodes(tensor_plan(), 1, act=lambda n, s: ops.swiglu(s[1], s[0], name="act")),
    ),
    "another weight is read": (
        r"device 0: %act = swiglu\(%gateed, %uped\) .* no such node with these operands",
        lambda: on(tensor_plan(), 0, 1, graph=read_other_value(uped="gate")),
    ),
    "an attribute differs on one device": (
        r"device 1: %normed2 .* attribute eps is 0\.1 and not 1e-06",
        lambda: nodes(tensor_plan(), 1, normed2=again(eps=0.1)),
    ),
    "an attribute differs on all devices": (
        r"device 0: %attended .* attribute scale is 0\.25 and not 0\.5",
        lambda: nodes(tensor_plan(), 0, 1, attended=again(scale=0.25)),
    ),
    "a mask sees other cells": (
        "device 0: %mask .* attribute window is 2 and not 0",
        lambda: nodes(tensor_plan(), 0, mask=again(window=2)),
    ),
    "another op is run": (
        r"device 1: %biased = sub\(.* no such node with these operands",
        lambda: nodes(tensor_plan(), 1, biased=lambda n, s: ops.sub(*s, name="biased")),
    ),
    "a node is run twice": (
        r"device 0: .*mul\(%mul, %norm\) .* no such node with these operands",
        lambda: nodes(tensor_plan(), 0, 1, normed=lambda n, s: ops.mul(ops.mul(*s), s[1])),
    ),
    "a copy rounds": (
        r"device 0: .*cast\(%o, dtype=f16\) .* no such node with these operands",
        lambda: nodes(
            layer_plan(),
            0,
            o__to__1=lambda n, s: send(ops.cast(ops.cast(s[0], dtype=DType.F16), dtype=DType.F32), **n.attrs),
        ),
    ),
    "a cache row is set from another value": (
        r"device 1: %new\.cache\.v = set_rows\(%cache\.v, %k.* no such node",
        lambda: on(tensor_plan(), 1, graph=_rows_of_keys),
    ),
}


def _rows_of_keys(graph: Graph) -> Graph:
    from ...given.plans.faults import rebuild_graph

    keys = {}

    def note(node, src):
        keys["k"] = ops.slice_(*src, name="k", **node.attrs)
        return keys["k"]

    return rebuild_graph(
        graph, {"k": note, "new.cache.v": lambda n, s: ops.set_rows(s[0], keys["k"], s[2], name="new.cache.v")}
    )


FAULTS = {**SUMS, **COLLECTIVE_FAULTS, **LAYOUTS, **NODES}


@pytest.mark.parametrize("make_plan", [tensor_plan, layer_plan, gather_plan, experts_plan, placed_plan])
def test_the_plans_in_which_faults_are_planted_are_right(make_plan):
    assert not list(find_plan_faults(make_plan()))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_names_the_fault(fault):
    require_named(*FAULTS[fault])
