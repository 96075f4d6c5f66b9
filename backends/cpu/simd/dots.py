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
from ..processor import features
from .bytes import dot4, has_fours, in_parts, magnitudes
from .vectors import bytes_of

_i8, _i16, _i32 = (ir.IntType(n) for n in (8, 16, 32))
LARGEST = 127
"""The largest magnitude of an activation."""
SIGN = "llvm.x86.avx2.psign.b"
"""Negates bytes where others are negative. AVX-512 has no such instruction, and to widen all bytes is faster there."""
SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"
"""Takes 16 bytes of two signed numbers."""
PAIRS: Mapping[str, tuple[int, str, str]] = MappingProxyType(
    {
        "avx512bw": (64, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        "avx2": (32, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    }
)
"""By CPU feature: the bytes of an operand, the instruction for 16-bit sums of two products, and the one that widens.

The second instruction adds two 16-bit sums into 32 bits.
"""


def _pairs() -> tuple[int, str, str] | None:
    return next((known for feature, known in PAIRS.items() if features().get(feature)), None)


@dataclass(frozen=True, slots=True)
class Codes:
    """Properties of weight codes: the largest code, the zero point, and whether half blocks have own scales."""

    largest: int = 255
    zero: int = 0
    halves: bool = True

    @property
    def sums(self) -> int:
        """The number of sums of two products that fit into 16 bits."""
        return 0x7FFF // (2 * LARGEST * self.largest)

    @property
    def signed(self) -> bool:
        """Whether products use codes minus the zero point on this processor."""
        fits = 0 < self.zero <= LARGEST + 1 and self.largest - self.zero <= LARGEST
        if has_fours() or not fits:
            return False
        return self.largest > LARGEST if features().get("dotprod") else not self.sums and _pairs() == PAIRS["avx2"]


class Products:
    """Sums of products by place, while code that computes them is emitted; `sums` are their initial values."""

    def __init__(self, b: Any, codes: Codes, sums: dict[Any, Any]) -> None:
        self.b, self.codes, self.sums = b, codes, sums
        self._signed = codes.signed
        self._by_fours = has_fours() or (features().get("dotprod") and (self._signed or codes.largest <= LARGEST))
        self._pairs = None if self._by_fours or not (self._signed or codes.sums) else _pairs()
        self._shorts: dict[Any, tuple[int, Any]] = {}

    def weight(self, codes: Any) -> tuple[Any, Any]:
        """Return a vector of codes in the form that `add` takes: factors, and the signs that the factors have lost.

        Several rows of activations may use the result.
        """
        if not self._signed:
            return codes, None
        less = self.b.sub(codes, bytes_of(self.codes.zero))
        return (magnitudes.body(self.b, less), less) if self._pairs else (less, None)

    def add(self, place: Any, weight: tuple[Any, Any], s: Any) -> None:
        """Add to each lane four products of a weight and activations."""
        b, (factors, signs) = self.b, weight
        if self._pairs is None:
            if has_fours() or not self._by_fours:
                self.sums[place] = dot4.body(b, self.sums[place], factors, s)
            else:
                self.sums[place] = in_parts(b, SDOT, _i32, 16, self.sums[place], factors, s)
            return
        size, two, _ = self._pairs
        if signs is not None:
            s = in_parts(b, SIGN, _i8, size, s, signs)
        x = in_parts(b, two, _i16, size, factors, s)
        count, before = self._shorts.get(place, (0, None))
        self._shorts[place] = count + 1, x if before is None else b.add(before, x)
        if count + 1 == max(1, self.codes.sums):
            self._widen(place)

    def done(self) -> dict[Any, Any]:
        """Return the sums."""
        for place in list(self._shorts):
            self._widen(place)
        return self.sums

    def _widen(self, place: Any) -> None:
        assert self._pairs is not None
        (_, x), (size, _, four) = self._shorts.pop(place), self._pairs
        ones = ir.Constant(x.type, [1] * x.type.count)
        self.sums[place] = self.b.add(self.sums[place], in_parts(self.b, four, _i32, size, x, ones))
