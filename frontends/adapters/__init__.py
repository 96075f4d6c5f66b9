"""What changes a model without changing its file: LoRA adapters, and control vectors.

Both are nodes of the graph that read tensors of other files, so the planner deals them out like all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ...graph import Graph, Value
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import FINITE, NONE, instance_of, integer_between, list_of, pair_of, validate_arguments
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from .control import ControlDirection, read_directions
from .lora import LoraChange, apply_changes, read_lora

FILE_KIND = instance_of(str, Path)
FILES_KIND = list_of(FILE_KIND | pair_of(FILE_KIND, FINITE), "a sequence of files, or of pairs of a file and its scale")
ScaledFile = str | Path | tuple[str | Path, float]
"""A file, which counts once, or a file and how often it counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The LoRA adapters and control vectors of a model: changes of matrices, and directions behind blocks."""

    changes: tuple[LoraChange, ...] = ()
    directions: tuple[ControlDirection, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What the leaves hold that graphs have because of the adapters, by the names of the leaves."""
        factors = {
            leaf.node.name: tensor for c in self.changes for leaf, tensor in zip(c.leaves, c.tensors, strict=True)
        }
        return factors | {d.leaf.node.name: d.tensor for d in self.directions}

    @property
    def scales(self) -> tuple[float, ...]:
        """By how much each tensor counts, which tells models apart that have the same tensors."""
        return (*(c.factor for c in self.changes), *(d.scale for d in self.directions))

    def apply_to_graph(self, graph: Graph) -> Graph:
        """The graph of a step, in which products with changed matrices are changed.  Raises `ModelError` as
        `lora.changed` does."""
        return apply_changes(graph, self.changes)

    def add_directions(self, block: int, x: Value) -> Value:
        """The residual f32[..., width] behind a block, with the directions that belong there added to it."""
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
    """The adapters in these files, for the model in ``base``, whose residual has ``width`` entries and so many blocks.

    ``control_layers`` are the first and the last block behind which directions are added, all if there are none.
    Raises `ModelError` for a file that is no adapter, or none for this model.
    """
    vectors = [with_scale(one) for one in control_vectors]
    first, last = control_layers or (1, blocks - 1)
    if control_layers and not vectors:
        raise ModelError(f"layers {first} to {last} are for a control vector; name one with --control-vector")
    if not 1 <= first <= last < blocks and vectors:
        raise ModelError(f"layers of control vectors are {first} to {last}; need two of 1 to {blocks - 1} in order")
    return Adapters(
        tuple(c for no, one in enumerate(lora) for c in read_lora(base, no, *with_scale(one))),
        tuple(d for no, one in enumerate(vectors) for d in read_directions(no, *one, width, blocks, (first, last))),
    )


def with_scale(one: ScaledFile) -> tuple[Path, float]:
    path, scale = (one, 1.0) if isinstance(one, str | Path) else one
    return Path(path), float(scale)
