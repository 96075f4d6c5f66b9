"""How a recurrence takes its state and gives it back: one per sequence, or as rows of a pool of states.

``pool="none"``: operand and result are the states of the sequences.  ``"read"``: the operand is a pool, sequence i
begins with row ``slots_in[i]``; the result is as before.  ``"update"``: the result is the pool, in which row
``slots_out[i]`` has become the new state of sequence i (all reads come first); it can be the operand's own memory, so
that a step moves no state but those it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.spec import Spec
from ..declaration.op import Array
from ..declaration.samples import LegalRange
from ..declaration.signature import SignatureMismatch
from ..movement.sharded_tables import require_row_numbers

POOL_MODES = ("none", "read", "update")

SLOT_RANGES: Mapping[str, LegalRange] = {
    "slots_in": LegalRange(0, "slots"),
    "slots_out": LegalRange(0, "slots", distinct=True),
}


def build_state_signatures(operands: str, out: str, state: str) -> dict[str, str]:
    """A signature for each `state_form`.  `operands` and `out` begin axes with ``...``; `state` lists those of one."""
    kept = state.replace("*", "")
    one, pool = f"state[..., {state}]", f"state[*slots, {state}], slots_in[...]: i32"
    signatures = {}
    for how, saved, rows in (("one", "", "*seqs"), ("several", "snapshots, ", "*seqs, *saved")):
        results = f"{out}: f32, [..., {saved}{kept}]: f32"
        signatures[f"none {how}"] = f"{operands}, {one} -> {results}"
        signatures[f"read {how}"] = f"{operands}, {pool} -> {results}"
        # The pool has no axis of sequences, so cutting those would leave each device with other rows updated.
        left = f"{operands}, {pool}, slots_out[{rows}]: i32".replace("...", "*seqs")
        signatures[f"update {how}"] = f"{left} -> {out.replace('...', 'seqs')}: f32, [slots, {kept}]: f32"
    return signatures


def choose_state_signature(attrs: Mapping[str, Attr]) -> str:
    """Which of the `state_signatures` holds under the attributes `pool` and `snapshots`."""
    pool, snapshots = attrs.get("pool", "none"), attrs.get("snapshots", 1)
    if pool not in POOL_MODES:
        raise SignatureMismatch(f"pool is {pool!r}; one of {', '.join(POOL_MODES)}")
    return f"{pool} {'one' if snapshots == 1 else 'several'}"


def state_inplace_pairs(attrs: Mapping[str, Attr]) -> tuple[tuple[int, str], ...]:
    """The new state may take the memory of the old one, but not of a pool that it only reads rows from."""
    return () if attrs.get("pool") == "read" else ((1, "state"),)


def state_overwritten_entries(attrs: Mapping[str, Attr]) -> tuple[str, int] | None:
    """Of a pool only the rows of the sequences change."""
    return ("slots_out", 0) if attrs.get("pool") == "update" else None


def check_state(snapshots: int, saved: int | None = None, **_: object) -> str | None:
    if snapshots < 1:
        return f"snapshots is {snapshots}; it must be at least 1"
    if saved is not None and saved != snapshots:
        return f"slots_out has {saved} rows for a sequence; snapshots is {snapshots}"
    return None


def make_state_traffic(index: int) -> Callable[[Sequence[Spec | None], Sequence[Spec], Attrs], int]:
    """Bytes moved by a recurrence whose operand `index` is the state: of a pool only the rows that are named."""

    def traffic(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
        state, *slots = (s for s in sources[index:] if s is not None)
        moved = sum(s.nbytes for s in (*sources[:index], *slots) if s is not None) + results[0].nbytes
        row = Spec(state.shape[1:], state.dtype).nbytes
        moved += slots[0].size * row if slots else state.nbytes
        return moved + (slots[1].size * row if len(slots) > 1 else results[1].nbytes)

    return traffic


def run_recurrence(
    step: Callable[[int, Array], Array],
    tokens: int,
    state: Array,
    slots_in: Array | None = None,
    slots_out: Array | None = None,
    snapshots: int = 1,
) -> Array:
    """The second result of a recurrence: what ``step(t, old)`` makes of the state, token by token.

    Snapshot s is the state s tokens before the end.  Those that lie before the first token are zeros; in a pool their
    rows stay as they are.
    """
    s = state if slots_in is None else state[require_row_numbers(slots_in, len(state), "slots_in")]
    last = [s]
    for t in range(tokens):
        s = step(t, s)
        last = [s, *(last if t else ())][:snapshots]
    if slots_out is None:
        missing = [np.zeros_like(s)] * (snapshots - len(last))
        return np.array(last[0]) if snapshots == 1 else np.stack([*last, *missing], axis=-4)
    pool = np.array(state)
    require_row_numbers(slots_out, len(state), "slots_out")
    for i, snapshot in enumerate(last):
        pool[slots_out if snapshots == 1 else slots_out[..., i]] = snapshot
    return pool
