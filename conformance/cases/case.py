"""A test case of one op: operand specs, attributes, operand layout and input kind, and the text that reproduces it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

from ...graph.attrs import Attr, format_attribute
from ...graph.dtypes import DType
from ...graph.errors import GraphError
from ...graph.parse import parse_case
from ...graph.spec import Spec
from ...graph.validation import did_you_mean
from ...ops import REGISTRY, Op
from ...ops.composite.references import COMPOSITE_DECLARATIONS

LAYOUTS = ("contiguous", "offset", "sliced", "permuted", "broadcast", "inplace", "twin", "overlap", "state")
INPUTS = ("normal", "uniform", "large", "denormal", "ties", "zeros", "constant", "infinities", "nan", "special")

DECLARATION_CHECK = "declaration"
"""The check of a case that stands for an op without cases, because its declaration is wrong; it always fails."""

_SETTING = re.compile(r"(?:^|,\s*)(layout|inputs|check|seed)=([\w.:-]+)\s*$")
_WHOLE = re.compile(r"\s*(\w+)\((.*)\)\s*", re.DOTALL)


def list_tested_op_names() -> tuple[str, ...]:
    """Return the names of all ops in the registry, followed by the names of the composite ops."""
    return tuple(dict.fromkeys((*REGISTRY, *COMPOSITE_DECLARATIONS)))


def get_tested_op(name: str) -> Op[Any]:
    """Return the op with this name, or the declaration of the composite op.

    Raises:
        KeyError: there is neither.
    """
    return REGISTRY[name] if name in REGISTRY else COMPOSITE_DECLARATIONS[name]


@dataclass(frozen=True, eq=False)
class Case:
    """One test case of an op, such as ``mul_mat(w=q4_K[64,256], x=f32[7,256], layout=permuted, inputs=large)``.

    `operands` and `attrs` are in declared order; attributes that equal their default are left out. `layout` and
    `inputs` are entries of `LAYOUTS` and `INPUTS`. `check` names the comparison: ``reference``, or a metamorphic check
    such as ``cut-m``. All random numbers derive from `seed` and from the text without the seed.
    """

    op: str
    operands: tuple[tuple[str, Spec], ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    layout: str = "contiguous"
    inputs: str = "normal"
    check: str = "reference"
    seed: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and str(self) == str(other)  # 0.0 and -0.0 are two attributes

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def op_declaration(self) -> Op:
        """The declaration of the op, which may be a composite op."""
        return get_tested_op(self.op)

    @cached_property
    def operand_text(self) -> str:
        """The operands and attributes as text, as in the samples of an op: ``x=f32[2,3], axis=1``."""
        parts = [f"{k}={s}" for k, s in self.operands] + [f"{k}={format_attribute(v)}" for k, v in self.attrs]
        return ", ".join(parts)

    @cached_property
    def text_without_seed(self) -> str:
        """The text of the case without its seed; ``str(case)`` adds the seed."""
        settings = [f"layout={self.layout}", f"inputs={self.inputs}"]
        settings += [] if self.check == "reference" else [f"check={self.check}"]
        return f"{self.op}({', '.join([self.operand_text] * bool(self.operand_text) + settings)})"

    def __str__(self) -> str:
        return self.text_without_seed if not self.seed else f"{self.text_without_seed[:-1]}, seed={self.seed})"

    @cached_property
    def random_seed(self) -> tuple[int, int]:
        """The seed of the random generator of this case: a CRC-32 of the text without the seed, and `seed`."""
        return crc32(self.text_without_seed.encode()), self.seed

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The spec of each operand by name."""
        return dict(self.operands)

    @property
    def attributes_with_defaults(self) -> Mapping[str, Attr]:
        """All attributes by name, with the defaults of the op for attributes that the case leaves out."""
        return self.op_declaration.normalise_attributes(dict(self.attrs))

    @property
    def dimension_sizes(self) -> Mapping[str, int]:
        """The sizes of the dimensions by name, with integer attributes and derived sizes."""
        attrs, specs = self.attributes_with_defaults, self.specs
        operands = self.op_declaration.signature_for(attrs).operands
        return self.op_declaration.resolve_sizes([specs.get(o.name) for o in operands], attrs).by_name

    @property
    def has_empty_operand(self) -> bool:
        """Whether an operand has no elements."""
        return any(0 in s.shape for _, s in self.operands)

    @property
    def needs_signed_zeros_and_subnormals(self) -> bool:
        """Whether a result must keep the sign of zeros and must not flush subnormal numbers to zero.

        The op declares this. Quantised operands are exempt, because a dequantised number is itself a product.
        """
        return self.op_declaration.signed_zeros and not self._is_quantised

    @property
    def can_exchange_nan_and_infinity(self) -> bool:
        """Whether a result may be NaN where the reference is infinite, or infinite where the reference is NaN.

        Products of quantised weights multiply codes and scales separately. Recurrences of several factors may process
        tokens in chunks, with other products. Both turn some infinities into NaN and the reverse.
        """
        is_chunked = bool(self.op_declaration.sequential) and self._has_three_floats
        return self.inputs == "special" and not self.op_declaration.signed_zeros and (self._is_quantised or is_chunked)

    @property
    def nan_for_infinity_operands(self) -> tuple[str, ...]:
        """The names of the operands in which a backend may replace an infinity by NaN, as the op declares.

        A product of two float32 operands has no such operand: backends multiply its factors as they are.
        """
        declared = self.op_declaration.nan_for_infinity if self.inputs == "special" else ()
        specs = self.specs
        return tuple(n for n in declared if n in specs and (self._has_three_floats or specs[n].dtype is not DType.F32))

    @property
    def _has_three_floats(self) -> bool:
        return sum(s.dtype.is_float and not s.dtype.is_quantised for _, s in self.operands) > 2

    @property
    def _is_quantised(self) -> bool:
        return any(s.dtype.is_quantised for _, s in self.operands)

    @property
    def layout_counted_in_reports(self) -> str:
        """The layout name under which reports count the case; ``zero-size`` for a case without elements."""
        return "zero-size" if self.has_empty_operand else self.layout

    @property
    def dtype_names(self) -> str:
        """The distinct operand dtypes as text, such as ``q4_K/f32``; integer dtypes only if there are no others."""
        dtypes = dict.fromkeys(s.dtype.text for _, s in self.operands if not s.dtype.is_integer)
        return "/".join(dtypes or dict.fromkeys(s.dtype.text for _, s in self.operands)) or "-"

    def with_settings(self, **changes: object) -> Case:
        """Return a copy of the case with other field values."""
        return replace(self, **changes)  # type: ignore[arg-type]  # fields by name


