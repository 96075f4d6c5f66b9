"""Look-up of rows in tables that may be sharded by rows.

An op with a dimension ``rows@ids`` has two attributes: its table has the rows from `first` on, of `total` rows in all;
0 means all rows. Entries with a row of another device are zeros. Over all devices, each entry comes from one device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ...graph.errors import BackendError
from ..declaration.op import Array


def require_row_numbers(ids: Array, count: int, subject: str) -> Array:
    """Check that all `ids` are row numbers from 0 to ``count - 1``, and return them.

    NumPy would accept negative numbers and count them from the end.

    Args:
        ids: integers of any shape.
        count: number of rows.
        subject: name of the ids in the error message, plural.

    Raises:
        BackendError: an id is no row number.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        raise BackendError(f"{subject} run from {ids.min()} to {ids.max()}, but there are 0 to {count - 1} only")
    return ids


def to_local_rows(ids: Array, first: int, count: int, total: int, subject: str) -> Array:
    """Convert row numbers of a table to row numbers of one device's shard; rows of other shards become -1.

    Example: in a shard of rows 4 to 7, row 5 becomes 1 and row 2 becomes -1.

    Args:
        ids: row numbers in the complete table.
        first: number of the shard's first row in the complete table.
        count: number of rows of the shard.
        total: number of rows of the complete table; 0 means `count`.
        subject: name of the ids in the error message, plural.

    Raises:
        BackendError: an id is no row of the complete table.
    """
    rows = require_row_numbers(ids, total or count, subject) - first
    return np.where((rows >= 0) & (rows < count), rows, -1)


def check_shard_row_range(first: int, total: int, count: int) -> str | None:
    """Return an error message if the shard of `count` rows from row `first` on exceeds the table, otherwise None.

    `total` is the number of rows of the complete table. With 0 there is no shard: the operand is the complete table,
    and `first` must be 0.
    """
    if total == first == 0 or (total > 0 and 0 <= first <= total - count):
        return None
    return f"rows {first} to {first + count} are no part of {total}"


@lru_cache(maxsize=1024)
def estimate_busiest_device_entries(entries: int, own: int, total: int) -> int:
    """Estimate how many of the selected rows of a sharded table are on the device with the largest number of them.

    Rows are assumed to be selected at random. The result is the mean per device plus the expected excess of the largest
    of independent normal counts (Blom, 1958).

    Args:
        entries: number of selected rows on all devices.
        own: number of rows of each device.
        total: number of rows of all devices.
    """
    from statistics import NormalDist  # 10 ms, which `import hocket` does not need

    if not own:
        return 0
    mean, devices = entries * own / total, max(1, round(total / own))
    above = math.sqrt(mean) * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return min(entries, math.ceil(mean + above - 1e-9))
