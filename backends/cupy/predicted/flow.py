"""How control flows through the machine code of a kernel, and which line each access of memory is from.

Of code with lines ``nvdisasm -gi`` shows

    //## File "packed.cu", line 12
            /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
    //## File "packed.cuh", line 7 inlined at "packed.cu", line 13
    //## File "packed.cu", line 13
            /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R12, R8 ;
            /*0030*/              @P0  BRA `(.L_x_1) ;

which is a block that ends with a branch, has an access of 16 bytes a lane at ``packed.cu:12`` and a product.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..device.disassembly import LINE, bits_of, kernels_in, text_of

Frames = tuple[str, ...]
"""``file:line`` in the sources of kernels, the innermost first, of code that is inlined."""

_LABEL = re.compile(r"([.$]\S+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\(([.$]\S+)\)")
_CONDITION = re.compile(r"\s*!?U?P\d\s*,")
_ACCESS = re.compile(r"(LDGSTS|LDG|STG|LDSM|LDS|STS)(\.|$)")
_MATRICES = re.compile(r"\.(\d)$")
_NEVER = "@!PT"
_PRODUCT = re.compile(r"(HGMMA|HMMA|IMMA|QMMA|OMMA)\.(\w+)")
_HELD = re.compile(r"\s*R\w+, R\d")
_NO_ISSUE = "NOP"
_REGISTER = re.compile(r"\bR(\d+)\b")
_PENDING = re.compile(r"DEPBAR\.LE SB0, 0x(\w+)")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A kind of access at a line: of shared memory or of global, a store or a load."""

    frames: Frames
    is_shared: bool
    is_store: bool


COPIES = -1
"""In place of a register, what was copied from global memory to shared."""


class Step(NamedTuple):
    """Registers that an instruction loads from global memory, and those that it uses; it waits for `waits` of a load if
    it uses one that is under way."""

    loads: frozenset[int]
    uses: frozenset[int]
    waits: float = 1.0


OF_WARPGROUPS = Place(("wgmma.cuh",), is_shared=True, is_store=False)
"""What products of warpgroups read, all of them: machine code has no line of most."""


@dataclass(slots=True)
class Block:
    """Instructions that run one after the other: how many, called functions included; bytes a lane by place; products
    of tensor cores by kind and shape, as ``("HMMA", "16816")`` or, of a warpgroup, ``("HGMMA", "64x256x16")``; steps
    that load from global memory or use registers; and the blocks that may follow, of which -1 is the end."""

    instructions: int = 0
    accesses: Counter[Place] = field(default_factory=Counter)
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


def flows(image: bytes) -> Mapping[str, Sequence[Block]]:
    """The blocks of each kernel of a cubin with lines, by its name there; the first is where it begins."""
    return {name: _blocks(list(lines)) for name, lines in kernels_in(text_of(image, "-gi"))}


@dataclass(frozen=True, slots=True)
class _Instruction:
    op: str
    operands: str
    is_conditional: bool
    is_never: bool
    frames: Frames


def _instructions(lines: Sequence[str]) -> tuple[list[_Instruction], dict[str, int]]:
    """All of a kernel, and the numbers of those that labels stand before."""
    ops: list[_Instruction] = []
    labels: dict[str, int] = {}
    frames: list[str] = []
    fresh = True
    for line in lines:
        if place := LINE.search(line):
            if fresh:
                frames = []
            frames.append(f"{place[1].rpartition('/')[2]}:{place[2]}")
            fresh = False
        elif label := _LABEL.match(line):
            labels[label[1]] = len(ops)
        elif shown := _INSTRUCTION.match(line):
            fresh = True
            when, op, operands = shown.groups()
            is_conditional = bool(when) or bool(_CONDITION.match(operands))
            is_never = bool(when) and when.strip() == _NEVER
            ops.append(_Instruction(op, operands, is_conditional, is_never, tuple(frames)))
    return ops, labels


