"""Collectives: the kernel meets the group through the `Comm` it was compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...graph.node import Attrs
from ...ops.collective import int_attr, runs_of
from .elementwise import copy, one_result, plain
from .kernel import Call, Calls, Kernel


def all_reduce(call: Call) -> Calls:
    scratch = call.take(*call.out.shape)
    return [partial(call.comm.all_reduce, call.operand(0), call.out, scratch, int(call.number("sequence")))]


def all_gather(call: Call) -> Calls:
    parts = gather_parts(call.attrs)
    return [partial(call.comm.all_gather, call.operand(0), call.out, parts, int(call.number("sequence")))]


def send(call: Call) -> Calls:
    to, sequence = int(call.number("to")), int(call.number("sequence"))
    return [*copy(call), partial(call.comm.send, call.out, to, sequence)]


def receive(call: Call) -> Calls:
    return [partial(call.comm.receive, call.out, int(call.number("source")), int(call.number("sequence")))]


Index = tuple[slice, ...]


def gather_parts(attrs: Attrs) -> list[list[tuple[Index, Index]]]:
    """For each device the pairs (where in the whole, where in its shard)."""
    ahead = (slice(None),) * int_attr(attrs["axis"])
    parts: list[list[tuple[Index, Index]]] = []
    for mine in runs_of(attrs["runs"]):
        start = 0
        pairs: list[tuple[Index, Index]] = []
        for offset, n in mine:
            pairs.append(((*ahead, slice(offset, offset + n)), (*ahead, slice(start, start + n))))
            start += n
        parts.append(pairs)
    return parts


KERNELS: Mapping[str, Kernel] = {
    "all_reduce": Kernel(all_reduce, one_result),
    "all_gather": plain(all_gather),
    "send": plain(send),
    "receive": plain(receive),
}
