"""Tiny models of many architectures, as llama.cpp's own test of them writes: headers, and goldens of llama.cpp.

``fixtures/architectures/NAME.npz`` holds a file up to its data: names, shapes and offsets of its tensors. It also
holds tokens from position 0, and llama.cpp's logits (float32 cache, one batch) at the last of them. Weights follow from
names and a seed, so that every part of a network matters.

Only ``gemma4-mixed``, which that test lacks, holds a whole file, and the logits of a float64 reference, since
llama.cpp rounds its GELU.

    python tests/given/models/architectures.py SUITE      packs them anew from a folder with heads, goldens and index
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parents[2] / "fixtures" / "architectures"
ROWS = 8
"""Positions with stored logits."""
SHORT = 8
"""Tokens of most models; others have windows that more tokens have to leave, or see all tokens at once."""
ALL = tuple(sorted(path.stem for path in FOLDER.glob("*.npz")))
"""Every model: the architecture, and whether it has experts."""


def weights(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """The values of a tensor; ``shape`` as GGUF has it, the fan-in first."""
    x = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode())).standard_normal(int(np.prod(shape)))
    last = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if last in ("attn_sinks.weight", "token_embd.weight"):
        return x.astype(np.float32)
    is_norm = ("norm" in last and not last.endswith("bias")) or last == "ssm_d"
    if "rope_f" in last:
        x = 1.0 + np.abs(x)
    elif last == "ssm_a":
        x = -np.exp(0.5 * x)
    elif last == "ssm_dt.bias":
        x = 0.5 * x - 1.0
    elif last.endswith(("scale", "scales")) or ("hc_" in last and last.endswith("_scale.weight")):
        x = 1.0 + 0.2 * np.tanh(x)
    elif is_norm:
        x = 1.0 + 0.2 * x
    elif last.endswith(("bias", "_base.weight", "_ape.weight")) or len(shape) == 1:
        x = 0.2 * x
    elif last == "position_embd.weight":
        x = 0.5 * x
    else:
        gain = 4.0 if "ffn_gate_inp" in last else 2.0 if last == "output.weight" else 1.0
        x = gain * x / np.sqrt(shape[0])
    return x.astype(np.float32)


def write_model(name: str, folder: Path) -> Path:
    """The whole model as a file in ``folder``."""
    with np.load(FOLDER / f"{name}.npz") as packed:
        head, tensors, seed = packed["head"].tobytes(), json.loads(packed["tensors"].tobytes()), int(packed["seed"])
    path = folder / f"{name}.gguf"
    with open(path, "wb") as file:
        file.write(head)
        for tensor, shape, offset in tensors:
            file.seek(len(head) + offset)
            file.write(weights(tensor, tuple(shape), seed).tobytes())
        file.truncate(-(-file.tell() // 32) * 32)
    return path


def golden(name: str) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Tokens, and llama.cpp's logits at the last `ROWS` of them."""
    with np.load(FOLDER / f"{name}.npz") as packed:
        return packed["tokens"].tolist(), packed["logits"].astype(np.float64)


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Add metadata of the type that follows from ``value``."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](key, value)


def write_file(writer: gguf.GGUFWriter, path: Path) -> None:
    """Write the file of a writer that has all its metadata and tensors."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack_file(
    name: str, path: Path, tokens: npt.NDArray[np.integer], rows: npt.NDArray[np.floating], seed: int
) -> None:
    """Pack a model file with weights from `weights`, and its golden rows [tokens, columns], as the fixture ``name``."""
    reader = gguf.GGUFReader(path)
    start = int(reader.data_offset)
    stored = [(t.name, [int(n) for n in t.shape], int(t.data_offset) - start) for t in reader.tensors]
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        head=np.frombuffer(path.read_bytes()[:start], np.uint8),
        tensors=np.frombuffer(json.dumps(stored).encode(), np.uint8),
        tokens=tokens.astype(np.int32),
        logits=rows[-ROWS:],
        seed=np.array(seed),
    )


def pack(suite: Path) -> None:
    """Pack every model of a folder with a known architecture, with as many tokens as it needs."""
    for name, about in json.loads((suite / "index.json").read_text("utf-8")).items():
        with np.load(suite / "golden" / f"{name}.npz") as whole:
            tokens, logits = whole["tokens"], whole["logits"]
        head = (suite / "heads" / f"{name}.gguf").read_bytes()
        tensors = (suite / "heads" / f"{name}.json").read_bytes()
        count = SHORT if about["causal"] and b"sliding_window_pattern" not in head else tokens.size
        np.savez_compressed(
            FOLDER / f"{name}.npz",
            head=np.frombuffer(head, np.uint8),
            tensors=np.frombuffer(tensors, np.uint8),
            tokens=tokens[:count],
            logits=logits[count - ROWS : count],
            seed=np.array(about["seed"]),
        )


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
