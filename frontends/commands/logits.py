"""``hocket logits``: writes the logits of every position to a ``.npy`` file, evaluated in batches or token by token."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...graph.errors import format_count
from ...graph.storage.files import replacing, require_writable
from ..errors import ModelError
from ..flag_values import parse_token_ids
from ..gguf.tokenization.tokenizer import tokenizer_from_metadata
from ..inference.session import F32, Session
from ..models import Model
from ..open_model import choose_context, open_adapted_model
from ..terminal.compile_progress import show_compile_progress
from .shared_flags import (
    add_model_file_argument,
    add_session_flags,
    broadcast_text_from_rank_0,
    config_from_flags,
    open_session_from_flags,
    trace_to_file,
)

HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers of ``.npy`` headers by version. `numpy.load` also reads archives, with other errors."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub)
    text = sub.add_mutually_exclusive_group(required=True)
    text.add_argument("--tokens", type=parse_token_ids, metavar="IDS", help="token ids, as 1,2,3")
    text.add_argument("--tokens-file", metavar="FILE", help=".npy file of token ids")
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to tokenize")
    sub.add_argument("--out", required=True, metavar="FILE", help=".npy file to write: float32 [tokens, vocabulary]")
    sub.add_argument(
        "--step", action="store_true", help="evaluate half of the tokens at once, and the other half one by one"
    )
    add_session_flags(sub, context={"help": "tokens of context (the number of its tokens)"})


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    model = open_adapted_model(config_from_flags(args))
    if args.prompt is not None:
        tokens = tokenizer_from_metadata(model.gguf.metadata).encode(args.prompt, parse_special=True)
    elif args.tokens is not None:
        tokens = args.tokens
    else:
        tokens = json.loads(broadcast_text_from_rank_0(args, lambda: json.dumps(read_npy_token_file(args.tokens_file))))
    require_nonempty_valid_tokens(tokens, model)
    if not args.world.rank:
        require_writable(args.out, model.gguf.part_paths)
    session = open_session_from_flags(
        args, model, choose_context(model, len(tokens), args.context, default=len(tokens))
    )
    blocks = compute_logits_in_blocks(session, tokens, step=args.step)
    with trace_to_file(session, args.trace):
        write_npy_rows_atomically(
            os.devnull if args.world.rank else args.out, blocks, (len(tokens), model.vocabulary_size)
        )
    return 0


def require_nonempty_valid_tokens(tokens: Sequence[int], model: Model) -> None:
    """Raise `ModelError` if there are no tokens, or if a token is outside of the vocabulary."""
    if not tokens:
        raise ModelError("there are no tokens; give at least one")
    for i, token in enumerate(tokens):
        if not 0 <= token < model.vocabulary_size:
            raise ModelError(
                f"token {token} at position {i} is not in the vocabulary; need 0 to {model.vocabulary_size - 1}"
            )


def read_npy_token_file(path: str) -> list[int]:
    """Read the token ids in a ``.npy`` file.

    Raises:
        ModelError: The file is no ``.npy`` file with integers in one dimension.
    """
    if not Path(path).is_file():
        raise ModelError(f"{path}: is no file; give a .npy file of token ids")
    with open(path, "rb") as file:
        try:
            with warnings.catch_warnings(action="ignore"):
                shape, _, dtype = HEADER_READERS[np.lib.format.read_magic(file)](file)
        except Exception as error:  # the header is Python source and may raise any exception
            name = type(error).__name__
            raise ModelError(f"{path}: cannot be read as .npy ({name}); save token ids with numpy.save") from None
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ModelError(f"{path}: holds {dtype}{list(shape)}; need integers in one dimension")
        need, have = shape[0] * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if not 0 <= need <= have:
            raise ModelError(
                f"{path}: announces {format_count(need, 'byte')} of token ids, but holds {have}; save them again"
            )
        return [int(token) for token in np.frombuffer(file.read(need), dtype)]


def compute_logits_in_blocks(session: Session, tokens: Sequence[int], *, step: bool = False) -> Iterator[F32]:
    """Compute the logits after each token, and yield them in blocks f32[n, vocabulary], in total one row per token.

    Tokens are evaluated in batches. With `step` the second half is evaluated token by token, as in generation.
    """
    batched_count = len(tokens) // 2 if step else len(tokens)
    for start in range(0, batched_count, session.batch):
        yield session.evaluate([tokens[start : min(start + session.batch, batched_count)]], every_position=True)[0]
    for token in tokens[batched_count:]:
        yield session.evaluate([[token]], every_position=True)[0]


def write_npy_rows_atomically(path: str, blocks: Iterable[F32], shape: tuple[int, int]) -> None:
    """Write blocks of rows as one float32 ``.npy`` file of the given shape; a failed write leaves no file."""
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for block in blocks:
            file.write(np.ascontiguousarray(block, "<f4").data)
