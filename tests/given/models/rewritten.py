"""Fixtures written anew with other tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

from hocket.frontends.models import Model
from hocket.frontends.open import open_model

from .goldens import path_of

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]


def tensors_of(name: str) -> Tensors:
    return {t.name: np.array(t.data) for t in GGUFReader(path_of(name)).tensors}


def with_block_ahead(path: Path, source: Path, pull: float, seed: int = 0) -> Model:
    """The model of a file with a further block that guesses (MTP): the last of its own again, behind a matrix that
    takes the token `pull` times and a random mix of both; its embedding is as much longer, so that a token says most
    of what follows."""
    rng = np.random.default_rng(seed)
    tensors = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(source).tensors}
    model = open_model(source)
    width, last, new = model.hyper.width, f"blk.{model.layers - 1}.", f"blk.{model.layers}."
    tensors["token_embd.weight"] = tensors["token_embd.weight"] * np.float32(pull)
    tensors |= {new + name.removeprefix(last): array for name, array in tensors.items() if name.startswith(last)}
    mix = np.concatenate([pull * np.eye(width), np.zeros((width, width))], axis=1)
    mix += rng.standard_normal(mix.shape) / np.sqrt(2 * width)
    tensors[f"{new}nextn.eh_proj.weight"] = mix.astype(np.float32)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{new}nextn.{name}.weight"] = (1.0 + 0.2 * rng.standard_normal(width)).astype(np.float32)
    return written(path, source, tensors, block_count=model.layers + 1, nextn_predict_layers=1)


def written(path: Path, source: str | Path, tensors: Tensors, **keys: int) -> Model:
    """A fixture, or the model of another file, with these tensors and counts in its metadata, written and opened."""
    fields = GGUFReader(path_of(source) if isinstance(source, str) else source).fields
    architecture = str(fields["general.architecture"].contents())
    writer = GGUFWriter(path, architecture)
    blocks = int(fields[f"{architecture}.block_count"].contents())
    names = {f"{architecture}.{name}": value for name, value in keys.items()}
    for name, value in names.items():
        writer.add_uint32(name, value)
    for key, field in fields.items():
        kind, *inner = field.types
        if kind is GGUFValueType.ARRAY and not inner:
            continue  # an empty list, which the writer cannot write
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in names:
            value = field.contents()
            if isinstance(value, list) and len(value) == blocks:  # a value for each block: the last for new ones
                value += value[-1:] * (keys.get("block_count", blocks) - blocks)
            writer.add_key_value(key, value, kind, inner[0] if kind is GGUFValueType.ARRAY else None)
    for tensor, array in tensors.items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_model(path)
