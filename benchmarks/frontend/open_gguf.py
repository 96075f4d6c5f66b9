"""Measure the time to open a GGUF file with a vocabulary of 262,144 tokens, with hocket and with the ``gguf`` package.

Run ``python benchmarks/frontend/open_gguf.py``; it writes a file of about 12 MB into a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import gguf

from hocket.frontends.gguf import open_gguf

TOKEN_COUNT = 262_144
MAX_SECONDS = 0.5
"""The limit for opening, in seconds."""


def write_vocabulary_model(path: Path, tokens: int = TOKEN_COUNT) -> None:
    """Write a header-only model: `tokens` strings of 1 to 12 characters, with a score, a type and a merge for each."""
    words = [f"{i:x}▁ü日"[: 1 + i % 12] + f"{i}" for i in range(tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges([f"{word} {word}" for word in words])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def measure_call_seconds(work: Callable[[], object], runs: int) -> float:
    """Return the median wall time of one call, in seconds."""
    times = []
    for _ in range(runs):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary_model(path)
        rows = [
            ("hocket, open", measure_call_seconds(lambda: open_gguf(path), 7)),
            (
                "hocket, open and decode tokens",
                measure_call_seconds(lambda: open_gguf(path).strings("tokenizer.ggml.tokens"), 7),
            ),
            ("gguf package, open", measure_call_seconds(lambda: gguf.GGUFReader(path), 1)),
        ]
        print(f"{TOKEN_COUNT} tokens, scores, types and merges; {path.stat().st_size / 1e6:.1f} MB")
    for name, time in rows:
        print(f"{name:<32} {time * 1e3:10.1f} ms")
    print(f"limit for opening {MAX_SECONDS * 1e3:.0f} ms: {'met' if rows[0][1] < MAX_SECONDS else 'MISSED'}")


if __name__ == "__main__":
    main()
