"""The states of a recurrence: one state per sequence, or rows of a pool of states.

The attribute `pool` has three values:

* ``"none"``: operand and result are the states of the sequences.
* ``"read"``: the operand is a pool; sequence i begins with row ``slots_in[i]``. The result is as with ``"none"``.
* ``"update"``: the result is the pool, with the new state of sequence i in row ``slots_out[i]``. All reads come first.
  The result may overwrite the operand, so that a step moves only the states that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...graph.attrs import Attr, Attrs
from ...graph.errors import format_count
from ...graph.spec import Spec
from ..declaration.op import Array
from ..declaration.samples import LegalRange
from ..declaration.signature import SignatureMismatch
from ..movement.sharded_tables import require_row_numbers

POOL_MODES = ("none", "read", "update")
"""Values of the attribute `pool`."""

SLOT_RANGES: Mapping[str, LegalRange] = {
    "slots_in": LegalRange(0, "slots"),
    "slots_out": LegalRange(0, "slots", distinct=True),
}
"""Legal row numbers of a pool."""


def build_recurrence_signatures(operands: str, out: str, state: str) -> dict[str, str]:
    """Build the signatures of a recurrence: one for each value of `pool`, with one state or several snapshots.

    Args:
        operands: operands before the state, with ``...`` for leading axes.
        out: the first result, with ``...`` for leading axes.
        state: the axes of one state.

    Returns:
        The signatures by key; `choose_recurrence_signature_key` returns the key of a call.
    """
    result_axes = state.replace("*", "")
    one, pool = f"state[..., {state}]", f"state[*slots, {state}], slots_in[...]: i32"
    signatures = {}
    for how, saved, rows in (("one", "", "*seqs"), ("several", "snapshots, ", "*seqs, *saved")):
        results = f"{out}: f32, [..., {saved}{result_axes}]: f32"
        signatures[f"none {how}"] = f"{operands}, {one} -> {results}"
        signatures[f"read {how}"] = f"{operands}, {pool} -> {results}"
        # The pool has no axis of sequences: shards of sequences would leave each device with other updated rows.
        left = f"{operands}, {pool}, slots_out[{rows}]: i32".replace("...", "*seqs")
        signatures[f"update {how}"] = f"{left} -> {out.replace('...', 'seqs')}: f32, [slots, {result_axes}]: f32"
    return signatures


def choose_recurrence_signature_key(attrs: Mapping[str, Attr]) -> str:
    """Return the key of the signature for the attributes `pool` and `snapshots`, such as ``update several``.

    Raises:
        SignatureMismatch: `pool` has no legal value.
    """
    pool, snapshots = attrs.get("pool", "none"), attrs.get("snapshots", 1)
    if pool not in POOL_MODES:
        raise SignatureMismatch(f"pool is {pool!r}; one of {', '.join(POOL_MODES)}")
    return f"{pool} {'one' if snapshots == 1 else 'several'}"


def state_inplace_pairs(attrs: Mapping[str, Attr]) -> tuple[tuple[int, str], ...]:
    """Return which result may overwrite which operand: the new state (index 1) may overwrite `state`.

    The tuple is empty if the pool of states is only read.
    """
    return () if attrs.get("pool") == "read" else ((1, "state"),)


def state_overwritten_entries(attrs: Mapping[str, Attr]) -> tuple[str, int] | None:
    """Return which entries of the state operand an in-place result changes.

    For an updated pool, these are the rows with the numbers in `slots_out`. None means all entries.
    """
    return ("slots_out", 0) if attrs.get("pool") == "update" else None


def check_snapshot_count(snapshots: int, saved: int | None = None, **_: object) -> str | None:
    """Return a problem with the number of snapshots, or None.

    The number is at least 1 and equals the rows per sequence in `slots_out`.

    Args:
        snapshots: number of states to return per sequence.
        saved: rows per sequence in `slots_out`; None without an axis of snapshots.
    """
    if snapshots < 1:
        return f"snapshots is {snapshots}; it must be at least 1"
    if saved is not None and saved != snapshots:
        return f"slots_out has {format_count(saved, 'row')} for a sequence; snapshots is {snapshots}"
    return None


def make_recurrence_byte_counter(index: int) -> Callable[[Sequence[Spec | None], Sequence[Spec], Attrs], int]:
    """Return a function that counts the bytes that one run of a recurrence reads and writes.

    Of a pool of states, only the rows of the sequences in the run count.

    Args:
        index: index of the state operand.
    """

    def traffic(sources: Sequence[Spec | None], results: Sequence[Spec], attrs: Attrs) -> int:
        state, *slots = (s for s in sources[index:] if s is not None)
        moved = sum(s.nbytes for s in (*sources[:index], *slots) if s is not None) + results[0].nbytes
        row = Spec(state.shape[1:], state.dtype).nbytes
        moved += slots[0].size * row if slots else state.nbytes
        return moved + (slots[1].size * row if len(slots) > 1 else results[1].nbytes)

    return traffic


def run_recurrence_and_return_state(
    step: Callable[[int, Array], Array],
    tokens: int,
    state: Array,
    slots_in: Array | None = None,
    slots_out: Array | None = None,
    snapshots: int = 1,
) -> Array:
    """Run a recurrence over all tokens, and return the new state, which is the second result of the op.

    Args:
        step: ``step(t, old)`` returns the state after token t.
        tokens: number of tokens.
        state: the states of the sequences, or a pool of states.
        slots_in: for each sequence, the row of the pool with its initial state.
        slots_out: for each sequence and snapshot, the row of the pool that gets the new state.
        snapshots: number of states to return per sequence; snapshot s is the state s tokens before the end.

    Returns:
        The last states, the snapshots, or the updated pool. Snapshots before the first token are zeros; in a pool,
        their rows do not change.
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
