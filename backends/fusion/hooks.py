"""The hooks of heavy kernels: groups of declared ops that run on each panel of a result, right after its computation.

A *body* is an instruction, or a fused pattern, with a kernel that computes its result panel by panel: some rows by some
columns. A group of declared ops hooks to the body if every element of the group needs only elements of the same panel,
and values from before the body. The kernel of the body then calls the kernel of the group for each panel, while the
panel is in a cache of the thread. So a step and its barrier disappear. The body still writes its own result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from ...ops.declaration.scalar import ROW_FUNCTIONS
from .dataflow import Dataflow, has_same_elements
from .expression_groups import ExpressionGroup, compose_instructions
from .operand_views import Shape, find_strides_of_reshape, with_shape_and_strides
from .operands import BoundInstruction, MemoryRegion, NoKernelError, Operand, require_supported
from .traced_instruction import TracedInstruction

Views = tuple[tuple[Operand, ...], tuple[Operand, ...]]
"""Views of the operands and of the results of a group."""
MAX_HOOKS = 4
MAX_READER_DISTANCE = 64
"""The most instructions from a body to a hook: a product that each layer reads would take long to plan."""
MIN_PANELS_PER_ROW, MAX_SMALL_PANEL_COLUMNS = 8, 32
"""Fewest panels of a row in a result without tiles, and the columns of panels that need no such number."""


@dataclass(frozen=True)
class ResultPanels:
    """How a kernel divides its result, a matrix of `rows` by `columns`, into panels: blocks of adjacent columns.

    The panel bounds are multiples of `unit` columns. None means that the kernel can use any unit.
    """

    rows: int
    columns: int
    unit: int | None

    def has_columns_in_multiples_of(self, columns: int) -> bool:
        """Return whether the kernel can use panels with a multiple of `columns` columns each."""
        if self.unit is not None:
            return self.columns % columns == 0 and self.unit % columns == 0
        is_shared = columns <= MAX_SMALL_PANEL_COLUMNS or MIN_PANELS_PER_ROW * columns <= self.columns
        return self.columns % columns == 0 and is_shared


@dataclass(frozen=True, eq=False)
class PanelHook:
    """A generated kernel that another kernel (the body) calls for each panel: a block of columns of its result.

    The panel is still in cache then.

    Attributes:
        group: the elementwise or row-wise ops that the hook computes.
        operands: the operands as views [groups of rows, rows of a group, row blocks, columns of a block]. The rows of
            the body in order are one or more such groups, for example one for each image.
        results: the results as views of this shape, or with one column for a number per row block.
        has_whole_blocks: whether a panel must consist of whole row blocks. Otherwise there is one block per row.
    """

    group: ExpressionGroup
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    has_whole_blocks: bool

    @property
    def shape(self) -> Shape:
        """The shape of the operand views: [groups of rows, rows of a group, row blocks, columns of a block]."""
        return self.operands[0].shape

    @property
    def panel_columns(self) -> int:
        """The number of columns of each panel must be a multiple of this number, for example the size of a head."""
        return self.shape[-1] if self.has_whole_blocks else 1

    def slice_columns(self, first: int, last: int) -> tuple[list[Operand], list[Operand]]:
        """Return the hook's operands and results, sliced to columns `first` to `last` of the body's result."""
        axis, unit = (2, self.shape[-1]) if self.has_whole_blocks else (3, 1)
        start, count = first // unit, (last - first) // unit

        def slice_operand(operand: Operand) -> Operand:
            return operand if operand.shape[axis] == 1 else operand.slice_axis(axis, start, count)

        return [*map(slice_operand, self.operands)], [*map(slice_operand, self.results)]


@dataclass(frozen=True, eq=False)
class KernelBodyWithHooks:
    """A kernel (the body) and the kernels that it calls for each block of columns of its result (hooks), in order.

    `body` has the instruction numbers, ascending; the last instruction computes the result.
    """

    body: tuple[int, ...]
    panels: ResultPanels
    hooks: tuple[PanelHook, ...]

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The instruction numbers of each stage: first of the body, then of each hook."""
        return (self.body, *(hook.group.instruction_numbers for hook in self.hooks))

    @property
    def instruction_numbers(self) -> tuple[int, ...]:
        return tuple(sorted(n for stage in self.stages for n in stage))

    @property
    def panel_columns(self) -> int:
        """The number of columns of each panel must be a multiple of this number, because of all hooks."""
        return math.lcm(*(hook.panel_columns for hook in self.hooks))


def find_hooked_bodies(
    flow: Dataflow,
    groups: Sequence[ExpressionGroup],
    bodies: Iterable[KernelBodyWithHooks],
    trace: Callable[[int], TracedInstruction | None],
) -> list[KernelBodyWithHooks]:
    """Find ops that can run on each panel of another kernel's result, while it is in cache; group them in `flow`.

    A panel is a block of columns. The heavy kernel is called body, and the kernels that it calls are hooks.

    Args:
        flow: The dataflow.
        groups: The groups of declared ops in `flow`. Single declared ops may become hooks, too.
        bodies: The instructions and patterns with kernels that call hooks, without hooks, in the order of the search.
        trace: Returns the traced instruction of a number; None without a generated kernel.
    """
    search = _HookSearch(flow, trace, {n: group for group in groups for n in group.instruction_numbers})
    found: list[KernelBodyWithHooks] = []
    for body in bodies:
        hooked = search.find_hooks(body)
        if hooked.hooks:
            flow.join_groups_unchecked(hooked.instruction_numbers)
            search.numbers_in_hooks.update(hooked.instruction_numbers)
            found.append(hooked)
    return found


