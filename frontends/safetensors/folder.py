"""Opens a Hugging Face folder as a `Gguf`: the metadata and tensors that a GGUF file of the same model has.

Matrices are views of the mapped safetensors files. Norms, biases, and the Q and K rows of families with paired rotary
embeddings are computed when they are read.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ...graph.dtypes import DType
from ...ops.quantisation import dequantise
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from ..gguf.mapped_file import MappedFile, format_name_for_message
from ..gguf.writer import WRITTEN_VERSION
from .derived_tensor import derive_tensor
from .families import (
    DELTA_NET_ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    EXPERT_NAME,
    SKIPPED_NAME,
    FolderFamily,
    choose_family,
    map_tensor_name,
    read_expert_count,
    read_head_size,
    read_hyperparameter_pairs,
    read_rope_parameters,
)
from .joined_experts import split_experts
from .json_files import JsonObject, read_json
from .linear_attention import convert_delta_net
from .packed_checkpoints import STORED_DTYPES, join_blocks_and_scales, read_quantisation_method
from .shards import DTYPES, read_shards
from .tokenizer_files import read_tokenizer_pairs
from .write_gguf import Pair, decode_metadata_pairs, encode_metadata_pairs, write_gguf_atomically

CONFIG_NAME = "config.json"
FILE_TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 32}
"""Values of ``general.file_type``."""


def is_model_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder with ``config.json``."""
    return os.path.isfile(os.path.join(path, CONFIG_NAME))


def open_folder(path: str | os.PathLike[str]) -> Gguf:
    """Open a Hugging Face folder as the GGUF model that `hocket convert` writes.

    Raises:
        ModelError: The folder is damaged, or its family or its dtype is not supported.
    """
    pairs, tensors, shard_paths = _read_folder(Path(path))
    metadata = decode_metadata_pairs(encode_metadata_pairs(pairs), Path(path))
    return Gguf(Path(path), WRITTEN_VERSION, MappingProxyType(metadata), MappingProxyType(tensors), shard_paths)


