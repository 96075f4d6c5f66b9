"""All ops: reference function, signature, sharding, cost and samples. A call of an op builds a node."""

from typing import Any as _Any

from .composite import COMPOSITE_OPS as COMPOSITE_OPS
from .composite import add_windows as add_windows
from .composite import convolution as convolution
from .composite import interpolate as interpolate
from .composite import pool as pool
from .composite import transposed_convolution as transposed_convolution
from .declaration.op import Op as Op
from .declaration.op import op as op
from .declaration.samples import LegalRange as LegalRange
from .reference_run import as_reference_array as as_reference_array
from .reference_run import evaluate as evaluate
from .registry import OP_FAMILIES as _OP_FAMILIES
from .registry import OP_RULES as OP_RULES
from .registry import REGISTRY as REGISTRY
from .registry import op_of as op_of
from .registry import register as register
from .registry import verify as verify

globals().update(
    {name: thing for family in _OP_FAMILIES for name, thing in vars(family).items() if isinstance(thing, Op)}
)

_OLD_NAMES = {"Range": "LegalRange", "RULES": "OP_RULES", "exact": "as_reference_array"}
"""Names before 0.2, which packages may use until 0.3."""


def __getattr__(name: str) -> _Any:
    """Return an op of another package, which is registered or installed, or an export under its old name."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _OLD_NAMES:
        return globals()[_OLD_NAMES[name]]
    if name in REGISTRY:
        return REGISTRY[name]
    from ..graph.validation import did_you_mean
    from .other_names import OPS_BY_OTHER_NAME

    named = OPS_BY_OTHER_NAME.get(name, (name,))
    hint = f"; use {', then '.join(named)}" if len(named) > 1 else did_you_mean(named[0], (*REGISTRY, *COMPOSITE_OPS))
    hint = hint or "; `hocket ops` lists all"
    raise AttributeError(f"there is no op {name!r}{hint}")
