"""Digests of loaded weights, which show that all ranks load the same bytes as rank 0.

A digest is a tree. The 64-bit words of a leaf are added column by column, and BLAKE2b joins the sums of all leaves.
Each changed word changes the digest. It detects damaged files and wrong weights; it does not protect against an
adversary.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from ...backends.base import Array
from ...distributed import RanksError, World
from ..ir.layout import Layout, Local, Shard

LEAF_BYTES = 1 << 21
"""Bytes of a leaf; a leaf has at least one entry of the first axis."""
WORD_COLUMNS = 257
"""Columns in which the words of a leaf are added; a prime number, so that exchanged rows change the sums."""
DIGEST_BYTES = 16
"""Bytes of a digest."""


def compute_digest(part: Array, release: Callable[[], object] = lambda: None) -> bytes:
    """Return a digest of an array, which depends on its shape, its dtype and all its bytes in C order.

    Args:
        part: The array, for example a shard of a weight.
        release: Called after each leaf of the digest tree, so that its pages may be dropped.
    """
    from hashlib import blake2b  # loads OpenSSL, which a single process does not need

    digest = blake2b(f"{part.shape} {part.dtype}".encode(), digest_size=DIGEST_BYTES)
    rows = np.atleast_1d(part)
    step = max(LEAF_BYTES // max(rows[:1].nbytes, 1), 1)
    for first in range(0, len(rows), step):
        leaf = np.ascontiguousarray(rows[first : first + step]).reshape(-1).view(np.uint8)
        whole_rows = leaf.size - leaf.size % (8 * WORD_COLUMNS)
        digest.update(leaf[:whole_rows].view(np.uint64).reshape(-1, WORD_COLUMNS).sum(axis=0).data)
        digest.update(leaf[whole_rows:].data)
        release()
    return digest.digest()


class LoadedWeightDigests:
    """The digests of loaded weights, which show whether all ranks (processes) load the same bytes as rank 0.

    Each rank has the digests of the parts that it has loaded since the last comparison. Rank 0 also computes the
    digests of the parts that other ranks load, from its own file or arrays.
    """

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        """Start without digests; `ranks` has the rank of each device of the plan."""
        self._world, self._ranks = world, ranks
        self._checked_ranks = frozenset(range(1, world.size))
        self._digests: dict[str, dict[int, str]] = {}

    def skip_ranks_with_shared_files(self, identity: str) -> None:
        """Leave out of later checks the ranks (processes) that map the same files as rank 0.

        All ranks must call this method.

        Args:
            identity: Names the files and the running machine; empty if they are unknown.
        """
        if self._world.size > 1:
            first, *others = self._world.all_gather_bytes(identity.encode())
            self._checked_ranks = frozenset(rank for rank, other in enumerate(others, 1) if not first or other != first)

    @property
    def has_to_digest_for_rank_0(self) -> bool:
        """Whether this rank must compute digests of the weights that it loads, for a comparison by rank 0."""
        return self._world.rank in self._checked_ranks

    def list_remote_devices_rank_0_checks(self, layout: Layout) -> list[int]:
        """Return the devices of other ranks for which rank 0 must compute digests of their parts of a weight.

        These devices have a part in this layout, and their ranks do not map the same files as rank 0. On all other
        ranks the list is empty.
        """
        if self._world.rank:
            return []
        holders = layout.devices if isinstance(layout, Local) else range(len(self._ranks))
        return [number for number in holders if self._ranks[number] in self._checked_ranks]

    def add_digest(self, name: str, layout: Layout, number: int, digest: Callable[[], bytes]) -> None:
        """Record the digest of the part of a weight that one device loads.

        Equal parts are read only once.

        Args:
            name: Name of the weight.
            layout: Layout of the weight.
            number: Number of the device.
            digest: Computes the digest.
        """
        known = self._digests.setdefault(name, {})
        like = next(
            (
                n
                for n in known
                if not isinstance(layout, Shard) or layout.index_ranges[n] == layout.index_ranges[number]
            ),
            None,
        )
        known[number] = digest().hex() if like is None else known[like]

    def require_equal_digests(self) -> None:
        """Compare the digests of each rank with rank 0; if they differ, raise `RanksError` on every rank."""
        if not self._checked_ranks or self._world.size == 1:
            return
        digests_of_rank = [
            json.loads(text) for text in self._world.all_gather_bytes(json.dumps(self._digests).encode())
        ]
        self._digests = {}
        for rank in sorted(self._checked_ranks):
            for name, parts in digests_of_rank[rank].items():
                known = digests_of_rank[0].get(name, {})
                if any(known.get(number) != digest for number, digest in parts.items()):
                    raise RanksError(
                        f"{self._world.describe_rank(rank)} has other bytes of weight %{name:.60} "
                        f"than {self._world.describe_rank(0)}; give all ranks the same weights"
                    )
