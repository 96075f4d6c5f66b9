"""Open a model file, and make a session that has loaded the weights of a model."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

from ..backends.progress_bar import is_progress_visible, open_progress_bar
from ..distributed import SINGLE_PROCESS, World
from ..graph.errors import format_count
from ..graph.validation import BOOL, NONE, instance_of, validate_arguments
from .adapters import read_adapters
from .errors import ModelError
from .generation.speculative import require_same_vocabulary
from .gguf import Gguf, open_gguf
from .inference.session import DEFAULT_CONTEXT, LoadProgress, Session
from .inference.value_watch import StepWatch
from .models import Model, load_model
from .run_config import DEFAULT_BATCH, DeviceGroup, RunConfig
from .safetensors import is_model_folder, open_folder

EMBEDDED_MODEL_FILE = "hocket-tiny-q8_0.gguf"
"""File name of the embedded model."""


@validate_arguments(ModelError, path=instance_of(str, Path) | NONE, header_only=BOOL)
def open_model(path: str | Path | None, *, header_only: bool = False) -> Model:
    """Open the model in a GGUF file or a Hugging Face folder, or the embedded model if `path` is `None`.

    With `header_only` the file may lack the weights.

    Raises:
        ModelError: The file is not a valid model.
    """
    if path is not None:
        return load_model(open_model_file(path, header_only=header_only))
    # If the package is in an archive, the file is temporary; its mapping outlives it.
    with as_file(files(f"{__package__.rpartition('.')[0]}.data").joinpath(EMBEDDED_MODEL_FILE)) as embedded:
        return load_model(open_gguf(embedded, header_only=header_only))


def open_model_file(path: str | Path, *, header_only: bool = False) -> Gguf:
    """Return the metadata and tensors of a GGUF file, or of a Hugging Face folder with ``config.json``.

    Raises:
        ModelError: The path is neither, or it is damaged.
    """
    return open_folder(path) if is_model_folder(path) else open_gguf(path, header_only=header_only)


def open_adapted_model(config: RunConfig, *, header_only: bool = False) -> Model:
    """Open the model of a configuration, with its LoRA adapters and control vectors.

    With `header_only` the model file may lack the weights.

    Raises:
        ModelError: A file does not fit the model. A session checks later that all changed matrices are used.
    """
    model = open_model(config.path, header_only=header_only)
    adapters = read_adapters(
        model.gguf,
        model.hyper.width,
        model.layer_count_without_mtp,
        lora=config.lora,
        control_vectors=config.control_vectors,
        control_layers=config.control_layers,
    )
    return replace(model, adapters=adapters)


def require_usable_model_files(config: RunConfig) -> None:
    """Require that the model, its adapters and its draft model fit together, before anything is loaded.

    Raises:
        ModelError: A file is not a model or adapter as its option needs, or options contradict each other.
    """
    if config.lora or config.control_vectors or config.control_layers:
        open_adapted_model(config, header_only=True)
    if config.draft is not None:
        require_same_vocabulary(open_model(config.path, header_only=True), open_model(config.draft, header_only=True))


def open_session(
    model: Model,
    *,
    on: DeviceGroup,
    context: int | None = None,
    batch: int = DEFAULT_BATCH,
    watch: StepWatch | None = None,
    world: World = SINGLE_PROCESS,
    sequences: int = 1,
) -> Session:
    """Make a session and load the weights.

    On a terminal or in a notebook, a bar shows the progress.

    Args:
        model: The model.
        on: The devices.
        context: Tokens per sequence.
        batch: Maximum new tokens of one run.
        watch: An observer of the steps.
        world: The ranks.
        sequences: Number of sequences.
    """
    make_session = partial(
        Session, model, on=on, sequences=sequences, context=context, batch=batch, watch=watch, world=world
    )
    if not is_progress_visible():
        return make_session()
    with open_progress_bar(unit="B", unit_scale=True, unit_divisor=1024, desc="load") as bar:

        def show(progress: LoadProgress) -> None:
            bar.total = progress.total_bytes
            bar.update(progress.loaded_bytes - bar.n)

        return make_session(on_progress=show)


def choose_context(model: Model, tokens: int, asked: int | None, *, default: int = DEFAULT_CONTEXT) -> int:
    """Choose the context of a session in tokens.

    This happens before any weight is loaded.

    Args:
        model: The model.
        tokens: Tokens that the context must hold.
        asked: The context that a user gave; 0 is the trained context. None is `default`, or the trained context if
            less.
        default: The context if the user gave none.

    Raises:
        ModelError: The context is longer than the trained context, or too short for the tokens.
    """
    context = min(default, model.context_length) if asked is None else asked or model.context_length
    model.require_context_within_training(context)
    if tokens > context:
        more = "shorten it or give a larger context=N" if context < model.context_length else "shorten it"
        raise ModelError(f"the text has {format_count(tokens, 'token')}, but the context holds {context}; {more}")
    return context


def read_text_without_bom_and_newline(path: str) -> str:
    """Read a text file without its byte-order mark and last line break, as llama.cpp reads prompts.

    Args:
        path: The file; ``-`` is stdin.

    Raises:
        ModelError: The text is not UTF-8.
        OSError: The file cannot be read.
    """
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        name = "stdin" if path == "-" else path
        raise ModelError(f"{name}: is not UTF-8 at byte {error.start}; convert the text") from None
