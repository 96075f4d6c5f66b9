"""The slots of a serving engine: sequences of one session that run in any subset, each with its own length.

A slot is the memory of one sequence. `SlotWindows` runs the steps of slots. This module saves, restores, copies and
zeroes their states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...distributed.rank_calls import RankCalls, on_all_ranks
from ..inference.prefill_chunks import next_power_of_two
from ..inference.rewind import rewind_states
from ..inference.saved_state import SavedSessionState, capture_state, check_saved_state, restore_saved_state
from ..inference.session import Session
from .step_runner import require_slot_memory
from .windows.candidate_decoder import CandidateDecoder
from .windows.slot_windows import SlotWindows

SlotStates = Mapping[str, npt.NDArray[np.generic]]
"""The recurrent states of one slot (all states except caches), by name, as host arrays."""


class SlotPool(SlotWindows):
    """The memory in which a server runs up to `slots` sequences, over the weights of a session.

    A slot is the place of one sequence of at most `context` tokens. Raises `ModelError` for a model without steps, and
    for more slots than the memory of the devices holds. With several ranks, all of them make the same pool. Rank 0
    makes the calls, and the other ranks follow them by `rank_calls`.

    Args:
        like: The session that has the weights.
        slots: Number of slots.
        context: Tokens of a slot.
        batch: Maximum prompt tokens of one run.
        shares_states: Whether the slots are the sequences of `like`, instead of further memory.
        rank_calls: The calls that run on all ranks of `like`.
    """

    def __init__(
        self,
        like: Session,
        slots: int,
        *,
        context: int,
        batch: int,
        shares_states: bool = False,
        rank_calls: RankCalls | None = None,
    ) -> None:
        super().__init__(like, slots, context=context, batch=batch, shares_states=shares_states, rank_calls=rank_calls)
        self._state_names = self._all_slots.state_names
        self._caches = tuple(name for name in self._state_names if self._all_slots.is_per_cell_cache(name))
        per_cell = like.model.tokens_per_cell
        self._rings = tuple(
            name for name in self._caches if self._all_slots.cell_count(name) * per_cell(name) < context
        )

    @property
    def has_recurrent_states(self) -> bool:
        """Whether a slot has recurrent states, which exist only for its last token.

        A shorter prefix can then be reused only from a saved copy of the states.
        """
        return len(self._caches) < len(self._state_names)

    @property
    def lost_states_reason(self) -> str:
        """Why a run has lost the states of the slots; an empty text while they are good."""
        return self._all_slots.store.lost_states.reason

    @property
    def droppable_last_tokens(self) -> int | None:
        """Number of its last tokens that a slot can drop and still go on from the remaining ones.

        Ring caches limit it, because they overwrite old cells; None without ring caches.
        """
        return next_power_of_two(self.batch) if self._rings else None

    def compute_slot_bytes_in_float32(self) -> int:
        """Compute the bytes of all states of one slot in float32, the largest size in a file."""
        store = self.open_window_session(0, 1).store
        return sum(4 * math.prod(store.state(name).shape) for name in self._state_names)

    @on_all_ranks
    def clear_recurrent_states(self, slot: int) -> None:
        """Zero the recurrent states of a slot before its first token; caches stay."""
        for name in self._state_names:
            if name not in self._caches:
                self._all_slots.store.state(name)[slot : slot + 1] = 0

    @on_all_ranks
    def zero_slot_states(self, slot: int) -> None:
        """Zero all states of a slot, including caches, after a run that may have left NaN or infinite numbers."""
        window = self.open_window_session(slot, 1)
        window.lengths = [self.context]
        window.reset(0)

    @on_all_ranks
    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew at their next use, and zero the states of all slots, after a failure of a device."""
        self._opening_seconds = self.planning_seconds
        self._windows.clear()
        self._all_slots.store.zero_states()

    def can_still_run_steps(self, slot: int) -> bool:
        """Whether the devices still run steps, by a prompt of one token in a free slot, which is empty afterwards."""
        try:
            self.zero_slot_states(slot)
            self.read_prompt(slot, [0], [])
            self.zero_slot_states(slot)
        except Exception:  # a broken backend may raise anything, and then the engine is built anew
            return False
        return True

    @on_all_ranks
    def rewind_recurrent_states(self, first: int, count: int, slot: int, step_tokens: int, retained: int) -> None:
        """Set the recurrent states of a slot to those after the first tokens of a reversible run of `append_tokens`.

        Args:
            first: The first slot of the window that has run.
            count: The number of slots of the window.
            slot: The slot.
            step_tokens: The bucket of tokens of the run.
            retained: How many of its tokens the slot keeps.
        """
        rewind_states(self.open_window_session(first, count), step_tokens, {slot - first: retained})

    @on_all_ranks
    def save_recurrent_states(self, slot: int) -> SlotStates:
        """Return a copy of the recurrent states of a slot. Its caches are left out."""
        names = (name for name in self._state_names if name not in self._caches)
        return {name: self.open_window_session(slot, 1).store.state(name)[:] for name in names}

    @on_all_ranks
    def restore_recurrent_states(self, slot: int, saved: SlotStates) -> None:
        """Set the recurrent states of a slot to saved ones. Its caches stay."""
        for name, array in saved.items():
            self.open_window_session(slot, 1).store.state(name)[:] = array

    @on_all_ranks
    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy the KV-cache cells of the first `tokens` tokens of a slot to another slot; ring caches as a whole."""
        store, count = self._all_slots.store, self._all_slots.sequences
        for name in self._caches:
            rows = store.state(name).shape[0] // count
            per_cell = self._all_slots.model.tokens_per_cell(name)
            used = rows if name in self._rings else min(rows, -(-tokens // per_cell))
            store.copy_state_rows(name, source * rows, target * rows, used)

    @on_all_ranks
    def capture_slot(self, slot: int, tokens: list[int], length: int) -> SavedSessionState:
        """Copy the states of a slot that has evaluated the first `length` of `tokens`."""
        window = self.open_window_session(slot, 1)
        window.lengths, window.recent = [length], [self._select_tokens_for_n_grams(tokens[:length])]
        return capture_state(window, [tokens])

    def check_saved_state(self, slot: int, state: SavedSessionState, path: str) -> int:
        """Check that a slot can be restored from a saved state; return the number of its evaluated tokens.

        Raises:
            ModelError: The state is of another model, or does not fit the context.
        """
        lengths, _, _ = check_saved_state(self.open_window_session(slot, 1), state, path)
        return lengths[0]

    @on_all_ranks
    def restore_slot(
        self, slot: int, header: Mapping[str, object], arrays: Mapping[str, npt.NDArray[np.generic]], path: str
    ) -> tuple[list[int], int]:
        """Restore a slot from a saved state, and return its tokens and the number of evaluated ones.

        Args:
            slot: Number of the slot; it is unchanged if the state does not fit.
            header: The header of the state.
            arrays: Its arrays.
            path: The file, for messages.

        Raises:
            ModelError: As `check_saved_state`.
        """
        window = self.open_window_session(slot, 1)
        window.lengths, window.recent = [0], [[]]
        (tokens,) = restore_saved_state(window, SavedSessionState(header, arrays), path)
        return tokens, window.lengths[0]

    def resize_to_slot_count(self, slots: int, lengths: Sequence[int]) -> None:
        """Move the first slots to memory of `slots` slots, with their states.

        Args:
            slots: The new number of slots.
            lengths: Tokens of each slot that is moved; the cells of these tokens are copied.

        Raises:
            ModelError: The states of all slots are larger than the memory of the devices.
        """
        old, model = self._all_slots, self._all_slots.model
        require_slot_memory(old, slots)
        new = Session(model, like=old, sequences=slots, context=self.context, batch=self.batch)
        with old.store.device_lock:
            old.store.lost_states.require_none()
            for name in self._state_names:
                source, target = old.store.state(name), new.store.state(name)
                rows = source.shape[0] // old.sequences
                per_cell = model.tokens_per_cell(name) if name in self._caches else 1
                for slot, tokens in enumerate(lengths):
                    is_partial = name in self._caches and name not in self._rings
                    used = min(rows, -(-tokens // per_cell)) if is_partial else rows
                    for number, part in source.parts.items():
                        cells = slice(slot * rows, slot * rows + used)
                        target.parts[number].memory_view[cells] = part.memory_view[cells]
        self._opening_seconds = self.planning_seconds
        self._windows.clear()
        self._candidate_decoder = CandidateDecoder()  # the last one refers to the old memory
        self._all_slots, self.slots = new, slots

    def compute_recurrent_state_bytes(self) -> int:
        """Compute the bytes of the recurrent states of one slot, without its caches."""
        store = self.open_window_session(0, 1).store
        return sum(store.state(name).spec.nbytes for name in self._state_names if name not in self._caches)
