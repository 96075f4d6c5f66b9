"""Fixtures written anew with other tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

from hocket.frontends.models import Model
from hocket.frontends.open_model import open_model

from .goldens import path_of

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]


def tensors_of(name: str) -> Tensors:
    return {t.name: np.array(t.data) for t in GGUFReader(path_of(name)).tensors}


def with_blocks_ahead(path: Path, source: Path, pull: float, count: int = 1, seed: int = 0) -> Model:
    """Return the model of a file with further blocks for multi-token prediction (MTP).

    A block is the last attention block again, behind a matrix that takes the token `pull` times and a random mix of
    both. Its embedding is longer by that part, so that a token decides most of the next one. Names and shapes are the
    ones of llama.cpp's converters.
    """
    rng = np.random.default_rng(seed)
    tensors = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(source).tensors}
    model = open_model(source)
    hyper, width, first = model.hyper, model.hyper.width, model.layer_count_without_mtp
    attending = [i for i, b in enumerate(hyper.blocks) if b.mixers and not any(m.taps for m in b.mixers)]
    like, gated = attending[-1], "output_hc_norm.weight" in tensors
    tensors["token_embd.weight"] = tensors["token_embd.weight"] * np.float32(pull)
    block = {name.removeprefix(f"blk.{like}."): t for name, t in tensors.items() if name.startswith(f"blk.{like}.")}
    if hyper.family.mixer == "single":  # a block of such a model has one part, but one that guesses both
        fed = f"blk.{max(i for i, b in enumerate(hyper.blocks) if not b.mixers)}."
        parts = {name.removeprefix(fed): array for name, array in tensors.items() if name.startswith(fed)}
        block |= {name.replace("attn_norm", "post_attention_norm"): array for name, array in parts.items()}
    if model.architecture == "glm5-next":  # its files give such a block no streams
        block = {name: array for name, array in block.items() if not name.startswith("hc_")}

    def norm(*shape: int) -> Array:
        return (1.0 + 0.2 * rng.standard_normal(shape)).astype(np.float32)

    for new in (f"blk.{first + k}." for k in range(count)):
        tensors |= {new + name: array for name, array in block.items()}
        mix = np.concatenate([pull * np.eye(width), np.zeros((width, width))], axis=1)
        mix += rng.standard_normal(mix.shape) / np.sqrt(2 * width)
        tensors[f"{new}nextn.eh_proj.weight"] = mix.astype(np.float32)
        tensors[f"{new}nextn.enorm.weight"] = norm(width)
        tensors[f"{new}nextn.hnorm.weight"] = norm(*[hyper.streams.count] * gated, width)
        if gated:
            heads = {name: array for name, array in tensors.items() if name.startswith("output_hc_")}
            tensors |= {f"{new}nextn.{n.removeprefix('output_').replace('hc', 'hc_head')}": a for n, a in heads.items()}
        else:
            tensors[f"{new}nextn.shared_head_norm.weight"] = norm(width)
    return write_fixture(path, source, tensors, like, block_count=first + count, nextn_predict_layers=count)


def write_fixture(path: Path, source: str | Path, tensors: Tensors, like: int = -1, **keys: int) -> Model:
    """Write and open a fixture, or the model of another file, with these tensors and counts in its metadata.

    Metadata of each block are repeated for new blocks as for the block `like`.
    """
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
            if isinstance(value, list) and len(value) == blocks:  # a value for each block
                value += [value[like]] * (keys.get("block_count", blocks) - blocks)
            writer.add_key_value(key, value, kind, inner[0] if kind is GGUFValueType.ARRAY else None)
    for tensor, array in tensors.items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_model(path)
