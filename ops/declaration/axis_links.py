"""Which axes of a view are which axes of its source: the sharding declaration of ops that move axes about."""

from __future__ import annotations

from ...graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AxisLink:
    """Axes of operand `operand` and axes of the result that are the same index.

    Several axes on a side are a product, outer first.  `start` is where the shorter side begins within the longer
    one: within the source for a slice, within the result for a concatenation.  A result axis without a link is free
    (any device can make any part of it) if the op is a view, else it is made whole; a source axis without one must be
    whole.
    """

    operand: int
    source: tuple[int, ...]
    result: tuple[int, ...]
    start: int = 0


def link_axes(axes: dict[int, int] | range) -> tuple[AxisLink, ...]:
    """Links of operand 0, from source axis to result axis."""
    pairs = axes.items() if isinstance(axes, dict) else ((i, i) for i in axes)
    return tuple(AxisLink(0, (source,), (result,)) for source, result in pairs)


def link_reshaped_axes(source: tuple[int, ...], result: tuple[int, ...]) -> tuple[AxisLink, ...]:
    """Links of a reshape: the shortest runs of axes on either side that hold equally many elements."""
    links: list[AxisLink] = []
    i = j = 0
    while i < len(source) and j < len(result):
        first_i, first_j = i, j
        left, right = source[i], result[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(source):
                left, i = left * source[i], i + 1
            elif right < left and j < len(result):
                right, j = right * result[j], j + 1
            else:
                return ()  # only with zero sizes, where there is nothing to cut
        links.append(AxisLink(0, tuple(range(first_i, i)), tuple(range(first_j, j))))
    return tuple(links)
