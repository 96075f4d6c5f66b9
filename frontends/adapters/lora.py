"""LoRA: a matrix changed by the product of two narrow ones, which is never written.  Hu et al., 2021.

Files and their scales are those of llama.cpp (``convert_lora_to_gguf.py``, ``llama-adapter.cpp``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ... import ops
from ...graph import Graph, Node, Value, weight
from ...graph.dtypes import FLOAT_DTYPES
from ...graph.lazy_dataclass import dataclass
from ...graph.rewrite import rewrite_graph
from ..errors import ModelError
from ..gguf import Gguf, Tensor, open_gguf

LORA_REMEDY = "use an adapter that convert_lora_to_gguf.py made for this model"
TOKEN_TABLE = "token_embd.weight"
"""Of tables of this name files have the first factor, a row for each token, as ``lora_a``, and the other transposed."""
EXPECTED_METADATA = (("general.type", "adapter"), ("adapter.type", "lora"))
ALORA_KEY = "adapter.alora.invocation_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class LoraChange:
    """What is added to a matrix W[..., m, k]: ``factor * up @ down``, with ``up`` [..., m, r], ``down`` [..., r, k].

    ``leaves`` are the factors as the file at ``path`` has them: down and up, or, of tables of embeddings, up and down
    transposed.
    """

    path: Path
    matrix: str
    factor: float
    leaves: tuple[Value, Value]
    tensors: tuple[Tensor, Tensor]

    @property
    def is_table(self) -> bool:
        return self.matrix.endswith(TOKEN_TABLE)

    @property
    def up(self) -> Value:
        return self.leaves[0] if self.is_table else self.leaves[1]

    @property
    def down(self) -> Value:
        return self.oriented_factor(self.leaves[1]) if self.is_table else self.leaves[0]

    @property
    def down_transposed(self) -> Value:
        """``down`` transposed."""
        return self.leaves[1] if self.is_table else self.oriented_factor(self.leaves[0])

    def oriented_factor(self, factor: Value) -> Value:
        if factor.dtype.is_quantised:
            need = ", ".join(map(str, FLOAT_DTYPES))
            raise self.error(
                f"{factor.node.name} is {factor.dtype}, and the model reads {self.matrix} both ways; need {need}"
            )
        return ops.transpose(factor)

    def matrix_product(self, node: Node) -> Value:
        """What is added to a product with the matrix."""
        short = ops.mul_mat(self.down, node.inputs[1])
        return ops.mul_mat(self.up, ops.scale(short, scale=self.factor))

    def expert_product(self, node: Node) -> Value:
        """What is added to products with matrices of chosen experts."""
        _, x, ids = node.inputs
        short = ops.mul_mat_id(self.down, x, ids)
        return ops.mul_mat_id(self.up, ops.scale(short, scale=self.factor), ids)

    def table_rows(self, node: Node) -> Value:
        """What is added to rows of the matrix."""
        short = ops.get_rows(self.up, node.inputs[1])
        return ops.mul_mat(self.down_transposed, ops.scale(short, scale=self.factor))

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}; {LORA_REMEDY}")


OP_CHANGES = MappingProxyType(
    {"mul_mat": LoraChange.matrix_product, "mul_mat_id": LoraChange.expert_product, "get_rows": LoraChange.table_rows}
)
"""The ops that may read a changed matrix as their first operand, and what is then added to their result."""


def apply_changes(graph: Graph, changes: Iterable[LoraChange]) -> Graph:
    """The graph with every product of a changed matrix followed by what its changes add.

    Raises `ModelError` for a matrix that is read otherwise, or that a graph with logits does not read at all.
    """
    of: dict[str, list[LoraChange]] = {}
    for change in changes:
        of.setdefault(change.matrix, []).append(change)
    if not of:
        return graph
    _require_changeable(graph, of)

    def rule(node: Node) -> Value | None:
        mine = of.get(_weight_name(node), ())
        if node.op not in OP_CHANGES or not mine:
            return None
        (y,) = node.results
        for change in mine:
            y = ops.add(y, OP_CHANGES[node.op](change, node), name=node.name and f"{node.name}.adapted")
        return y

    return rewrite_graph(graph, rule)


def _weight_name(node: Node) -> str:
    """The weight that a node reads as its first operand, if it does."""
    first = node.src[0] if node.src else None
    return first.node.name if first is not None and first.node.op == "weight" else ""


def _require_changeable(graph: Graph, of: Mapping[str, Sequence[LoraChange]]) -> None:
    read = {w.node.name for w in graph.weights}
    for name, (change, *_) in of.items():
        if name not in read and "logits" in graph.outputs:
            raise change.error(f"the model has {name}, but does not read it")
        if (scale := f"{name.removesuffix('.weight')}.scale") in read:
            raise change.error(f"{name} has a scale of its own ({scale}), which no adapter can be meant for")
    for node in graph.nodes:
        for place, source in enumerate(node.src):
            name = source.node.name if source is not None and source.node.op == "weight" else ""
            if name in of and (node.op not in OP_CHANGES or place):
                raise of[name][0].error(f"the model reads {name} in {node.op}, where hocket cannot change it")


def read_lora(base: Gguf, number: int, path: Path, scale: float) -> Iterator[LoraChange]:
    """The changes in a file, which counts ``scale`` times; ``number`` tells its leaves from those of other files.

    Raises `ModelError` for a file that is no adapter, or for another model than ``base``.
    """
    gguf = open_gguf(path)

    def error(problem: str) -> ModelError:
        return ModelError(f"{path}: {problem}; {LORA_REMEDY}")

    for key, need in (*EXPECTED_METADATA, ("general.architecture", base.require("general.architecture", str))):
        if (got := gguf.get(key, str, "")) != need:
            raise error(f"{key} is {got!r:.60}; need {need!r}")
    if ALORA_KEY in gguf.metadata:
        raise error("the adapter begins to count where certain tokens are read (aLoRA), which hocket cannot do")
    alpha = gguf.get("adapter.lora.alpha", float, 0.0)
    if not math.isfinite(alpha):
        raise error(f"adapter.lora.alpha is {alpha}; need a finite number")
    names = dict.fromkeys(name.removesuffix(".lora_a").removesuffix(".lora_b") for name in gguf.tensors)
    if not names:
        raise error("has no tensors")
    for name in names:
        pair = [gguf.tensors.get(f"{name}.lora_{letter}") for letter in "ab"]
        if name not in base.tensors:
            raise error(f"tensor {name!r:.80} changes nothing in {base.path}")
        first, second = pair
        if first is None or second is None:
            raise error(f"of the change of {name} there is {[t.name for t in pair if t]}; need .lora_a and .lora_b")
        shape = base.tensors[name].shape
        *lead, m, k = shape if len(shape) > 1 else (0, 0)
        rank = first.shape[-1 if name.endswith(TOKEN_TABLE) else -2] if len(first.shape) > 1 else 0
        factors = ((m, rank), (k, rank)) if name.endswith(TOKEN_TABLE) else ((*lead, rank, k), (*lead, m, rank))
        if not rank or (first.shape, second.shape) != factors:
            raise error(
                f"{name} has shape {list(shape)}, its .lora_a {list(first.shape)} and .lora_b {list(second.shape)}, "
                "whose product is no change of it"
            )
        for tensor in (first, second):
            if not (tensor.dtype in FLOAT_DTYPES or tensor.dtype.is_quantised):
                raise error(
                    f"tensor {tensor.name} is {tensor.dtype}; need {', '.join(map(str, FLOAT_DTYPES))} or blocks"
                )
        leaves = (
            weight(f"{first.name}.{number}", first.shape, first.dtype),
            weight(f"{second.name}.{number}", second.shape, second.dtype),
        )
        yield LoraChange(path, name, scale * alpha / rank if alpha else scale, leaves, (first, second))
