"""Write docs/quantisations.md: every weight dtype, and the dtype in which each backend stores it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import hocket
from hocket import ops
from hocket.backends.base import find_device
from hocket.frontends.models import ARCHITECTURES
from hocket.frontends.quantisation.file_types import FILE_TYPES
from hocket.frontends.quantisation.type_choice import fit_dtype_to_columns
from hocket.graph import DType, Node, Spec
from hocket.graph.dtypes import CACHE_DTYPES, FLOAT_DTYPES, STATE_DTYPES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "quantisations.md"
HEAD = """# Weight dtypes

`python docs/write_quantisations.py` writes this page from the answers of the backends. Any architecture may use any of
these dtypes, because all of [the {architectures}](models.md) multiply and look up by the same ops ({readers}). These
ops accept each of these dtypes on every backend, sharded over devices or not.

- "As in the file" means that kernels read the blocks of the file.
- A dtype with bits means that weights are converted to this dtype once, when they are loaded.
- Bits are the bits of one weight with its share of the scales.
- `cuda-emulated` stores weights as `cuda` does, and `reference` stores float64.

| dtype | weights per block | bits | {backends} |
|---|---|---|{rules}
"""
WRITTEN_VALUES = """
## Write quantised values in a graph

`cast` and `set_rows` round to these dtypes, as GGML's CPU backend does:

{written}

The other quantised dtypes are refused: IQ1, IQ2 and IQ3 need importances, and `q8_1` and `q8_K` are dtypes of
activations. `concat` joins values of these dtypes. `attention` and
`lightning_indexer` read keys of these dtypes. `-ctk` and `-ctv` take f32, f16, bf16 and the first {cached}.

- `cpu` keeps states in blocks. Compiled kernels read and write the dtypes of `-ctk`. NumPy does so for the other
  dtypes, and encodes only the rows that a run writes.
- `cuda` keeps states of the dtypes of `-ctk` in blocks, which kernels store, and unpack during attention. Keys and
  values of different dtypes are unpacked to float32 once for a step of few tokens.
- `cuda` keeps states of the other quantised dtypes as float32, and `numpy` all of them. `set_rows` does not round such
  a row; `cast` does.
"""
WRITTEN_FILES = """
## Write a file of smaller weights

`hocket quantize` writes a model in another type from a file of f32, f16 or bf16 weights:

```sh
hocket quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M --dry-run
hocket imatrix model-f16.gguf text.txt -o imatrix.gguf
hocket quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M --imatrix imatrix.gguf
hocket compare model-f16.gguf model-q4_k_m.gguf -f text.txt
```

1. The first command prints the dtype of each tensor and the size of the file.
2. The second command makes an importance matrix from a text. The types of `IQ1`, `IQ2`, `IQ3_XXS`, `IQ3_XS` and
   `Q2_K_S` need one, as in `llama-quantize`. A file of `llama-imatrix` is also read.
3. The third command writes the file.
4. The fourth command measures the change: KL divergence, equal top tokens, and the perplexities of both files.

A type is a mixture: important tensors have more bits, by the rules of `llama-quantize`. `--pure` gives all matrices the
dtype of the type. `--tensor-type REGEX=DTYPE` sets the dtype of tensors with a matching name. If the rows of a tensor
are no whole number of blocks, then the tensor has the dtype in the last column.

| type | dtype of most matrices | scales | for other rows |
|---|---|---|---|
{rows}
- "By range" means that the largest number of a block determines its scale. The bytes are equal to the bytes of ggml.
- "Searched" means that the scale of a block is the one with the smallest error. Numbers have weights in this error: the
  importance of their column if it is known, times their magnitude.
- "Mean" means that the scale is the mean magnitude, weighted by importances.
- With an importance matrix the scales of `Q4_0` and `Q5_0` are searched too.
- `nvfp4` is a dtype for `--tensor-type`; no file type has it.

While `hocket quantize` writes OUT, finished tensors are in `OUT.partial`, and `OUT.partial.record` has their digests.
After an interruption, as by a full disk or a killed process, the same command continues after the last complete tensor.
With another model or other options it starts from the first tensor and says so. An interrupted run of `hocket imatrix`
goes on with `--in-file OUT --chunk READ`, where READ is the number of chunks in the file.

