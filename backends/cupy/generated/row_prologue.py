"""Prologues of kernels that read rows of x: the text that computes x from the operands of the ops that produce it.

The ops of a prologue are declared in the scalar language. A kernel computes each element of x that it reads, so that
these ops have no launch and x is not written. One block writes the values that other instructions read (tees).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ....ops.declaration.expression import Expression
from ....ops.declaration.scalar import ROW_FUNCTIONS
from ....ops.registry import REGISTRY
from ...fusion.dataflow import Dataflow, require_no_alias
from ...fusion.expression_groups import ExpressionGroup, GroupComposition, compose_instructions
from ...fusion.operand_views import find_strides_of_reshape
from ...fusion.operands import NoKernelError, Operand, require_supported
from ...fusion.traced_instruction import TracedInstruction
from ...kernel_tables import find_op_package_binding
from ..binding.launch_builder import LaunchWord
from .expression_text import (
    REDUCTION_TEXTS,
    has_cuda_text_for_all_functions,
    list_argument_steps,
    write_number_statements,
    write_step_statement,
)

BLOCK_COLUMNS = 32
"""Columns that four lanes bring together."""
HEAD_SIZES = (32, 64, 128, 256)
"""Sizes of rows within x that the lanes of one warp reduce."""
MAX_PROLOGUE_ELEMENTS = 65536
"""Maximum elements that each block computes: rows of x times their columns."""
MAX_PROLOGUE_INSTRUCTIONS = 8
PLAIN_PROLOGUE, LANES_HEADER = "plain_prologue.cuh", "lanes.cuh"
"""The header of kernels that read x as it is, and the header of generated prologues."""
BLOCK_SUM_FLOATS = 32
"""Floats of shared memory that a sum over a block takes."""
PLAIN_PROLOGUE_WORDS: Sequence[LaunchWord] = (0,)


@dataclass(frozen=True)
class RowPrologue:
    """Generated CUDA code at the start of a matmul kernel, which computes the activation rows x that it multiplies.

    So the ops that produce x, such as a norm, need no launch of their own.

    Attributes:
        instruction_numbers: the instructions, ascending.
        text: the CUDA struct ``Prologue``.
        words: the fields of its struct ``Words``.
        numbers_per_row: numbers that a block keeps for each whole row.
        is_per_head: whether warps reduce parts of a row; a stretch of columns has whole parts.
        operands: operands that the kernel reads.
        tees: results that the kernel also writes, because other instructions read them.
    """

    instruction_numbers: tuple[int, ...]
    text: str
    words: tuple[LaunchWord, ...]
    numbers_per_row: int
    is_per_head: bool
    operands: tuple[Operand, ...]
    tees: tuple[Operand, ...]


def find_row_prologue(flow: Dataflow, readers: Sequence[int], rows: int, columns: int) -> RowPrologue:
    """Find the ops that compute the activation rows of some matmuls, and make them a prologue of the matmul kernel.

    The ops must be declared in the scalar language, from which CUDA code can be generated.

    Args:
        flow: The dataflow.
        readers: Numbers of the matmuls. All have the same operand 1, the rows.
        rows: Rows of the operand.
        columns: Columns of the operand.

    Raises:
        NoKernelError: No declared op computes it, or the values do not lie as a prologue reads them.
    """
    last = flow.require_producer(readers[0], 1)
    for number in readers:
        require_supported(flow.require_producer(number, 1) == last, "instructions read other values in the same memory")
        require_supported(flow.is_whole_result_operand_of(last, number, 1), "a part of a result is read")
    require_supported(rows * columns <= MAX_PROLOGUE_ELEMENTS, "each block would compute too many elements")
    first = _trace_instruction(flow, last)
    if first is None:
        raise NoKernelError("no declared op makes the rows")
    composition = compose_instructions({last: first})
    require_supported(_has_cuda_text(composition), "an operand has no text")
    while (larger := _add_last_producer_to_prologue(flow, composition, readers)) is not None:
        composition = larger
    all_readers = first.readers
    is_written = all_readers is None or not all_readers <= {*readers}
    stored = [n for n in composition.list_numbers_read_outside() if n != last]
    group = composition.build_group_with_results([*stored, last])
    return _build_prologue(group, [*stored, *([last] if is_written else [])], (rows, columns))


def _add_last_producer_to_prologue(
    flow: Dataflow, composition: GroupComposition, readers: Sequence[int]
) -> GroupComposition | None:
    """Add the last producer of an operand, in program order, to a prologue; None if all producers stay outside."""
    if len(composition.calls) >= MAX_PROLOGUE_INSTRUCTIONS:
        return None
    producers = {p for call in composition.calls.values() for p in call.producers if p is not None}
    for number in sorted(producers - composition.calls.keys(), reverse=True):
        call = _trace_instruction(flow, number)
        if call is None or not flow.can_group([*composition.calls, number, *readers]):
            continue
        try:
            larger = composition.join({number: call})
        except NoKernelError:
            continue
        if _has_cuda_text(larger):
            return larger
    return None


def _has_cuda_text(composition: GroupComposition) -> bool:
    """Return whether CUDA code can be generated for all steps of a prologue.

    Numbers per row, and operands that are read only in a part of the rows, have no CUDA code.
    """
    return has_cuda_text_for_all_functions(Expression(tuple(composition.steps)))


def _trace_instruction(flow: Dataflow, number: int) -> TracedInstruction | None:
    """Trace an instruction to its expression; None if it is in a group, or if a prologue cannot compute its op."""
    call = flow.bound_instruction(number)
    declared = REGISTRY[call.op].expression if call.op in REGISTRY else None
    if (
        declared is None
        or declared.arrange
        or declared.place
        or len(call.dst) != 1
        or not flow.can_join_fusion(number)
        or find_op_package_binding(call.op, "cuda") is not None
    ):
        return None
    operands = [call.optional_operand(index) for index in range(len(declared.operand_names))]
    expression = declared.trace([o is not None for o in operands], call.attrs)
    if not has_cuda_text_for_all_functions(expression) or expression.reduces_row:
        return None
    if expression.depends_on_row_reduction_or_length and not (operands[0] and operands[0].shape):
        return None
    producers = [None if o is None else flow.find_last_writer(o.region, number) for o in operands]
    readers = flow.find_readers(number)
    traced = TracedInstruction(
        expression, operands, producers, call.attrs, call.out, None if readers is None else frozenset(readers)
    )
    return None if traced.reason_against_fusion else traced


def _build_prologue(group: ExpressionGroup, stored: Collection[int], size: tuple[int, int]) -> RowPrologue:
    """Build the prologue that computes a group of ops; its last result is x [rows, columns].

    The results of the instructions `stored` are also written to memory.
    """
    rows, columns = size
    head, expression = group.shape[-1], group.expression
    require_supported(
        group.size == rows * columns and columns % head == 0 and head % BLOCK_COLUMNS == 0, "rows have other columns"
    )
    is_per_head = expression.depends_on_row_reduction_or_length and head != columns
    require_supported(not is_per_head or head in HEAD_SIZES, f"heads of {head} columns are not reduced by a warp")
    tees = group.results[: len(stored)]
    for tee in tees:
        require_supported(tee.shape == group.shape, "a number of each row is read elsewhere")
        require_no_alias(tee, group.operands)
    views = [_view_as_rows_and_heads(o, group.shape, (rows, columns // head, head)) for o in (*group.operands, *tees)]
    arguments = list_argument_steps(expression)
    numbers = expression.compute_number_steps(group.attributes)
    words: list[LaunchWord] = [word for o, (row, column) in views for word in (o, row, column)]
    text = write_prologue_struct(
        expression, len(group.operands), len(tees), head if head != columns else 0, tuple(arguments)
    )
    return RowPrologue(
        group.instruction_numbers,
        text,
        (*words, *(float(numbers[n]) for n in arguments)),
        0 if is_per_head else sum(s.function in ROW_FUNCTIONS for s in expression.steps),
        is_per_head,
        group.operands,
        tees,
    )


def _view_as_rows_and_heads(
    operand: Operand, shape: tuple[int, ...], view: tuple[int, int, int]
) -> tuple[Operand, tuple[int, int]]:
    """Return an operand, and its strides between rows and between heads; its columns must be adjacent and aligned."""
    strides = find_strides_of_reshape(shape, operand.strides, view)
    if strides is None:
        raise NoKernelError("an operand has no view as rows and heads")
    row, head, column = strides
    is_aligned = operand.address % 16 == 0 and row % 4 == 0 and head % 4 == 0
    require_supported(column == 1 and is_aligned and operand.is_float, "rows of an operand are not aligned")
    return operand, (row, head)


# ------------------------------------------------------------------------------------------------------------- text


@cache
def write_prologue_struct(
    expression: Expression, operand_count: int, tee_count: int, head: int, arguments: tuple[int, ...]
) -> str:
    """Write the CUDA struct ``Prologue``, which computes an expression for the rows of x.

    Args:
        expression: The expression. Its last result is x. The first results are those to write to memory (tees), or x
            too.
        operand_count: The number of operands.
        tee_count: The number of results that are written.
        head: Columns of a part of a row over which the expression is evaluated; 0 for whole rows.
        arguments: The steps that are arguments.
    """
    reductions = [n for n, s in enumerate(expression.steps) if s.function in ROW_FUNCTIONS]
    number_count = 0 if head else len(reductions)
    passes = _write_row_reduction(expression, reductions, arguments) if number_count else ()
    fields = [
        *(f"const float *p{i}; i64 row{i}, head{i};" for i in range(operand_count)),
        *(f"float *p{i}; i64 row{i}, head{i};" for i in range(operand_count, operand_count + tee_count)),
        *(f"double n{n};" for n in arguments),
    ]
    lines = [
        "// Generated: computes rows of x.",
        "struct Prologue {",
        "    struct Words {",
        *(f"        {field}" for field in fields),
        "    };",
        f"    static constexpr bool COMPUTES = true;\n    static constexpr int NUMBERS = {number_count};",
        "    // Numbers of a whole row, by all threads of a block; `numbers` and `room` are shared.",
        "    static __device__ __forceinline__ void reduce(const Words &a, i64 token, int columns, float *numbers, "
        "float *room) {",
        *(f"        {line}" for line in passes),
        "    }",
        "    // As `bring`, of row `token`.  Who `writes` has the results that others read.",
        "    static __device__ __forceinline__ void bring(const Words &a, const float *numbers, float4 (&x)[2], "
        "i64 token, int columns, int block, int blocks, bool writes) {",
        *(
            f"        {line}"
            for line in _write_element_computation(expression, reductions, operand_count, tee_count, head, arguments)
        ),
        "    }",
        "};",
        "",
    ]
    return "\n".join(lines)


def _write_row_reduction(expression: Expression, reductions: Sequence[int], arguments: Sequence[int]) -> Iterator[str]:
    """Write the CUDA loops over a whole row, one loop for each reduction of an expression.

    Sums have the order of the kernels of rows: thread t has columns t, t + threads, ..., where the number of threads
    depends on the columns only. So a launch of more threads has the same bits.
    """
    yield "const int threads = min(512, max(32, (columns + 127) / 128 * 32));"
    yield from write_number_statements(expression, arguments)
    for number in range(reductions[-1] + 1):
        step = expression.steps[number]
        if number in reductions:
            update, join = REDUCTION_TEXTS[step.function]
            yield f"float s{number};"
            yield "{"
            yield "    float sum = 0.0f;"
            yield "    if ((int)threadIdx.x < threads)"
            yield "#pragma unroll 4"
            yield "        for (int c = threadIdx.x; c < columns; c += threads) {"
            for element in sorted(_find_element_steps(expression, step.sources)):
                source = expression.steps[element]
                at = f"a.p{source.value}[token * a.row{source.value} + c]"
                text = (
                    f"const float s{element} = {at};"
                    if source.function == "operand"
                    else write_step_statement(element, source)
                )
                yield f"            {text}"
            yield f"            sum = {update.format(*(f's{s}' for s in step.sources))};"
            yield "        }"
            yield f"    s{number} = block_{join}(sum, room);"
            yield "}"
            yield f"if (threadIdx.x == 0) numbers[{reductions.index(number)}] = s{number};"
        elif _is_one_number_per_row(expression, number) and number < reductions[-1]:
            yield _write_row_number(expression, number)


def _is_one_number_per_row(expression: Expression, number: int) -> bool:
    """Return whether a step has one number for each row, and is not one number for the whole call."""
    return number in expression.steps_with_one_number_per_row and number not in expression.steps_without_operands


def _write_row_number(expression: Expression, number: int) -> str:
    step = expression.steps[number]
    return (
        f"const float s{number} = (float)columns;"
        if step.function == "row_count"
        else write_step_statement(number, step)
    )


def _find_element_steps(expression: Expression, numbers: Sequence[int]) -> set[int]:
    return set().union(*(expression.find_element_steps(n) for n in numbers))


def _write_element_computation(
    expression: Expression,
    reductions: Sequence[int],
    operand_count: int,
    tee_count: int,
    head: int,
    arguments: Sequence[int],
) -> Iterator[str]:
    """Write the CUDA code that computes the eight elements of a lane, in two runs of four columns.

    They begin at columns ``4 t`` and ``4 t + 16`` of the lane's block.
    """
    yield "const int mine = block + threadIdx.x % 32 / 4, first = 32 * mine + 4 * (threadIdx.x % 4);"
    yield "const bool is_inside = mine < blocks;"
    if head:
        yield f"columns = {head};"
        yield f"const i64 part = first / {head}, within = first % {head};"
    else:
        yield "const i64 part = 0, within = first;"
    yield from write_number_statements(expression, arguments)
    for operand in range(operand_count):
        yield f"float v{operand}[8] = {{}};"
    for operand in range(operand_count):
        place = f"a.p{operand} + token * a.row{operand} + part * a.head{operand} + within"
        yield f"if (is_inside) load_lane(v{operand}, {place});"
    for number, step in enumerate(expression.steps):
        if number in reductions and head:
            update, join = REDUCTION_TEXTS[step.function]
            yield f"float s{number};"
            yield "{"
            yield "    float sum = 0.0f;"
            yield "#pragma unroll"
            yield "    for (int e = 0; e < 8; e++) {"
            yield from _write_elements(expression, step.sources)
            yield f"        sum = {update.format(*(f's{s}' for s in step.sources))};"
            yield "    }"
            yield f"    for (int by = 1; by < {head // 8}; by *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);"
            yield f"    s{number} = sum;"
            yield "}"
            assert join == "sum"
        elif number in reductions:
            yield f"const float s{number} = numbers[{reductions.index(number)}];"
        elif _is_one_number_per_row(expression, number):
            yield _write_row_number(expression, number)
    results = expression.results
    for tee in range(tee_count):
        yield f"float made{tee}[8];"
    yield "float result[8];"
    yield "#pragma unroll"
    yield "for (int e = 0; e < 8; e++) {"
    yield from _write_elements(expression, results)
    for tee in range(tee_count):
        yield f"    made{tee}[e] = s{results[tee]};"
    yield f"    result[e] = is_inside ? s{results[-1]} : 0.0f;"
    yield "}"
    yield "x[0] = make_float4(result[0], result[1], result[2], result[3]);"
    yield "x[1] = make_float4(result[4], result[5], result[6], result[7]);"
    for tee in range(tee_count):
        position = operand_count + tee
        place = f"a.p{position} + token * a.row{position} + part * a.head{position} + within"
        yield f"if (writes && is_inside) store_lane({place}, made{tee});"


def _write_elements(expression: Expression, numbers: Sequence[int]) -> Iterator[str]:
    for element in sorted(_find_element_steps(expression, numbers)):
        source = expression.steps[element]
        text = f"const float s{element} = v{source.value}[e];"
        yield f"    {text if source.function == 'operand' else write_step_statement(element, source)}"
