"""The prefix cache of a serving engine: it finds prompt tokens that a slot has read, so they are not read again.

A slot is the memory of one sequence: cells (one per token) in KV caches, and recurrent states. Each slot keeps the
tokens that it has read as prompt. A new prompt takes the free slot that shares the longest prefix, or copies the
cells of a running one. Recurrent states hold the last token only. So a slot with such states also keeps copies of
them at some positions: near the end of each prompt, and where a later prompt was seen to differ. Kernels compute
several tokens of a recurrence at once, so these positions are multiples of `STATE_ALIGNMENT`.

Cells that were decoded token by token are not reused, because kernels for single tokens round otherwise. An answer is
read again as a part of the next prompt, and a text is the same with and without the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from ...graph.lazy_dataclass import dataclass
from .slots import SlotStates

MIN_REUSED_TOKENS = 16
"""Smallest number of prefix tokens that are reused; shorter prefixes are read again."""

STATE_ALIGNMENT = 16
"""Tokens between positions at which recurrent states may be saved.

A delta rule rounds differently if a prompt is cut at an odd position. At multiples of 16 the logits stay equal bit for
bit on CPUs.
"""


class SlotMemory(Protocol):
    """The interface of `SlotPool` that the prefix cache uses."""

    slots: int

    @property
    def has_recurrent_states(self) -> bool:
        """Whether a slot has recurrent states; see `SlotPool.has_recurrent_states`."""

    @property
    def droppable_last_tokens(self) -> int | None:
        """Number of its last tokens that a slot can drop and still go on; see `SlotPool.droppable_last_tokens`."""

    def clear_recurrent_states(self, slot: int) -> None:
        """Zero the recurrent states of a slot; see `SlotPool.clear_recurrent_states`."""

    def save_recurrent_states(self, slot: int) -> SlotStates:
        """Return a copy of the recurrent states of a slot; see `SlotPool.save_recurrent_states`."""

    def restore_recurrent_states(self, slot: int, saved: SlotStates) -> None:
        """Set the recurrent states of a slot to saved ones; see `SlotPool.restore_recurrent_states`."""

    def copy_cache_cells(self, source: int, target: int, tokens: int) -> None:
        """Copy KV-cache cells of a slot to another slot; see `SlotPool.copy_cache_cells`."""

    def zero_slot_states(self, slot: int) -> None:
        """Zero all states of a slot; see `SlotPool.zero_slot_states`."""

    def resize_to_slot_count(self, slots: int, lengths: Sequence[int]) -> None:
        """Replace the memory by one for `slots` slots, and copy the first slots to it.

        See `SlotPool.resize_to_slot_count`.
        """

    def compute_recurrent_state_bytes(self) -> int:
        """Return the bytes of the recurrent states of one slot; see `SlotPool.compute_recurrent_state_bytes`."""


@dataclass(frozen=True, slots=True)
class SourceAndTargetSlots:
    """The slots that were chosen for a prompt.

    Slot `source` holds the first `tokens` tokens of the prompt. The free slot `target` will run it.
    """

    tokens: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class EvaluatedSlotTokens:
    """The tokens of a slot; the first `length` of them are evaluated.

    A last token that was sampled but never evaluated may follow them.
    """

    tokens: tuple[int, ...]
    length: int


NO_CONTENTS = EvaluatedSlotTokens((), 0)


@dataclass(frozen=True, slots=True)
class SavedRecurrentStates:
    """A copy of the recurrent states that a slot had after some prefix of tokens, with its size in bytes."""

    states: SlotStates
    nbytes: int


class PrefixCache:
    """Tracks the prompt tokens that each slot has read, and keeps saved recurrent states, to reuse common prefixes.

    Args:
        memory: The slots.
        state_bytes: Maximum bytes of saved recurrent states; the least recently used ones are dropped.
    """

    def __init__(self, memory: SlotMemory, *, state_bytes: int) -> None:
        self._memory, self._state_bytes = memory, state_bytes
        self._tokens: list[tuple[int, ...]] = [()] * memory.slots
        self._lengths: list[int] = [0] * memory.slots
        """Number of tokens that each slot holds, decoded tokens included."""
        self._last_use: list[int] = [0] * memory.slots
        self._uses = 0
        self._saved: OrderedDict[tuple[int, ...], SavedRecurrentStates] = OrderedDict()
        """Saved states by slot and position, least recently used first."""
        self._saved_bytes = 0
        self._contents: list[EvaluatedSlotTokens] = [NO_CONTENTS] * memory.slots
        """The contents of each slot after the end of its last request, for slot files."""
        self._ring_starts: list[int] = [0] * memory.slots
        """Per slot the tokens before which its ring caches have no complete window, because they came from a file."""
        self._save_points: list[frozenset[int]] = [frozenset()] * memory.slots
        """Per slot the positions of its present prompt at which recurrent states are saved."""

    @property
    def saved_state_bytes(self) -> int:
        """The bytes of all saved recurrent states."""
        return self._saved_bytes

    def count_cached_slot_tokens(self, slot: int) -> int:
        """Return the number of prompt tokens that a slot keeps for reuse."""
        return len(self._tokens[slot])

    def count_retained_slot_tokens(self, slot: int) -> int:
        """Return the number of tokens that a slot keeps after its request, with the tokens of the answer."""
        return max(self._contents[slot].length, len(self._tokens[slot]))

    def find_slot_for_prompt(
        self, prompt: tuple[int, ...], free: Sequence[int], window_size: Callable[[int], int] = lambda slot: 1
    ) -> SourceAndTargetSlots:
        """Find the best free slot for a prompt, and the slot from which its longest known prefix can be reused.

        At least one token is left to read. The prompt goes to the slot that makes the smallest window. Among equal
        ones it stays in the slot that has its prefix, unless that slot has at least twice as many tokens. Then an
        empty slot is preferred, then the least recently used one.

        Args:
            prompt: The tokens; empty for a request that uses no cache.
            free: The free slots, at least one.
            window_size: Returns the slots of the window in which a slot would run with the present requests.
        """
        reusable = {slot: self._count_reusable_tokens(slot, prompt) for slot in range(self._memory.slots)}
        best = max(reusable, key=lambda slot: (reusable[slot], slot in free))
        tokens = reusable[best] if reusable[best] >= MIN_REUSED_TOKENS else 0

        def rank(slot: int) -> tuple[int, bool, bool, int]:
            stays = slot == best and tokens > 0 and len(self._tokens[slot]) < 2 * tokens
            return window_size(slot), not stays, bool(self._tokens[slot]), self._last_use[slot]

        target = min(free, key=rank)
        return SourceAndTargetSlots(tokens, best if tokens else target, target)

    def move_running_request(self, source: int, target: int, length: int) -> None:
        """Move a running request, with its `length` tokens, from slot `source` to the free slot `target`.

        The tokens that the free slot kept for reuse are forgotten.
        """
        self.forget_slot_tokens_and_states(target)
        self._memory.copy_cache_cells(source, target, length)
        if self._memory.has_recurrent_states:
            self._memory.restore_recurrent_states(target, self._memory.save_recurrent_states(source))
        self._tokens[target], self._lengths[target] = self._tokens[source], length
        for key in [key for key in self._saved if key[0] == source]:
            self._saved[target, key[1]] = self._saved.pop(key)
        self._save_points[target] = self._save_points[source]
        self._ring_starts[target] = self._ring_starts[source]
        self.forget_slot_tokens_and_states(source)
        self._mark_recently_used(target)

    def _count_reusable_tokens(self, slot: int, prompt: tuple[int, ...]) -> int:
        """Count how many tokens at the start of a prompt a slot has already processed, in a state that can be reused.

        Recurrent states can be reused only where they were saved. Ring caches can be reused only if few tokens are
        dropped.
        """
        known = self._tokens[slot]
        shared = count_common_prefix_tokens(known, prompt[:-1])
        if self._memory.has_recurrent_states:
            return max((key[1] for key in self._saved if key[0] == slot and key[1] <= shared), default=0)
        slack = self._memory.droppable_last_tokens
        if slack is None:
            return shared
        return shared if self._lengths[slot] - shared <= slack and shared >= self._ring_starts[slot] else 0

    def has_room_for_request(
        self, match: SourceAndTargetSlots, prompt: tuple[int, ...], limit: int, sent_tokens: int
    ) -> bool:
        """Whether the memory has room for a request; here always, because a slot has cells for its context.

        Args:
            match: The match of the prompt.
            prompt: The prompt.
            limit: The largest number of new tokens.
            sent_tokens: New tokens that the client has already.
        """
        return True

    def reserve_cells(self, slot: int, count: int) -> bool:
        """Reserve the cells of `count` tokens in all for a slot; return False if other requests have them."""
        return True

    def prepare_target_slot(self, match: SourceAndTargetSlots, prompt: tuple[int, ...], limit: int = 0) -> None:
        """Prepare the target slot of a match: copy or restore the reused tokens, and forget all other tokens.

        `limit` is the largest number of new tokens.
        """
        source, target = match.source, match.target
        ring_start = self._ring_starts[source] if match.tokens else 0
        shared = max((count_common_prefix_tokens(known, prompt[:-1]) for known in self._tokens), default=0)
        saved = self._saved.get((source, match.tokens))
        if source != target:
            self.forget_slot_tokens_and_states(target)
            if match.tokens:
                self._memory.copy_cache_cells(source, target, match.tokens)
                self._lengths[target] = self._lengths[source]
        if saved is not None:
            self._saved.move_to_end((source, match.tokens))
            self._memory.restore_recurrent_states(target, saved.states)
        elif self._memory.has_recurrent_states:
            self._memory.clear_recurrent_states(target)
        self._tokens[target] = self._tokens[source][: match.tokens]
        self._ring_starts[target], self._contents[target] = ring_start, NO_CONTENTS
        for key in [key for key in self._saved if key[0] == target and key[1] > match.tokens]:
            self._drop(key)
        if source != target and saved is not None:
            self._keep((target, match.tokens), saved)
        self._save_points[target] = frozenset()
        if self._memory.has_recurrent_states:
            self._save_points[target] = choose_save_points(len(prompt), shared, match.tokens)
        self._mark_recently_used(target)

    def limit_chunk_to_save_position(self, slot: int, position: int, size: int) -> int:
        """Return the size of the next prompt chunk, shortened to end where the recurrent states are to be saved.

        Args:
            slot: Number of the slot.
            position: Tokens that the slot has read.
            size: Largest size of the chunk in tokens.
        """
        return min((at - position for at in self._save_points[slot] if position < at < position + size), default=size)

    def record_read_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        """Record the prompt tokens that a slot has read.

        If they end at a position that was chosen for saving, the recurrent states of the slot are saved.
        """
        self._tokens[slot], self._lengths[slot] = tuple(tokens), len(tokens)
        self._mark_recently_used(slot)
        if len(tokens) in self._save_points[slot]:
            nbytes = self._memory.compute_recurrent_state_bytes()
            if nbytes <= self._state_bytes:
                self._keep((slot, len(tokens)), SavedRecurrentStates(self._memory.save_recurrent_states(slot), nbytes))

    def resize_to_slot_count(self, slots: int) -> None:
        """Change the memory to `slots` slots, and forget the slots beyond them. The others keep their tokens."""
        for slot in range(slots, len(self._tokens)):
            self.forget_slot_tokens_and_states(slot)
        self._memory.resize_to_slot_count(slots, self._lengths[:slots])
        added = slots - len(self._tokens)
        self._tokens[slots:] = [()] * added
        self._lengths[slots:] = [0] * added
        self._last_use[slots:] = [0] * added
        self._save_points[slots:] = [frozenset()] * added
        self._contents[slots:] = [NO_CONTENTS] * added
        self._ring_starts[slots:] = [0] * added

    def forget_slot_tokens_and_states(self, slot: int) -> None:
        """Forget the tokens and the saved recurrent states of a slot."""
        self._tokens[slot], self._contents[slot], self._ring_starts[slot] = (), NO_CONTENTS, 0
        for key in [key for key in self._saved if key[0] == slot]:
            self._drop(key)

    def zero_and_forget_slot(self, slot: int) -> None:
        """Zero all states of a slot, which may hold NaN or infinite numbers, and forget its tokens."""
        self._memory.zero_slot_states(slot)
        self.forget_slot_tokens_and_states(slot)

    def forget_all_slots(self) -> None:
        """Forget the tokens and the saved recurrent states of all slots."""
        for slot in range(self._memory.slots):
            self.forget_slot_tokens_and_states(slot)

    def record_decoded_length(self, slot: int, length: int) -> None:
        """Record that a slot holds `length` tokens after a decode step."""
        self._lengths[slot] = length

    def record_slot_contents(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Record the contents of a slot at the end of its request; see `EvaluatedSlotTokens`."""
        self._contents[slot] = EvaluatedSlotTokens(tuple(tokens), length)

    def get_slot_contents(self, slot: int) -> EvaluatedSlotTokens:
        """Return the contents of a slot after the end of its last request; they are empty while it runs one."""
        return self._contents[slot]

    def has_room_for_recurrent_states(self) -> bool:
        """Whether one copy of the recurrent states of a slot fits into the memory for them."""
        return self._memory.compute_recurrent_state_bytes() <= self._state_bytes

    def reserve_cells_for_restored_slot(self, slot: int, length: int) -> None:
        """Reserve cells for `length` tokens that will be restored to a slot; here it has cells for its context."""

    def make_restored_tokens_reusable(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Make the restored contents of a slot reusable: its first `length` tokens, decoded ones included.

        Recurrent states can be reused at the end of the contents alone.
        """
        self.forget_slot_tokens_and_states(slot)
        self._tokens[slot], self._lengths[slot] = tuple(tokens[:length]), length
        self._ring_starts[slot] = length
        self.record_slot_contents(slot, tokens, length)
        if self._memory.has_recurrent_states:
            nbytes = self._memory.compute_recurrent_state_bytes()
            self._keep((slot, length), SavedRecurrentStates(self._memory.save_recurrent_states(slot), nbytes))
        self._mark_recently_used(slot)

    def _mark_recently_used(self, slot: int) -> None:
        self._uses += 1
        self._last_use[slot] = self._uses

    def _keep(self, key: tuple[int, ...], saved: SavedRecurrentStates) -> None:
        if key in self._saved:
            self._drop(key)
        self._saved[key] = saved
        self._saved_bytes += saved.nbytes
        while self._saved_bytes > self._state_bytes:
            self._drop(next(iter(self._saved)))

    def _drop(self, key: tuple[int, ...]) -> None:
        self._saved_bytes -= self._saved.pop(key).nbytes


def choose_save_points(prompt_tokens: int, shared: int, reused: int) -> frozenset[int]:
    """Choose the positions of a prompt at which recurrent states are saved: near its end, and where prompts differ.

    Args:
        prompt_tokens: Tokens of the prompt.
        shared: Tokens at its start that an earlier prompt has.
        reused: Tokens at its start that are not read again.
    """
    points = {at // STATE_ALIGNMENT * STATE_ALIGNMENT for at in (prompt_tokens - 1, shared)}
    return frozenset(at for at in points if at >= reused + MIN_REUSED_TOKENS)


def count_common_prefix_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Count the tokens of the longest common prefix of two token sequences.

    The search halves the range, because comparing slices is faster than comparing tokens one by one.
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
