"""Control vectors: directions that are added to the residual behind blocks.

Zou et al., Representation engineering, 2023; files are those of llama.cpp's ``cvector-generator``.
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
class ControlDirection:
    """What is added behind a block: a vector f32[width], so many times."""

    block: int
    scale: float
    leaf: Value
    tensor: Tensor

    def __call__(self, x: Value) -> Value:
        vector = self.leaf if self.scale == 1.0 else ops.scale(self.leaf, scale=self.scale)
        return ops.add(x, vector, name=f"blk.{self.block}.steered")


def read_directions(
    number: int, path: Path, scale: float, width: int, blocks: int, layers: tuple[int, int]
) -> Iterator[ControlDirection]:
    """The directions in a file for blocks from the first to the last of ``layers``; the first block has number 0, and
    no direction.

    ``number`` tells leaves from those of other files.  Raises `ModelError` for a file that is no control vector, or
    none for a model of this ``width`` and so many ``blocks``, and where no direction is left.
    """
    gguf, left = open_gguf(path), 0
    for name, tensor in gguf.tensors.items():
        named = DIRECTION_NAME.fullmatch(name)
        if not named or int(named[1]) >= blocks:
            raise ModelError(
                f"{path}: tensor {name!r:.80}; need direction.1 to direction.{blocks - 1}; {CONTROL_REMEDY}"
            )
        if tensor.shape != (width,) or tensor.dtype not in FLOAT_DTYPES:
            got = f"{tensor.dtype}{list(tensor.shape)}"
            raise ModelError(f"{path}: tensor {name} is {got}; need f32[{width}]; {CONTROL_REMEDY}")
        if layers[0] <= int(named[1]) <= layers[1]:
            left += 1
            yield ControlDirection(int(named[1]), scale, weight(f"{name}.{number}", tensor.shape, tensor.dtype), tensor)
    if not left:
        raise ModelError(f"{path}: has no direction for layers {layers[0]} to {layers[1]}; choose others")
