"""Saving a session and going on later: whole states, so that the number of devices may differ.

The file is a NumPy ``.npz``: one array per state (caches cut to the cells in use) and a JSON header that says which
model, which sequences and how long they are.  Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..graph.arguments import ANY, a, list_of, needs
from .errors import ModelError
from .models import Model
from .session import Session, token_ids

FORMAT = "hocket-state-1"


def model_digest(model: Model) -> str:
    """What a saved state must share with the model that goes on: architecture, tensors, their shapes and sizes."""
    sha = hashlib.sha256(model.architecture.encode())
    for name, tensor in sorted(model.gguf.tensors.items()):
        sha.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        if tensor.nbytes <= 1 << 16:  # norms and biases tell two fine-tunings of one shape apart
            sha.update(tensor.raw.tobytes())
    return sha.hexdigest()


@needs(ModelError, session=a(Session), tokens=list_of(ANY, "a sequence of sequences of tokens"), path=a(str, Path))
def save_state(session: Session, tokens: Sequence[Sequence[int]], path: str | Path) -> None:
    """Write what `session` remembers, and the tokens of each sequence, to `path` (whole or not at all).

    Raises `OSError` if it cannot be written.
    """
    with session.store.turn:
        header = {
            "format": FORMAT,
            "model": model_digest(session.model),
            "context": session.context,
            "lengths": session.lengths,
            "tokens": [token_ids(i, row) for i, row in enumerate(tokens)],
        }
        arrays = {f"state/{name}": _used(session, name) for name in session.store.states}
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            text = np.frombuffer(json.dumps(header).encode(), np.uint8)
            np.savez(file, header=text, **arrays)  # type: ignore[arg-type]  # keywords are arrays, never allow_pickle
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@needs(ModelError, session=a(Session), path=a(str, Path))
def load_state(session: Session, path: str | Path) -> list[list[int]]:
    """Put `session` where the saved one was and return the tokens of each sequence.

    The session may have another context size, number of devices or split.  Raises `ModelError` for a damaged file, one
    of another model or other sequences, or one that does not fit the context; the session is then as before.
    """
    try:
        header, arrays = _read(Path(path))
        lengths, tokens = _checked(session, header)
        wanted = {name: _expected(session, name, lengths) for name in session.store.states}
        if {name: a.shape for name, a in arrays.items()} != wanted:
            raise ValueError("its states have other names or shapes")
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, UnicodeDecodeError) as why:
        raise ModelError(f"{path}: not a saved state of this model ({why}); save one with --save-state") from None
    with session.store.turn:
        for i in range(session.sequences):
            session.reset(i)
        for name, array in arrays.items():
            _restore(session, name, array, lengths)
        session.lengths = lengths
    return tokens


def _read(path: Path) -> tuple[Mapping[str, object], dict[str, npt.NDArray[np.float32]]]:
    size = path.stat().st_size
    # Our own file object: numpy leaves its own open when it refuses the content.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
        if sum(i.file_size for i in saved.zip.infolist()) > 2 * size + 4096:
            raise ValueError("its arrays are larger than the file")  # savez does not compress
        header = json.loads(bytes(saved["header"]))
        arrays = {key.removeprefix("state/"): saved[key] for key in saved.files if key.startswith("state/")}
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    return header, arrays


def _checked(session: Session, header: Mapping[str, object]) -> tuple[list[int], list[list[int]]]:
    if header["model"] != model_digest(session.model):
        raise ValueError("it is of another model")
    lengths, tokens = header["lengths"], header["tokens"]
    if not isinstance(lengths, list) or not isinstance(tokens, list) or len(lengths) != session.sequences:
        raise ValueError(f"it does not hold {session.sequences} sequences")
    if any(not isinstance(n, int) or n < 0 for n in lengths):
        raise ValueError("its lengths are no counts")
    if max(lengths) > session.context:
        raise ModelError(
            f"the saved state has {max(lengths)} tokens, but the context holds {session.context}; raise --ctx-size"
        )
    vocabulary = session.model.vocabulary_size
    if len(tokens) != len(lengths) or any(not 0 <= int(t) < vocabulary for row in tokens for t in row):
        raise ValueError("its tokens are none of this model's")
    return lengths, tokens


def _is_cache(session: Session, name: str) -> bool:
    """Whether a state has a row for each cell of context (and the spare one), not one entry for each sequence."""
    return bool(session.store.state(name).shape[0] == session.sequences * session.context + 1)


def _expected(session: Session, name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    shape = session.store.state(name).shape
    return (sum(lengths), *shape[1:]) if _is_cache(session, name) else tuple(shape)


def _rows(session: Session, lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """The cache rows in use, sequence by sequence."""
    return np.concatenate([i * session.context + np.arange(n) for i, n in enumerate(lengths)])


def _used(session: Session, name: str) -> npt.NDArray[np.float32]:
    whole = np.asarray(session.store.state(name))
    return whole[_rows(session, session.lengths)] if _is_cache(session, name) else whole


def _restore(session: Session, name: str, array: npt.NDArray[np.float32], lengths: Sequence[int]) -> None:
    view = session.store.state(name)
    if _is_cache(session, name):
        view[_rows(session, lengths)] = array
    else:
        view[...] = array
