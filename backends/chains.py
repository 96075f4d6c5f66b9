"""Fused patterns for which backends have kernels: their instructions, found by dataflow.

- `ScaledNorm`: ``rms_norm``, ``mul``.
- `NormedRope`: ``rms_norm``, ``mul``, ``rope`` or ``rope_multi``.
- `GatedUnit`: one or two products, and their gated unit.
- `ExpertRouting`: the op that turns scores into probabilities, perhaps ``add``, ``top_k``, ``get_rows``; perhaps the
  sum of the chosen, ``clamp`` and ``div``; perhaps ``scale``.
- `ExpertSum`: ``mul_mat_id``, and the ``mul_mat`` with shares that adds the results of the experts.
- `ExpertSumWithShared`: the same, and ``add`` of another product, perhaps multiplied by a ``sigmoid``.
- `SavedStateUpdate`: a save and the update of the state: ``get_rows``, ``set_rows``; or ``cont``, ``gated_delta_net``.
- `ConvolutionPattern`: ``concat``, ``ssm_conv``, ``silu``, two ``l2_norm``, ``get_rows``, and the save of the state.

Each function begins at one instruction and follows the readers and producers of values. It raises `NoKernelError` if an
instruction outside reads a value that only the pattern may read. Backends check shapes, dtypes and layouts.
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
    """Match the pattern that begins with a norm."""
    return ScaledNorm(norm, flow.reader(norm, "mul"))


class TurnedHeads(NamedTuple):
    """``rope(rms_norm(x) w)``."""

    norm: int
    factor: int
    rope: int


def turned_heads(flow: Flow, norm: int) -> TurnedHeads:
    """Match the pattern that begins with a norm."""
    factor = flow.reader(norm, "mul")
    rope = flow.readers_of(factor)[0]
    need(flow.call(rope).op in ROPES and flow.reader(factor, flow.call(rope).op) == rope, "it is not turned")
    return TurnedHeads(norm, factor, rope)


class GatedUnit(NamedTuple):
    """``unit(gate, up)`` of two products, or of two halves of one."""

    products: tuple[int, ...]
    unit: int


def gated_unit(flow: Flow, product: int, units: Container[str]) -> GatedUnit:
    """Match the gated unit of a product.

    Args:
        flow: The dataflow.
        product: The product.
        units: Ops of the unit. The unit must be the only reader of the products.
    """
    unit = flow.readers_of(product)[0]
    need(flow.call(unit).op in units, "no gated unit reads it")
    products = tuple(dict.fromkeys(flow.maker(unit, index) for index in range(len(flow.call(unit).src))))
    need(all(flow.found(p) == [unit] for p in products), "something else reads a product")
    need({flow.call(p).op for p in products} == {flow.call(product).op}, "something else makes an operand")
    return GatedUnit(products, unit)


class Routed(NamedTuple):
    """The choice of experts by their probabilities, and the shares of the chosen experts.

    A bias may be added for the choice. The shares are the probabilities of the chosen experts, perhaps divided by their
    clamped sum, perhaps scaled.
    """

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
        """The instructions that are present; the last one computes the shares."""
        return [n for n in self if n is not None]


def routed(flow: Flow, gate: int) -> Routed:
    """Match the pattern that begins with the op that computes probabilities."""
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
    """Products with the weights of the experts of a token, multiplied by their shares and added."""

    product: int
    total: int


def summed_experts(flow: Flow, product: int) -> SummedExperts:
    """Match the pattern that begins with the products; the order in which the sum reads them is not checked."""
    return SummedExperts(product, flow.reader(product, "mul_mat"))


class WithOther(NamedTuple):
    """An expert sum plus the product of one more expert, which a sigmoid may multiply."""

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
    """Match the pattern that begins with the products of the chosen experts."""
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
    """A state, or rows of it, that is saved and then updated."""

    save: int
    change: int


def changed_state(flow: Flow, save: int, op: str) -> ChangedState:
    """Match a save and the next write into the state, which must be `op`."""
    need(save in flow.saves, "it saves nothing")
    writers = flow.writers(flow.call(save).operand(0), save)
    need(writers and flow.call(writers[0]).op == op, f"the state is not changed by {op}")
    return ChangedState(save, writers[0])


class ShortConvolution(NamedTuple):
    """The convolution before a delta rule.

    It joins old and new rows, convolves and activates them, and normalises two slices of the columns. `state_update`
    are the rows for the next step; `save` saves the old rows.
    """

    join: int
    mix: int
    active: int
    norms: tuple[int, int]
    keep: int
    save: int | None


def short_convolution(flow: Flow, join: int) -> ShortConvolution:
    """Match the pattern that begins with the concatenation; other instructions may read the activation."""
    readers = {flow.call(n).op: n for n in flow.readers_of(join)}
    need(len(flow.readers_of(join)) == 2 and readers.keys() == {"ssm_conv", "get_rows"}, "it is read otherwise")
    mix, keep = readers["ssm_conv"], readers["get_rows"]
    need(flow.makes(join, mix, 0) and flow.makes(join, keep, 0), "another operand is read")
    active = flow.reader(mix, "silu")
    norms = [n for n in flow.readers_of(active) if flow.call(n).op == "l2_norm"]
    need(len(norms) == 2, "not two parts are normed")
    first, last = sorted(norms, key=lambda n: flow.call(n).operand(0).address)
    return ShortConvolution(join, mix, active, (first, last), keep, flow.save(flow.call(join).operand(0), keep))
