"""Links from axes of operands to axes of results: the sharding declaration of ops that move axes."""

from __future__ import annotations

from ...graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AxisLink:
    """A link between axes of an operand and axes of the result: entries with equal indices belong together.

    The planner shards both sides of a link in the same way.

    - `operand`: the index of the operand.
    - If one side has several axes, they count as their product, outer axis first.
    - `start`: if one side is shorter, the offset of its first entry within the longer side. The operand is longer for a
      slice, and the result is longer for a concatenation.

    A result axis without a link may be sharded freely if the op is a view; otherwise each device computes all of it. An
    operand axis without a link must be complete on every device.
    """

    operand: int
    source: tuple[int, ...]
    result: tuple[int, ...]
    start: int = 0


def link_first_operand_axes_to_result(axes: dict[int, int] | range) -> tuple[AxisLink, ...]:
    """Link axes of the first operand to axes of the result, one to one.

    Args:
        axes: the result axis for each operand axis. A range links each of its axes to the result axis of equal number.
    """
    pairs = axes.items() if isinstance(axes, dict) else ((i, i) for i in axes)
    return tuple(AxisLink(0, (source,), (result,)) for source, result in pairs)


def link_reshaped_axes(source: tuple[int, ...], result: tuple[int, ...]) -> tuple[AxisLink, ...]:
    """Link the axes of an operand to the axes of its reshape.

    Each link joins neighbouring axes of the operand with neighbouring axes of the result that have as many elements. It
    has as few axes as possible. Example: [2, 6] to [2, 3, 2] gives 0 to 0, and 1 to (1, 2).

    Args:
        source: shape of the operand.
        result: shape of the result.
    """
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
                return ()  # only with zero sizes, where no shard has elements
        links.append(AxisLink(0, tuple(range(first_i, i)), tuple(range(first_j, j))))
    return tuple(links)
