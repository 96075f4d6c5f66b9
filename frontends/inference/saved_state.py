"""Save a session to a file and load it later. Whole states are saved, so the number of devices may differ.

The file is a NumPy ``.npz``: one array per state, with only the cache cells in use, and a JSON header. The header names
the model, the sequences and their lengths. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ...graph.storage.files import PRIVATE, replacing
from ...graph.validation import ANY, NONE, instance_of, list_of, validate_arguments
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message
from ..terminal.arguments import describe_os_error_with_remedy
from .cache_rows import find_cache_rows
from .micro_batches import MicroBatchedSession
from .model_digest import compute_model_digest
from .prefill_chunks import convert_to_token_ids
from .session import Session

STATE_FORMAT = "hocket-state-2"
MAX_F16 = float(np.finfo(np.float16).max)
NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype><f4|<f2|\|u1)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18},? ?){0,8})\), \} *\n",
    re.DOTALL,
)
"""Pattern of the header of a dense array of float32, float16 or bytes, as `numpy.save` writes it."""


@validate_arguments(
    ModelError,
    session=instance_of(Session, MicroBatchedSession),
    tokens=list_of(ANY, "a sequence of sequences of tokens"),
    path=instance_of(str, Path),
    talk=instance_of(Mapping) | NONE,
)
def save_state(
    session: Session | MicroBatchedSession,
    tokens: Sequence[Sequence[int]],
    path: str | Path,
    *,
    talk: Mapping[str, object] | None = None,
) -> None:
    """Save the states of a session and the tokens of each sequence to a file.

    The file is written completely or not at all.

    Args:
        session: The session. All ranks make this call; rank 0 writes the file.
        tokens: The tokens of each sequence.
        path: The file.
        talk: The conversation to save with it, if any.

    Raises:
        OSError: The file cannot be written.
    """
    captured = capture_state(session, tokens, talk=talk)
    if not session.world.rank:
        write_state_atomically(captured, path)


@dataclass(frozen=True, slots=True)
class SavedSessionState:
    """The saved state of a session, as in a file: a header, and the rows in use of each state by name."""

    header: Mapping[str, object]
    arrays: Mapping[str, npt.NDArray[np.generic]]


def capture_state(
    session: Session | MicroBatchedSession,
    tokens: Sequence[Sequence[int]],
    *,
    talk: Mapping[str, object] | None = None,
) -> SavedSessionState:
    """Copy the states of a session, so that `write_state_atomically` can write them while the session goes on.

    Args:
        session: The session. All ranks make this call.
        tokens: The tokens of each sequence.
        talk: The conversation to save with it, if any.
    """
    first = session.sessions[0]
    with first.store.device_lock:
        header = {
            "format": STATE_FORMAT,
            "model": compute_model_digest(session.model),
            "context": session.context,
            "lengths": session.lengths,
            "recent": session.recent,
            "tokens": [convert_to_token_ids(i, row) for i, row in enumerate(tokens)],
            **({} if talk is None else {"talk": talk}),
        }
        shares = {name: [_copy_rows_in_use(one, name) for one in session.sessions] for name in first.state_names}
        return SavedSessionState(header, {name: np.concatenate(own) for name, own in shares.items()})


def write_state_atomically(state: SavedSessionState, path: str | Path) -> None:
    """Write a captured state to a file, completely or not at all. Raises `OSError`."""
    text = np.frombuffer(json.dumps(state.header).encode(), np.uint8)
    arrays = {f"state/{name}": array for name, array in state.arrays.items()}
    with replacing(path, mode=PRIVATE) as file:
        np.savez(file, header=text, **arrays)  # type: ignore[arg-type]  # keywords are arrays, never allow_pickle


@validate_arguments(ModelError, session=instance_of(Session, MicroBatchedSession), path=instance_of(str, Path))
def load_state(session: Session | MicroBatchedSession, path: str | Path) -> list[list[int]]:
    """Restore the states of a session from a file, and return the tokens of each sequence.

    The context, the split, and the number of devices and of processes may have changed. Rank 0 reads the file. After an
    error the session is unchanged.

    Raises:
        ModelError: The file is damaged, is of another model or other sequences, or does not fit the context.
    """
    with _convert_parse_errors_to_model_error(path):
        state = _parse_saved_state(session.world.broadcast_from_rank_0(Path(path).read_bytes))
    return restore_saved_state(session, state, path)


def read_state(path: str | Path, max_bytes: int) -> SavedSessionState:
    """Read a saved state of at most `max_bytes` bytes, for `restore_saved_state`.

    Raises:
        ModelError: The file is damaged, or larger.
        OSError: The file cannot be read.
    """
    size = Path(path).stat().st_size
    if size > max_bytes:
        raise ModelError(
            f"{format_name_for_message(str(path))}: has {size} bytes, but a state here has {max_bytes} at most; "
            "choose another file"
        )
    with _convert_parse_errors_to_model_error(path):
        return _parse_saved_state(Path(path).read_bytes())


def check_saved_state(
    session: Session | MicroBatchedSession, state: SavedSessionState, path: str | Path
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Check that a saved state can be restored; return the length, the tokens and the last tokens of each sequence.

    Args:
        session: The session.
        state: The content of the file.
        path: The file, for messages.

    Raises:
        ModelError: The state is of another model or other sequences, or does not fit the context.
    """
    with _convert_parse_errors_to_model_error(path):
        lengths, tokens = _parse_header(session, state.header)
        recent = _parse_and_check_recent_tokens(session, state.header, lengths)
        first = session.sessions[0]
        expected_shapes = {name: _compute_expected_shape(session, name, lengths) for name in first.state_names}
        if {name: a.shape for name, a in state.arrays.items()} != expected_shapes:
            raise ValueError("its states have other names or shapes")
        for name, array in state.arrays.items():
            is_narrower = array.dtype != np.float16 and first.store.state(name).spec.dtype is DType.F16
            if is_narrower and np.abs(array).max(initial=0) > MAX_F16:
                raise ValueError(f"its numbers of {name!r:.60} are too large for F16")
    return lengths, tokens, recent


