"""Parses the machine code of kernels into basic blocks, with the source line of each memory access.

``nvdisasm -gi`` prints code with line information like this:

    //## File "packed.cu", line 12
            /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
    //## File "packed.cuh", line 7 inlined at "packed.cu", line 13
    //## File "packed.cu", line 13
            /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R12, R8 ;
            /*0030*/              @P0  BRA `(.L_x_1) ;

This is one basic block. It has an access of 16 bytes per warp lane at ``packed.cu:12``, a matrix product, and a
branch at its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..device.disassembly import SOURCE_LINE_PATTERN, compute_access_bits, run_disassembler, split_disassembly_by_kernel

Frames = tuple[str, ...]
"""``file:line`` of an instruction and of the calls into which it was inlined, innermost first."""

_LABEL = re.compile(r"([.$]\S+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\(([.$]\S+)\)")
_PREDICATE_OPERAND = re.compile(r"\s*!?U?P\d\s*,")
_MEMORY_ACCESS = re.compile(r"(LDGSTS|LDG|STG|LDSM|LDS|STS)(\.|$)")
_MATRIX_COUNT = re.compile(r"\.(\d)$")
_NEVER_PREDICATE = "@!PT"
_MATRIX_PRODUCT = re.compile(r"(HGMMA|HMMA|IMMA|QMMA|OMMA)\.(\w+)")
_REGISTER_OPERAND = re.compile(r"\s*R\w+, R\d")
_NO_OPERATION = "NOP"
_REGISTER = re.compile(r"\bR(\d+)\b")
_COPY_WAIT = re.compile(r"DEPBAR\.LE SB0, 0x(\w+)")


@dataclass(frozen=True, slots=True, order=True)
class AccessSourceLocation:
    """The source location of a memory access: its line and the inlined frames around it, and the kind of access.

    The kind is a store or a load, in shared or global memory.
    """

    frames: Frames
    is_shared: bool
    is_store: bool


ASYNC_COPIES = -1
"""A register number that stands for data of asynchronous copies from global to shared memory."""


class LoadedAndUsedRegisters(NamedTuple):
    """The registers that an instruction loads from global memory, and the registers that it reads (uses).

    If a used register is still being loaded, the instruction waits for `wait_share` of the latency of a load.
    """

    loads: frozenset[int]
    uses: frozenset[int]
    wait_share: float = 1.0


WARPGROUP_OPERANDS = AccessSourceLocation(("wgmma.cuh",), is_shared=True, is_store=False)
"""The common location of all operands of warpgroup products: most of them have no line in machine code."""


@dataclass(slots=True)
class BasicBlock:
    """A basic block of machine code: instructions that run one after the other, as counts.

    Attributes:
        instruction_count: Instructions, called functions included.
        access_bytes: Bytes per warp lane, by location.
        products: The number of tensor-core products, by opcode and shape: ``("HMMA", "16816")``, ``("HGMMA",
            "64x256x16")``.
        dependences: Loads from global memory and uses of registers, in order.
        successors: Indices of the blocks that may follow; -1 is the end of the kernel.
    """

    instruction_count: int = 0
    access_bytes: Counter[AccessSourceLocation] = field(default_factory=Counter)
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    dependences: list[LoadedAndUsedRegisters] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


def build_control_flow_graphs(image: bytes) -> Mapping[str, Sequence[BasicBlock]]:
    """Build the control-flow graph of each kernel of a cubin with line information, by mangled name.

    A graph is a list of basic blocks. The first block is the entry of the kernel.
    """
    return {
        name: _build_blocks(list(lines)) for name, lines in split_disassembly_by_kernel(run_disassembler(image, "-gi"))
    }


@dataclass(frozen=True, slots=True)
class _Instruction:
    op: str
    operands: str
    is_conditional: bool
    never_runs: bool
    frames: Frames


def _parse_instructions_and_labels(lines: Sequence[str]) -> tuple[list[_Instruction], dict[str, int]]:
    """Parse the disassembly of a kernel: return its instructions, and for each label the index of its instruction."""
    ops: list[_Instruction] = []
    labels: dict[str, int] = {}
    frames: list[str] = []
    fresh = True
    for line in lines:
        if place := SOURCE_LINE_PATTERN.search(line):
            if fresh:
                frames = []
            frames.append(f"{place[1].rpartition('/')[2]}:{place[2]}")
            fresh = False
        elif label := _LABEL.match(line):
            labels[label[1]] = len(ops)
        elif match := _INSTRUCTION.match(line):
            fresh = True
            when, op, operands = match.groups()
            is_conditional = bool(when) or bool(_PREDICATE_OPERAND.match(operands))
            is_never = bool(when) and when.strip() == _NEVER_PREDICATE
            ops.append(_Instruction(op, operands, is_conditional, is_never, tuple(frames)))
    return ops, labels


def _build_blocks(lines: Sequence[str]) -> list[BasicBlock]:
    ops, labels = _parse_instructions_and_labels(lines)
    called = {labels[to] for op in ops if (to := _find_called_function_label(op))}
    upto = min(called, default=len(ops))  # called functions follow the kernel
    lengths = {start: _count_instructions_to_return(ops, start) for start in called}
    begins = {0, *(at for at in labels.values() if at < upto)}
    begins |= {i + 1 for i, op in enumerate(ops[:upto]) if _is_block_end(op) and i + 1 < upto}
    starts = sorted(begins)
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], upto], strict=True):
        block = BasicBlock()
        for op in ops[start:end]:
            _add_instruction(block, op, lengths, labels)
        block.successors = [number.get(at, -1) for at in _find_successor_instructions(ops[end - 1], end, labels)]
        blocks.append(block)
    return blocks


def _count_instructions_to_return(ops: Sequence[_Instruction], start: int) -> int:
    """Count the instructions of a called function, from index `start` to its return.

    The result is an upper limit for one call, which may skip some instructions.
    """
    return next((i for i in range(start, len(ops)) if ops[i].op.startswith("RET")), len(ops) - 1) - start + 1


def _find_called_function_label(op: _Instruction) -> str:
    """Return the label of the function that an instruction calls; "" for all other instructions.

    A call of a local label counts as a branch, not as a function call.
    """
    to = _TARGET.search(op.operands) if op.op.startswith("CALL") else None
    return to[1] if to and to[1].startswith("$") else ""


def _is_block_end(op: _Instruction) -> bool:
    """Return whether an instruction ends a basic block, because it branches or returns.

    BRA.DIV does not count: it branches only if the lanes of a warp have diverged, and they never have.
    """
    if op.op.startswith("CALL"):
        return not _find_called_function_label(op)
    return op.op.startswith(("BRA", "EXIT", "RET", "BRX", "JMX")) and not op.op.startswith("BRA.DIV")


def _find_successor_instructions(last: _Instruction, end: int, labels: Mapping[str, int]) -> Iterator[int]:
    """Yield the indices of the instructions that may follow a block; -1 is the end of the kernel.

    Args:
        last: The last instruction of the block.
        end: The index after that instruction.
        labels: The instruction index of each label.
    """
    if not _is_block_end(last):
        yield end
        return
    if last.op.startswith(("BRA", "CALL")) and (to := _TARGET.search(last.operands)) and to[1] in labels:
        yield labels[to[1]]
    else:
        yield -1
    if last.is_conditional:
        yield end


def _add_instruction(
    block: BasicBlock, op: _Instruction, lengths: Mapping[int, int], labels: Mapping[str, int]
) -> None:
    if op.op == _NO_OPERATION:
        return
    block.instruction_count += 1
    if to := _find_called_function_label(op):
        block.instruction_count += lengths[labels[to]]
    if product := _MATRIX_PRODUCT.match(op.op):
        block.products[product[1], product[2]] += 1
        if product[1] == "HGMMA":
            block.access_bytes[WARPGROUP_OPERANDS] += _compute_warpgroup_shared_bytes_per_lane(
                product[2], bool(_REGISTER_OPERAND.match(op.operands))
            )
    if step := _find_loaded_and_used_registers(op):
        block.dependences.append(step)
    if (access := _MEMORY_ACCESS.match(op.op)) and not op.never_runs:
        kind = access[1]
        many = _MATRIX_COUNT.search(op.op) if kind == "LDSM" else None
        nbytes = 4 * int(many[1]) if many else compute_access_bits(op.op) // 8
        if kind == "LDGSTS":
            block.access_bytes[AccessSourceLocation(op.frames, is_shared=True, is_store=True)] += nbytes
            block.access_bytes[AccessSourceLocation(op.frames, is_shared=False, is_store=False)] += nbytes
        else:
            block.access_bytes[AccessSourceLocation(op.frames, kind[2] == "S", kind.startswith("ST"))] += nbytes


def _compute_warpgroup_shared_bytes_per_lane(shape: str, in_registers: bool) -> int:
    """Return the bytes per warp lane that a warpgroup product loads from shared memory.

    The four warps of the group share the operands.

    Args:
        shape: The shape of the product, such as ``64x256x16``.
        in_registers: Whether the rows are in registers, so that only the columns are loaded.
    """
    rows, columns, terms = map(int, shape.split("x"))
    return ((0 if in_registers else rows) + columns) * terms * 2 // 128


def _find_loaded_and_used_registers(op: _Instruction) -> LoadedAndUsedRegisters | None:
    """Find the registers that an instruction loads from global memory and uses; return `None` if there are none."""
    if op.op.startswith("LDGSTS"):
        return LoadedAndUsedRegisters(frozenset({ASYNC_COPIES}), frozenset())
    if pending := _COPY_WAIT.match(op.op + op.operands):
        return LoadedAndUsedRegisters(frozenset(), frozenset({ASYNC_COPIES}), 1 / (1 + int(pending[1], 16)))
    names = [int(name) for name in _REGISTER.findall(op.operands)]
    if op.op.startswith("LDG.") and names:
        many = max(compute_access_bits(op.op) // 32, 1)
        return LoadedAndUsedRegisters(frozenset(range(names[0], names[0] + many)), frozenset(names[1:]))
    return LoadedAndUsedRegisters(frozenset(), frozenset(names)) if names else None