def make_case(op: Op, parts: Mapping[str, Spec | Attr], **settings: object) -> Case:
    """Return a case of `op` from operand specs and attributes in any order.

    Args:
        op: the op under test.
        parts: operand specs and attributes by name.
        settings: further fields of the case, such as `layout`.

    Raises:
        GraphError: the op has no operand or attribute of a given name.
    """
    operands = tuple((k, s) for k in op.operand_names if isinstance(s := parts.get(k), Spec))
    known = (*op.required_attributes, *op.defaults)
    attrs = [(k, v) for k in known if k in parts and not isinstance(v := parts[k], Spec)]
    stray = parts.keys() - dict(operands).keys() - dict(attrs).keys()
    if stray:
        raise GraphError(f"{op.name} has no operand or attribute {', '.join(sorted(stray))}")
    changed_attrs = tuple((k, v) for k, v in attrs if k not in op.defaults or op.defaults[k] != v)
    return Case(op.name, operands, changed_attrs, **settings)  # type: ignore[arg-type]  # fields by name


def parse_test_case(text: str) -> Case:
    """Parse the text of a case; settings that the text lacks have their defaults.

    Raises:
        GraphError: the text describes no case.
    """
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise GraphError(f"cannot read the case {text!r}; it looks like add(a=f32[2,3], b=f32[3], layout=permuted)")
    name, rest = whole[1], whole[2]
    known = list_tested_op_names()
    if name not in known:
        hint = did_you_mean(name, known) or "; `hocket ops` lists them"
        raise GraphError(f"case {text!r}: there is no op {name!r}{hint}")
    settings: dict[str, object] = {}
    while setting := _SETTING.search(rest):
        settings[setting[1]] = int(setting[2]) if setting[1] == "seed" else setting[2]
        rest = rest[: setting.start()]
    for key, known in (("layout", LAYOUTS), ("inputs", INPUTS)):
        if settings.get(key, known[0]) not in known:
            raise GraphError(f"case {text!r}: {key} is {settings[key]!r}; one of {', '.join(known)}")
    try:
        specs = parse_case(rest)
    except GraphError as why:
        raise GraphError(f"case {text!r}: {why}") from None
    return make_case(get_tested_op(name), specs, **settings)
