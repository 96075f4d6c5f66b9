"""How often each block of a kernel's machine code runs, where only the accesses of a launch were counted.

The emulation runs what g++ makes of a kernel, and a device what NVRTC makes of it: their blocks differ, but both know
which line an access is from.  A warp that enters a block leaves it, so what runs is a flow from the begin to the end;
of all flows that as many warps begin, the one is taken whose bytes at each line differ least from those counted.

A loop of a line that was counted 96 times, over 8 warps, whose block has two such accesses:

    begin 8 -> loop 48 (back 40) -> end 8
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx
import numpy as np

from ..emulation.access_counters import AccessSite
from ..emulation.source_lines import select_kernel_frames
from .control_flow import WARPGROUP_OPERANDS, AccessLocation, BasicBlock

INSTRUCTION_PENALTY = 1e-4
"""What an instruction that runs costs against an access that is missed: of two flows that fit, the shorter."""

MISSING_ACCESS_PENALTY = 0.4
"""What an access costs that was counted and that the flow lacks, against one too many: g++ loads some numbers twice."""


def estimate_block_counts(blocks: Sequence[BasicBlock], sites: Iterable[AccessSite], warps: int) -> list[float]:
    """How many warps run each block, in a launch of so many warps.

    Raises `ImportError` without SciPy, whose solver is HiGHS.
    """
    from scipy.optimize import linprog

    reached = _find_reachable_blocks(blocks)
    edges = [(a, b) for a in reached for b in blocks[a].successors]
    ways_out, ways_in = (np.array([[e[end] == b for e in edges] for b in reached], float) for end in (0, 1))
    begins = np.array([warps if b == 0 else 0 for b in reached], float)
    places = _build_access_equations(blocks, reached, sites)
    moved = np.array([[of.get(b, 0.0) for b in reached] for of, _ in places]).reshape(-1, len(reached))
    counted = np.array([number for _, number in places])
    each = np.identity(len(places))  # how much the flow lacks at each place, and how much it has above
    instructions = np.array([blocks[b].instruction_count for b in reached], float)
    solved = linprog(
        np.concatenate(
            [INSTRUCTION_PENALTY * (instructions @ ways_out), np.repeat([MISSING_ACCESS_PENALTY, 1.0], len(places))]
        ),
        A_eq=np.block(
            [[ways_out - ways_in, np.zeros((len(reached), 2 * len(places)))], [moved @ ways_out, each, -each]]
        ),
        b_eq=np.concatenate([begins, counted]),
        method="highs",
    )
    ran = np.zeros(len(blocks))
    ran[reached] = ways_out @ solved.x[: len(edges)]
    return [float(times) for times in ran]


def _build_access_equations(
    blocks: Sequence[BasicBlock], reached: Iterable[int], sites: Iterable[AccessSite]
) -> list[tuple[dict[int, float], float]]:
    """Of places that either compiler knows: the accesses that each block has there, and how many were counted.  One is
    as wide as the widest that was counted."""
    there, counted = _sum_block_bytes(blocks, reached), _sum_counted_bytes(sites)
    known = []
    for places in _group_equivalent_locations({*there, *counted}, _find_inlining_conflicts(blocks, reached)):
        of_block: dict[int, float] = defaultdict(float)
        width = max((counted[p][1] for p in places if p in counted), default=0)
        for place in places:
            for block, nbytes in there.get(place, {}).items():
                of_block[block] += nbytes / max(width, 1)
        if width and of_block:
            known.append((dict(of_block), sum(counted[p][0] for p in places if p in counted) / width))
    return known


def _group_equivalent_locations(
    places: Iterable[AccessLocation], confused: Iterable[Sequence[AccessLocation]]
) -> Iterable[Sequence[AccessLocation]]:
    """Places together that may be one: those confused, and either compiler leaves out outer frames, of a lambda or of
    code it has moved."""
    groups = nx.Graph()
    groups.add_nodes_from(places)
    named = set(places)
    for place in named:
        for upto in range(1, len(place.frames)):
            shorter = AccessLocation(place.frames[:upto], place.is_shared, place.is_store)
            if shorter in named:
                groups.add_edge(place, shorter)
    for these in confused:
        nx.add_path(groups, these)
    return [sorted(group) for group in nx.connected_components(groups)]


def _find_inlining_conflicts(blocks: Sequence[BasicBlock], reached: Iterable[int]) -> Iterator[list[AccessLocation]]:
    """Places of a block with one function of the prelude in all of them: NVRTC says of some of its accesses that they
    were inlined where another one was."""
    for number in reached:
        through: dict[tuple[str, bool, bool], set[AccessLocation]] = defaultdict(set)
        for place in blocks[number].access_bytes:
            if place.frames and not select_kernel_frames(place.frames[:1]):
                through[place.frames[0], place.is_shared, place.is_store].add(_to_kernel_location(place))
        yield from (sorted(places) for places in through.values() if len(places) > 1)


def _to_kernel_location(place: AccessLocation) -> AccessLocation:
    return AccessLocation(select_kernel_frames(place.frames), place.is_shared, place.is_store)


def _find_reachable_blocks(blocks: Sequence[BasicBlock]) -> list[int]:
    """Blocks that may run, from the first on."""
    reached, open_ = {0}, [0]
    while open_:
        for after in blocks[open_.pop()].successors:
            if after >= 0 and after not in reached:
                reached.add(after)
                open_.append(after)
    return sorted(reached)


def _sum_block_bytes(blocks: Sequence[BasicBlock], reached: Iterable[int]) -> dict[AccessLocation, dict[int, float]]:
    """By place: the bytes a lane that each block moves there."""
    there: dict[AccessLocation, dict[int, float]] = defaultdict(dict)
    for number in reached:
        for place, nbytes in blocks[number].access_bytes.items():
            at = _to_kernel_location(place)
            there[at][number] = there[at].get(number, 0.0) + nbytes
    return there


def _sum_counted_bytes(sites: Iterable[AccessSite]) -> dict[AccessLocation, tuple[float, int]]:
    """By place: bytes a lane that were counted, of all warps, and those of one access."""
    counted: dict[AccessLocation, tuple[float, int]] = {}
    for site in sites:
        at = AccessLocation(select_kernel_frames(site.frames), site.is_shared, site.is_store)
        if at.frames and at.frames[0].startswith(WARPGROUP_OPERANDS.frames):
            at = WARPGROUP_OPERANDS
        nbytes, widest = counted.get(at, (0.0, 0))
        counted[at] = nbytes + site.requests * site.nbytes, max(widest, site.nbytes)
    return counted
