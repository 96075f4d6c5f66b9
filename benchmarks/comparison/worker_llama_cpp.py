"""Run the tests of ``vs_llama_cpp.py`` in llama.cpp, through llama-cpp-python; they arrive as JSON lines.

Started as ``python worker_llama_cpp.py MODEL THREADS CONTEXT``, by an interpreter that does not need hocket.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time

import llama_cpp as lc


@lc.llama_log_callback
def discard_log(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Discard the log of the library."""


def open_model_and_context(path: str, threads: int, size: int) -> tuple[object, object]:
    """Return a model and a context with the settings of ``llama-bench -fa 1``."""
    lc.llama_log_set(discard_log, ctypes.c_void_p(0))
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    parameters = lc.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = size, 2048, 512
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = lc.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of {size} tokens for {path}")
    return model, context


def evaluate_tokens(context: object, tokens: list[int]) -> None:
    """Evaluate tokens, and wait for the result."""
    block = (lc.llama_token * len(tokens))(*tokens)
    if lc.llama_decode(context, lc.llama_batch_get_one(block, len(tokens))):
        raise SystemExit("llama.cpp failed to decode")
    lc.llama_synchronize(context)


def measure_test_seconds(context: object, vocabulary: int, kind: str, count: int, depth: int) -> float:
    """Return the seconds of one test: a prompt at once, or tokens one by one.

    Args:
        context: The llama.cpp context.
        vocabulary: The vocabulary size.
        kind: ``pp`` for a prompt, ``tg`` for single tokens.
        count: Timed tokens.
        depth: Tokens that are evaluated before the timed ones.
    """
    lc.llama_memory_clear(lc.llama_get_memory(context), True)
    tokens = random.Random(0).choices(range(vocabulary), k=depth + count)
    for start in range(0, depth, 512):
        evaluate_tokens(context, tokens[start : min(depth, start + 512)])
    parts = [tokens[depth:]] if kind == "pp" else [[token] for token in tokens[depth:]]
    start = time.perf_counter()
    for part in parts:
        evaluate_tokens(context, part)
    return time.perf_counter() - start


def main() -> None:
    path, threads, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model, context = open_model_and_context(path, threads, size)
    vocabulary = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    about = {"version": lc.__version__, "system": lc.llama_print_system_info().decode().strip()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        test = json.loads(line)
        print(
            json.dumps(measure_test_seconds(context, vocabulary, test["kind"], test["tokens"], test["depth"])),
            flush=True,
        )


if __name__ == "__main__":
    main()
