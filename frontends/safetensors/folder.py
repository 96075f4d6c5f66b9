"""Opens a Hugging Face folder as a `Gguf`: the metadata and tensors that a GGUF file of the same model has.

Matrices are views of the mapped safetensors files. Norms, biases, and the Q and K rows of families with paired rotary
embeddings are computed when they are read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ...graph.dtypes import DType
from ...ops.quantisation import dequantise
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from ..gguf.mapped_file import format_name_for_message
from ..gguf.writer import WRITTEN_VERSION
from .completeness import require_complete_layers, require_stated_sizes
from .derived_tensor import derive_tensor
from .families import (
    DELTA_NET_ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    SKIPPED_NAME,
    FolderFamily,
    choose_family,
    map_tensor_name,
    read_language_config,
    strip_language_prefix,
)
from .hyperparameters import read_expert_count, read_hyperparameter_pairs
from .joined_experts import EXPERT_NAME, split_joined_experts, stack_experts
from .json_files import JsonObject, read_json
from .linear_attention import convert_delta_net_tensor
from .packed_checkpoints import STORED_DTYPES, join_blocks_and_scales_when_read, read_quantisation_method
from .rope_scaling import make_rope_divisor_tensors
from .shards import DTYPES, read_shards
from .tokenizer_files import read_tokenizer_pairs
from .write_gguf import Pair, decode_metadata_pairs, encode_metadata_pairs, write_gguf_atomically

CONFIG_NAME = "config.json"
FILE_TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 32}
"""Values of ``general.file_type``."""


def is_model_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder with ``config.json``."""
    return os.path.isfile(os.path.join(path, CONFIG_NAME))


def list_files_of_folder(path: str | os.PathLike[str]) -> list[Path]:
    """List the files of a folder that belong to its model; GGUF files that were written into it do not.

    Partial GGUF files, as ``out.gguf.partial``, do not belong to it either.
    """
    return [file for file in Path(path).glob("*") if ".gguf" not in file.suffixes]


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


def read_encoded_folder_pairs(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the metadata pairs of the GGUF file of a folder as bytes, by their keys; raise `ModelError` as above."""
    return encode_metadata_pairs(_read_folder(Path(path))[0])


def _read_folder(folder: Path) -> tuple[dict[str, Pair], dict[str, Tensor], tuple[Path, ...]]:
    config = read_language_config(read_json(folder / CONFIG_NAME))
    family = choose_family(config)
    stored = read_shards(folder, DTYPES | STORED_DTYPES.get(read_quantisation_method(config), {}), skipped=SKIPPED_NAME)
    tensors = _map_tensors(family, config, join_blocks_and_scales_when_read(config, stored))
    require_complete_layers(config, tensors)
    require_stated_sizes(config, tensors)
    tensors |= make_rope_divisor_tensors(family, config)
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
    is_tied = config.get_boolean("tie_word_embeddings", False)
    for stored_name, tensor in stored.items():
        name = strip_language_prefix(stored_name)
        if is_tied and name == "lm_head.weight":
            continue
        if family.architecture in EXPERT_ARCHITECTURES and (match := EXPERT_NAME.fullmatch(name)):
            experts.setdefault(f"blk.{int(match[1])}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = tensor
            continue
        if parts_by_name := split_joined_experts(family.architecture, name, tensor):
            tensors |= parts_by_name
            continue
        if family.architecture in DELTA_NET_ARCHITECTURES and (
            parts_by_name := convert_delta_net_tensor(config, name, tensor)
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
        tensors[name] = stack_experts(name, read_expert_count(config), parts)
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