def restore_saved_state(
    session: Session | MicroBatchedSession, state: SavedSessionState, path: str | Path
) -> list[list[int]]:
    """Restore the states of a session from the content of a file, and return the tokens of each sequence.

    Args:
        session: The session; it is unchanged after an error.
        state: The content of the file.
        path: The file, for messages.

    Raises:
        ModelError: The state is of another model or other sequences, or does not fit the context.
    """
    lengths, tokens, recent = check_saved_state(session, state, path)
    arrays = dict(state.arrays)
    with session.sessions[0].store.device_lock:
        for i in range(session.sequences):
            session.reset(i)
        for one, own in _pair_sessions_with_lengths(session, lengths):
            for name, array in arrays.items():
                count = _count_saved_rows(one, name, own)
                _restore_state(one, name, array[:count], own)
                arrays[name] = array[count:]
            one.lengths = own
            one.recent, recent = recent[: one.sequences], recent[one.sequences :]
    return tokens


@contextmanager
def _convert_parse_errors_to_model_error(path: str | Path) -> Iterator[None]:
    """Convert each `ValueError` and `KeyError` in this context to a `ModelError` that names the file."""
    try:
        yield
    except (ValueError, KeyError) as why:
        raise ModelError(
            f"{format_name_for_message(str(path))}: not a saved state of this model ({why}); save one with Model.save"
        ) from None


def read_saved_conversation(session: Session | MicroBatchedSession, path: str | Path) -> Mapping[str, object]:
    """Read the conversation in a saved state.

    Raises:
        ModelError: The state has no conversation.
    """
    try:
        talk = _parse_saved_state(session.world.broadcast_from_rank_0(Path(path).read_bytes)).header["talk"]
    except (ValueError, KeyError):
        talk = None
    if not isinstance(talk, dict):
        raise ModelError(
            f"{format_name_for_message(str(path))}: holds no talk; save one with /save, or with --chat and Model.save"
        )
    return talk


def _parse_saved_state(saved: bytes) -> SavedSessionState:
    members = _read_zip_members(BytesIO(saved), len(saved))
    try:
        header = json.loads(_view_npy_array("header.npy", members.pop("header.npy"), ("|u1",)).tobytes())
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(header, dict) or header.get("format") != STATE_FORMAT:
        raise ValueError(f"its format is not {STATE_FORMAT}")
    if not all(name.startswith("state/") for name in members):
        raise ValueError("it holds more than states")
    states = {name.removesuffix(".npy"): _view_npy_array(name, data, ("<f4", "<f2")) for name, data in members.items()}
    for name, array in states.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name!r:.60} holds NaN or infinite numbers")
    return SavedSessionState(header, {name.removeprefix("state/"): array for name, array in states.items()})


def _read_zip_members(file: BinaryIO, file_bytes: int) -> dict[str, bytes]:
    """Read the members of a zip archive of `file_bytes` bytes, by name.

    Raises:
        ValueError: `numpy.savez` did not write the archive.
    """
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ValueError("its arrays are compressed or encrypted")
            if sum(entry.file_size for entry in entries) > file_bytes:
                raise ValueError("its arrays are larger than the file")
            if len({entry.filename for entry in entries}) < len(entries):
                raise ValueError("it holds two arrays of one name")
            return {entry.filename: archive.read(entry) for entry in entries}
    except (BadZipFile, EOFError, struct.error, NotImplementedError) as why:
        raise ValueError(str(why)) from None
    except (OSError, OverflowError) as why:  # the directory of the archive points outside the file
        raise ValueError(f"its archive is damaged: {why}") from None


