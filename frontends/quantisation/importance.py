"""Importance matrices: for each column of a weight, the mean square of the activations that it multiplies.

A GGUF file of llama-imatrix has two tensors for each weight NAME: ``NAME.in_sum2``, the sums of sums_of_tokens
[matrices, columns], and ``NAME.counts``, the numbers of tokens [matrices, 1]. A weight of experts has several matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..gguf import open_gguf
from ..gguf.mapped_file import format_name_for_message
from ..gguf.tensor import Tensor

Importances = npt.NDArray[np.float32]
SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceMatrix:
    """How much each column of each weight matters for the error of a quantisation.

    It has importances by the name of the weight, float32 [matrices, columns], and facts for the metadata of files.
    """

    path: Path
    columns: Mapping[str, Importances]
    chunk_count: int | None

    def find(self, tensor: Tensor) -> Importances | None:
        """Return the importances [matrices, columns] of a weight, or None.

        Raises:
            ModelError: The importances have another shape than the weight.
        """
        known = self.columns.get(tensor.name)
        if known is None:
            return None
        matrices = int(np.prod(tensor.shape[:-2], dtype=np.int64))
        if known.shape != (matrices, tensor.shape[-1]):
            file, name = format_name_for_message(str(self.path)), format_name_for_message(tensor.name)
            need = [matrices, tensor.shape[-1]]
            raise ModelError(
                f"{file}: importances of {name} have shape {list(known.shape)}, but the weight needs {need}; "
                "make the importance matrix with this model"
            )
        return known


def read_importance_matrix(path: str | Path) -> ImportanceMatrix:
    """Read an importance matrix in GGUF form.

    Raises:
        ModelError: The file is no importance matrix, or it has a number that is infinite, NaN or negative.
    """
    file = open_gguf(path)
    columns = {}
    for name, sums in file.tensors.items():
        if not name.endswith(SUMS_SUFFIX):
            continue
        weight = name.removesuffix(SUMS_SUFFIX)
        counts = file.tensor(weight + COUNTS_SUFFIX)
        problem = _find_shape_problem(sums, counts)
        if problem is None:
            sums_of_tokens, tokens = sums.dequantise(), counts.dequantise().reshape(-1, 1)
            if not (np.isfinite(sums_of_tokens).all() and np.isfinite(tokens).all() and (sums_of_tokens >= 0).all()):
                problem = "has a number that is infinite, NaN or negative"
        if problem is not None:
            raise ModelError(
                f"{format_name_for_message(str(path))}: tensor {format_name_for_message(name)} {problem}; "
                "make the file again"
            )
        sums_of_tokens = sums_of_tokens.reshape(len(tokens), -1)
        # An expert without tokens has no information: all of its columns are equally important.
        columns[weight] = np.where(tokens > 0, sums_of_tokens / np.maximum(tokens, 1), np.float32(1)).astype(np.float32)
    if not columns:
        raise ModelError(
            f"{format_name_for_message(str(path))}: has no tensor NAME{SUMS_SUFFIX}, so it is no importance matrix; "
            "convert an old file with llama-imatrix --output-format gguf"
        )
    return ImportanceMatrix(Path(path), columns, file.get("imatrix.chunk_count", int))


def _find_shape_problem(sums: Tensor, counts: Tensor) -> str | None:
    if sums.dtype is not DType.F32 or counts.dtype is not DType.F32:
        return f"and its counts are {sums.dtype} and {counts.dtype}; need f32"
    matrices = int(np.prod(counts.shape, dtype=np.int64))
    if int(np.prod(sums.shape, dtype=np.int64)) % matrices:
        return f"has shape {list(sums.shape)}, which {matrices} counts do not divide"
    return None
