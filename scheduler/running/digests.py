"""Digests of the weights that ranks load, which have to be equal to digests of the same bytes of rank 0.

A digest is a tree: 64-bit words of a leaf are added up column by column, and BLAKE2b joins the sums of all leaves. Each
changed word changes it. It finds damaged files and other weights; it is no proof against an adversary.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from ...backends.base import Array
from ...distributed import RanksError, World
from ..layout import Layout, Local, Shard

LEAF_BYTES = 1 << 21
"""Bytes of a leaf, at least one entry of the first axis."""
COLUMNS = 257
"""Columns in which the words of a leaf are added up: a prime number, so that exchanged rows change the sums, too."""
DIGEST_BYTES = 16


def digest_of(part: Array, release: Callable[[], object] = lambda: None) -> bytes:
    """Return the digest of the shape, the dtype and all bytes of `part`; `release` is called after each leaf.

    It depends on the entries in C order, not on the strides.
    """
    from hashlib import blake2b  # loads OpenSSL, which a single process need not do

    digest = blake2b(f"{part.shape} {part.dtype}".encode(), digest_size=DIGEST_BYTES)
    rows = np.atleast_1d(part)
    step = max(LEAF_BYTES // max(rows[:1].nbytes, 1), 1)
    for first in range(0, len(rows), step):
        leaf = np.ascontiguousarray(rows[first : first + step]).reshape(-1).view(np.uint8)
        whole_rows = leaf.size - leaf.size % (8 * COLUMNS)
        digest.update(leaf[:whole_rows].view(np.uint64).reshape(-1, COLUMNS).sum(axis=0).data)
        digest.update(leaf[whole_rows:].data)
        release()
    return digest.digest()


class LoadedBytes:
    """The digests of what this rank has loaded since ranks have last compared them.

    Rank 0 has digests of the bytes that other ranks load, from its own file or arrays.
    """

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        """`ranks`: the rank of each device of the plan."""
        self._world, self._ranks = world, ranks
        self._checked = frozenset(range(1, world.size))
        self._digests: dict[str, dict[int, str]] = {}

    def compare_files(self, identity: str) -> None:
        """Skip the digests of ranks that map the very files of rank 0; all ranks call it.

        `identity` says which files these are, on which running machine; it is empty if that is unknown.
        """
        if self._world.size > 1:
            first, *others = self._world.all_gather_bytes(identity.encode())
            self._checked = frozenset(rank for rank, other in enumerate(others, 1) if not first or other != first)

    @property
    def is_checked(self) -> bool:
        """Whether the digests of this rank's own bytes are compared."""
        return self._world.rank in self._checked

    def others(self, layout: Layout) -> list[int]:
        """The devices of other ranks that load a part of a weight, for which rank 0 has to know the digest."""
        if self._world.rank:
            return []
        holders = layout.devices if isinstance(layout, Local) else range(len(self._ranks))
        return [number for number in holders if self._ranks[number] in self._checked]

    def add(self, name: str, layout: Layout, number: int, digest: Callable[[], bytes]) -> None:
        """Note the digest of the part of a weight that device `number` loads; equal parts are read once."""
        known = self._digests.setdefault(name, {})
        like = next((n for n in known if not isinstance(layout, Shard) or layout.runs[n] == layout.runs[number]), None)
        known[number] = digest().hex() if like is None else known[like]

    def agree(self) -> None:
        """Raises `RanksError`, on every rank, if one has loaded other bytes than rank 0 has there."""
        if not self._checked or self._world.size == 1:
            return
        digests_of_rank = [
            json.loads(text) for text in self._world.all_gather_bytes(json.dumps(self._digests).encode())
        ]
        self._digests = {}
        for rank in sorted(self._checked):
            for name, parts in digests_of_rank[rank].items():
                known = digests_of_rank[0].get(name, {})
                if any(known.get(number) != digest for number, digest in parts.items()):
                    raise RanksError(
                        f"{self._world.name(rank)} has other bytes of weight %{name:.60} than {self._world.name(0)}; "
                        "give all ranks the same weights"
                    )