[A comparison with llama-quantize](../benchmarks/results/2026-11-29-zen5-quantize.md) has errors and times.
"""
TAIL = """
## Floats of eight and of four bits

GGUF has no dtype of 8-bit floats (FP8). The pull requests that would add one to ggml
([10055](https://github.com/ggml-org/llama.cpp/pull/10055), [25336](https://github.com/ggml-org/llama.cpp/pull/25336),
[27512](https://github.com/ggml-org/llama.cpp/pull/27512)) were open in November 2026. Files of models with FP8 weights
have these weights in another dtype.

The 4-bit float instructions of GPUs since Blackwell accept activations of at most 8-bit floats (`e4m3`). Such
activations change the logits of a model by <!--fact:e4m3-error-->8.6e-3<!--/fact--> or more of their mean square;
the limit of `--fast` is 1e-3.
[The comparison](comparison.md#weights-of-4-bit-floats) has the figures.
"""
BACKEND_BY_COLUMN = {"cpu": "cpu", "cuda": "cuda-emulated", "numpy": "numpy"}
"""The backend that answers for each column; ``cuda`` itself would need a GPU."""


def make_reading_nodes(dtype: DType) -> tuple[Node, ...]:
    """Return the nodes that read matrices of a dtype in models: one matrix, experts, and rows of a table."""
    matrix, experts = hocket.weight("w", (256, 256), dtype), hocket.weight("w", (4, 256, 256), dtype)
    ids, x = hocket.input("ids", (1, 2), "i32"), hocket.input("x", (1, 1, 256))
    row = hocket.input("row", (1,), "i32")
    return ops.mul_mat(matrix, x).node, ops.mul_mat_id(experts, x, ids).node, ops.get_rows(matrix, row).node


def format_dtypes() -> Iterator[str]:
    """Yield a row for each dtype that matrices may have.

    Raises:
        ValueError: A backend cannot read the dtype.
    """
    asked = [find_device(kind) for kind in BACKEND_BY_COLUMN.values()]
    for dtype in (d for d in DType if d.is_quantised or d in FLOAT_DTYPES):
        cells = []
        for backend, device in asked:
            if refusals := [
                answer.reason for n in make_reading_nodes(dtype) if not (answer := backend.supports(n, device)).ok
            ]:
                raise ValueError(f"{backend.name} does not read {dtype}: {refusals[0]}")
            stored_dtype = backend.storage_spec(Spec((256, 256), dtype), "weight").dtype
            cells.append(
                "as in the file" if stored_dtype is dtype else f"{stored_dtype}, {stored_dtype.block_bytes * 8} bits"
            )
        bits = f"{dtype.block_bytes * 8 / dtype.block:g}"
        yield f"| `{dtype}` | {dtype.block} | {bits} | {' | '.join(cells)} |\n"


def page() -> str:
    """Return the expected text of the page."""
    head = HEAD.format(
        architectures=f"{len(ARCHITECTURES)} architectures",
        readers=", ".join(f"`{node.op}`" for node in make_reading_nodes(DType.F32)),
        backends=" | ".join(BACKEND_BY_COLUMN),
        rules="---|" * len(BACKEND_BY_COLUMN),
    )
    written = [f"`{dtype}`" for dtype in STATE_DTYPES if dtype.is_quantised]
    values = WRITTEN_VALUES.format(
        written=fill(", ".join(written), 120), cached=sum(dtype.is_quantised for dtype in CACHE_DTYPES)
    )
    files = WRITTEN_FILES.format(rows="".join(format_file_types()))
    return head + "".join(format_dtypes()) + values + files + TAIL


def format_file_types() -> Iterator[str]:
    """Yield a row for each type that ``hocket quantize`` writes."""
    by_range = (DType.Q4_0, DType.Q5_0, DType.Q8_0, DType.MXFP4, DType.TQ1_0, DType.TQ2_0)
    for one in FILE_TYPES.values():
        smaller = fit_dtype_to_columns(one.dtype, 32)
        replaced = f"`{smaller}`" if smaller is not one.dtype else "f16" if one.dtype.is_quantised else ""
        scales = "by range" if one.dtype in by_range else "mean" if one.dtype is DType.Q1_0 else "searched"
        scales = scales if one.dtype.is_quantised else ""
        yield f"| `{one.name}` | `{one.dtype}` | {scales} | {replaced} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