def write_folder_as_gguf(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> tuple[int, int]:
    """Write the GGUF file of a Hugging Face folder; return the number of its tensors and its bytes.

    Raises:
        ModelError: As `open_folder`.
        OSError: The file cannot be written.
    """
    pairs, tensors, _ = _read_folder(Path(path))
    size = write_gguf_atomically(Path(output), encode_metadata_pairs(pairs), tensors)
    return len(tensors), size


def _read_folder(folder: Path) -> tuple[dict[str, Pair], dict[str, Tensor], tuple[Path, ...]]:
    config = read_json(folder / CONFIG_NAME)
    family = choose_family(config)
    stored = read_shards(folder, DTYPES | STORED_DTYPES.get(read_quantisation_method(config), {}))
    tensors = _map_tensors(family, config, join_blocks_and_scales(config, stored))
    if read_rope_parameters(config).get_text("rope_type", "") == "llama3":
        tensors["rope_freqs.weight"] = _compute_llama3_rope_divisors(config)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(
            f"{format_name_for_message(str(folder))}: has no model.embed_tokens.weight; download the folder again"
        )
    pairs: dict[str, Pair] = {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": FILE_TYPES[embedding.dtype],
        "general.quantization_version": 2,
    }
    pairs |= read_hyperparameter_pairs(family, config)
    pairs |= read_tokenizer_pairs(folder, config, embedding.shape[0])
    return pairs, tensors, tuple(sorted({tensor.file.path for tensor in stored.values()}))


def _map_tensors(family: FolderFamily, config: JsonObject, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    is_tied = config.get_boolean("tie_word_embeddings", family.architecture == "gemma3")
    for name, tensor in stored.items():
        if SKIPPED_NAME.fullmatch(name) or (is_tied and name == "lm_head.weight"):
            continue
        if family.architecture in EXPERT_ARCHITECTURES and (match := EXPERT_NAME.fullmatch(name)):
            experts.setdefault(f"blk.{int(match[1])}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = tensor
            continue
        if family.architecture == "gpt-oss" and (parts_by_name := split_experts(name, tensor)):
            tensors |= parts_by_name
            continue
        if family.architecture in DELTA_NET_ARCHITECTURES and (
            parts_by_name := convert_delta_net(config, name, tensor)
        ):
            tensors |= parts_by_name
            continue
        new_name = map_tensor_name(family, name)
        if new_name is None:
            raise tensor.file.make_error(
                f"tensor {format_name_for_message(name)} is unknown in {family.architecture}",
                "convert the folder with llama.cpp",
            )
        tensors[new_name] = _rename_and_derive_tensor(family, config, tensor, new_name)
    for name, parts in experts.items():
        tensors[name] = _stack_experts(config, name, [parts[i] for i in sorted(parts)])
    if not is_tied and "output.weight" not in tensors:
        raise config.make_error("lm_head.weight is missing, and tie_word_embeddings is false")
    return tensors


def _rename_and_derive_tensor(family: FolderFamily, config: JsonObject, tensor: Tensor, name: str) -> Tensor:
    """Rename a tensor of the file, and derive the elements that its architecture needs in GGUF."""
    part = name.split(".")[-2]
    heads = 0
    if family.permutes_rows and part in ("attn_q", "attn_k"):
        heads = config.require_positive_integer("num_attention_heads")
        if part == "attn_k":
            heads = config.get_nonnegative_integer("num_key_value_heads", heads) or heads
        if tensor.shape[0] % (2 * heads):
            raise tensor.file.make_error(
                f"tensor {format_name_for_message(tensor.name)} has {tensor.shape[0]} rows; need {heads} heads"
            )
    offset = family.norm_offset if part.endswith("norm") else 0.0
    # llama.cpp's converter stores vectors and the router as float32
    dtype = DType.F32 if len(tensor.shape) == 1 or part == "ffn_gate_inp" else tensor.dtype
    if not heads and not offset and dtype is tensor.dtype and tensor.offset % tensor.dtype.block_bytes == 0:
        return replace(tensor, name=name)
    return derive_tensor(
        tensor,
        name,
        shape=tensor.shape,
        dtype=dtype,
        change=f"as {dtype} plus {offset}, {heads} heads permuted",
        compute=partial(_compute_elements, tensor.dtype, dtype, heads, offset),
    )


def _stack_experts(config: JsonObject, name: str, experts: list[Tensor]) -> Tensor:
    """Return the matrices of all experts of a layer as one tensor [experts, rows, columns], stacked when it is read."""
    first, count = experts[0], read_expert_count(config)
    if len(experts) != count or any((e.shape, e.dtype) != (first.shape, first.dtype) for e in experts):
        raise first.file.make_error(f"{name} has {len(experts)} experts; need {count} of equal shape and dtype")
    origins = sha256(repr([e.cache_identity for e in experts]).encode()).hexdigest()

    def stack(_: np.ndarray) -> np.ndarray:
        stacked = np.stack([e.stored_elements for e in experts])
        for expert in experts:
            expert.release_memory()
        return stacked

    return derive_tensor(
        first,
        name,
        shape=(count, *first.shape),
        dtype=first.dtype,
        change=f"stack of {origins}",
        compute=stack,
    )


def _compute_elements(source: DType, dtype: DType, heads: int, offset: float, elements: np.ndarray) -> np.ndarray:
    if dtype is not source or offset:
        elements = dequantise(elements, source)
    if offset:
        elements = elements + np.float32(offset)
    if heads:
        shape = elements.shape
        halves = elements.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        elements = halves.swapaxes(1, 2).reshape(shape)
    return elements


def _compute_llama3_rope_divisors(config: JsonObject) -> Tensor:
    """Return the tensor of divisors of rotary frequencies for Llama 3.1.

    Short waves have 1, long waves have `factor`, and a ramp lies between.
    """
    rope, size = read_rope_parameters(config), read_head_size(config)
    factor, low, high = (
        rope.get_finite_number(key, default)
        for key, default in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    context = rope.get_nonnegative_integer("original_max_position_embeddings", 8192) or 8192
    theta = rope.get_finite_number("rope_theta", 1e4)
    if min(factor, low, theta) <= 0 or high <= low or not 2 <= size <= 1 << 16:
        raise config.make_error("the llama3 rope parameters need 0 < low_freq_factor < high_freq_factor")
    waves = 2 * math.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = (context / waves - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, middle))
    elements = factors.astype("<f4").tobytes()
    data = mmap.mmap(-1, len(elements))
    data[:] = elements
    # release() of anonymous memory would lose the factors, so the elements are computed at each read
    file = MappedFile(config.path, data, len(elements), zlib.crc32(elements))
    source = Tensor("rope_freqs.weight", (size // 2,), DType.F32, file, 0)
    values = np.frombuffer(elements, "<f4")
    return derive_tensor(
        source,
        source.name,
        shape=source.shape,
        dtype=DType.F32,
        change="rope factors",
        compute=lambda _: values,
    )
