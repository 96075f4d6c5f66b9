"""Matching of fused patterns for which backends have kernels, by dataflow.

- `ScaledNorm`: ``rms_norm``, ``mul``.
- `NormedRope`: ``rms_norm``, ``mul``, ``rope`` or ``rope_multi``.
- `GatedUnit`: one or two matrix products, and their gated unit.
- `ExpertRouting`: the op that turns scores into probabilities, optionally ``add``, then ``top_k``, ``get_rows``.
  Optionally the sum of the chosen, ``clamp`` and ``div`` follow; optionally ``scale``.
- `ExpertSum`: ``mul_mat_id``, and the ``mul_mat`` with expert weights that adds the results of the experts.
- `ExpertSumWithShared`: the same, and ``add`` of another product, optionally multiplied by a ``sigmoid``.
- `SavedStateUpdate`: a save and the update of the state: ``get_rows``, ``set_rows``; or ``cont``, ``gated_delta_net``.
- `ShortConvolutionPattern`: ``concat``, ``ssm_conv``, ``silu``, two ``l2_norm``, ``get_rows``, and a save of the state.

A pattern is a tuple of instruction numbers. Each function begins at one instruction and follows the readers and
producers of values. It raises `NoKernelError` if the pattern does not match, or if an instruction outside reads a value
that only the pattern may read. Backends check shapes, dtypes and layouts.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from .dataflow import Dataflow
from .operands import require_supported

ROPE_OPS = ("rope", "rope_multi")


class ScaledNorm(NamedTuple):
    """The instruction numbers of ``rms_norm(x) * w``."""

    norm: int
    factor: int


def match_scaled_norm(flow: Dataflow, norm: int) -> ScaledNorm:
    """Match ``rms_norm(x) * w`` that begins with instruction `norm`."""
    return ScaledNorm(norm, flow.require_sole_reader(norm, "mul"))


class NormedRope(NamedTuple):
    """The instruction numbers of ``rope(rms_norm(x) * w)``."""

    norm: int
    factor: int
    rope: int


def match_normed_rope(flow: Dataflow, norm: int) -> NormedRope:
    """Match ``rope(rms_norm(x) * w)`` that begins with instruction `norm`."""
    factor = flow.require_sole_reader(norm, "mul")
    rope = flow.require_readers(factor)[0]
    require_supported(
        flow.bound_instruction(rope).op in ROPE_OPS
        and flow.require_sole_reader(factor, flow.bound_instruction(rope).op) == rope,
        "it is not turned",
    )
    return NormedRope(norm, factor, rope)


class GatedUnit(NamedTuple):
    """The instruction numbers of a gated unit ``unit(gate, up)`` and of the matrix products that compute its operands.

    Either one product computes both operands, or two products compute one operand each.
    """

    products: tuple[int, ...]
    unit: int


def match_gated_unit(flow: Dataflow, product: int, units: Container[str]) -> GatedUnit:
    """Match the gated unit that reads the matrix product `product`.

    Args:
        flow: The dataflow.
        product: Number of the product.
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
    """The instruction numbers of MoE routing: the choice of experts by probability, and the chosen experts' weights.

    A bias may be added to the probabilities for the choice. The weights are the unbiased probabilities of the chosen
    experts. They may be divided by their clamped sum, and may be scaled.
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
        """The indices of all instructions of the pattern; the last one computes the expert weights."""
        return [n for n in self if n is not None]


def match_expert_routing(flow: Dataflow, gate: int) -> ExpertRouting:
    """Match expert routing that begins with instruction `gate`, which computes probabilities."""
    readers = {flow.bound_instruction(n).op: n for n in flow.require_readers(gate)}
    require_supported(
        len(flow.require_readers(gate)) == len(readers) == 2 and "get_rows" in readers, "it is read otherwise"
    )
    shares = readers.pop("get_rows")
    (first,) = readers.values()
    biased = first if flow.bound_instruction(first).op == "add" else None
    choice = first if biased is None else flow.require_sole_reader(first, "top_k")
    require_supported(
        flow.bound_instruction(choice).op == "top_k" and flow.is_whole_result_operand_of(gate, first, 0),
        "nothing is chosen by it",
    )
    require_supported(
        flow.is_whole_result_operand_of(gate, shares, 0) and flow.is_whole_result_operand_of(choice, shares, 1),
        "other shares are taken",
    )
    total = limited = normal = scaled = None
    after = {flow.bound_instruction(n).op: n for n in flow.find_readers(shares) or ()}
    if after.keys() == {"sum_rows", "div"}:
        total, normal = after["sum_rows"], after["div"]
        limited = flow.require_sole_reader(total, "clamp")
        require_supported(
            flow.require_sole_reader(limited, "div", 1) == normal
            and flow.is_whole_result_operand_of(shares, normal, 0),
            "another sum divides them",
        )
    last = shares if normal is None else normal
    if len(ends := flow.find_readers(last) or []) == 1 and flow.bound_instruction(ends[0]).op == "scale":
        scaled = ends[0]
    return ExpertRouting(gate, biased, choice, shares, total, limited, normal, scaled)


class ExpertSum(NamedTuple):
    """The instruction numbers of an expert sum: matrix products with the chosen experts, and their weighted sum."""

    product: int
    total: int


def match_expert_sum(flow: Dataflow, product: int) -> ExpertSum:
    """Match an expert sum that begins with the matrix products of instruction `product`.

    The order in which the sum reads the experts is not checked.
    """
    return ExpertSum(product, flow.require_sole_reader(product, "mul_mat", in_order=False))


class ExpertSumWithShared(NamedTuple):
    """The instruction numbers of an expert sum plus the output of a shared expert.

    A sigmoid gate may multiply the output of the shared expert.
    """

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
    """Match an expert sum with a shared expert that begins with the products of the chosen experts."""
    total = match_expert_sum(flow, product).total
    both = flow.require_readers(total)[0]
    index = 0 if flow.is_whole_result_operand_of(total, both, 0) else 1
    require_supported(flow.require_sole_reader(total, "add", index) == both, "nothing is added to the sum")
    other, times, logistic = flow.require_producer(both, 1 - index), None, None
    require_supported(flow.is_whole_result_operand_of(other, both, 1 - index), "a part of something is added")
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
    """The instruction numbers of an update of a state, and of the save of its old content before it (for a rollback).

    The save has the whole state or some of its rows.
    """

    save: int
    update: int


def match_saved_state_update(flow: Dataflow, save: int, op: str) -> SavedStateUpdate:
    """Match a save of a state and the next write into that state; the write must have the op `op`."""
    require_supported(save in flow.save_positions, "it saves nothing")
    writers = flow.list_state_writers(flow.bound_instruction(save).operand(0), save)
    require_supported(writers and flow.bound_instruction(writers[0]).op == op, f"the state is not changed by {op}")
    return SavedStateUpdate(save, writers[0])


class ShortConvolutionPattern(NamedTuple):
    """The instruction numbers of the short convolution before a delta rule.

    The pattern joins old and new rows, convolves and activates them, and normalises two slices of the columns.
    `state_update` computes the rows for the next step. `save` saves the old rows.
    """

    concat: int
    convolution: int
    activation: int
    norms: tuple[int, int]
    state_update: int
    save: int | None


def match_short_convolution(flow: Dataflow, join: int) -> ShortConvolutionPattern:
    """Match a short convolution from its first instruction `join`, which concatenates old and new rows.

    Instructions outside of the pattern may also read the activation.
    """
    readers = {flow.bound_instruction(n).op: n for n in flow.require_readers(join)}
    require_supported(
        len(flow.require_readers(join)) == 2 and readers.keys() == {"ssm_conv", "get_rows"}, "it is read otherwise"
    )
    mix, keep = readers["ssm_conv"], readers["get_rows"]
    require_supported(
        flow.is_whole_result_operand_of(join, mix, 0) and flow.is_whole_result_operand_of(join, keep, 0),
        "another operand is read",
    )
    active = flow.require_sole_reader(mix, "silu")
    norms = [n for n in flow.require_readers(active) if flow.bound_instruction(n).op == "l2_norm"]
    require_supported(len(norms) == 2, "not two parts are normed")
    first, last = sorted(norms, key=lambda n: flow.bound_instruction(n).operand(0).address)
    return ShortConvolutionPattern(
        join, mix, active, (first, last), keep, flow.find_state_save(flow.bound_instruction(join).operand(0), keep)
    )
