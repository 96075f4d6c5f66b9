"""From a path to a model, and from a model to a session with its weights loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

from ..distributed import SINGLE_PROCESS, World
from ..graph.validation import BOOL, NONE, instance_of, validate_arguments
from .adapters import Scaled, read_adapters
from .errors import ModelError
from .gguf import open_gguf
from .models import Model, load_model
from .session import DEFAULT_BATCH, DEFAULT_CONTEXT, Group, Progress, Session
from .watch import Watch

EMBEDDED = "hocket-tiny-q8_0.gguf"


@validate_arguments(ModelError, path=instance_of(str, Path) | NONE, header_only=BOOL)
def open_model(path: str | Path | None, *, header_only: bool = False) -> Model:
    """The model in a GGUF file, or the one that comes with hocket.

    With ``header_only`` the weights need not be there.  Raises `ModelError` for anything that is not a sound model.
    """
    if path is not None:
        return load_model(open_gguf(path, header_only=header_only))
    # Where the package lies in an archive the file is a temporary one; its mapping outlives it.
    with as_file(files(f"{__package__.rpartition('.')[0]}.data").joinpath(EMBEDDED)) as embedded:
        return load_model(open_gguf(embedded, header_only=header_only))


def open_adapted(
    path: str | Path | None,
    *,
    lora: Sequence[Scaled] = (),
    control_vectors: Sequence[Scaled] = (),
    control_layers: tuple[int, int] | None = None,
) -> Model:
    """The model in a GGUF file, or the one that comes with hocket, with LoRA adapters and control vectors.

    Each is a file, or a pair of a file and its scale; all of them add up.  ``control_layers`` are the first and the
    last block behind which control vectors count.  Raises `ModelError` for a file that does not fit the model; whether
    all matrices that change are read is known when a session is made.
    """
    model = open_model(path)
    adapters = read_adapters(
        model.gguf,
        model.hyper.width,
        model.layers,
        lora=lora,
        control_vectors=control_vectors,
        control_layers=control_layers,
    )
    return replace(model, adapters=adapters)


def open_session(
    model: Model,
    *,
    on: Group,
    context: int | None = None,
    batch: int = DEFAULT_BATCH,
    watch: Watch | None = None,
    world: World = SINGLE_PROCESS,
    sequences: int = 1,
) -> Session:
    """A session; a bar on stderr shows the bytes loaded, if that is a terminal."""
    given = partial(Session, model, on=on, sequences=sequences, context=context, batch=batch, watch=watch, world=world)
    if not (sys.stderr and sys.stderr.isatty()):
        return given()
    from tqdm import tqdm  # 15 ms that only a terminal needs

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="load", leave=False, disable=None) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total
            bar.update(progress.done - bar.n)

        return given(on_progress=show)


def context_for(model: Model, tokens: int, asked: int | None, *, default: int = DEFAULT_CONTEXT) -> int:
    """The context size of a session that must hold ``tokens``: the one asked for (0: the model's own), else ``default``
    or less.

    Raises `ModelError` if it is longer than the model allows or the tokens do not fit, before any weight is loaded.
    """
    context = min(default, model.context_length) if asked is None else asked or model.context_length
    model.check_context(context)
    if tokens > context:
        more = "shorten it or give a larger context=N" if context < model.context_length else "shorten it"
        raise ModelError(f"the text has {tokens} tokens, but the context holds {context}; {more}")
    return context


def read_text(path: str) -> str:
    """A text file without its byte-order mark and its last line break, as llama.cpp reads prompts; ``-`` is stdin.

    Raises `ModelError` if it is not UTF-8, `OSError` if it cannot be read.
    """
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        name = "stdin" if path == "-" else path
        raise ModelError(f"{name}: is not UTF-8 at byte {error.start}; convert the text") from None
