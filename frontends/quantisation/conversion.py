"""The conversion of a model to other weight dtypes: a plan of all tensors, and the files that it writes.

Tensors are converted one after another, in parts of `PART_ELEMENTS`, by several threads. A few parts for each
thread are in memory. A file gets its name when it is complete; an interrupted conversion continues after its last
complete tensor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np

from ... import __version__
from ...backends.cpu.compilation.compiler import compute_kernel_code_digest
from ...backends.cpu.kernels.quantisers.row_quantiser import compile_quantisers, quantise_rows
from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ...graph.storage.files import require_writable
from ...graph.storage.resumable_file import RESUMABLE_ERRORS, ResumableFile, list_partial_files, resuming
from ...ops.quantisation import dequantise
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message
from ..gguf.metadata import MetadataType
from ..gguf.reader import DEFAULT_ALIGNMENT, Gguf
from ..gguf.tensor import Tensor
from ..gguf.writer import (
    TensorDescription,
    encode_metadata_pair,
    encode_padded_header,
    name_split_file,
    read_encoded_metadata_pairs,
    write_padded_tensor,
)
from ..safetensors import is_model_folder, list_files_of_folder, read_encoded_folder_pairs
from .importance import ImportanceMatrix, Importances
from .type_choice import (
    EMBEDDING_NAMES,
    IMPORTANCE_DTYPES,
    ModelFacts,
    TypeRequest,
    choose_dtypes,
    fit_dtype_to_columns,
)

PART_ELEMENTS = 1 << 20
"""Elements that a thread converts at a time."""
PARTS_PER_THREAD = 3
"""Parts in memory for each thread: one that is converted, and others that wait for the file."""
QUANTISATION_VERSION = 2
"""The version of block layouts in written files (``GGML_QNT_VERSION``)."""
MAX_FLOAT16 = 65504.0
MAX_NVFP4 = 2688.0
"""The largest number of NVFP4: the largest scale, 448, times the largest 4-bit float, 6."""
FILE_NAME_BYTES = 127
"""Bytes of a file name in the metadata."""
Progress = Callable[[int], object]
"""Called with the numbers of elements that have been written since the last call."""


@dataclass(frozen=True, slots=True)
class TensorConversion:
    """The dtype that a tensor is converted to: the one that was asked for, and the one that it gets.

    - `tensor`: the tensor of the model.
    - `required`: the dtype that the request asks for.
    - `dtype`: the dtype that it gets. It differs if the rows of the tensor do not fit `required`.
    """

    tensor: Tensor
    required: DType
    dtype: DType

    @property
    def written_tensor_description(self) -> TensorDescription:
        """The name, shape and dtype of the tensor in the written file."""
        return TensorDescription(self.tensor.name, self.tensor.shape, self.dtype)

    @property
    def element_count(self) -> int:
        return prod(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The conversions of all tensors of a model, in the order of its files."""

    model: Gguf
    request: TypeRequest
    conversions: Sequence[TensorConversion]
    importance: ImportanceMatrix | None

    @property
    def element_count(self) -> int:
        """Elements of all tensors."""
        return sum(c.element_count for c in self.conversions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors after the conversion."""
        return sum(c.written_tensor_description.nbytes for c in self.conversions)

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors before the conversion."""
        return sum(c.tensor.nbytes for c in self.conversions)

    def list_unfitting_conversions(self) -> list[TensorConversion]:
        """Return the conversions that cannot get the required dtype because of the shape of the tensor."""
        return [c for c in self.conversions if c.dtype is not c.required]

    def list_conversions_without_importance(self) -> list[TensorConversion]:
        """Return the conversions to a quantised dtype for which the importance matrix has no entry.

        Without an importance matrix the list is empty.
        """
        if self.importance is None:
            return []
        changed = (c for c in self.conversions if c.dtype is not c.tensor.dtype and c.dtype.is_quantised)
        return [c for c in changed if self.importance.find_importances(c.tensor) is None]


def plan_conversion(
    model: Gguf,
    request: TypeRequest,
    importance: ImportanceMatrix | None = None,
    *,
    requantises: bool = False,
    is_dry_run: bool = False,
) -> ConversionPlan:
    """Choose the dtype of each tensor and check that the conversion is possible.

    Args:
        model: The model to convert.
        request: The wishes of the user.
        importance: Importances of the columns of weights.
        requantises: Whether quantised tensors may be quantised again, which adds their errors.
        is_dry_run: Whether nothing will be written, so that missing importances do not matter.

    Raises:
        ModelError: A quantised tensor would be quantised again, or importances are missing or have wrong shapes.
    """
    facts = read_facts_for_mixture_rules(model, has_importances=importance is not None)
    dtypes = choose_dtypes(model.tensors.values(), request, facts)
    conversions = [
        TensorConversion(t, dtypes[t.name], fit_dtype_to_columns(dtypes[t.name], t.shape[-1]))
        for t in model.tensors.values()
    ]
    for c in conversions:
        name = format_name_for_message(c.tensor.name)
        if c.dtype is not c.tensor.dtype and c.tensor.dtype.is_quantised and not requantises:
            raise ModelError(
                f"{format_name_for_message(str(model.path))}: tensor {name} is {c.tensor.dtype} already, and a second "
                "rounding adds its error; start from a file of f32, f16 or bf16, or add --allow-requantize"
            )
        found = importance.find_importances(c.tensor) if importance is not None else None
        if found is None and not is_dry_run and is_refused_without_importances(c, request):
            raise ModelError(
                f"tensor {name}: {c.dtype} in type {request.file_type.name} needs importances of its columns; "
                "make them with hocket imatrix, and give --imatrix FILE"
            )
    return ConversionPlan(model, request, conversions, importance)


def is_refused_without_importances(conversion: TensorConversion, request: TypeRequest) -> bool:
    """Return whether llama-quantize refuses the conversion of a tensor without importances."""
    is_small = request.file_type.name == "Q2_K_S" and conversion.dtype is DType.Q2_K
    is_look_up = conversion.tensor.name in (*EMBEDDING_NAMES, "output.weight")
    return (is_small or conversion.dtype in IMPORTANCE_DTYPES) and not is_look_up


def read_facts_for_mixture_rules(model: Gguf, *, has_importances: bool) -> ModelFacts:
    """Return the facts about a model that the mixture rules read.

    Missing metadata give the facts of a simple model.
    """
    architecture = model.get("general.architecture", str, "")
    layers = model.get(f"{architecture}.block_count", int, 0)
    heads, key_heads = (
        _read_first_integer(model, f"{architecture}.attention.{key}") for key in ("head_count", "head_count_kv")
    )
    if key_heads is None:  # the default of the format
        key_heads = heads
    groups = heads // key_heads if heads and key_heads else 0
    experts = model.get(f"{architecture}.expert_count", int, 0)
    return ModelFacts(architecture, layers, experts, groups, has_importances)


def _read_first_integer(model: Gguf, key: str) -> int | None:
    """Return an integer of the metadata; None if the key is missing.

    Of a list with one value per layer, the first value is returned.
    """
    return model.read_per_layer(key, int, 1)[0] if key in model.metadata else None


def write_model(
    plan: ConversionPlan,
    path: Path,
    *,
    threads: int,
    keeps_split: bool = False,
    report: Progress = lambda count: None,
    notify: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """Write the converted model and return the paths of its files.

    Complete tensors of an interrupted call with the same model, importances and request are kept.

    Args:
        plan: The conversions.
        path: The file, or with `keeps_split` the name to which part numbers are added.
        threads: Threads that convert.
        keeps_split: Whether the model is written in as many files as it has now.
        report: Called after each part.
        notify: Called with a line about partial files that are continued, dropped or left.

    Raises:
        ModelError: A weight has a value that the dtype cannot hold, or a file of the model would be replaced.
        OSError: A file cannot be written. Then no file has changed.
    """
    groups = _group_by_source_file(plan) if keeps_split else [list(plan.conversions)]
    count = len(groups)
    paths = [path] if count == 1 else [name_split_file(path, i + 1, count) for i in range(count)]
    for one in paths:
        for name in (str(one), *list_partial_files(one)):
            require_writable(name, _list_input_files(plan, paths))
    pairs, alignment = (
        _create_first_file_metadata_pairs(plan),
        plan.model.get("general.alignment", int, DEFAULT_ALIGNMENT),
    )
    compile_quantisers({c.dtype for c in plan.conversions})
    digest = _digest_inputs_and_code(plan, paths)
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(threads)
        layouts = []
        for i, (one, group) in enumerate(zip(paths, groups, strict=True)):
            own = (pairs if i == 0 else {}) | (_make_split_pairs(i, count, len(plan.conversions)) if count > 1 else {})
            if i and alignment != DEFAULT_ALIGNMENT:
                own["general.alignment"] = pairs["general.alignment"]
            header = encode_padded_header(own, [c.written_tensor_description for c in group], alignment)
            file = stack.enter_context(resuming(one, sha256(digest + header).hexdigest()))
            layouts.append((one, file, header, group))
        stack.callback(pool.shutdown, cancel_futures=True)
        for one, file, header, group in layouts:
            _notify_of_partial_file(one, file, len(group), notify)
            finished = file.finished_sections
            report(sum(c.element_count for c in group[:finished]))
            try:
                for i, c in enumerate(group[finished:], finished):
                    if i == 0:
                        file.write(header)
                    parts = _convert_in_parallel_parts(c, plan.importance, pool, threads, report)
                    write_padded_tensor(file, c.written_tensor_description, parts, alignment)
                    file.finish_section()
                    c.tensor.release_memory()
            except RESUMABLE_ERRORS:
                if file.finished_sections and file.is_resumable:
                    left = f"{file.finished_sections} of {len(group)} tensors are complete"
                    notify(f"{_format_partial_name(one)}: {left}; the same command continues after them")
                raise
    return paths


def _format_partial_name(path: Path) -> str:
    return format_name_for_message(list_partial_files(path)[0])


def _notify_of_partial_file(path: Path, file: ResumableFile, count: int, notify: Callable[[str], object]) -> None:
    if file.finished_sections:
        notify(f"{_format_partial_name(path)}: continue after {file.finished_sections} of {count} tensors")
    elif file.is_restarted:
        problem = "has no complete tensor of this model and these options"
        notify(f"{_format_partial_name(path)}: {problem}; start from the first tensor")


def _digest_inputs_and_code(plan: ConversionPlan, paths: Sequence[Path]) -> bytes:
    """Return the SHA-256 of everything that determines the files, except their headers.

    A file of the model counts by its path, size and modification time.
    """
    digest = sha256(compute_kernel_code_digest() + __version__.encode())
    for c in plan.conversions:
        digest.update(repr((c.tensor.name, str(c.tensor.dtype), str(c.dtype), c.tensor.cache_identity)).encode())
    for file in sorted(_list_input_files(plan, paths)):
        status = file.stat()
        digest.update(repr((str(file.resolve()), status.st_size, status.st_mtime_ns)).encode())
    if plan.importance is not None:
        for name, columns in sorted(plan.importance.columns.items()):
            digest.update(repr((name, columns.shape)).encode() + columns.tobytes())
    return digest.digest()


def _list_input_files(plan: ConversionPlan, paths: Sequence[Path]) -> list[Path]:
    """List the files that a conversion to `paths` reads: of the model, its folder, and the importance matrix."""
    model = plan.model
    partial = {name for path in paths for name in list_partial_files(path)}
    files = list_files_of_folder(model.path) if is_model_folder(model.path) else []
    files = [file for file in files if os.path.realpath(file) not in partial]
    return [*files, *model.part_paths, *([] if plan.importance is None else [plan.importance.path])]


def _group_by_source_file(plan: ConversionPlan) -> list[list[TensorConversion]]:
    """Group the conversions by the file of the model that contains their tensor.

    Tensors that are computed from the configuration of a folder, such as the divisors of RoPE, join the first file.
    """
    groups: dict[Path, list[TensorConversion]] = {path: [] for path in plan.model.part_paths}
    for c in plan.conversions:
        groups.get(c.tensor.file.path, groups[plan.model.part_paths[0]]).append(c)
    return list(groups.values())


def _create_first_file_metadata_pairs(plan: ConversionPlan) -> dict[str, bytes]:
    """Return the metadata of the first file: the pairs of the model, with the facts of this conversion."""
    is_folder, path = is_model_folder(plan.model.path), plan.model.path
    encoded = read_encoded_folder_pairs(path) if is_folder else read_encoded_metadata_pairs(plan.model.part_paths[0])
    pairs = {key: pair for key, pair in encoded.items() if not key.startswith("split.")}
    values: list[tuple[str, MetadataType, int | str]] = [
        ("general.quantization_version", MetadataType.UINT32, QUANTISATION_VERSION),
        ("general.file_type", MetadataType.UINT32, plan.request.file_type.number),
    ]
    if plan.importance is not None:
        name = plan.importance.path.name.encode("utf-8", "replace")[:FILE_NAME_BYTES].decode(errors="ignore")
        values += [
            ("quantize.imatrix.file", MetadataType.STRING, name),
            ("quantize.imatrix.entries_count", MetadataType.UINT32, len(plan.importance.columns)),
        ]
        if plan.importance.chunk_count is not None:
            values.append(("quantize.imatrix.chunks_count", MetadataType.UINT32, plan.importance.chunk_count))
    return pairs | {key: encode_metadata_pair(key, kind, value) for key, kind, value in values}


def _make_split_pairs(number: int, count: int, tensors: int) -> dict[str, bytes]:
    return {
        "split.no": encode_metadata_pair("split.no", MetadataType.UINT16, number),
        "split.count": encode_metadata_pair("split.count", MetadataType.UINT16, count),
        "split.tensors.count": encode_metadata_pair("split.tensors.count", MetadataType.INT32, tensors),
    }


def _convert_in_parallel_parts(
    c: TensorConversion, importance: ImportanceMatrix | None, pool: ThreadPoolExecutor, threads: int, report: Progress
) -> Iterator[np.ndarray]:
    """Yield the stored elements of a converted tensor in parts; threads convert the next parts meanwhile."""
    raw = c.tensor.stored_elements
    columns = importance.find_importances(c.tensor) if importance is not None else None
    width, matrix_rows = c.tensor.shape[-1], c.tensor.shape[-2] if len(c.tensor.shape) > 1 else 1
    rows, step = raw.reshape(-1, raw.shape[-1]), max(1, PART_ELEMENTS // width)
    waiting: deque[tuple[int, Future[np.ndarray]]] = deque()
    for matrix in range(len(rows) // matrix_rows):
        own = None if columns is None else columns[matrix]
        end = (matrix + 1) * matrix_rows
        for first in range(matrix * matrix_rows, end, step):
            part = rows[first : min(end, first + step)]
            waiting.append((part.shape[0] * width, pool.submit(partial(_convert_rows, c, part, own))))
            if len(waiting) > PARTS_PER_THREAD * threads:
                yield from _take_first(waiting, report)
    while waiting:
        yield from _take_first(waiting, report)


def _take_first(waiting: deque[tuple[int, Future[np.ndarray]]], report: Progress) -> Iterator[np.ndarray]:
    count, future = waiting.popleft()
    yield future.result()
    report(count)


def _convert_rows(c: TensorConversion, rows: np.ndarray, importance: Importances | None) -> np.ndarray:
    """Convert rows to the storage format of the new dtype.

    Raises:
        ModelError: The dtype cannot hold a value.
    """
    if c.dtype is c.tensor.dtype:
        return np.ascontiguousarray(rows)
    x = dequantise(rows, c.tensor.dtype)
    largest = max(float(x.max()), -float(x.min()))  # NaN if one of them is
    limit = MAX_FLOAT16 if c.dtype.is_quantised or c.dtype is DType.F16 else float(np.finfo(np.float32).max)
    if c.dtype is DType.NVFP4:
        limit = MAX_NVFP4
    if not largest <= limit:
        problem = "NaN" if largest != largest else f"the magnitude {largest:g}"
        file, name = format_name_for_message(str(c.tensor.file.path)), format_name_for_message(c.tensor.name)
        raise ModelError(
            f"{file}: tensor {name} has a value of {problem}; {c.dtype} needs magnitudes up to {limit:g}; "
            "repair the model, or keep the tensor with --tensor-type"
        )
    return quantise_rows(x, c.dtype, importance)
