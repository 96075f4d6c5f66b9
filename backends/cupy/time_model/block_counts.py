"""Estimates the number of executions of each basic block in a kernel's machine code.

The input is the access counters of one launch. The emulator runs the code of g++, and a device runs the code of NVRTC.
Their basic blocks differ, but both compilers record the source line of each access. The algorithm:

1. A warp that enters a block also leaves it. The executions therefore form a flow from the first block to the end.
2. The flow at the first block is the number of warps.
3. A linear program finds the flow with the smallest difference to the counted bytes of each source line.

Example: 8 warps made 96 accesses at the line of a loop. The block of the loop has two such accesses, so it ran 48
times:

    begin 8 -> loop 48 (back 40) -> end 8
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx
import numpy as np

from ..emulation.access_counters import AccessSiteCounters
from ..emulation.source_lines import select_kernel_frames
from .control_flow import WARPGROUP_OPERANDS, AccessSourceLocation, BasicBlock

INSTRUCTION_PENALTY = 1e-4
"""Cost of one executed instruction; one surplus access costs 1. Of two equal fits, the shorter flow is chosen."""

MISSING_ACCESS_PENALTY = 0.4
"""Cost of a counted access that the flow lacks; one surplus access costs 1. g++ loads some numbers twice."""


def estimate_block_executions(
    blocks: Sequence[BasicBlock], sites: Iterable[AccessSiteCounters], warps: int
) -> list[float]:
    """Estimate the number of warps that execute each basic block of a kernel in one launch.

    The numbers are fitted to the accesses that the emulator counted.

    Args:
        blocks: Basic blocks of the kernel; the first one is the entry.
        sites: Counted accesses of the launch.
        warps: Warps of the launch.

    Returns:
        Warp executions of each block, in the order of `blocks`. A block that cannot be reached has 0.

    Raises:
        ImportError: SciPy is not installed. Its solver HiGHS is used.
    """
    from scipy.optimize import linprog

    reached = _find_reachable_blocks(blocks)
    edges = [(a, b) for a in reached for b in blocks[a].successors]
    edges_out, edges_in = (np.array([[e[end] == b for e in edges] for b in reached], float) for end in (0, 1))
    begins = np.array([warps if b == 0 else 0 for b in reached], float)
    places = _build_access_equations(blocks, reached, sites)
    moved = np.array([[of.get(b, 0.0) for b in reached] for of, _ in places]).reshape(-1, len(reached))
    counted = np.array([number for _, number in places])
    each = np.identity(len(places))  # how much the flow lacks at each place, and how much it has above
    instructions = np.array([blocks[b].instruction_count for b in reached], float)
    solved = linprog(
        np.concatenate(
            [INSTRUCTION_PENALTY * (instructions @ edges_out), np.repeat([MISSING_ACCESS_PENALTY, 1.0], len(places))]
        ),
        A_eq=np.block(
            [[edges_out - edges_in, np.zeros((len(reached), 2 * len(places)))], [moved @ edges_out, each, -each]]
        ),
        b_eq=np.concatenate([begins, counted]),
        method="highs",
    )
    ran = np.zeros(len(blocks))
    ran[reached] = edges_out @ solved.x[: len(edges)]
    return [float(times) for times in ran]


def _build_access_equations(
    blocks: Sequence[BasicBlock], reached: Iterable[int], sites: Iterable[AccessSiteCounters]
) -> list[tuple[dict[int, float], float]]:
    """Build linear equations between the executions of basic blocks and the memory accesses that the emulator counted.

    There is one equation for each group of locations that may be the same access. It is a pair: the accesses of one
    execution by block index, and the counted accesses of the launch. An access has the largest width that was counted
    in the group. A group that only one of the two compilers knows has no equation.
    """
    there, counted = _sum_bytes_by_location_and_block(blocks, reached), _sum_counted_bytes_by_location(sites)
    known = []
    for places in _group_locations_of_same_access(
        {*there, *counted}, _find_locations_sharing_inlined_function(blocks, reached)
    ):
        of_block: dict[int, float] = defaultdict(float)
        width = max((counted[p][1] for p in places if p in counted), default=0)
        for place in places:
            for block, nbytes in there.get(place, {}).items():
                of_block[block] += nbytes / max(width, 1)
        if width and of_block:
            known.append((dict(of_block), sum(counted[p][0] for p in places if p in counted) / width))
    return known


def _group_locations_of_same_access(
    places: Iterable[AccessSourceLocation], conflicts: Iterable[Sequence[AccessSourceLocation]]
) -> Iterable[Sequence[AccessSourceLocation]]:
    """Group the access locations of two compilers, g++ and NVRTC, that may be the same access in the source.

    Two locations are in one group if the inlined frames of one are the inner frames of the other. The reason: each
    compiler omits outer frames of lambdas and of moved code. The locations of each list in `conflicts` are in one
    group, too.
    """
    groups = nx.Graph()
    groups.add_nodes_from(places)
    named = set(places)
    for place in named:
        for upto in range(1, len(place.frames)):
            shorter = AccessSourceLocation(place.frames[:upto], place.is_shared, place.is_store)
            if shorter in named:
                groups.add_edge(place, shorter)
    for these in conflicts:
        nx.add_path(groups, these)
    return [sorted(group) for group in nx.connected_components(groups)]


def _find_locations_sharing_inlined_function(
    blocks: Sequence[BasicBlock], reached: Iterable[int]
) -> Iterator[list[AccessSourceLocation]]:
    """Yield lists of locations in one basic block that come from calls of one inlined function of the prelude.

    They are hard to tell apart: NVRTC records some of these accesses at the place of another call of the function.
    """
    for number in reached:
        through: dict[tuple[str, bool, bool], set[AccessSourceLocation]] = defaultdict(set)
        for place in blocks[number].access_bytes:
            if place.frames and not select_kernel_frames(place.frames[:1]):
                through[place.frames[0], place.is_shared, place.is_store].add(_without_prelude_frames(place))
        yield from (sorted(places) for places in through.values() if len(places) > 1)


def _without_prelude_frames(place: AccessSourceLocation) -> AccessSourceLocation:
    """Return an access location without its frames in the prelude, the headers that all kernels share."""
    return AccessSourceLocation(select_kernel_frames(place.frames), place.is_shared, place.is_store)


def _find_reachable_blocks(blocks: Sequence[BasicBlock]) -> list[int]:
    """Find the blocks that can be reached from the first one; return their indices in ascending order."""
    reached, open_ = {0}, [0]
    while open_:
        for after in blocks[open_.pop()].successors:
            if after >= 0 and after not in reached:
                reached.add(after)
                open_.append(after)
    return sorted(reached)


def _sum_bytes_by_location_and_block(
    blocks: Sequence[BasicBlock], reached: Iterable[int]
) -> dict[AccessSourceLocation, dict[int, float]]:
    """Sum the bytes per warp lane that one execution of each reachable block moves, by access location and block."""
    there: dict[AccessSourceLocation, dict[int, float]] = defaultdict(dict)
    for number in reached:
        for place, nbytes in blocks[number].access_bytes.items():
            at = _without_prelude_frames(place)
            there[at][number] = there[at].get(number, 0.0) + nbytes
    return there


def _sum_counted_bytes_by_location(
    sites: Iterable[AccessSiteCounters],
) -> dict[AccessSourceLocation, tuple[float, int]]:
    """Return for each location the counted bytes per warp lane of all warps, and the bytes of the widest access."""
    counted: dict[AccessSourceLocation, tuple[float, int]] = {}
    for site in sites:
        at = AccessSourceLocation(select_kernel_frames(site.frames), site.is_shared, site.is_store)
        if at.frames and at.frames[0].startswith(WARPGROUP_OPERANDS.frames):
            at = WARPGROUP_OPERANDS
        nbytes, widest = counted.get(at, (0.0, 0))
        counted[at] = nbytes + site.requests * site.nbytes, max(widest, site.nbytes)
    return counted
