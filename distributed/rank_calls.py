"""Calls that run on all ranks: rank 0 decides which, and the other ranks follow.

A server schedules requests on rank 0, where its clients are. A method with the decorator `on_all_ranks` first sends its
name and its arguments to the other ranks. They make the same call on an object of their own. So all ranks reach the
same collectives in the same order.

An error of the arguments, such as a text that is too long, must come on all ranks or on none. A backend that fails ends
all ranks.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from ..graph.errors import BackendError, HocketError
from .array_packets import pack_array, unpack_array
from .world import RanksError, World

MESSAGE_HEADER = struct.Struct("<q")
"""The bytes of the JSON text of a call; the text follows, and then the packet of each array behind its length."""
MARK = "runs_on_all_ranks"
"""The attribute of a method that runs on all ranks."""
END = ""
"""The name of the call that ends `RankCalls.follow_rank_0`."""

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class HasRankCalls(Protocol):
    """An object with methods that run on all ranks.

    Two objects that inherit the same method need different attributes `rank_label`, which are part of its name.
    """

    rank_calls: RankCalls


_Target = TypeVar("_Target", bound=HasRankCalls)


def on_all_ranks(
    method: Callable[Concatenate[_Target, _Params], _Result],
) -> Callable[Concatenate[_Target, _Params], _Result]:
    """Make a method run on all ranks: rank 0 calls it, and the other ranks make the same call.

    Arguments are JSON values, or mappings from names to NumPy arrays. Keyword arguments must be JSON values, too. A
    call inside of such a call is not sent, because the other ranks make it by themselves.
    """

    @wraps(method)
    def call_on_all_ranks(target: _Target, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        return target.rank_calls.run_on_all_ranks(
            lambda: method(target, *args, **kwargs), make_rank_call_name(target, method), args, kwargs
        )

    vars(call_on_all_ranks)[MARK] = True
    return call_on_all_ranks


def list_rank_calls_by_name(targets: Sequence[HasRankCalls]) -> dict[str, Callable[..., object]]:
    """Return the methods of some objects that run on all ranks, by the name that `make_rank_call_name` gives them.

    Overridden methods of base classes are included, because they may be called by ``super``.
    """
    members = ((target, m) for target in targets for kind in type(target).__mro__ for m in vars(kind).values())
    return {make_rank_call_name(target, m): m.__get__(target) for target, m in members if hasattr(m, MARK)}


def make_rank_call_name(target: object, method: Callable[..., object]) -> str:
    """Make the name of a method call that is equal on all ranks: the class, the method and the object's `rank_label`.

    The `rank_label` of an object tells it from others of the same class.
    """
    return f"{getattr(target, 'rank_label', '')}{method.__qualname__}"


class RankCalls:
    """Runs calls on all ranks of a world: rank 0 makes a call, and the other ranks repeat it, one call at a time.

    Any thread of rank 0 may make calls. With one process, calls run at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.RLock()
        self._is_inside = False
        self._has_failed = False
        """Whether the last call has ended by an error of its arguments."""
        self._has_ended = False

    def run_on_all_ranks(
        self, run: Callable[[], _Result], name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> _Result:
        """Run a call on this rank and make the other ranks repeat it.

        Inside of another such call nothing is sent, because the other ranks make the inner call by themselves.

        Args:
            run: Makes the call on this rank.
            name: The name of the call, from `make_rank_call_name`.
            args: Its arguments without the object.
            kwargs: Its keyword arguments.

        Raises:
            HocketError: The other ranks have ended by `end`.
            RanksError: A rank has failed.
            Exception: The error of the call. If a backend has failed, all ranks end.
        """
        if self._world.size == 1 or self._world.rank:
            return run()
        with self._lock:
            if self._is_inside:
                return run()
            if self._has_ended:
                raise HocketError("the ranks have ended; start the server again")
            message = encode_call(name, args, kwargs, has_failed=self._has_failed)
            self._world.broadcast_from_rank_0(lambda: message)
            self._is_inside = True
            try:
                return self._run_or_end_all_ranks(run)
            finally:
                self._is_inside = False

    def _run_or_end_all_ranks(self, run: Callable[[], _Result]) -> _Result:
        """Run a call; if it fails by an error that other ranks may not have, end all ranks."""
        self._has_failed = False
        try:
            return run()
        except RanksError:
            raise
        except Exception as error:  # the call may be of a backend, which may raise anything; it is raised again
            if isinstance(error, BackendError) or not isinstance(error, HocketError):
                self._world.announce_failure(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._has_failed = True
            raise

    def follow_rank_0(self, targets: Sequence[HasRankCalls]) -> None:
        """Repeat the calls of rank 0 on this rank, until rank 0 calls `end`.

        Args:
            targets: The objects of this rank, one of each class.

        Raises:
            RanksError: A rank has failed, or a call had an error on this rank or on rank 0 alone.
            Exception: A backend of this rank has failed.
        """
        calls, world, last = list_rank_calls_by_name(targets), self._world, ""
        while True:
            name, args, kwargs, has_failed = decode_call(
                np.frombuffer(world.broadcast_from_rank_0(lambda: b""), np.uint8), world.describe_rank(0)
            )
            if has_failed != self._has_failed:
                where = world.describe_rank(0 if has_failed else world.rank)
                raise RanksError(f"{where}: {last} had an error there alone; give all ranks the same files and memory")
            if name == END:
                return
            last = name
            try:
                self._run_or_end_all_ranks(partial(calls[name], *args, **kwargs))
            except RanksError:
                raise
            except HocketError as error:
                if isinstance(error, BackendError):
                    raise

    def end(self) -> None:
        """Make the other ranks leave `follow_rank_0`; later calls raise `HocketError`. Other ranks do nothing here."""
        with self._lock:
            if self._world.size > 1 and not self._world.rank and not self._has_ended:
                self._has_ended = True
                message = encode_call(END, (), {}, has_failed=self._has_failed)
                self._world.broadcast_from_rank_0(lambda: message)


def encode_call(name: str, args: Sequence[object], kwargs: Mapping[str, object], *, has_failed: bool) -> bytes:
    """Encode a call as bytes, for `decode_call`.

    Args:
        name: The name of the call.
        args: JSON values, or mappings from names to arrays.
        kwargs: JSON values.
        has_failed: Whether the call before has ended by an error of its arguments.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    fields: list[tuple[object, list[str] | None]] = []
    """Each argument: a JSON value, or the names of the arrays of a mapping."""
    for value in args:
        if isinstance(value, Mapping) and value and all(isinstance(one, np.ndarray) for one in value.values()):
            fields.append((None, list(value)))
            arrays += value.values()
        else:
            fields.append((value, None))
    text = json.dumps([name, fields, dict(kwargs), has_failed]).encode()
    parts = [MESSAGE_HEADER.pack(len(text)), text]
    for number, array in enumerate(arrays):
        packet = pack_array(array, number)
        parts += [MESSAGE_HEADER.pack(packet.nbytes), packet.tobytes()]
    return b"".join(parts)


def decode_call(
    message: np.ndarray[Any, np.dtype[np.uint8]], sender: str
) -> tuple[str, list[object], dict[str, object], bool]:
    """Decode a call from the bytes that `encode_call` of rank 0 has made.

    Args:
        message: The bytes.
        sender: The rank, for messages.

    Returns:
        The name, the arguments, the keyword arguments, and whether the call before has failed on rank 0.

    Raises:
        RanksError: The bytes are no encoded call.
    """
    at = MESSAGE_HEADER.size

    def take_part(start: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
        (count,) = MESSAGE_HEADER.unpack_from(message.data, start)
        return message[start + at : start + at + count], start + at + count

    try:
        text, place = take_part(0)
        name, fields, kwargs, has_failed = json.loads(text.tobytes())
        args, number = list[object](), 0
        for value, names in fields:
            if names is None:
                args.append(value)
                continue
            arrays = {}
            for one in names:
                packet, place = take_part(place)
                arrays[one], number = unpack_array(packet, sender, number), number + 1
            args.append(arrays)
    except (ValueError, struct.error) as error:
        raise RanksError(f"{sender} sent {len(message)} bytes that are no call ({error})") from None
    return name, args, kwargs, has_failed
