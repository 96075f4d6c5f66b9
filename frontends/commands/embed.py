"""``hocket embed``: embedding vectors of texts, by encoders or language models."""

from __future__ import annotations

import argparse
import io
import json
import sys

import numpy as np

from ..errors import ModelError
from ..language_model import Model
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_to_stdout_unless_closed
from ..text_limits import require_nonempty_texts_fit
from .shared_flags import SESSION_OPTIONS, add_model_file_argument, add_option_flags, run_options_from_flags


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub)
    sub.add_argument(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text; may be repeated (the lines of stdin)",
    )
    sub.add_argument("--no-normalise", action="store_true", help="do not normalise the vectors")
    sub.add_argument(
        "-o",
        "--output",
        choices=("jsonl", "npy"),
        default="jsonl",
        help="a JSON list for each text, or an array [texts, width] (jsonl)",
    )
    add_option_flags(
        sub, SESSION_OPTIONS, context={"help": "maximum tokens of a text (at most 4096, or the context of the model)"}
    )


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    texts = args.prompt or _read_stdin_lines()
    if not texts:
        raise ModelError("got no text; give some with -p, or a line each on stdin")
    with Model(args.model, **run_options_from_flags(args) | {"context": args.context or None}) as model:
        ids = [model.tokenize(text) for text in texts]
        require_nonempty_texts_fit(ids, model.context, "text" if args.prompt else "line")
        vectors = model.embed(ids, normalise=not args.no_normalise)
    if args.output == "npy":
        array = io.BytesIO()
        np.save(array, vectors, allow_pickle=False)
        sys.stdout.buffer.write(array.getvalue())
    else:
        for vector in vectors:
            write_to_stdout_unless_closed(json.dumps([float(f"{x:.7g}") for x in vector]) + "\n")
    return 0


def _read_stdin_lines() -> list[str]:
    text = sys.stdin.read().removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n")
    return text.split("\n") if text else []
