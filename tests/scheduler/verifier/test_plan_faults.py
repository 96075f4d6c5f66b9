"""Faults planted in correct plans, one by one: the verifier names each of them."""

from __future__ import annotations

import dataclasses
import re
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

Fault = tuple[str, Callable[[], Plan]]
"""A pattern of the message that must appear, and a function that builds the faulty plan."""


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
    "a sum is missing on one device": (
        r"all_reduce 0 \(%mixed\.sum\) of device 0: device 1 does not come",
        lambda: nodes(tensor_plan(), 1, mixed__sum=lambda n, s: s[0]),
    ),
    "a sum is missing on all devices": (
        "%normed3 .* not linear in x, a sum that is still owed",
        lambda: nodes(tensor_plan(), 0, 1, z__sum=lambda n, s: s[0]),
    ),
    "a sum is taken twice": (
        r"%z\.sum .* device 0 brings all of it, and devices \[1\] bring it again",
        lambda: nodes(tensor_plan(), 0, 1, z__sum=twice_reduced),
    ),
    "a whole value is summed": (
        r"all_reduce\(%rms_norm.* device 0 brings all of it, and devices \[1\] bring it again",
        lambda: nodes(tensor_plan(), 0, 1, normed3=lambda n, s: all_reduce(ops.rms_norm(s[0]), sequence=2)),
    ),
    "a norm reads a sum that is owed": (
        "%normed2 .* not linear in x, a sum that is still owed",
        lambda: on(tensor_plan(), 0, 1, graph=reading(normed2="mixed")),
    ),
    "a norm reads a sum that is owed on one device": (
        "device 1: %normed3 .* not linear in x, a sum that is still owed",
        lambda: on(tensor_plan(), 1, graph=reading(normed3="z")),
    ),
    "an activation reads a sum that is owed": (
        r"silu\(%mul_mat\) .* no such node on these values",
        lambda: nodes(tensor_plan(), 0, 1, downed=lambda n, s: ops.silu(ops.mul_mat(*s))),
    ),
    "a bias is counted on two devices": (
        r"%mixed\.sum .* devices \[1\] bring it again",
        lambda: nodes(tensor_plan(), 1, bo__zero=lambda n, s: s[0]),
    ),
    "a bias is counted on none": (
        r"%mixed\.sum .* no device brings anything",
        lambda: nodes(tensor_plan(), 0, biased=lambda n, s: ops.add(s[0], ops.scale(s[1], scale=0.0), name="biased")),
    ),
    "a residual is counted on two devices": (
        r"%mixed\.sum .* devices \[1\] bring it again",
        lambda: nodes(tensor_plan(), 1, x__zero=lambda n, s: s[0]),
    ),
    "a residual is counted half on each device": (
        r"device 1: .*scale\(%x, scale=0\.5.* no such node on these values",
        lambda: nodes(tensor_plan(), 1, x__zero=lambda n, s: ops.scale(s[0], scale=0.5)),
    ),
    "a residual is counted on none": (
        r"%mixed\.sum .* no device brings anything",
        lambda: nodes(tensor_plan(), 0, mixed=lambda n, s: ops.add(ops.scale(s[0], scale=0.0), s[1], name="mixed")),
    ),
    "a residual is counted again where it was whole": (
        r"%z\.sum .* devices \[1\] bring it again",
        lambda: on(tensor_plan(), 0, 1, graph=reading(z="mixed__sum")),
    ),
    "one device takes the whole residual, one its part": (
        r"%z\.sum .* devices \[1\] bring it again",
        lambda: on(tensor_plan(), 0, graph=reading(z="mixed__sum")),
    ),
    "two devices have the same terms": (
        "weight %down has 6 of 12 entries on no device",
        lambda: laid(tensor_plan(), down=cut(1, ((0, 6),), ((0, 6),))),
    ),
    "devices have terms in common": (
        "weight %down has 3 of 12 entries on no device",
        lambda: laid(tensor_plan(), down=cut(1, ((0, 6),), ((3, 6),))),
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
        r"device 1: .*concat\(%act, %act.* no such node on these values",
        lambda: nodes(
            tensor_plan(), 1, downed=lambda n, s: ops.mul_mat(*(ops.concat(v, v, axis=1) for v in s), name="downed")
        ),
    ),
    "terms of weight and activation belong to others": (
        r"device 0: %o .* different entries of k: \[8:16\] and \[0:8\]",
        lambda: laid(tensor_plan(), wo=cut(1, ((8, 8),), ((0, 8),))),
    ),
}

