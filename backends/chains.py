"""Chains of instructions for which backends have kernels: which instructions belong to one, found by dataflow.

| chain | ops |
|---|---|
| `scaled_norm` | ``rms_norm``, ``mul`` |
| `turned_heads` | ``rms_norm``, ``mul``, ``rope`` or ``rope_multi`` |
| `gated_unit` | one or two products, and the unit of them |
| `routed` | what turns scores into probabilities, perhaps ``add``, ``top_k``, ``get_rows``; perhaps the sum of the
  chosen, ``clamp`` and ``div``; perhaps ``scale`` |
| `summed_experts` | ``mul_mat_id``, the ``mul_mat`` with shares that adds up what the experts answer |
| `with_other` | those; ``add`` of another product, which may be multiplied by a ``sigmoid`` |
| `changed_state` | a save, and what changes the state: ``get_rows``, ``set_rows``; ``cont``, ``gated_delta_net`` |
| `short_convolution` | ``concat``, ``ssm_conv``, ``silu``, two ``l2_norm``, ``get_rows``, and the save of the state |

Each function begins at one instruction and follows what reads and makes values.  It raises `NoKernelError` where
something else reads what only the chain may.  Shapes, types and where operands lie are for each backend to ask.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from .flow import Flow
from .operands import need

ROPES = ("rope", "rope_multi")


class ScaledNorm(NamedTuple):
    """``rms_norm(x) w``."""

    norm: int
    factor: int


def scaled_norm(flow: Flow, norm: int) -> ScaledNorm:
    """The chain that begins with a norm."""
    return ScaledNorm(norm, flow.reader(norm, "mul"))


class TurnedHeads(NamedTuple):
    """``rope(rms_norm(x) w)``."""

    norm: int
    factor: int
    rope: int


def turned_heads(flow: Flow, norm: int) -> TurnedHeads:
    """The chain that begins with a norm."""
    factor = flow.reader(norm, "mul")
    rope = flow.readers_of(factor)[0]
    need(flow.call(rope).op in ROPES and flow.reader(factor, flow.call(rope).op) == rope, "it is not turned")
    return TurnedHeads(norm, factor, rope)


class GatedUnit(NamedTuple):
    """``unit(gate, up)`` of two products, or of two parts of one."""

    products: tuple[int, ...]
    unit: int


def gated_unit(flow: Flow, product: int, units: Container[str]) -> GatedUnit:
    """The chain with this product whose unit is one of `units`, which alone reads what the products make."""
    unit = flow.readers_of(product)[0]
    need(flow.call(unit).op in units, "no gated unit reads it")
    products = tuple(dict.fromkeys(flow.maker(unit, index) for index in range(len(flow.call(unit).src))))
    need(all(flow.found(p) == [unit] for p in products), "something else reads a product")
    need({flow.call(p).op for p in products} == {flow.call(product).op}, "something else makes an operand")
    return GatedUnit(products, unit)


class Routed(NamedTuple):
    """Which experts are chosen by their probabilities, to which a bias may be added, and their shares: the
    probabilities of the chosen, perhaps divided by their sum within limits, perhaps scaled."""

    gate: int
    biased: int | None
    choice: int
    shares: int
    total: int | None
    limited: int | None
    normal: int | None
    scaled: int | None

    @property
    def numbers(self) -> list[int]:
        """Those that are there; the last one makes the shares."""
        return [n for n in self if n is not None]


def routed(flow: Flow, gate: int) -> Routed:
    """The chain that begins with what makes probabilities."""
    readers = {flow.call(n).op: n for n in flow.readers_of(gate)}
    need(len(flow.readers_of(gate)) == len(readers) == 2 and "get_rows" in readers, "it is read otherwise")
    shares = readers.pop("get_rows")
    (first,) = readers.values()
    biased = first if flow.call(first).op == "add" else None
    choice = first if biased is None else flow.reader(first, "top_k")
    need(flow.call(choice).op == "top_k" and flow.makes(gate, first, 0), "nothing is chosen by it")
    need(flow.makes(gate, shares, 0) and flow.makes(choice, shares, 1), "other shares are taken")
    total = limited = normal = scaled = None
    after = {flow.call(n).op: n for n in flow.found(shares) or ()}
    if after.keys() == {"sum_rows", "div"}:
        total, normal = after["sum_rows"], after["div"]
        limited = flow.reader(total, "clamp")
        need(flow.reader(limited, "div", 1) == normal and flow.makes(shares, normal, 0), "another sum divides them")
    last = shares if normal is None else normal
    if len(ends := flow.found(last) or []) == 1 and flow.call(ends[0]).op == "scale":
        scaled = ends[0]
    return Routed(gate, biased, choice, shares, total, limited, normal, scaled)


class SummedExperts(NamedTuple):
    """Products with the weights of a token's experts, each times its share, added up."""

    product: int
    total: int


