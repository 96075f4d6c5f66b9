"""Code for int8 dot products of unsigned weight codes and signed activations, by the best instructions of the target.

1. Some processors have an instruction that adds four products of an unsigned and a signed byte to a 32-bit sum.
2. Other processors have such an instruction for two signed bytes only.
3. Other processors multiply bytes into 16-bit sums of two products. A few 16-bit sums can be added before the code
   widens the result to 32 bits. The number of 16-bit sums decreases with the largest code.
4. Without such instructions the code widens bytes to 16 bits before the multiplication.

Codes up to 255 are not signed bytes, and a single 16-bit sum of such products may overflow. For these codes the zero
point is subtracted from the codes before the multiplication, and not from the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from ..target_cpu import find_features_of_compile_target
from .byte_vectors import absolute_bytes, apply_instruction_per_register, dot4, has_dot4_instruction
from .vectors import bytes_of

_i8, _i16, _i32 = (ir.IntType(n) for n in (8, 16, 32))
MAX_ACTIVATION = 127
"""The largest absolute value of an 8-bit activation."""
SIGN_INSTRUCTION = "llvm.x86.avx2.psign.b"
"""LLVM name of the AVX2 instruction that negates the bytes of one operand where the other operand is negative.

AVX-512 has no such instruction. Widening of all bytes is faster on AVX-512.
"""
SDOT_INSTRUCTION = "llvm.aarch64.neon.sdot.v4i32.v16i8"
"""LLVM name of the Arm instruction that adds four products of two signed bytes to each lane; operands have 16 bytes."""
PAIR_INSTRUCTIONS: Mapping[str, tuple[int, str, str]] = MappingProxyType(
    {
        "avx512bw": (64, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        "avx2": (32, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    }
)
"""By CPU feature: operand bytes, the instruction for 16-bit sums of two products, and the widening instruction.

The widening instruction adds two 16-bit sums into 32 bits.
"""


def _find_pair_instructions() -> tuple[int, str, str] | None:
    return next(
        (known for feature, known in PAIR_INSTRUCTIONS.items() if find_features_of_compile_target().get(feature)), None
    )


@dataclass(frozen=True, slots=True)
class WeightCodeProperties:
    """Properties of weight codes: largest code, zero point, and whether half blocks have scales of their own."""

    max_code: int = 255
    zero_point: int = 0
    has_half_scales: bool = True

    @property
    def max_pair_sums_in_int16(self) -> int:
        """How many sums of two products (weight code times activation) can be added in 16 bits without overflow."""
        return 0x7FFF // (2 * MAX_ACTIVATION * self.max_code)

    @property
    def uses_centred_codes(self) -> bool:
        """Whether dot products on this processor use centred codes: codes minus the zero point."""
        fits = 0 < self.zero_point <= MAX_ACTIVATION + 1 and self.max_code - self.zero_point <= MAX_ACTIVATION
        if has_dot4_instruction() or not fits:
            return False
        return (
            self.max_code > MAX_ACTIVATION
            if find_features_of_compile_target().get("dotprod")
            else not self.max_pair_sums_in_int16 and _find_pair_instructions() == PAIR_INSTRUCTIONS["avx2"]
        )


class Int8DotProductEmitter:
    """Emitter of LLVM code for several int8 dot products, each with a sum of 16 int32 lanes under a key.

    `sums` has the initial values by key.
    """

    def __init__(self, b: Any, codes: WeightCodeProperties, sums: dict[Any, Any]) -> None:
        self.b, self.codes, self.sums = b, codes, sums
        self._uses_centred_codes = codes.uses_centred_codes
        self._uses_dot4 = has_dot4_instruction() or (
            find_features_of_compile_target().get("dotprod")
            and (self._uses_centred_codes or codes.max_code <= MAX_ACTIVATION)
        )
        self._pair_instructions = (
            None
            if self._uses_dot4 or not (self._uses_centred_codes or codes.max_pair_sums_in_int16)
            else _find_pair_instructions()
        )
        self._short_sums: dict[Any, tuple[int, Any]] = {}

    def prepare_weight_codes(self, codes: Any) -> tuple[Any, Any]:
        """Return a vector of weight codes in the form that `emit_dot4` needs: 8-bit factors, and signs or None.

        With pair instructions, centred codes become magnitudes, and the second value has their signs. The result serves
        several rows of activations.
        """
        if not self._uses_centred_codes:
            return codes, None
        less = self.b.sub(codes, bytes_of(self.codes.zero_point))
        return (absolute_bytes.body(self.b, less), less) if self._pair_instructions else (less, None)

    def emit_dot4(self, key: Any, weight: tuple[Any, Any], activations: Any) -> None:
        """Emit code that adds four adjacent products of weight codes and activations to each lane of the sum `key`.

        Lane i of the sum gains ``weight[4 i + k] * activations[4 i + k]`` for k = 0 to 3.

        Args:
            key: Key of the sum.
            weight: Pair of 8-bit factors and their signs, from `prepare_weight_codes`.
            activations: Signed 8-bit activations.
        """
        b, (factors, signs) = self.b, weight
        if self._pair_instructions is None:
            if has_dot4_instruction() or not self._uses_dot4:
                self.sums[key] = dot4.body(b, self.sums[key], factors, activations)
            else:
                self.sums[key] = apply_instruction_per_register(
                    b, SDOT_INSTRUCTION, _i32, 16, self.sums[key], factors, activations
                )
            return
        size, two, _ = self._pair_instructions
        if signs is not None:
            activations = apply_instruction_per_register(b, SIGN_INSTRUCTION, _i8, size, activations, signs)
        x = apply_instruction_per_register(b, two, _i16, size, factors, activations)
        count, before = self._short_sums.get(key, (0, None))
        self._short_sums[key] = count + 1, x if before is None else b.add(before, x)
        if count + 1 == max(1, self.codes.max_pair_sums_in_int16):
            self._widen_short_sum(key)

    def flush_pending_sums(self) -> dict[Any, Any]:
        """Emit code that adds the pending 16-bit sums, and return the sums by key."""
        for place in list(self._short_sums):
            self._widen_short_sum(place)
        return self.sums

    def _widen_short_sum(self, place: Any) -> None:
        assert self._pair_instructions is not None
        (_, x), (size, _, four) = self._short_sums.pop(place), self._pair_instructions
        ones = ir.Constant(x.type, [1] * x.type.count)
        self.sums[place] = self.b.add(
            self.sums[place], apply_instruction_per_register(self.b, four, _i32, size, x, ones)
        )
