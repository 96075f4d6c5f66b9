"""Factor layouts: the layouts of values while factors are chosen, and the conversions between them.

Factor layouts are the layouts of `scheduler.ir.layout` with a factor in place of index ranges. The ranges follow once
the shard ranges of the factor are known.

- `Replicate`: every device has the whole value.
- `FactorShard`: every device has the entries of its indices of `factor`.
- `Partial`: every device has a partial sum.
- `TableLookupPartial`: a partial sum in which each entry is zero on all devices except one.
- `Local`: the listed devices have the whole value.
- `EarlierPlanShard`: every device has the entries that an earlier plan gave it, which no factor of this graph
  describes. Only weights and states have this layout.

A value is produced in one layout and read in another. These pairs need one conversion:

- `Replicate` to `FactorShard` or `EarlierPlanShard`: each device takes a slice.
- `Replicate` to `Partial`: one device keeps the value, and all others have zeros.
- `FactorShard` to `Replicate`: all-gather.
- `FactorShard` to another `FactorShard`: all-to-all.
- `Partial` or `TableLookupPartial` to `Replicate`: all-reduce.
- `Partial` or `TableLookupPartial` to `FactorShard`: reduce-scatter.
- `Local` to `Replicate` or to another device: messages.
- `EarlierPlanShard` to `Replicate`: all-gather.

All other pairs are converted to `Replicate` first. `TableLookupPartial` is never the target of a conversion: a device
could not know where its partial sum has to be zero.

>>> f, g = Factor(8), Factor(6)
>>> find_conversion_path(FactorShard(f), FactorShard(f)), find_conversion_path(FactorShard(f), FactorShard(g))
((), (FactorShard(factor=6),))
>>> find_conversion_path(FactorShard(f), PARTIAL)
(Replicate(), Partial())
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...graph.node import Value
from ..ir.layout import PARTIAL, REPLICATE, Local, Partial, Replicate, Shard
from .axes import Factor


@dataclass(frozen=True, slots=True)
class FactorShard:
    """The layout of a value that is sharded by `factor`: each device has the entries of its own range of indices."""

    factor: Factor
    is_partial = False


@dataclass(frozen=True, slots=True)
class TableLookupPartial:
    """The layout of rows that are looked up in a sharded table: one device has the complete row, all others have zeros.

    `factor` shards the rows of the table, and an entry is complete on the device that has its table row.
    `index_operand` has the row number of each entry, and its axes are the first axes of the value.
    """

    factor: Factor
    index_operand: Value
    is_partial = True


@dataclass(frozen=True, slots=True)
class EarlierPlanShard:
    """The layout of a weight or state that is sharded as in an earlier plan over the same memory.

    The shards need not be describable by factors of the new graph.
    """

    layout: Shard
    is_partial = False


FactorLayout: TypeAlias = Replicate | FactorShard | Partial | TableLookupPartial | Local | EarlierPlanShard
"""A layout in terms of factors."""


def find_conversion_path(source_layout: FactorLayout, target_layout: FactorLayout) -> tuple[FactorLayout, ...]:
    """Find the steps that change the layout of a value, as the sequence of layouts after each step.

    Each step is one collective, message or slice. Example: a value on one device is made whole on all devices first,
    and then sharded. Without a change the result is empty.

    Raises:
        AssertionError: `target_layout` is a `TableLookupPartial` other than `source_layout`.
    """
    if source_layout == target_layout or (target_layout is PARTIAL and source_layout.is_partial):
        return ()
    assert not isinstance(target_layout, TableLookupPartial), f"{source_layout} cannot become {target_layout}"
    if isinstance(source_layout, Local) and isinstance(target_layout, Local):
        return () if set(target_layout.devices) <= set(source_layout.devices) else (target_layout,)
    direct = REPLICATE in (source_layout, target_layout) or (
        isinstance(target_layout, FactorShard) and not isinstance(source_layout, Local | EarlierPlanShard)
    )
    return (target_layout,) if direct else (REPLICATE, target_layout)