def _view_npy_array(name: str, data: bytes, dtypes: Sequence[str]) -> npt.NDArray[np.generic]:
    """Return the array in an archive member in npy format, as a view of `data`.

    NumPy's own reader would allocate memory for the declared shape before it checks the size of the data.
    """
    head = NPY_HEADER.match(data)
    if head is None or (dtype := head["dtype"].decode()) not in dtypes:
        raise ValueError(f"{name!r:.60} is no array of {' or '.join(map(str, map(np.dtype, dtypes)))}")
    shape, left = tuple(map(int, re.findall(rb"[0-9]+", head["shape"]))), len(data) - head.end()
    if math.prod(shape) * np.dtype(dtype).itemsize != left:
        raise ValueError(f"{name!r:.60} has {left} bytes, not what its shape says")
    return np.ndarray(shape, dtype, data, head.end())


def _parse_header(
    session: Session | MicroBatchedSession, header: Mapping[str, object]
) -> tuple[list[int], list[list[int]]]:
    if header["model"] != compute_model_digest(session.model):
        raise ValueError("it is of another model")
    lengths, tokens = header["lengths"], header["tokens"]
    if not isinstance(lengths, list) or not isinstance(tokens, list) or len(lengths) != session.sequences:
        raise ValueError(f"it does not hold {format_count(session.sequences, 'sequence')}")
    if any(type(n) is not int or n < 0 for n in lengths):  # False is 0 to Python
        raise ValueError("its lengths are no counts")
    if max(lengths) > session.context:
        raise ModelError(
            f"the saved state has {format_count(max(lengths), 'token')}, but the context holds {session.context}; "
            "give a larger context=N"
        )
    vocabulary = session.model.vocabulary_size
    if len(tokens) != len(lengths) or not all(isinstance(row, list) for row in tokens):
        raise ValueError("it does not hold the tokens of each sequence")
    if any(type(t) is not int or not 0 <= t < vocabulary for row in tokens for t in row):
        raise ValueError("its tokens are none of this model's")
    return lengths, tokens


def _parse_and_check_recent_tokens(
    session: Session | MicroBatchedSession, header: Mapping[str, object], lengths: Sequence[int]
) -> list[list[int]]:
    """Return the recent tokens of each sequence from the header of a saved state, after a check."""
    history_count, rows = session.model.ngram_history_token_count, header["recent"]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("it does not hold the last tokens of each sequence")
    if [len(row) for row in rows] != [min(n, history_count) for n in lengths]:
        raise ValueError("it holds more or fewer last tokens than the model needs")
    if any(type(t) is not int or not 0 <= t < session.model.vocabulary_size for row in rows for t in row):
        raise ValueError("its last tokens are none of this model's")
    return rows


def _pair_sessions_with_lengths(
    session: Session | MicroBatchedSession, lengths: Sequence[int]
) -> Iterator[tuple[Session, list[int]]]:
    """Yield each session that holds states, with the lengths of its sequences from `lengths`.

    A session with micro-batches has several such sessions.
    """
    places = zip(session.sessions, session.sequence_ranges, strict=True)
    return ((one, list(lengths[place.start : place.stop])) for one, place in places)


def _compute_expected_shape(
    session: Session | MicroBatchedSession, name: str, lengths: Sequence[int]
) -> tuple[int, ...]:
    rest = session.sessions[0].store.state(name).shape[1:]
    return (sum(_count_saved_rows(one, name, own) for one, own in _pair_sessions_with_lengths(session, lengths)), *rest)


def _count_saved_rows(session: Session, name: str, lengths: Sequence[int]) -> int:
    """Count the rows of a state that a file stores: the rows in use of a cache, all rows of other states."""
    return (
        sum(len(_find_cells_in_use(session, name, length)) for length in lengths)
        if session.is_per_cell_cache(name)
        else session.store.state(name).shape[0]
    )


def _select_cache_rows_in_use(session: Session, name: str, lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the indices of the cache rows that hold tokens of a sequence, sequence by sequence.

    In a cache of a layer with an attention window, only the last tokens count. In a cache of token blocks, only
    complete blocks count.
    """
    seen = [np.array(_find_cells_in_use(session, name, length), np.int64) for length in lengths]
    return np.concatenate([find_cache_rows(session, name, i, cells) for i, cells in enumerate(seen)])


def _find_cells_in_use(session: Session, name: str, length: int) -> range:
    """Return the cells of a cache that hold the tokens of a sequence of `length` tokens."""
    window, tokens = session.model.attention_window_tokens(name), session.model.tokens_per_cell(name)
    return range(max(0, length - window) if window else 0, length // tokens)


def _copy_rows_in_use(session: Session, name: str) -> npt.NDArray[np.floating[Any]]:
    whole = np.ascontiguousarray(session.store.state(name))
    return (
        whole[_select_cache_rows_in_use(session, name, session.lengths)] if session.is_per_cell_cache(name) else whole
    )


def _restore_state(session: Session, name: str, array: npt.NDArray[np.generic], lengths: Sequence[int]) -> None:
    view = session.store.state(name)
    if session.is_per_cell_cache(name):
        view[_select_cache_rows_in_use(session, name, lengths)] = array
    else:
        view[...] = array


@contextmanager
def convert_os_errors_to_model_error() -> Iterator[None]:
    """Convert each `OSError` in this context to a `ModelError`."""
    try:
        yield
    except OSError as error:
        raise ModelError(describe_os_error_with_remedy(error)) from error
