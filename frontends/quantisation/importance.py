"""Importance matrices: for each column of a weight, the mean square of the activations that it multiplies.

A GGUF file of llama-imatrix has two tensors for each weight NAME: ``NAME.in_sum2``, the sums of squares
[matrices, columns], and ``NAME.counts``, the numbers of rows [matrices, 1]. A weight of experts has several matrices.
A stack of matrices that read equally many rows has one count, and ``[1, matrices * columns]`` sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ...graph.storage.files import replacing
from ..errors import ModelError
from ..gguf import open_gguf
from ..gguf.mapped_file import format_name_for_message
from ..gguf.metadata import LazyMetadataArray, MetadataType
from ..gguf.reader import DEFAULT_ALIGNMENT
from ..gguf.tensor import Tensor
from ..gguf.writer import (
    TensorDescription,
    encode_metadata_pair,
    encode_padded_header,
    encode_string_array_pair,
    write_padded_tensor,
)

Importances = npt.NDArray[np.float32]
FloatSums = npt.NDArray[np.float64]
SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"
MAX_CHUNK_COUNT, MAX_SUM = 2**32 - 1, float(np.finfo(np.float32).max)
"""The largest number of chunks and the largest sum that the format holds: uint32 and float32."""
DATASETS_KEY, CHUNK_COUNT_KEY, CHUNK_SIZE_KEY = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceMatrix:
    """How much each column of each weight matters for the error of a quantisation.

    It has importances by the name of the weight, float32 [matrices or 1, columns], and facts for the metadata of files.
    """

    path: Path
    columns: Mapping[str, Importances]
    chunk_count: int | None

    def find_importances(self, tensor: Tensor) -> Importances | None:
        """Return the importances [matrices, columns] of a weight, or None.

        Raises:
            ModelError: The importances have another shape than the weight.
        """
        known = self.columns.get(tensor.name)
        if known is None:
            return None
        matrices = int(np.prod(tensor.shape[:-2], dtype=np.int64))
        if len(known) == 1 and known.size == matrices * tensor.shape[-1]:
            known = known.reshape(matrices, -1)
        if known.shape != (matrices, tensor.shape[-1]):
            file, name = format_name_for_message(str(self.path)), format_name_for_message(tensor.name)
            need = [matrices, tensor.shape[-1]]
            raise ModelError(
                f"{file}: importances of {name} have shape {list(known.shape)}, but the weight needs {need}; "
                "make the importance matrix with this model"
            )
        return known


class ImportanceSums:
    """The sums of an importance matrix while texts or files are added.

    Args:
        chunk_tokens: Tokens of a chunk of the text.

    `sums` has float64 [counts, columns] by the name of a weight, and `counts` float64 [counts].
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.sums: dict[str, FloatSums] = {}
        self.counts: dict[str, FloatSums] = {}
        self.datasets: list[str] = []

    def add_column_sums(self, name: str, sums: npt.NDArray[np.floating], counts: npt.NDArray[np.floating]) -> None:
        """Add sums of squared activations, one sum for each column of a weight, to the sums of this weight.

        Args:
            name: The name of the weight.
            sums: Sums of any shape; they are stored row by row.
            counts: Numbers of rows [counts]: one for each matrix, or a single one.

        Raises:
            ModelError: A sum is infinite or NaN, or the weight has sums of another shape.
        """
        if not np.isfinite(sums).all():
            raise ModelError(
                f"tensor {format_name_for_message(name)}: a product reads a value that is infinite or NaN; "
                "check the model with hocket run, and try --exact"
            )
        new, rows = np.asarray(sums, np.float64).reshape(len(counts), -1), np.asarray(counts, np.float64)
        if name not in self.sums:
            self.sums[name], self.counts[name] = new.copy(), rows.copy()
            return
        if self.sums[name].shape != new.shape:
            raise ModelError(
                f"tensor {format_name_for_message(name)}: its sums have shape {list(self.sums[name].shape)}, and "
                f"{list(new.shape)} are added; use importance matrices of one model"
            )
        self.sums[name] += new
        self.counts[name] += rows

    def merge(self, other: ImportanceSums) -> None:
        """Add the sums of another matrix, and the names of its texts.

        Raises:
            ModelError: A weight has other sums in the other matrix.
        """
        for name, sums in other.sums.items():
            self.add_column_sums(name, sums, other.counts[name])
        self.datasets += other.datasets

    @property
    def chunk_count(self) -> int:
        """The number of text chunks in the sums: the largest row count of a weight, divided by the rows of a chunk."""
        return int(max((counts.max() for counts in self.counts.values()), default=0)) // self.chunk_tokens

    def list_unused_matrices(self) -> dict[str, int]:
        """Return the numbers of matrices without rows, by weight; these are experts that no token has chosen."""
        unused = {name: int((counts == 0).sum()) for name, counts in self.counts.items()}
        return {name: number for name, number in unused.items() if number}

    def write(self, path: str | Path) -> None:
        """Write the sums as a GGUF file that llama-quantize reads.

        Raises:
            ModelError: A sum or the number of chunks is too large for the format.
            OSError: The file cannot be written.
        """
        if self.chunk_count > MAX_CHUNK_COUNT:
            raise ModelError(
                f"{self.chunk_count} chunks are too many; need at most {MAX_CHUNK_COUNT}; give true counts"
            )
        for name, sums in self.sums.items():
            if not sums.max() <= MAX_SUM:
                raise ModelError(
                    f"tensor {format_name_for_message(name)}: the sum {sums.max():g} is too large; need at most "
                    f"{MAX_SUM:g}; add fewer texts"
                )
        pairs = {
            "general.type": encode_metadata_pair("general.type", MetadataType.STRING, "imatrix"),
            DATASETS_KEY: encode_string_array_pair(DATASETS_KEY, self.datasets),
            CHUNK_COUNT_KEY: encode_metadata_pair(CHUNK_COUNT_KEY, MetadataType.UINT32, self.chunk_count),
            CHUNK_SIZE_KEY: encode_metadata_pair(CHUNK_SIZE_KEY, MetadataType.UINT32, self.chunk_tokens),
        }
        arrays = {}
        for name in sorted(self.sums):
            arrays[name + SUMS_SUFFIX] = self.sums[name].astype(np.float32)
            arrays[name + COUNTS_SUFFIX] = self.counts[name].astype(np.float32)[:, None]
        tensors = [TensorDescription(name, array.shape, DType.F32) for name, array in arrays.items()]
        with replacing(path, durable=True) as file:
            file.write(encode_padded_header(pairs, tensors))
            for tensor in tensors:
                write_padded_tensor(file, tensor, [arrays[tensor.name]], DEFAULT_ALIGNMENT)


