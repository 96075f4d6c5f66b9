"""Control vectors: directions that are added to the residual after blocks.

Source: Zou et al., Representation engineering, 2023. The files come from ``cvector-generator`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ... import ops
from ...graph import Value, weight
from ...graph.dtypes import FLOAT_DTYPES
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf import Tensor, open_gguf

DIRECTION_NAME = re.compile(r"direction\.([1-9]\d{0,5})")
CONTROL_REMEDY = "use a control vector that was made for this model"


@dataclass(frozen=True, slots=True, eq=False)
class BlockControlVector:
    """A control direction: a vector f32[width] that is added, times `scale`, to the residual after a block."""

    block: int
    scale: float
    leaf: Value
    tensor: Tensor

    def __call__(self, x: Value) -> Value:
        vector = self.leaf if self.scale == 1.0 else ops.scale(self.leaf, scale=self.scale)
        return ops.add(x, vector, name=f"blk.{self.block}.steered")


def read_control_directions(
    number: int, path: Path, scale: float, width: int, blocks: int, layers: tuple[int, int]
) -> Iterator[BlockControlVector]:
    """Yield the control directions of a file for the selected blocks. Block 0 has no direction.

    Args:
        number: Index of the file, which makes leaf names unique.
        path: The control vector file.
        scale: Factor of the directions.
        width: Entries of the residual.
        blocks: Number of blocks of the model.
        layers: First and last selected block.

    Raises:
        ModelError: The file is no control vector for such a model, or no direction is selected.
    """
    gguf, count = open_gguf(path), 0
    for name, tensor in gguf.tensors.items():
        matched = DIRECTION_NAME.fullmatch(name)
        if not matched or int(matched[1]) >= blocks:
            raise ModelError(
                f"{path}: tensor {name!r:.80}; need direction.1 to direction.{blocks - 1}; {CONTROL_REMEDY}"
            )
        if tensor.shape != (width,) or tensor.dtype not in FLOAT_DTYPES:
            got = f"{tensor.dtype}{list(tensor.shape)}"
            raise ModelError(f"{path}: tensor {name} is {got}; need f32[{width}]; {CONTROL_REMEDY}")
        if layers[0] <= int(matched[1]) <= layers[1]:
            count += 1
            yield BlockControlVector(
                int(matched[1]), scale, weight(f"{name}.{number}", tensor.shape, tensor.dtype), tensor
            )
    if not count:
        raise ModelError(f"{path}: has no direction for layers {layers[0]} to {layers[1]}; choose others")
