"""Adapters, which change a model without changing its file: LoRA adapters and control vectors.

Both become graph nodes that read tensors of other files, so the planner shards them like all other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ...graph import Graph, Value
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import (
    FILE_KIND,
    FINITE,
    NONE,
    integer_between,
    list_of,
    pair_of,
    validate_arguments,
)
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from .control import BlockControlVector, read_control_directions
from .lora import LoraChange, apply_lora_changes, read_lora_changes

FILES_KIND = list_of(FILE_KIND | pair_of(FILE_KIND, FINITE), "a sequence of files, or of pairs of a file and its scale")
ScaledFile = str | Path | tuple[str | Path, float]
"""A file with scale 1, or a file and its scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters of one model: LoRA changes of matrices, and control directions after blocks."""

    changes: tuple[LoraChange, ...] = ()
    directions: tuple[BlockControlVector, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The adapter tensors that graphs read as weights, by weight name."""
        factors = {
            leaf.node.name: tensor for c in self.changes for leaf, tensor in zip(c.leaves, c.tensors, strict=True)
        }
        return factors | {d.leaf.node.name: d.tensor for d in self.directions}

    @property
    def lora_and_control_scales(self) -> tuple[float, ...]:
        """The scales of all LoRA changes and control directions.

        Two models with the same adapter tensors but other scales are different models; the scales tell them apart.
        """
        return (*(c.factor for c in self.changes), *(d.scale for d in self.directions))

    def add_lora_changes(self, graph: Graph) -> Graph:
        """Return the graph of a step with the LoRA changes added.

        Raises:
            ModelError: As for `lora.apply_lora_changes`.
        """
        return apply_lora_changes(graph, self.changes)

    def add_control_directions(self, block: int, x: Value) -> Value:
        """Add the control directions of a block to the residual f32[..., width] after the block."""
        for direction in self.directions:
            x = direction(x) if direction.block == block else x
        return x


NO_ADAPTERS = Adapters()


@validate_arguments(
    ModelError,
    lora=FILES_KIND,
    control_vectors=FILES_KIND,
    control_layers=NONE | pair_of(integer_between(0), integer_between(0)),
)
def read_adapters(
    base: Gguf,
    width: int,
    blocks: int,
    *,
    lora: Iterable[ScaledFile] = (),
    control_vectors: Iterable[ScaledFile] = (),
    control_layers: tuple[int, int] | None = None,
) -> Adapters:
    """Read the LoRA adapters and control vectors of a model from files.

    Args:
        base: The model file.
        width: Entries of the residual.
        blocks: Number of blocks of the model.
        lora: LoRA files, each with an optional scale.
        control_vectors: Control vector files, each with an optional scale.
        control_layers: First and last block with control directions; None selects all blocks except block 0.

    Raises:
        ModelError: A file is no adapter for this model, or the range of blocks is wrong.
    """
    vectors = [with_scale(one) for one in control_vectors]
    first, last = control_layers or (1, blocks - 1)
    if control_layers and not vectors:
        raise ModelError(f"control_layers=({first}, {last}) is for control vectors; give control_vectors=FILE")
    if not 1 <= first <= last < blocks and vectors:
        raise ModelError(f"control_layers=({first}, {last}): need two of 1 to {blocks - 1} in order")
    return Adapters(
        tuple(c for no, one in enumerate(lora) for c in read_lora_changes(base, no, *with_scale(one))),
        tuple(
            d for no, one in enumerate(vectors) for d in read_control_directions(no, *one, width, blocks, (first, last))
        ),
    )


def with_scale(one: ScaledFile) -> tuple[Path, float]:
    path, scale = (one, 1.0) if isinstance(one, str | Path) else one
    return Path(path), float(scale)
