"""Sums of products of unsigned weight codes and signed activations, by the best instructions of the processor.

1. Some processors add four such products to a sum at once.
2. Others do so only for two signed numbers.
3. Others multiply bytes into 16-bit sums of two products. A few such sums can be added before they are widened: the
   larger the codes, the fewer.
4. Without such instructions, bytes are widened to 16 bits before they are multiplied.

For codes up to 255 not even one 16-bit sum is safe, and the codes are not signed bytes. Then the zero point is
subtracted from the codes first and not from the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from ..target_cpu import find_target_features
from .byte_vectors import absolute_bytes, apply_per_register, dot4, has_dot4
from .vectors import bytes_of

_i8, _i16, _i32 = (ir.IntType(n) for n in (8, 16, 32))
MAX_ACTIVATION = 127
"""The largest magnitude of an activation."""
SIGN_INSTRUCTION = "llvm.x86.avx2.psign.b"
"""Negates bytes where others are negative. AVX-512 has no such instruction, and to widen all bytes is faster there."""
SDOT_INSTRUCTION = "llvm.aarch64.neon.sdot.v4i32.v16i8"
"""Takes 16 bytes of two signed numbers."""
PAIR_INSTRUCTIONS: Mapping[str, tuple[int, str, str]] = MappingProxyType(
    {
        "avx512bw": (64, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        "avx2": (32, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    }
)
"""By CPU feature: the bytes of an operand, the instruction for 16-bit sums of two products, and the one that widens.

The second instruction adds two 16-bit sums into 32 bits.
"""


def _find_pair_instructions() -> tuple[int, str, str] | None:
    return next((known for feature, known in PAIR_INSTRUCTIONS.items() if find_target_features().get(feature)), None)


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """Properties of weight codes: the largest code, the zero point, and whether half blocks have own scales."""

    max_code: int = 255
    zero_point: int = 0
    has_half_scales: bool = True

    @property
    def max_16_bit_sums(self) -> int:
        """The number of sums of two products that fit into 16 bits."""
        return 0x7FFF // (2 * MAX_ACTIVATION * self.max_code)

    @property
    def uses_signed_codes(self) -> bool:
        """Whether products use codes minus the zero point on this processor."""
        fits = 0 < self.zero_point <= MAX_ACTIVATION + 1 and self.max_code - self.zero_point <= MAX_ACTIVATION
        if has_dot4() or not fits:
            return False
        return (
            self.max_code > MAX_ACTIVATION
            if find_target_features().get("dotprod")
            else not self.max_16_bit_sums and _find_pair_instructions() == PAIR_INSTRUCTIONS["avx2"]
        )


class DotProducts:
    """Sums of products by place, while code that computes them is emitted; `sums` are their initial values."""

    def __init__(self, b: Any, codes: WeightCodes, sums: dict[Any, Any]) -> None:
        self.b, self.codes, self.sums = b, codes, sums
        self._uses_signed_codes = codes.uses_signed_codes
        self._uses_dot4 = has_dot4() or (
            find_target_features().get("dotprod") and (self._uses_signed_codes or codes.max_code <= MAX_ACTIVATION)
        )
        self._pair_instructions = (
            None
            if self._uses_dot4 or not (self._uses_signed_codes or codes.max_16_bit_sums)
            else _find_pair_instructions()
        )
        self._short_sums: dict[Any, tuple[int, Any]] = {}

    def prepare_weight(self, codes: Any) -> tuple[Any, Any]:
        """Return a vector of codes in the form that `add` takes: factors, and the signs that the factors have lost.

        Several rows of activations may use the result.
        """
        if not self._uses_signed_codes:
            return codes, None
        less = self.b.sub(codes, bytes_of(self.codes.zero_point))
        return (absolute_bytes.body(self.b, less), less) if self._pair_instructions else (less, None)

    def add(self, place: Any, weight: tuple[Any, Any], s: Any) -> None:
        """Add ``weight[4 i + k] * s[4 i + k]`` for k = 0 to 3 to each 32-bit lane i of the sum at `place`.

        `weight` is a pair: the 8-bit factors and their signs. `s` has the 8-bit activations.
        """
        b, (factors, signs) = self.b, weight
        if self._pair_instructions is None:
            if has_dot4() or not self._uses_dot4:
                self.sums[place] = dot4.body(b, self.sums[place], factors, s)
            else:
                self.sums[place] = apply_per_register(b, SDOT_INSTRUCTION, _i32, 16, self.sums[place], factors, s)
            return
        size, two, _ = self._pair_instructions
        if signs is not None:
            s = apply_per_register(b, SIGN_INSTRUCTION, _i8, size, s, signs)
        x = apply_per_register(b, two, _i16, size, factors, s)
        count, before = self._short_sums.get(place, (0, None))
        self._short_sums[place] = count + 1, x if before is None else b.add(before, x)
        if count + 1 == max(1, self.codes.max_16_bit_sums):
            self._widen_short_sum(place)

    def finish(self) -> dict[Any, Any]:
        """Return the sums."""
        for place in list(self._short_sums):
            self._widen_short_sum(place)
        return self.sums

    def _widen_short_sum(self, place: Any) -> None:
        assert self._pair_instructions is not None
        (_, x), (size, _, four) = self._short_sums.pop(place), self._pair_instructions
        ones = ir.Constant(x.type, [1] * x.type.count)
        self.sums[place] = self.b.add(self.sums[place], apply_per_register(self.b, four, _i32, size, x, ones))