def _blocks(lines: Sequence[str]) -> list[Block]:
    ops, labels = _instructions(lines)
    called = {labels[to] for op in ops if (to := _called(op))}
    upto = min(called, default=len(ops))  # functions that are called stand behind the kernel
    lengths = {start: _length(ops, start) for start in called}
    begins = {0, *(at for at in labels.values() if at < upto)}
    begins |= {i + 1 for i, op in enumerate(ops[:upto]) if _leaves(op) and i + 1 < upto}
    starts = sorted(begins)
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], upto], strict=True):
        block = Block()
        for op in ops[start:end]:
            _add(block, op, lengths, labels)
        block.after = [number.get(at, -1) for at in _next(ops[end - 1], end, labels)]
        blocks.append(block)
    return blocks


def _length(ops: Sequence[_Instruction], start: int) -> int:
    """Instructions of a function, all of them, which is more than one call runs."""
    return next((i for i in range(start, len(ops)) if ops[i].op.startswith("RET")), len(ops) - 1) - start + 1


def _called(op: _Instruction) -> str:
    """The function that an instruction calls; a call of a label never returns, it is a branch."""
    to = _TARGET.search(op.operands) if op.op.startswith("CALL") else None
    return to[1] if to and to[1].startswith("$") else ""


def _leaves(op: _Instruction) -> bool:
    """Whether it ends a block; BRA.DIV goes to code for warps that are not together, which they always are."""
    if op.op.startswith("CALL"):
        return not _called(op)
    return op.op.startswith(("BRA", "EXIT", "RET", "BRX", "JMX")) and not op.op.startswith("BRA.DIV")


def _next(last: _Instruction, end: int, labels: Mapping[str, int]) -> Iterator[int]:
    """Numbers of the instructions that may follow; -1 is the end."""
    if not _leaves(last):
        yield end
        return
    if last.op.startswith(("BRA", "CALL")) and (to := _TARGET.search(last.operands)) and to[1] in labels:
        yield labels[to[1]]
    else:
        yield -1
    if last.is_conditional:
        yield end


def _add(block: Block, op: _Instruction, lengths: Mapping[int, int], labels: Mapping[str, int]) -> None:
    if op.op == _NO_ISSUE:
        return
    block.instructions += 1
    if to := _called(op):
        block.instructions += lengths[labels[to]]
    if product := _PRODUCT.match(op.op):
        block.products[product[1], product[2]] += 1
        if product[1] == "HGMMA":
            block.accesses[OF_WARPGROUPS] += _operands(product[2], bool(_HELD.match(op.operands)))
    if step := _step(op):
        block.steps.append(step)
    if (access := _ACCESS.match(op.op)) and not op.is_never:
        kind = access[1]
        many = _MATRICES.search(op.op) if kind == "LDSM" else None
        nbytes = 4 * int(many[1]) if many else bits_of(op.op) // 8
        if kind == "LDGSTS":
            block.accesses[Place(op.frames, is_shared=True, is_store=True)] += nbytes
            block.accesses[Place(op.frames, is_shared=False, is_store=False)] += nbytes
        else:
            block.accesses[Place(op.frames, kind[2] == "S", kind.startswith("ST"))] += nbytes


def _operands(shape: str, is_held: bool) -> int:
    """Bytes a lane of the operands of a product such as 64x256x16, which the four warps of a group bring together from
    shared memory; rows that are held are in registers."""
    rows, columns, terms = map(int, shape.split("x"))
    return ((0 if is_held else rows) + columns) * terms * 2 // 128


def _step(op: _Instruction) -> Step | None:
    """What an instruction loads and uses, unless it does neither."""
    if op.op.startswith("LDGSTS"):
        return Step(frozenset({COPIES}), frozenset())
    if pending := _PENDING.match(op.op + op.operands):
        return Step(frozenset(), frozenset({COPIES}), 1 / (1 + int(pending[1], 16)))
    names = [int(name) for name in _REGISTER.findall(op.operands)]
    if op.op.startswith("LDG.") and names:
        many = max(bits_of(op.op) // 32, 1)
        return Step(frozenset(range(names[0], names[0] + many)), frozenset(names[1:]))
    return Step(frozenset(), frozenset(names)) if names else None
