"""The decays and learning rates of a gated delta net, and the matmuls that compute their logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ....fusion.dataflow import Dataflow, has_same_elements
from ....fusion.operand_views import find_strides_of_reshape
from ....fusion.operands import Operand, compute_broadcast_strides, require_supported
from ...binding.launch_builder import LaunchWord, compute_row_stride
from .states import is_vector_aligned

MAX_PRODUCT_TOKENS = 4
"""Maximum tokens for which the blocks of gates compute the logits too: each block reads two rows of weights again."""


@dataclass(frozen=True, slots=True)
class DecayAndRateInstructions:
    """The indices of the instructions that compute log decays and learning rates of a gated delta net.

    `None` stands for an absent copy.
    """

    shifted: int
    steps: int
    rates: int
    decay: int
    logistic: int
    beta: int
    dense_alpha: int | None
    dense_beta: int | None


def match_gates(flow: Dataflow, rule: int) -> DecayAndRateInstructions:
    decay, beta = flow.require_producer(rule, 3), flow.require_producer(rule, 4)
    rates, logistic = flow.require_producer(decay, 0), flow.require_producer(beta, 0)
    steps = flow.require_producer(rates, 0)
    shifted = flow.require_producer(steps, 0)
    gates = DecayAndRateInstructions(
        shifted,
        steps,
        rates,
        decay,
        logistic,
        beta,
        *(_find_dense_copy_for_only_reader(flow, n) for n in (shifted, logistic)),
    )
    require_supported(flow.require_sole_reader(gates.shifted, "softplus") == steps, "the steps are made otherwise")
    require_supported(
        flow.require_sole_reader(steps, "mul") == rates and flow.require_sole_reader(rates, "mul") == decay,
        "decays are made otherwise",
    )
    require_supported(flow.require_sole_reader(logistic, "mul") == beta, "learning rates are made otherwise")
    require_supported(
        flow.bound_instruction(gates.shifted).op == "add" and flow.bound_instruction(logistic).op == "sigmoid",
        "gates are made otherwise",
    )
    return gates


def _find_dense_copy_for_only_reader(flow: Dataflow, reader: int) -> int | None:
    """Return the contiguous copy that only instruction `reader` reads, by its index; `None` if there is none."""
    maker = flow.require_producer(reader, 0)
    return maker if flow.bound_instruction(maker).op == "cont" and flow.find_readers(maker) == [reader] else None


def require_gate_operands(flow: Dataflow, gates: DecayAndRateInstructions, tokens: int, heads: int) -> None:
    """Require operands of the gates that kernels can read: padding marks per token, and gate weights per head.

    Raises `NoKernelError` otherwise.
    """
    of_token, of_head = (int(tokens > 1), 0), (0, int(heads > 1))
    for number, want in (
        (gates.shifted, of_head),
        (gates.rates, of_head),
        (gates.decay, of_token),
        (gates.beta, of_token),
    ):
        call = flow.bound_instruction(number)
        shape, strides = call.out.shape, compute_broadcast_strides(call.operand(1), call.out.shape)
        require_supported(
            call.out.size == tokens * heads and find_strides_of_reshape(shape, strides, (tokens, heads)) == want,
            "gates are made of other numbers",
        )


@dataclass(frozen=True, slots=True)
class GateProducts:
    """Two matmuls of the same few rows with float32 weights, which compute the logits of decays and of rates.

    `x`: the rows [tokens, columns]. `alpha`, `beta`: the weights [value heads, columns].
    """

    instruction_numbers: tuple[int, int]
    x: Operand
    alpha: Operand
    beta: Operand

    @property
    def words(self) -> list[LaunchWord]:
        """The fields of the struct `GateProducts` of kernels."""
        x, columns = self.x, self.x.shape[-1]
        return [x, compute_row_stride(x), columns, self.alpha, self.beta]


NO_GATE_PRODUCTS: tuple[LaunchWord, ...] = (0,) * 5


def match_gate_products(flow: Dataflow, gates: DecayAndRateInstructions) -> GateProducts:
    """Match the matmuls that compute the logits of decays and rates; raise `NoKernelError` without a match."""
    require_supported(gates.dense_alpha is None and gates.dense_beta is None, "logits lie in groups")
    numbers = flow.require_producer(gates.shifted, 0), flow.require_producer(gates.logistic, 0)
    alpha, beta = map(flow.bound_instruction, numbers)
    for number, call, reader in zip(numbers, (alpha, beta), (gates.shifted, gates.logistic), strict=True):
        require_supported(call.op == "mul_mat" and flow.find_readers(number) == [reader], "logits are made otherwise")
        require_supported(flow.is_whole_result_operand_of(number, reader, 0), "a part of the logits is read")
        w = call.operand(0)
        require_supported(
            w.is_float and w.is_dense and len(w.shape) == 2 and w.shape[-1] % 4 == 0 and is_vector_aligned(w),
            "weights of logits are not float32, or not aligned",
        )
    x = alpha.operand(1)
    require_supported(has_same_elements(x, beta.operand(1)), "logits are made of other rows")
    require_supported(x.size > 0, "logits are zeros")
    require_supported(
        x.is_float and x.has_uniform_row_stride and is_vector_aligned(x) and prod(x.shape[:-1]) <= MAX_PRODUCT_TOKENS,
        "rows are many, or not aligned",
    )
    require_supported(alpha.operand(0).shape == beta.operand(0).shape, "logits have other heads")
    return GateProducts(numbers, x, alpha.operand(0), beta.operand(0))