def summed_experts(flow: Flow, product: int) -> SummedExperts:
    """The chain that begins with the products; that the sum reads them the other way round is not asked here."""
    return SummedExperts(product, flow.reader(product, "mul_mat"))


class WithOther(NamedTuple):
    """The same, and the product of one more expert: as it is, or times a sigmoid."""

    product: int
    total: int
    both: int
    other: int
    times: int | None
    logistic: int | None

    @property
    def numbers(self) -> list[int]:
        return [n for n in self if n is not None]


def with_other(flow: Flow, product: int) -> WithOther:
    """The chain that begins with the products of the experts that a router chose."""
    total = summed_experts(flow, product).total
    both = flow.readers_of(total)[0]
    index = 0 if flow.makes(total, both, 0) else 1
    need(flow.reader(total, "add", index) == both, "nothing is added to the sum")
    other, times, logistic = flow.maker(both, 1 - index), None, None
    need(flow.makes(other, both, 1 - index), "a part of something is added")
    if flow.call(other).op == "mul":
        times = other
        need(flow.found(times) == [both], "something else reads the other answer")
        logistic, other = sorted((flow.maker(times, k) for k in (0, 1)), key=lambda n: flow.call(n).op == "mul_mat")
        need(flow.call(logistic).op == "sigmoid" and flow.found(logistic) == [times], "another share")
    need(flow.call(other).op == "mul_mat" and flow.found(other) == [both if times is None else times], "no product")
    return WithOther(product, total, both, other, times, logistic)


class ChangedState(NamedTuple):
    """A state, or rows of it, saved and then changed."""

    save: int
    change: int


def changed_state(flow: Flow, save: int, op: str) -> ChangedState:
    """The chain that begins with a save, and ends with the op that is the next to write into the state."""
    need(save in flow.saves, "it saves nothing")
    writers = flow.writers(flow.call(save).operand(0), save)
    need(writers and flow.call(writers[0]).op == op, f"the state is not changed by {op}")
    return ChangedState(save, writers[0])


class ShortConvolution(NamedTuple):
    """The convolution before a delta rule: the rows before and the new ones, joined, convolved, activated; the norms of
    two of its parts, from the first columns on; the rows kept for the next step, and the save of those before."""

    join: int
    mix: int
    active: int
    norms: tuple[int, int]
    keep: int
    save: int | None


def short_convolution(flow: Flow, join: int) -> ShortConvolution:
    """The chain that begins with the join; others may read what is activated."""
    readers = {flow.call(n).op: n for n in flow.readers_of(join)}
    need(len(flow.readers_of(join)) == 2 and readers.keys() == {"ssm_conv", "get_rows"}, "it is read otherwise")
    mix, keep = readers["ssm_conv"], readers["get_rows"]
    need(flow.makes(join, mix, 0) and flow.makes(join, keep, 0), "another operand is read")
    active = flow.reader(mix, "silu")
    norms = [n for n in flow.readers_of(active) if flow.call(n).op == "l2_norm"]
    need(len(norms) == 2, "not two parts are normed")
    first, last = sorted(norms, key=lambda n: flow.call(n).operand(0).address)
    return ShortConvolution(join, mix, active, (first, last), keep, flow.save(flow.call(join).operand(0), keep))
