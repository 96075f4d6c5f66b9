"""LoRA: add the product of two narrow matrices to a matrix without computing the product. Source: Hu et al., 2021.

Files and scales follow llama.cpp (``convert_lora_to_gguf.py``, ``llama-adapter.cpp``). Example: instead of
``(W + s * up @ down) @ x`` the graph computes ``W @ x + up @ (s * (down @ x))``.
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
"""Suffix of embedding tables; for these ``lora_a`` has one row per token, and ``lora_b`` is transposed."""
EXPECTED_METADATA = (("general.type", "adapter"), ("adapter.type", "lora"))
ALORA_KEY = "adapter.alora.invocation_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class LoraChange:
    """The LoRA change of a matrix W[..., m, k]: ``W + factor * up @ down``, with up[..., m, r] and down[..., r, k].

    `leaves` are both matrices as the file stores them: down and up, or, for an embedding table, up and transposed down.
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
        """The matrix `down`, transposed to [..., k, r]."""
        return self.leaves[1] if self.is_table else self.oriented_factor(self.leaves[0])

    def oriented_factor(self, factor: Value) -> Value:
        if factor.dtype.is_quantised:
            need = ", ".join(map(str, FLOAT_DTYPES))
            raise self.error(
                f"{factor.node.name} is {factor.dtype}, and the model reads {self.matrix} both ways; need {need}"
            )
        return ops.transpose(factor)

    def emit_matmul_delta(self, node: Node) -> Value:
        """Emit the LoRA delta of a `mul_mat` node: the value to add to its result."""
        short = ops.mul_mat(self.down, node.inputs[1])
        return ops.mul_mat(self.up, ops.scale(short, scale=self.factor))

    def emit_expert_matmul_delta(self, node: Node) -> Value:
        """Emit the LoRA delta of a `mul_mat_id` node with expert matrices: the value to add to its result."""
        _, x, ids = node.inputs
        short = ops.mul_mat_id(self.down, x, ids)
        return ops.mul_mat_id(self.up, ops.scale(short, scale=self.factor), ids)

    def emit_embedding_delta(self, node: Node) -> Value:
        """Emit the LoRA delta of a `get_rows` node of an embedding table: the value to add to its result."""
        short = ops.get_rows(self.up, node.inputs[1])
        return ops.mul_mat(self.down_transposed, ops.scale(short, scale=self.factor))

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}; {LORA_REMEDY}")


OP_CHANGES = MappingProxyType(
    {
        "mul_mat": LoraChange.emit_matmul_delta,
        "mul_mat_id": LoraChange.emit_expert_matmul_delta,
        "get_rows": LoraChange.emit_embedding_delta,
    }
)
"""Methods that emit the LoRA delta, by op; the op reads the changed matrix as its first operand."""


def apply_lora_changes(graph: Graph, changes: Iterable[LoraChange]) -> Graph:
    """Return a graph in which LoRA deltas are added to the results of all ops that read a changed matrix.

    Raises:
        ModelError: An op without a LoRA delta reads a changed matrix, or a graph with logits does not read it.
    """
    changes_by_matrix: dict[str, list[LoraChange]] = {}
    for change in changes:
        changes_by_matrix.setdefault(change.matrix, []).append(change)
    if not changes_by_matrix:
        return graph
    _require_changeable(graph, changes_by_matrix)

    def rule(node: Node) -> Value | None:
        own_changes = changes_by_matrix.get(_get_weight_name_of_first_operand(node), ())
        if node.op not in OP_CHANGES or not own_changes:
            return None
        (y,) = node.results
        for change in own_changes:
            y = ops.add(y, OP_CHANGES[node.op](change, node), name=node.name and f"{node.name}.adapted")
        return y

    return rewrite_graph(graph, rule)


def _get_weight_name_of_first_operand(node: Node) -> str:
    """Return the name of the weight that is the first operand of a node, or an empty string."""
    first = node.src[0] if node.src else None
    return first.node.name if first is not None and first.node.op == "weight" else ""


def _require_changeable(graph: Graph, changes_by_matrix: Mapping[str, Sequence[LoraChange]]) -> None:
    read = {w.node.name for w in graph.weights}
    for name, (change, *_) in changes_by_matrix.items():
        if name not in read and "logits" in graph.outputs:
            raise change.error(f"the model has {name}, but does not read it")
        if (scale := f"{name.removesuffix('.weight')}.scale") in read:
            raise change.error(f"{name} has a scale of its own ({scale}), which no adapter can be meant for")
    for node in graph.nodes:
        for place, source in enumerate(node.src):
            name = source.node.name if source is not None and source.node.op == "weight" else ""
            if name in changes_by_matrix and (node.op not in OP_CHANGES or place):
                raise changes_by_matrix[name][0].error(
                    f"the model reads {name} in {node.op}, where hocket cannot change it"
                )


def read_lora_changes(base: Gguf, number: int, path: Path, scale: float) -> Iterator[LoraChange]:
    """Yield the LoRA change of each matrix in a LoRA file.

    Args:
        base: The model file.
        number: Index of the LoRA file, which makes leaf names unique.
        path: The LoRA file.
        scale: Factor of the changes.

    Raises:
        ModelError: The file is no LoRA adapter, or it belongs to another model.
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
        pair = [gguf.tensors.get(f"{name}.lora_{suffix}") for suffix in "ab"]
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
