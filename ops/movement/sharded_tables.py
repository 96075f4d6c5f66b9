"""Tables whose rows are looked up by numbers, dealt over devices: which numbers are a device's own, and how many come.

An op with a dimension ``rows@ids`` takes two attributes: its table has the rows from `first` on, of `total` in all (0:
it has them all).  Entries whose row lies elsewhere give zeros, so over all devices each entry comes from one of them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ...graph.errors import BackendError
from ..declaration.op import Array


def require_row_numbers(ids: Array, count: int, what: str) -> Array:
    """`ids`, if they number one of `count` rows each.  Raises `BackendError`; NumPy would count negative ones back."""
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        raise BackendError(f"{what} run from {ids.min()} to {ids.max()}, but there are 0 to {count - 1} only")
    return ids


def to_local_rows(ids: Array, first: int, count: int, total: int, what: str) -> Array:
    """For each of `ids` which of the `count` rows of a table it is, -1 where another table has it.

    Raises `BackendError` for one that no table has.
    """
    rows = require_row_numbers(ids, total or count, what) - first
    return np.where((rows >= 0) & (rows < count), rows, -1)


def check_row_range(first: int, total: int, count: int) -> str | None:
    """Why `count` rows from `first` on are no part of `total`; None if they are."""
    if total == first == 0 or (total > 0 and 0 <= first <= total - count):
        return None
    return f"rows {first} to {first + count} are no part of {total}"


@lru_cache(maxsize=1024)
def estimate_busiest_count(entries: int, own: int, total: int) -> int:
    """How many of `entries` numbers come to the busiest of the devices that have `own` rows of `total` each, expected
    where all rows are equally likely.

    The mean, and what the largest of so many independent counts exceeds it by (Blom, 1958, for normal ones).
    """
    from statistics import NormalDist  # 10 ms that `import hocket` need not pay

    if not own:
        return 0
    mean, devices = entries * own / total, max(1, round(total / own))
    above = math.sqrt(mean) * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return min(entries, math.ceil(mean + above - 1e-9))
