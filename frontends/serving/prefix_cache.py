"""The prefix cache of a serving engine: prompts that begin with the tokens of a slot are read from there on.

Each slot keeps the tokens that it has read as prompt. A new prompt takes the free slot that shares the longest prefix,
or copies the cells of a running one. Recurrent states hold the last token only, so a slot with such states also keeps
copies of them at some positions: at the end of each prompt, and where a later prompt was seen to differ.

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
"""Fewest tokens of a prefix that are worth a match."""


class SlotMemory(Protocol):
    """The members of `SlotPool` that the cache uses."""

    slots: int

    @property
    def has_recurrent_states(self) -> bool:
        """See `SlotPool.has_recurrent_states`."""

    @property
    def ring_slack_tokens(self) -> int | None:
        """See `SlotPool.ring_slack_tokens`."""

    def clear_states(self, slot: int) -> None:
        """See `SlotPool.clear_states`."""

    def save_states(self, slot: int) -> SlotStates:
        """See `SlotPool.save_states`."""

    def restore_states(self, slot: int, saved: SlotStates) -> None:
        """See `SlotPool.restore_states`."""

    def copy_cells(self, source: int, target: int, tokens: int) -> None:
        """See `SlotPool.copy_cells`."""

    def compute_state_bytes(self) -> int:
        """See `SlotPool.compute_state_bytes`."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The first `tokens` tokens of a prompt are in the slot `source`; the prompt goes to the free slot `target`."""

    tokens: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class _SavedState:
    """The recurrent states after a prefix of tokens."""

    states: SlotStates
    nbytes: int


class PrefixCache:
    """The tokens that each slot has read, and saved recurrent states.

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
        self._saved: OrderedDict[tuple[int, int], _SavedState] = OrderedDict()
        """Saved states by slot and position, least recently used first."""
        self._saved_bytes = 0
        self._branch_points: list[int] = [0] * memory.slots
        """Per slot the position at which its present prompt leaves the tokens of a slot."""

    @property
    def saved_bytes(self) -> int:
        """The bytes of all saved states."""
        return self._saved_bytes

    def count_tokens(self, slot: int) -> int:
        """Return the number of tokens that a slot keeps."""
        return len(self._tokens[slot])

    def find_match(
        self, prompt: tuple[int, ...], free: Sequence[int], window_size: Callable[[int], int] = lambda slot: 1
    ) -> PrefixMatch:
        """Return the slot for a prompt, and how many of its tokens need not be read.

        At least one token is read. The prompt goes to the slot that makes the smallest window. Among equal ones it
        stays in the slot that has its prefix, unless that slot has at least twice as many tokens. Then an empty slot is
        preferred, then the least recently used one.

        Args:
            prompt: The tokens; empty for a request that uses no cache.
            free: The free slots, at least one.
            window_size: Returns the slots of the window in which a slot would run with the present requests.
        """
        reusable = {slot: self._count_reusable(slot, prompt) for slot in range(self._memory.slots)}
        best = max(reusable, key=lambda slot: (reusable[slot], slot in free))
        tokens = reusable[best] if reusable[best] >= MIN_REUSED_TOKENS else 0

        def rank(slot: int) -> tuple[int, bool, bool, int]:
            stays = slot == best and tokens > 0 and len(self._tokens[slot]) < 2 * tokens
            return window_size(slot), not stays, bool(self._tokens[slot]), self._last_use[slot]

        target = min(free, key=rank)
        return PrefixMatch(tokens, best if tokens else target, target)

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Move the `length` tokens of a running request to a free slot, and forget the old tokens of that slot."""
        self.forget(target)
        self._memory.copy_cells(source, target, length)
        if self._memory.has_recurrent_states:
            self._memory.restore_states(target, self._memory.save_states(source))
        self._tokens[target], self._lengths[target] = self._tokens[source], length
        for key in [key for key in self._saved if key[0] == source]:
            self._saved[target, key[1]] = self._saved.pop(key)
        self._branch_points[target] = self._branch_points[source]
        self._tokens[source] = ()
        self._touch(target)

    def _count_reusable(self, slot: int, prompt: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt a slot can provide."""
        known = self._tokens[slot]
        shared = count_common_tokens(known, prompt[:-1])
        if self._memory.has_recurrent_states:
            return max((at for place, at in self._saved if place == slot and at <= shared), default=0)
        slack = self._memory.ring_slack_tokens
        return shared if slack is None or self._lengths[slot] - shared <= slack else 0

    def take_slot(self, match: PrefixMatch, prompt: tuple[int, ...]) -> None:
        """Prepare the target slot of a match: copy or restore the reused tokens, and forget all others."""
        source, target = match.source, match.target
        shared = max((count_common_tokens(known, prompt[:-1]) for known in self._tokens), default=0)
        saved = self._saved.get((source, match.tokens))
        if source != target:
            self.forget(target)
            if match.tokens:
                self._memory.copy_cells(source, target, match.tokens)
        if saved is not None:
            self._saved.move_to_end((source, match.tokens))
            self._memory.restore_states(target, saved.states)
        elif self._memory.has_recurrent_states:
            self._memory.clear_states(target)
        self._tokens[target] = self._tokens[source][: match.tokens]
        for key in [key for key in self._saved if key[0] == target and key[1] > match.tokens]:
            self._drop(key)
        if source != target and saved is not None:
            self._keep(target, match.tokens, saved)
        self._branch_points[target] = shared if shared > match.tokens + MIN_REUSED_TOKENS else 0
        self._touch(target)

    def limit_chunk(self, slot: int, position: int, size: int) -> int:
        """Return the size, at most `size`, of the next chunk of a slot, which ends where states are to be saved."""
        at = self._branch_points[slot]
        return at - position if self._memory.has_recurrent_states and position < at < position + size else size

    def note_read(self, slot: int, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Record the tokens that a slot has read of its prompt; save recurrent states where they are wanted.

        Args:
            slot: The slot.
            tokens: The beginning of the prompt.
            prompt_tokens: Tokens of the whole prompt.
        """
        self._tokens[slot], self._lengths[slot] = tuple(tokens), len(tokens)
        self._touch(slot)
        is_saved = len(tokens) in (prompt_tokens, self._branch_points[slot])
        if is_saved and self._memory.has_recurrent_states:
            nbytes = self._memory.compute_state_bytes()
            if nbytes <= self._state_bytes:
                self._keep(slot, len(tokens), _SavedState(self._memory.save_states(slot), nbytes))

    def forget(self, slot: int) -> None:
        """Forget the tokens and the saved states of a slot."""
        self._tokens[slot] = ()
        for key in [key for key in self._saved if key[0] == slot]:
            self._drop(key)

    def note_decoded(self, slot: int, length: int) -> None:
        """Record that a slot holds `length` tokens after a decode step."""
        self._lengths[slot] = length

    def _touch(self, slot: int) -> None:
        self._uses += 1
        self._last_use[slot] = self._uses

    def _keep(self, slot: int, position: int, saved: _SavedState) -> None:
        if (slot, position) in self._saved:
            self._drop((slot, position))
        self._saved[slot, position] = saved
        self._saved_bytes += saved.nbytes
        while self._saved_bytes > self._state_bytes:
            self._drop(next(iter(self._saved)))

    def _drop(self, key: tuple[int, int]) -> None:
        self._saved_bytes -= self._saved.pop(key).nbytes


def count_common_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the longest common prefix of two token sequences.

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
