"""How a value lies on the devices while factors are chosen, and the way from one such state to another.

The states are the layouts of `scheduler.layout`, with a factor in place of the runs of entries, which follow only once
the factor is dealt:

    Replicate     every device has all of it
    Cut(f)        every device has the entries of its own indices of f
    Partial       every device has a summand; the sum is owed
    Routed(f, i)  a sum is owed of which each entry is zero on all devices but one
    Local(d)      device d alone has all of it
    Lying(s)      every device has the entries that an earlier plan gave it: no factor of this graph says which

A value is produced in one state and read in another.  Most pairs take one conversion; the rest go through Replicate:

    made          wanted: Replicate   Cut(f)            Partial             Local               Lying(s)
    Replicate             -           take a slice      keep it on one      -                   take a slice
    Cut(g)                all-gather  all-to-all        through Replicate   through Replicate   through Replicate
    Partial, Routed       all-reduce  reduce-scatter    -                   through Replicate   through Replicate
    Local                 send        through Replicate through Replicate   send                through Replicate
    Lying(t)              all-gather  through Replicate through Replicate   through Replicate   through Replicate

Nobody wants a Routed value that was not made so: no device could know where its summand has to be zero.  Weights and
states alone are Lying.

>>> f, g = Factor(8), Factor(6)
>>> way(Cut(f), Cut(f)), way(Cut(f), Cut(g))
((), (Cut(factor=6),))
>>> way(Cut(f), PARTIAL)
(Replicate(), Partial())
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...graph.node import Value
from ..layout import PARTIAL, REPLICATE, Local, Partial, Replicate, Shard
from .axes import Factor


@dataclass(frozen=True, slots=True)
class Cut:
    """Each device has the entries that belong to its indices of `factor`."""

    factor: Factor
    is_owed = False


@dataclass(frozen=True, slots=True)
class Routed:
    """A partial sum of which each entry comes from one device: the one with the part of `factor` in which lies the row
    that `ids` names at the first axes of the entry.  On all others it is zero."""

    factor: Factor
    ids: Value
    is_owed = True


@dataclass(frozen=True, slots=True)
class Lying:
    """Each device has what `layout` says, which an earlier plan over the same weights and states settled."""

    layout: Shard
    is_owed = False


State: TypeAlias = Replicate | Cut | Partial | Routed | Local | Lying


def way(made: State, wanted: State) -> tuple[State, ...]:
    """The states a value goes through from `made` to `wanted`, one conversion each.

    Raises `AssertionError` for a `Routed` state in which the value was not made.
    """
    if made == wanted or (wanted is PARTIAL and made.is_owed):
        return ()
    assert not isinstance(wanted, Routed), f"{made} cannot become {wanted}"
    if isinstance(made, Local) and isinstance(wanted, Local):
        return () if set(wanted.devices) <= set(made.devices) else (wanted,)
    direct = REPLICATE in (made, wanted) or (isinstance(wanted, Cut) and not isinstance(made, Local | Lying))
    return (wanted,) if direct else (REPLICATE, wanted)