def read_importance_sums(path: str | Path) -> ImportanceSums:
    """Read the sums of an importance matrix in GGUF form.

    Raises:
        ModelError: The file is no importance matrix, or it has a number that is infinite, NaN or negative.
    """
    file = open_gguf(path)
    size = file.get(CHUNK_SIZE_KEY, int, 0)
    result = ImportanceSums(max(1, size))
    for name, sums in file.tensors.items():
        if not name.endswith(SUMS_SUFFIX):
            continue
        weight = name.removesuffix(SUMS_SUFFIX)
        counts = file.tensor(weight + COUNTS_SUFFIX)
        problem = _find_shape_problem(sums, counts)
        if problem is None:
            sums_of_rows, rows = sums.dequantise(), counts.dequantise().reshape(-1)
            if not all(np.isfinite(numbers).all() and (numbers >= 0).all() for numbers in (sums_of_rows, rows)):
                problem = "has a number that is infinite, NaN or negative"
        if problem is not None:
            raise ModelError(
                f"{format_name_for_message(str(path))}: tensor {format_name_for_message(name)} {problem}; "
                "make the file again"
            )
        result.add_column_sums(weight, sums_of_rows, rows)
    if not result.sums:
        raise ModelError(
            f"{format_name_for_message(str(path))}: has no tensor NAME{SUMS_SUFFIX}, so it is no importance matrix; "
            "convert an old file with llama-imatrix --output-format gguf"
        )
    datasets = file.metadata.get(DATASETS_KEY)
    if isinstance(datasets, LazyMetadataArray) and datasets.item_type is MetadataType.STRING:
        result.datasets = list(datasets.strings())
    return result


def read_gguf_importance_matrix(path: str | Path) -> ImportanceMatrix:
    """Read an importance matrix in GGUF form.

    Raises:
        ModelError: The file is no importance matrix, or it has a number that is infinite, NaN or negative.
    """
    known = read_importance_sums(path)
    columns = {}
    for name, sums in known.sums.items():
        rows = known.counts[name][:, None]
        # An expert without tokens has no information: all of its columns are equally important.
        columns[name] = np.where(rows > 0, sums / np.maximum(rows, 1), 1).astype(np.float32)
    chunk_count = open_gguf(path).get(CHUNK_COUNT_KEY, int)
    if chunk_count is not None and not 0 <= chunk_count <= MAX_CHUNK_COUNT:
        raise ModelError(
            f"{format_name_for_message(str(path))}: {CHUNK_COUNT_KEY} is {chunk_count}; need 0 to {MAX_CHUNK_COUNT}; "
            "make the file again"
        )
    return ImportanceMatrix(Path(path), columns, chunk_count)


def _find_shape_problem(sums: Tensor, counts: Tensor) -> str | None:
    if sums.dtype is not DType.F32 or counts.dtype is not DType.F32:
        return f"and its counts are {sums.dtype} and {counts.dtype}; need f32"
    matrices = int(np.prod(counts.shape, dtype=np.int64))
    if int(np.prod(sums.shape, dtype=np.int64)) % matrices:
        return f"has shape {list(sums.shape)}, which {matrices} counts do not divide"
    return None
