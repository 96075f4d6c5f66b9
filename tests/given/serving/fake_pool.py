"""A slot pool without a model: the logits are a function of all tokens of a slot, and wrong addresses are found."""

from __future__ import annotations

import hashlib

import numpy as np

from hocket.graph.errors import BackendError

VOCABULARY = 32
END_TOKEN = 0


def compute_logits(tokens):
    """Return the logits after a sequence of tokens, f32[32]; equal sequences give equal logits."""
    digest = hashlib.sha256(np.array(tokens, np.int64).tobytes()).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32) / 16


def generate_alone(request, context):
    """Return the tokens of a request that runs alone, and the reason of its end."""
    tokens, new = list(request.prompt), []
    params = request.params
    if params.limit == 0:
        return new, "length"
    while True:
        rng = np.random.default_rng([params.seed, len(tokens)])
        token = params.sampling.choose_token(compute_logits(tokens), rng, tokens)
        if token in params.end_tokens:
            return new, "stop"
        new.append(token)
        tokens.append(token)
        if len(new) == params.limit or len(tokens) >= context:
            return new, "length"


class FakePool:
    """Cells hold tokens. A recurrent pool also has the tokens that its state has seen, in order.

    A run costs a virtual second per row. The first chunk of a size in `unplanned` costs 50 more, for its plan. The
    slots in `failing` raise `BackendError`, and their run changes nothing. Operations in `breaks`, ``read`` and
    ``decode``, raise `RuntimeError`, after they have written nonsense.
    """

    def __init__(self, slots, *, context=64, batch=16, recurrent=False):
        self.slots, self.context, self.batch, self.has_recurrent_states = slots, context, batch, recurrent
        self.droppable_last_tokens = None
        self.cells = [[] for _ in range(slots)]
        self.states = [()] * slots
        self.failing, self.now = set(), 0.0
        self.breaks, self.rebuilds = frozenset(), 0
        self.unplanned, self.planning_seconds = set(), 0.0
        self.saved_seconds, self.mixed = 0.0, []
        """The predicted gain of mixed steps; the slot and the tokens of the prompt, and the decoding slots, of each."""
        self.reads, self.decoded = [], []
        """Slot and tokens of each prompt chunk; the slots of each decode step."""

    def read_prompt(self, slot, tokens, before):
        self._require_alive([slot], "read")
        assert 0 < len(tokens) <= self.batch
        self.now += len(tokens)
        if len(tokens) in self.unplanned:
            self.unplanned.discard(len(tokens))
            self.now += 50.0
            self.planning_seconds += 50.0
        self.reads.append((slot, len(tokens)))
        return self._append(slot, tokens, before)

    def decode(self, tokens, before):
        self._require_alive(tokens, "decode")
        self.now += len(tokens)
        self.decoded.append([*tokens])
        return {slot: self._append(slot, [token], before[slot]) for slot, token in tokens.items()}

    def predict_seconds_saved_by_mixing(self, slots, slot, size, length):
        assert slot not in slots
        return self.saved_seconds

    def read_prompt_and_decode(self, slot, prompt, tokens, before):
        """Run a mixed step, which costs a virtual second per row, as the two steps that it replaces."""
        self._require_alive([slot, *tokens], "decode")
        self.now += len(prompt) + len(tokens)
        self.mixed.append((slot, len(prompt), [*tokens]))
        rows = {each: self._append(each, [token], before[each]) for each, token in tokens.items()}
        return rows | {slot: self._append(slot, prompt, before[slot])}

    def list_evaluated_draft_tokens(self, slot):
        return ()

    def decode_to_candidates(self, *_):
        return None

    def _require_alive(self, slots, operation):
        if operation in self.breaks:
            self.cells, self.states = [[-1] for _ in self.cells], [(-1,)] * self.slots
            raise RuntimeError("the pool is broken")
        if self.failing & set(slots):
            raise BackendError("device fake:0 failed")

    def _append(self, slot, tokens, before):
        assert self.cells[slot][: len(before)] == list(before), "a slot has other tokens than its request"
        if self.has_recurrent_states:
            assert self.states[slot] == tuple(before), "a recurrent state has seen other tokens"
            self.states[slot] = (*before, *tokens)
        self.cells[slot] = [*before, *tokens]
        return compute_logits(self.cells[slot])

    def predict_prompt_seconds(self, size):
        return size * 1e-3

    def zero_slot_states(self, slot):
        self.cells[slot], self.states[slot] = [], ()

    def rebind_plans_and_zero_states(self):
        self.cells, self.states = [[] for _ in self.cells], [()] * self.slots
        self.rebuilds += 1

    def clear_recurrent_states(self, slot):
        self.states[slot] = ()

    def save_recurrent_states(self, slot):
        return {"state": self.states[slot]}

    def restore_recurrent_states(self, slot, saved):
        self.states[slot] = saved["state"]

    def copy_cache_cells(self, source, target, tokens):
        self.cells[target] = self.cells[source][:tokens]

    def compute_recurrent_state_bytes(self):
        return 1

    def resize_to_slot_count(self, slots, lengths):
        """Move to new memory, which has only the cells that are in use."""
        added = slots - self.slots
        self.cells = [cells[:length] for cells, length in zip(self.cells[:slots], lengths, strict=True)]
        self.cells += [[] for _ in range(added)]
        self.states[slots:] = [()] * added
        self.slots = slots