MEETINGS: Mapping[str, Fault] = {
    "two meetings are exchanged on one device": (
        r"all_reduce 0 \(%z\.sum\) of device 1 runs after all_reduce 1 \(%mixed\.sum\)",
        lambda: renumbered(tensor_plan(), 1, {0: 1, 1: 0}),
    ),
    "a meeting has another number on one device": (
        r"all_reduce 9 \(%z\.sum\) of device 1: device 0 does not come",
        lambda: renumbered(tensor_plan(), 1, {1: 9}),
    ),
    "two meetings have one number": (
        r"all_reduce 0 \(%z\.sum\) of device 0 is there twice",
        lambda: renumbered(renumbered(tensor_plan(), 1, {1: 0}), 0, {1: 0}),
    ),
    "a gather puts shards in another order": (
        r"%n .* c must be whole, and only \[3:6, 0:3\] of 6 is there",
        lambda: nodes(gather_plan(), 0, 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))),
    ),
    "devices gather into different runs": (
        r"all_gather 0 \(%h\.whole\) of device 1, which is another",
        lambda: nodes(gather_plan(), 1, h__whole=again(runs=(((3, 3),), ((0, 3),)))),
    ),
    "a gather interleaves what is contiguous": (
        r"%n .* c must be whole, and only \[0:2, 3:5, 2:3, 5:6\] of 6 is there",
        lambda: nodes(gather_plan(), 0, 1, h__whole=again(runs=(((0, 2), (4, 1)), ((2, 2), (5, 1))))),
    ),
    "a device does not come to a gather": (
        r"all_gather 0 \(%h\.whole\) of device 0: device 1 does not come",
        lambda: nodes(gather_plan(), 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)),
    ),
    "nobody gathers": (
        r"concat\(%h, %h.* no such node on these values",
        lambda: nodes(gather_plan(), 0, 1, h__whole=lambda n, s: ops.concat(s[0], s[0], axis=1)),
    ),
    "one device gathers another value": (
        r"device 1: .*neg\(%h\) .* no such node on these values",
        lambda: nodes(gather_plan(), 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)),
    ),
    "all devices gather another value": (
        r"device 0: .*neg\(%h\) .* no such node on these values",
        lambda: nodes(gather_plan(), 0, 1, h__whole=lambda n, s: all_gather(ops.neg(s[0]), **n.attrs)),
    ),
    "a sum is gathered": (
        r"all_gather\(%slice.* it is a sum still owed",
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
        lambda: renumbered(layer_plan(), 1, {0: 5}),
    ),
    "another value is sent": (
        r"device 0: .*neg\(%o\) .* no such node on these values",
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


LAYOUTS: Mapping[str, Fault] = {
    "shards of a fused weight are exchanged": (
        r"%new\.cache\.k .* different entries of d: \[0:4\] and \[4:8\]",
        lambda: laid(tensor_plan(), wkv=cut(0, ((4, 4), (12, 4)), ((0, 4), (8, 4)))),
    ),
    "a fused weight is cut in halves": (
        r"device 0: %new\.cache\.v .* no such node on these values",
        lambda: laid(tensor_plan(), wkv=cut(0, ((0, 8),), ((8, 8),))),
    ),
    "parts of a fused weight are in another order": (
        r"device 0: .*reshape\(%k.* no such node on these values",
        lambda: laid(tensor_plan(), wkv=cut(0, ((8, 4), (0, 4)), ((12, 4), (4, 4)))),
    ),
    "query heads follow another key head": (
        r"%attended .* \[0:1, 2:3\] is no product \(kv_heads query_heads\)",
        lambda: laid(tensor_plan(), wq=cut(0, ((0, 4), (8, 4)), ((4, 4), (12, 4)))),
    ),
    "heads are shifted by half a head": (
        r"reshape\(%q.* \[2:10\] is not \[4, 4\] cut along axes",
        lambda: laid(tensor_plan(), wq=cut(0, ((2, 8),), ((10, 6), (0, 2)))),
    ),
    "a cache lies the other way round": (
        r"%new\.cache\.k .* different entries of d: \[4:8\] and \[0:4\]",
        lambda: laid(tensor_plan(), cache__k=cut(1, ((4, 4),), ((0, 4),))),
    ),
    "the head's shards are exchanged": (
        r"output 'logits' on device 0 should be .*'\[0:5\]'\] .* and is .*'\[5:10\]'\]",
        lambda: laid(tensor_plan(), head=cut(0, ((5, 5),), ((0, 5),))),
    ),
    "a weight is cut along another axis": (
        r"%wkv .* bound to entries \['\[0:16\]', '\[0:8\]'\]",
        lambda: laid(tensor_plan(), wkv=cut(1, ((0, 8),), ((0, 8),))),
    ),
    "some rows of a weight lie nowhere": (
        "weight %gate has 6 of 12 entries on no device",
        lambda: laid(tensor_plan(), gate=cut(0, ((0, 6),), ((0, 6),))),
    ),
    "runs of a weight lie outside it": (
        "weight %head has runs outside its 10 entries",
        lambda: laid(tensor_plan(), head=cut(0, ((0, 5),), ((6, 5),))),
    ),
    "runs of a weight are too short": (
        r"device 0: %head .* bound to entries \['\[0:6\]', '\[0:8\]'\]",
        lambda: laid(tensor_plan(), head=cut(0, ((0, 6),), ((6, 4),))),
    ),
    "a weight is bound whole": (
        r"device 0: %gate .* bound to entries \['\[0:12\]', '\[0:8\]'\]",
        lambda: laid(tensor_plan(), gate=REPLICATE),
    ),
    "a whole weight is bound in shards": (
        r"device 1: %norm .* bound to entries \['\[4:8\]'\]",
        lambda: laid(tensor_plan(), norm=cut(0, ((0, 4),), ((4, 4),))),
    ),
    "a weight is bound as a sum": ("weight %bo has the layout P", lambda: laid(tensor_plan(), bo=PARTIAL)),
    "a weight has no layout": ("its layouts are of other leaves", lambda: laid(tensor_plan(), gate=None)),
    "an input is bound in shards": (
        r"input %x is given whole to every device, and the plan says S0\(3\|0\)",
        lambda: laid(tensor_plan(), x=cut(0, ((0, 3),), ())),
    ),
    "a weight lies on the other device": (
        "device 0: weight %wo is not bound there",
        lambda: laid(layer_plan(), wo=Local((1,))),
    ),
    "a state lies on the other device": (
        r"device 0: state %cache\.v is not bound there",
        lambda: laid(layer_plan(), cache__v=Local((1,))),
    ),
    "an output's shards are exchanged": (
        r"output 'logits' on device 0 should be .*'\[5:10\]'\] .* and is .*'\[0:5\]'\]",
        lambda: ending(tensor_plan(), logits=cut(1, ((5, 5),), ((0, 5),))),
    ),
    "a cut output is said to be whole": (
        r"output 'logits' on device 0 should be .*'\[0:10\]'\] .* and is .*'\[0:5\]'\]",
        lambda: ending(tensor_plan(), logits=REPLICATE),
    ),
    "a whole output is said to be cut": (
        r"output 'z' on device 1 should be .*'\[4:8\]'\] .* and is .*'\[0:8\]'\]",
        lambda: ending(tensor_plan(), z=cut(1, ((0, 4),), ((4, 4),))),
    ),
    "an output is said to lie on the other device": (
        "output 'z' is missing on device 0",
        lambda: ending(layer_plan(), z=Local((0,))),
    ),
    "an output is said to be a sum": ("output 'z' has the layout P", lambda: ending(tensor_plan(), z=PARTIAL)),
    "an output is another value": (
        r"device 0: .*neg\(%z\.sum\) .* no such node on these values",
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

NODES: Mapping[str, Fault] = {
    "a slice begins too late": (
        r"device 1: .*reshape\(%k.* no such node on these values",
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
        r"device 1: .*permute\(%attended.* no such node on these values",
        lambda: nodes(tensor_plan(), 1, flat=lambda n, s: ops.reshape(ops.permute(s[0], axes=(0, 2, 1)), shape=(3, 8))),
    ),
    "an operand is read twice instead of another": (
        r"swiglu\(%gateed, %gateed\) .* no such node on these values",
        lambda: nodes(tensor_plan(), 0, act=lambda n, s: ops.swiglu(s[0], s[0], name="act")),
    ),
    "operands are exchanged": (
        r"swiglu\(%uped, %gateed\) .* no such node on these values",
        lambda: nodes(tensor_plan(), 1, act=lambda n, s: ops.swiglu(s[1], s[0], name="act")),
    ),
    "another weight is read": (
        r"device 0: %act = swiglu\(%gateed, %uped\) .* no such node on these values",
        lambda: on(tensor_plan(), 0, 1, graph=reading(uped="gate")),
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
        r"device 1: %biased = sub\(.* no such node on these values",
        lambda: nodes(tensor_plan(), 1, biased=lambda n, s: ops.sub(*s, name="biased")),
    ),
    "a node is run twice": (
        r"device 0: .*mul\(%mul, %norm\) .* no such node on these values",
        lambda: nodes(tensor_plan(), 0, 1, normed=lambda n, s: ops.mul(ops.mul(*s), s[1])),
    ),
    "a copy rounds": (
        r"device 0: .*cast\(%o, dtype=f16\) .* no such node on these values",
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
    "memory is reused while its value is still read": (
        r"step \d+ \(%act\): operand 0: reads %gateed.* which holds %uped",
        reuse,
    ),
    "a result overwrites its operand while it is read": (
        r"step \d+ \(%gateed\): overwrites its operand x while reading it",
        lambda: step(tensor_plan(), 0, "gateed", lambda i: at_offset(i, i.src[1].offset)),
    ),
    "the arena is too small": (r"\(%attended\): its scratch: .* lies outside its buffer of 768 bytes", small_arena),
    "a buffer is for the whole weight": (
        r"device 1: .*declared=f32\[8,16\].* is for weight %wo: f32\[8,8\]",
        other_buffer,
    ),
    "a view is read at another offset": (
        r"\(%new\.cache\.v\): operand 1: reads other entries of %kv.* than its view has",
        lambda: step(
            tensor_plan(),
            1,
            "new.cache.v",
            lambda i: dataclasses.replace(i, src=(i.src[0], moved(i.src[1], -16), i.src[2])),
        ),
    ),
    "a view is read with other strides": (
        r"\(%new\.cache\.v\): operand 1: .* is not f32\[3, 4\] by strides \[8, 1\]",
        lambda: step(
            tensor_plan(),
            1,
            "new.cache.v",
            lambda i: dataclasses.replace(i, src=(i.src[0], dataclasses.replace(i.src[1], strides=(4, 1)), i.src[2])),
        ),
    ),
    "a step is missing": ("device 0: %act never runs", lambda: without_step(tensor_plan(), 0, "act")),
    "a device does not come to a meeting": (
        r"all_reduce 1 \(%z\.sum\) of device 0: device 1 does not come",
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
        r"\(%attended\): needs 96 bytes of scratch",
        lambda: step(tensor_plan(), 0, "attended", lambda i: dataclasses.replace(i, scratch=None)),
    ),
    "a result is kept in another dtype": (
        r"\(%normed2\): result: .* kept as f32, is written to f16\[3,8\]",
        lambda: step(
            tensor_plan(),
            0,
            "normed2",
            lambda i: dataclasses.replace(i, dst=(dataclasses.replace(i.dst[0], dtype=DType.F16),)),
        ),
    ),
    "an output is read elsewhere": (
        r"device 0: at the end, output 'z': reads %z\.sum",
        lambda: programmed(
            tensor_plan(), 0, outputs={k: moved(t, 64) for k, t in tensor_plan().lanes[0].program.outputs.items()}
        ),
    ),
    "an input lies on another": (
        r"device 0: input %ids lies where %x: f32\[3,8\] lies",
        lambda: programmed(
            tensor_plan(),
            0,
            inputs={k: dataclasses.replace(t, offset=0) for k, t in tensor_plan().lanes[0].program.inputs.items()},
        ),
    ),
    "a state is read before its new rows are written": (
        r"\(%attended\): operand 1: reads %new\.cache\.k.* which holds %cache\.k",
        lambda: without_step(tensor_plan(), 1, "new.cache.k"),
    ),
    "a program is for a device of another backend": (
        "device 1 is toy:1, and cpu would call it cpu:1",
        lambda: other_device(),
    ),
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
    "an expert lies on two devices": (
        r"%combined\.sum .* devices 0 and 1 both have a term",
        lambda: other_lane(experts_plan(2, 1), 0, 0, ((0, 4),), LAST),
    ),
    "an expert lies on no device": (
        "weight %down has 1 of 6 entries on no device",
        lambda: other_lane(experts_plan(2, 1), 1, 1, FIRST, ((4, 2),)),
    ),
    "an expert that no device has is said to lie on one": (
        r"device 1: %down .* bound to entries \['\[3:6\]'",
        lambda: other_lane(experts_plan(2, 1), 1, 1, FIRST, LAST),
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
        "%act .* not linear in gate and up, a sum that is still owed",
        lambda: exchanged("up", uped=1),
    ),
    "the last table is dealt otherwise than the first": (
        "%downed .* x is a sum still owed, and not by the rows of w that are here",
        lambda: exchanged("down", downed=1),
    ),
    "a bias is dealt otherwise than what it is added to": (
        "%act .* not linear in gate and up, a sum that is still owed",
        lambda: exchanged("bg", biased=1),
    ),
    "a bias of experts is added on one device only": (
        r"device 1: %act = swiglu\(%gateed, %uped\) .* no such node",
        lambda: nodes(experts_plan(), 1, biased=lambda n, s: s[0]),
    ),
    "what is whole is counted on each device with a bias": (
        r"%z\.sum .* devices \[1\] bring it again",
        lambda: nodes(experts_plan(), 1, whole__zero=lambda n, s: s[0]),
    ),
    "something is made of zeros": (
        "%opened .* not linear in x, a sum that is still owed",
        lambda: on(experts_plan(), 0, 1, graph=reading(opened="routed")),
    ),
    "something is made of zeros on one device": (
        r"all_reduce 1 \(%routed\.sum\) of device 0: device 1 does not come",
        lambda: on(experts_plan(), 1, graph=reading(opened="routed")),
    ),
    "answers are not summed": (
        "%normed .* not linear in x, a sum that is still owed",
        lambda: nodes(experts_plan(), 0, 1, combined__sum=lambda n, s: s[0]),
    ),
    "answers are not summed on one device": (
        r"all_reduce 0 \(%combined\.sum\) of device 0: device 1 does not come",
        lambda: nodes(experts_plan(), 1, combined__sum=lambda n, s: s[0]),
    ),
    "answers are summed twice": (
        r"%combined\.sum = all_reduce\(%all_reduce.* devices \[1\] bring it again",
        lambda: nodes(
            experts_plan(),
            *(0, 1),
            combined__sum=lambda n, s: all_reduce(all_reduce(s[0], **n.attrs), sequence=9, name="combined.sum"),
        ),
    ),
    "answers are summed before they are combined and after": (
        r"%combined\.sum .* devices \[1\] bring it again",
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
        lambda: on(experts_plan(), 0, 1, graph=lambda g: _numbered(g, "gateed", "others")),
    ),
    "one device looks up by other numbers": (
        r"device 1: %fared = mul_mat_id\(%far, %x, %ids.* no such node",
        lambda: on(experts_plan(), 1, graph=lambda g: _numbered(g, "fared", "ids")),
    ),
}


def _numbered(graph: Graph, name: str, numbers: str) -> Graph:
    """One lookup by another input."""
    from ...given.plans.faults import rebuilt

    (leaf,) = (v for v in graph.inputs if v.node.name == numbers)
    return rebuilt(graph, {name: lambda n, s: ops.mul_mat_id(s[0], s[1], leaf, name=name, **n.attrs)})


def nothing(*shape: int):
    return ops.cont(ops.broadcast(constant("nothing", [0.0]), shape=shape))


PLACES: Mapping[str, Fault] = {
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
        r"device 1: .*neg\(%act\) .* no such node on these values",
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
        r"all_reduce 0 \(%mixed\.sum\) of device 1: device 0 does not come",
        lambda: on(placed_plan(), 0, graph=lambda g: without_output(g, "mixed.sum")),
    ),
    "a placed weight is bound to the other device": (
        "device 1: weight %gate is not bound there",
        lambda: laid(placed_plan(), gate=Local((0,))),
    ),
    "a placed weight is bound in shards": (
        r"device 1: %up .* bound to entries \['\[6:12\]', '\[0:8\]'\]",
        lambda: laid(placed_plan(), up=cut(0, ((0, 6),), ((6, 6),))),
    ),
    "a node runs on a device that cannot run it": (
        "device 1: %act .* cannot run on cpu:1: not here",
        lambda: refusing(placed_plan(), 1, "swiglu"),
    ),
    "a node is computed on another device than it is placed on": (
        r"%act is placed on device 0, and computed on \[1\]",
        lambda: said(placed_plan(), "act", "act", device=0),
    ),
    "a node is computed on two devices and placed on one": (
        r"%normed is placed on device 1, and computed on \[0\]",
        lambda: said(placed_plan(), "act", "act", "normed"),
    ),
    "a copied value is computed where it was not placed": (
        r"send 3 \(%normed3\.to\.1\) of device 0: device 1 does not receive it",
        lambda: nodes(placed_plan(), 1, normed3__from__0=lambda n, s: ops.neg(nothing(3, 8))),
    ),
    "a node is placed that there is not": (
        "a node %nobody is placed that the graph does not have",
        lambda: said(placed_plan(), "act", "nobody"),
    ),
    "a node is placed on a device that there is not": (
        "nodes are placed on device 2 of 2",
        lambda: said(placed_plan(), "act", "act", device=2),
    ),
}


def without_output(graph: Graph, node: str) -> Graph:
    kept = {name: v for name, v in graph.outputs.items() if v.node.name != node}
    assert len(kept) < len(graph.outputs)
    return Graph(kept, graph.updates)


FAULTS = {**SUMS, **MEETINGS, **LAYOUTS, **NODES, **PROGRAMS, **ROUTING, **PLACES}


@pytest.mark.parametrize("made", [tensor_plan, layer_plan, gather_plan, experts_plan, placed_plan])
def test_the_plans_in_which_faults_are_planted_are_right(made):
    assert not list(plan_faults(made()))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_finds_that(fault):
    message, build_plan = FAULTS[fault]
    broken = build_plan()
    found = list(plan_faults(broken))
    assert any(re.search(message, one) for one in found), found
    with pytest.raises(PlanError):
        verify_plan(broken)