@dataclass(frozen=True)
class _HookSearch:
    """The search for groups of ops that a heavy kernel can call for each block of columns of its result."""

    flow: Dataflow
    trace: Callable[[int], TracedInstruction | None]
    group_by_number: Mapping[int, ExpressionGroup]
    numbers_in_hooks: set[int] = field(default_factory=set)

    def find_hooks(self, hooked: KernelBodyWithHooks) -> KernelBodyWithHooks:
        while len(hooked.hooks) < MAX_HOOKS:
            hook = next(
                filter(
                    None, (self._make_hook_from_reader(hooked, n) for n in self._list_nearby_unhooked_readers(hooked))
                ),
                None,
            )
            if hook is None:
                break
            hooked = replace(hooked, hooks=(*hooked.hooks, hook))
        return hooked

    def _list_nearby_unhooked_readers(self, hooked: KernelBodyWithHooks) -> list[int]:
        """List nearby instructions that read a result of the body or of a hook, and are in no hook yet."""
        members = hooked.instruction_numbers
        readers = map(self.flow.reader_table.find_known_readers_of_first_result, members)
        candidates = {n for some in readers for n in some if n <= hooked.body[-1] + MAX_READER_DISTANCE}
        return sorted(candidates - self.numbers_in_hooks.union(members))

    def _make_hook_from_reader(self, hooked: KernelBodyWithHooks, reader: int) -> PanelHook | None:
        """Make a hook that computes the instruction `reader` with its group; None if it cannot run panel by panel."""
        group = self.group_by_number.get(reader)
        try:
            if group is None:
                call = self.trace(reader) if self.flow.can_join_fusion(reader) else None
                if call is None or call.reason_against_fusion:
                    return None
                group = compose_instructions({reader: call}).build_group_for_any_order()
            body = [*map(self.flow.bound_instruction, hooked.body)]
            hook = make_panel_hook(group, hooked.panels.rows, hooked.panels.columns)
            require_supported(
                hooked.panels.has_columns_in_multiples_of(hook.panel_columns), "panels have too few columns"
            )
            _require_no_access_across_panels(body, hooked.hooks, hook)
        except NoKernelError:
            return None
        together = (*hooked.instruction_numbers, *group.instruction_numbers)
        return hook if self.flow.can_join_groups(together) else None


def make_panel_hook(group: ExpressionGroup, rows: int, columns: int) -> PanelHook:
    """Make the hook that computes a group of ops for each panel of a body's result [rows, columns].

    The group must have one element for each element of the result.

    Raises:
        NoKernelError: the group has another size, or no loop over the rows and columns of a panel expresses its
            views.
    """
    length = group.shape[-1] if group.shape else 1
    require_supported(group.size == rows * columns and columns > 1, "it has another size")
    require_supported(not group.boxes, "an operand has elements in a part of it only")
    reads_row = any(s.function in ROW_FUNCTIONS or s.function == "row_count" for s in group.expression.steps)
    if not reads_row and all(result.shape == group.shape for result in group.results):
        views = _reshape_group_views_to_row_blocks(group, rows, (1, columns))
        if views is not None:
            return PanelHook(group, *views, has_whole_blocks=False)
    require_supported(length > 1 and columns % length == 0, "its rows are in several rows of the body")
    views = _reshape_group_views_to_row_blocks(group, rows, (columns // length, length))
    if views is None:
        raise NoKernelError("no loop over panels expresses its views")
    return PanelHook(group, *views, has_whole_blocks=True)


def _reshape_group_views_to_row_blocks(group: ExpressionGroup, rows: int, blocks: Shape) -> Views | None:
    """Reshape a group's operands and results to the axes of `PanelHook.shape`; None if strides cannot do so.

    Args:
        group: The group.
        rows: The rows of the body. A group of rows has all indices of some last axes of the group.
        blocks: The row blocks, and the columns of a block.
    """
    counts = dict.fromkeys([1, *accumulate(group.shape, mul)])
    shapes = ((count, rows // count, *blocks) for count in counts if rows % count == 0)
    return next(filter(None, (_reshape_group_views(group, shape) for shape in shapes)), None)


def _reshape_group_views(group: ExpressionGroup, shape: Shape) -> Views | None:
    """Reshape a group's operands and results to `shape`, without a copy; None if strides cannot express that."""
    operands, results = [], []
    for operand in group.operands:
        strides = find_strides_of_reshape(group.shape, operand.strides, shape)
        if strides is None or strides[-1] not in (0, 1):
            return None
        operands.append(with_shape_and_strides(operand, shape, strides))
    for result in group.results:
        own = shape if result.shape == group.shape else (*shape[:-1], 1)
        strides = find_strides_of_reshape(result.shape, result.strides, own)
        if strides is None or math.prod(own) != result.size:
            return None
        results.append(with_shape_and_strides(result, own, strides))
    return tuple(operands), tuple(results)


def _require_no_access_across_panels(
    body: Sequence[BoundInstruction], hooks: Sequence[PanelHook], hook: PanelHook
) -> None:
    """Require that results for one panel do not depend on other panels; raise `NoKernelError` otherwise.

    No memory that is written for one panel may be used for another.
    """
    stages = [*hooks, hook]
    written = [body[-1].out, *(o for stage in stages for o in stage.results)]
    read = [o for stage in stages for o in stage.operands]
    before: list[MemoryRegion] = [o.region for call in body for o in call.src if o is not None]
    for place in written:
        require_supported(not any(place.region.overlaps(region) for region in before), "the body still reads there")
        for other in (*read, *written):
            require_supported(
                not other.region.overlaps(place.region) or has_same_elements(other, place),
                "a panel reads or overwrites another panel",
            )
