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

from .dataflow import Dataflow
from .operands import require_supported

ROPE_OPS = ("rope", "rope_multi")


class ScaledNorm(NamedTuple):
    """``rms_norm(x) w``."""

    norm: int
    factor: int


def match_scaled_norm(flow: Dataflow, norm: int) -> ScaledNorm:
    """Match the pattern that begins with a norm."""
    return ScaledNorm(norm, flow.require_sole_reader(norm, "mul"))


class NormedRope(NamedTuple):
    """``rope(rms_norm(x) w)``."""

    norm: int
    factor: int
    rope: int


def match_normed_rope(flow: Dataflow, norm: int) -> NormedRope:
    """Match the pattern that begins with a norm."""
    factor = flow.require_sole_reader(norm, "mul")
    rope = flow.require_readers(factor)[0]
    require_supported(
        flow.bound_instruction(rope).op in ROPE_OPS
        and flow.require_sole_reader(factor, flow.bound_instruction(rope).op) == rope,
        "it is not turned",
    )
    return NormedRope(norm, factor, rope)


class GatedUnit(NamedTuple):
    """``unit(gate, up)`` of two products, or of two halves of one."""

    products: tuple[int, ...]
    unit: int


def match_gated_unit(flow: Dataflow, product: int, units: Container[str]) -> GatedUnit:
    """Match the gated unit of a product.

    Args:
        flow: The dataflow.
        product: The product.
        units: Ops of the unit. The unit must be the only reader of the products.
    """
    unit = flow.require_readers(product)[0]
    require_supported(flow.bound_instruction(unit).op in units, "no gated unit reads it")
    products = tuple(
        dict.fromkeys(flow.require_producer(unit, index) for index in range(len(flow.bound_instruction(unit).src)))
    )
    require_supported(all(flow.find_readers(p) == [unit] for p in products), "something else reads a product")
    require_supported(
        {flow.bound_instruction(p).op for p in products} == {flow.bound_instruction(product).op},
        "something else makes an operand",
    )
    return GatedUnit(products, unit)


class ExpertRouting(NamedTuple):
    """The choice of experts by their probabilities, and the shares of the chosen experts.

    A bias may be added for the choice. The shares are the probabilities of the chosen experts, perhaps divided by their
    clamped sum, perhaps scaled.
    """

    gate: int
    bias_add: int | None
    top_k: int
    expert_weights: int
    weight_sum: int | None
    clamp: int | None
    normalisation: int | None
    scale: int | None

    @property
    def instruction_numbers(self) -> list[int]:
        """The instructions that are present; the last one computes the shares."""
        return [n for n in self if n is not None]


def match_expert_routing(flow: Dataflow, gate: int) -> ExpertRouting:
    """Match the pattern that begins with the op that computes probabilities."""
    readers = {flow.bound_instruction(n).op: n for n in flow.require_readers(gate)}
    require_supported(
        len(flow.require_readers(gate)) == len(readers) == 2 and "get_rows" in readers, "it is read otherwise"
    )
    shares = readers.pop("get_rows")
    (first,) = readers.values()
    biased = first if flow.bound_instruction(first).op == "add" else None
    choice = first if biased is None else flow.require_sole_reader(first, "top_k")
    require_supported(
        flow.bound_instruction(choice).op == "top_k" and flow.is_operand_of(gate, first, 0), "nothing is chosen by it"
    )
    require_supported(
        flow.is_operand_of(gate, shares, 0) and flow.is_operand_of(choice, shares, 1), "other shares are taken"
    )
    total = limited = normal = scaled = None
    after = {flow.bound_instruction(n).op: n for n in flow.find_readers(shares) or ()}
    if after.keys() == {"sum_rows", "div"}:
        total, normal = after["sum_rows"], after["div"]
        limited = flow.require_sole_reader(total, "clamp")
        require_supported(
            flow.require_sole_reader(limited, "div", 1) == normal and flow.is_operand_of(shares, normal, 0),
            "another sum divides them",
        )
    last = shares if normal is None else normal
    if len(ends := flow.find_readers(last) or []) == 1 and flow.bound_instruction(ends[0]).op == "scale":
        scaled = ends[0]
    return ExpertRouting(gate, biased, choice, shares, total, limited, normal, scaled)


