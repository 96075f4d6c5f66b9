"""The states of single slots as files, in the format of ``hocket run --save-state``.

The engine copies and restores states between two steps. Files are read and written elsewhere, so that a slow disk
delays no request.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ...graph.errors import format_count
from ..errors import ModelError
from ..inference.saved_state import SavedSessionState
from .prefix_cache import PrefixCache
from .slots import SlotPool

MAX_HEADER_BYTES = 64 << 20
"""Maximum bytes of the other parts of a slot file, without its states: tokens and a conversation."""


class SlotFiles:
    """Saves slots as the contents of files, restores slots from them, and erases slots.

    The thread of the engine makes all calls, for free slots.

    Args:
        pool: The slots.
        cache: The prefix cache of the engine, which then finds restored tokens.
    """

    def __init__(self, pool: SlotPool, cache: PrefixCache) -> None:
        self._pool, self._cache = pool, cache

    def capture(self, slot: int) -> SavedSessionState:
        """Copy the states and the tokens of a slot after its last request.

        Raises:
            ModelError: The slot has no tokens.
        """
        contents = self._cache.get_slot_contents(slot)
        if not contents.length:
            raise ModelError(f"slot {slot} has no tokens; send it a request first, with id_slot")
        return self._pool.capture_slot(slot, list(contents.tokens), contents.length)

    def restore(self, slot: int, state: SavedSessionState, path: str | Path) -> int:
        """Restore a slot from the content of a file, and return the number of its evaluated tokens.

        Args:
            slot: Number of the slot. A file that does not fit leaves it unchanged; after other errors it is empty.
            state: The content of the file.
            path: The file, for messages.

        Raises:
            ModelError: The state is of another model, does not fit the context, or has fewer tokens than it says. Or
                a pool of blocks has no free ones.
        """
        if self._pool.has_recurrent_states and not self._cache.has_room_for_recurrent_states():
            raise ModelError(f"{path}: the states need more memory; start the server with a larger --cache-memory")
        _require_token_for_each_evaluated_position(state, path)
        length = self._pool.check_saved_state(slot, state, str(path))
        with ExitStack() as after_error:
            after_error.callback(self._cache.forget_slot_tokens_and_states, slot)
            self._cache.reserve_cells_for_restored_slot(slot, length)
            tokens, length = self._pool.restore_slot(slot, state.header, state.arrays, str(path))
            self._cache.make_restored_tokens_reusable(slot, tokens, length)
            after_error.pop_all()
        return length

    def erase(self, slot: int) -> int:
        """Forget the tokens of a slot, and return their number."""
        count = self._cache.count_retained_slot_tokens(slot)
        self._cache.zero_and_forget_slot(slot)
        return count


def _require_token_for_each_evaluated_position(state: SavedSessionState, path: str | Path) -> None:
    """Require that a state of one sequence has a token for each evaluated position.

    The prefix cache compares prompts to these tokens. They are missing after a context shift.

    `restore_saved_state` checks the types and all else.
    """
    lengths, tokens = state.header.get("lengths"), state.header.get("tokens")
    match lengths, tokens:
        case [int(length)], [list(row)] if len(row) < length:
            raise ModelError(
                f"{path}: has {len(row)} of {format_count(length, 'token')}, as after a context shift; save "
                "another talk"
            )