class ExpertSum(NamedTuple):
    """Products with the weights of the experts of a token, multiplied by their shares and added."""

    product: int
    total: int


def match_expert_sum(flow: Dataflow, product: int) -> ExpertSum:
    """Match the pattern that begins with the products; the order in which the sum reads them is not checked."""
    return ExpertSum(product, flow.require_sole_reader(product, "mul_mat"))


class ExpertSumWithShared(NamedTuple):
    """An expert sum plus the product of one more expert, which a sigmoid may multiply."""

    product: int
    total: int
    combined_sum: int
    shared_product: int
    gated_product: int | None
    sigmoid: int | None

    @property
    def instruction_numbers(self) -> list[int]:
        return [n for n in self if n is not None]


def match_expert_sum_with_shared(flow: Dataflow, product: int) -> ExpertSumWithShared:
    """Match the pattern that begins with the products of the chosen experts."""
    total = match_expert_sum(flow, product).total
    both = flow.require_readers(total)[0]
    index = 0 if flow.is_operand_of(total, both, 0) else 1
    require_supported(flow.require_sole_reader(total, "add", index) == both, "nothing is added to the sum")
    other, times, logistic = flow.require_producer(both, 1 - index), None, None
    require_supported(flow.is_operand_of(other, both, 1 - index), "a part of something is added")
    if flow.bound_instruction(other).op == "mul":
        times = other
        require_supported(flow.find_readers(times) == [both], "something else reads the other answer")
        logistic, other = sorted(
            (flow.require_producer(times, k) for k in (0, 1)), key=lambda n: flow.bound_instruction(n).op == "mul_mat"
        )
        require_supported(
            flow.bound_instruction(logistic).op == "sigmoid" and flow.find_readers(logistic) == [times], "another share"
        )
    require_supported(
        flow.bound_instruction(other).op == "mul_mat"
        and flow.find_readers(other) == [both if times is None else times],
        "no product",
    )
    return ExpertSumWithShared(product, total, both, other, times, logistic)


class SavedStateUpdate(NamedTuple):
    """A state, or rows of it, that is saved and then updated."""

    save: int
    update: int


def match_saved_state_update(flow: Dataflow, save: int, op: str) -> SavedStateUpdate:
    """Match a save and the next write into the state, which must be `op`."""
    require_supported(save in flow.save_positions, "it saves nothing")
    writers = flow.list_state_writers(flow.bound_instruction(save).operand(0), save)
    require_supported(writers and flow.bound_instruction(writers[0]).op == op, f"the state is not changed by {op}")
    return SavedStateUpdate(save, writers[0])


class ConvolutionPattern(NamedTuple):
    """The convolution before a delta rule.

    It joins old and new rows, convolves and activates them, and normalises two slices of the columns. `state_update`
    are the rows for the next step; `save` saves the old rows.
    """

    concat: int
    convolution: int
    activation: int
    norms: tuple[int, int]
    state_update: int
    save: int | None


def match_short_convolution(flow: Dataflow, join: int) -> ConvolutionPattern:
    """Match the pattern that begins with the concatenation; other instructions may read the activation."""
    readers = {flow.bound_instruction(n).op: n for n in flow.require_readers(join)}
    require_supported(
        len(flow.require_readers(join)) == 2 and readers.keys() == {"ssm_conv", "get_rows"}, "it is read otherwise"
    )
    mix, keep = readers["ssm_conv"], readers["get_rows"]
    require_supported(flow.is_operand_of(join, mix, 0) and flow.is_operand_of(join, keep, 0), "another operand is read")
    active = flow.require_sole_reader(mix, "silu")
    norms = [n for n in flow.require_readers(active) if flow.bound_instruction(n).op == "l2_norm"]
    require_supported(len(norms) == 2, "not two parts are normed")
    first, last = sorted(norms, key=lambda n: flow.bound_instruction(n).operand(0).address)
    return ConvolutionPattern(
        join, mix, active, (first, last), keep, flow.find_state_save(flow.bound_instruction(join).operand(0), keep)
    )
