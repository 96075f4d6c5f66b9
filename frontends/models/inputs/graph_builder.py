"""The builder of one step graph: inputs, masks, KV-cache writes and state updates that all mixers share.

A step is one run of the model over T new tokens of each of B sequences. A cell is the place of one token in a KV
cache. Shapes use B for sequences, T for new tokens per sequence, and E for the model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial, reduce

from .... import ops
from ....graph import DType, Graph, Value, input, state
from ....ops.matrix.attention import BLOCK_KEYS
from ...errors import ModelError
from .attention_window import FULL_WINDOW, AttentionWindow, TemperatureScaling
from .step import PLAIN_KINDS, STATE_TOKEN_KINDS, RingRowNumberInput, Step, count_cache_rows_with_spare

MASKED_SCORE = -1e38
"""The score of masked cells, so that their softmax is 0."""
CACHE_INPUTS = frozenset({"pos", "slot"})
"""Inputs of mixers with a KV cache."""
RECURRENT_INPUTS = frozenset({"valid", "conv_rows"})
"""Inputs of mixers with convolutions and recurrent states."""
NEXT_TOKEN_STATE = "next_token"
"""The state i32[B] with the next token of each sequence, for steps that read their tokens from a state."""
SNAPSHOTS, WINDOWS = ".snapshots", ".windows"
"""Suffixes of the states ``NAME.T.snapshots`` and ``NAME.T.windows``, which save a state NAME after each of T tokens.

They are [B, T, ...] with the last token first, or [B, kept+T, c] with the rows from which NAME was taken.
"""


def _require_whole_quantisation_blocks(name: str, size: int, dtype: DType) -> None:
    """Require that the heads of a cache are whole quantisation blocks of its dtype."""
    if size % dtype.block:
        what = f"{name}: heads of {size} numbers are no whole blocks of {dtype}, which have {dtype.block}"
        raise ModelError(f"{what}; use cache_type_{'v' if '_v.' in name else 'k'}='f16'")


class StepGraphBuilder:
    """Builds the graph of one step of a model: graph inputs, masks and caches that the layers share, and state updates.

    Linear layers read the tokens of all sequences as rows [B*T, width]; attention and recurrences read [B, T, ...],
    for B sequences of T tokens. The graph keeps only the inputs that its outputs depend on. ``steered(block, x)``
    adds control vectors: it returns the residual after a block.
    """

    def __init__(
        self, step: Step, *, taps: int = 0, steered: Callable[[int, Value], Value] = lambda block, x: x
    ) -> None:
        self.step, self.steered = step, steered
        self.taps = taps
        source, name = (state, NEXT_TOKEN_STATE) if step.output_kind in STATE_TOKEN_KINDS else (input, "tokens")
        self.tokens = source(name, (step.padded_token_count,), DType.I32)
        self.pos = input("pos", step.grid, DType.I32)
        self.slot = input("slot", (step.padded_token_count,), DType.I32)
        self.out_ids = input("out_ids", (step.outputs,), DType.I32)
        self.valid = input("valid", (*step.grid, 1))
        self.last = input("last", step.grid, DType.I32)
        self._masks: dict[tuple[AttentionWindow, Value | None], Value] = {}
        self.shared_values: dict[str, Value] = {}
        """Values that one layer leaves for later layers, by name, such as all cells of a cache."""
        self._integer_inputs: dict[str, Value] = {}
        self._updates: dict[Value, Value] = {}

    def attention_mask(self, attention_window: AttentionWindow = FULL_WINDOW, biases: Value | None = None) -> Value:
        """Return the attention mask of a window: f32[B, T, cells], or f32[B, T, T] for bidirectional attention.

        Layers with equal arguments share one mask. With ``biases`` f32[buckets, heads] the mask is f32[B, heads, T, T]
        and includes the bias of each head and distance.
        """
        key = attention_window, biases
        if key not in self._masks:
            mask = (
                self._build_causal_mask(attention_window)
                if attention_window.is_causal
                else self._build_bidirectional_mask(attention_window)
            )
            self._masks[key] = mask if biases is None else self._add_relative_position_biases(mask, biases)
        return self._masks[key]

    def _build_bidirectional_mask(self, attention_window: AttentionWindow) -> Value:
        """Build the mask f32[B, T, T] of bidirectional attention: a token attends to its whole text or to a window.

        A centred window has half of its tokens on either side. A window that is not centred, or a chunk, hides only
        earlier tokens.
        """
        count, half = self.step.tokens, attention_window.window // 2
        mask = ops.causal_mask(self.last, cells=count, name="mask")
        if attention_window.window and attention_window.is_centred:
            end = ops.cast(ops.scale(ops.cast(self.pos, dtype=DType.F32), scale=1.0, bias=half), dtype=DType.I32)
            mask = ops.add(mask, ops.causal_mask(end, cells=count, window=2 * half + 1), name="window_mask")
        elif 0 < attention_window.window < count:
            mask = self._mask_cells_before(self._compute_window_starts(attention_window), mask)
        return (
            ops.sub(mask, ops.abs_(self.token_positions_relative_to_query), name="distances")
            if attention_window.has_distance_bias
            else mask
        )

    def _compute_window_starts(self, attention_window: AttentionWindow) -> Value:
        """Compute the first position in the attention window of each token, f32[B, T, 1].

        The result is this position minus 0.5, a threshold between two positions.
        """
        if not attention_window.is_chunked:
            return ops.scale(self.positions, scale=1.0, bias=0.5 - attention_window.window)
        chunk = ops.floor(
            ops.scale(self.positions, scale=1.0 / attention_window.window, bias=0.5 / attention_window.window)
        )
        return ops.scale(chunk, scale=float(attention_window.window), bias=-0.5)

    def _mask_cells_before(self, first: Value, mask: Value) -> Value:
        """Set the mask f32[B, T, n] to minus infinity for the cells before ``first`` f32[B, T, 1]."""
        numbers = ops.arange(start=0.0, stop=float(mask.shape[-1]))
        ahead = ops.sub(ops.add(ops.fill(mask, value=0.0), numbers), first)
        return ops.add(mask, ops.log(ops.step(ahead)), name="first_mask")

    @cached_property
    def token_positions_relative_to_query(self) -> Value:
        """How many positions each token of a text is after each other token: f32[B, T, T], negative for earlier tokens.

        Rows are the tokens that attend (queries), columns the tokens that they attend to.
        """
        count = self.step.tokens
        numbers = ops.repeat(ops.arange(start=0.0, stop=float(count)), shape=(*self.pos.shape, count))
        return ops.sub(numbers, self.positions)

    def _add_relative_position_biases(self, mask: Value, table: Value) -> Value:
        """Add the relative position biases of T5 to the mask, and return f32[B, heads, T, T].

        ``table`` f32[buckets, heads] has a bias per bucket of distances. Half of the buckets are for later tokens. In
        each half, the first half of the buckets is for one distance each; the others grow logarithmically up to 128.
        Raffel et al., T5, 2020.
        """
        (buckets, heads), (sequences, count) = table.shape, self.pos.shape
        exact_buckets, log_buckets = buckets // 4, buckets // 2 - buckets // 4
        ahead = ops.arange(start=1.0 - count, stop=float(count))
        size = ops.abs_(ahead)
        octaves = ops.log(ops.scale(ops.clamp(size, min=exact_buckets, max=math.inf), scale=1.0 / exact_buckets))
        # 1e-4 keeps exact powers of the ratio in their bucket.
        number = ops.floor(ops.scale(octaves, scale=log_buckets / math.log(128.0 / exact_buckets), bias=1e-4))
        number = ops.add(ops.clamp(size, min=0.0, max=exact_buckets), ops.clamp(number, min=0.0, max=log_buckets - 1.0))
        number = ops.add(number, ops.scale(ops.step(ahead), scale=float(buckets // 2)))
        biases = ops.get_rows(table, ops.cast(number, dtype=DType.I32), name="biases")
        where = ops.cast(
            ops.scale(self.token_positions_relative_to_query, scale=1.0, bias=count - 1.0), dtype=DType.I32
        )
        biases = ops.get_rows(biases, ops.reshape(where, shape=(where.spec.size,)))
        biases = ops.transpose(ops.reshape(biases, shape=(sequences, count * count, heads)))
        biases = ops.reshape(biases, shape=(sequences, heads, count, count))
        return ops.add(biases, ops.reshape(mask, shape=(sequences, 1, count, count)), name="biased_mask")

    def _build_causal_mask(self, attention_window: AttentionWindow) -> Value:
        """Build the mask f32[B, T, cells] of causal attention, with window, chunks or distance biases.

        The mask for a ring cache has fewer cells.
        """
        cells, window = self.step.cells, 0 if attention_window.is_chunked else attention_window.window
        if 0 < (ring := self.step.ring_cells(attention_window.cell_lifetime_tokens)) < cells:
            return self._build_ring_mask(ring, window)
        mask = ops.causal_mask(self.pos, cells=cells, window=window, name="window_mask" if window else "mask")
        if attention_window.is_chunked and cells > attention_window.window:
            mask = self._mask_cells_before(self._compute_window_starts(attention_window), mask)
        if attention_window.has_distance_bias:
            mask = ops.sub(ops.add(mask, self.cell_numbers), self.positions, name="distances")
        return mask

    def _build_ring_mask(self, ring: int, window: int) -> Value:
        """Build the mask of a ring cache, f32[B, T, ring]: 0 for cells with one of the last ``window`` tokens.

        Other cells get a very low score. Example: in a ring of 6 cells, a token at position 8 sees the positions 6 7
        8 3 4 5 in the cells. With a window of 3 tokens, the first three cells get 0.
        """
        places = ops.repeat(self.positions, shape=(*self.pos.shape, ring))
        ahead = ops.sub(places, ops.arange(start=0.0, stop=float(ring)))
        turns = ops.floor(ops.scale(ahead, scale=1.0 / ring, bias=0.5 / ring))
        back = ops.sub(ahead, ops.scale(turns, scale=float(ring)))  # tokens since the cell was written
        late = ops.step(ops.scale(back, scale=1.0, bias=0.5 - window))
        never = ops.step(ops.sub(ops.scale(back, scale=1.0, bias=-0.5), places))
        return ops.scale(ops.add(late, never), scale=MASKED_SCORE, name="ring_mask")

    @cached_property
    def cell_numbers(self) -> Value:
        """The numbers 0, 1, 2, ... of the rows (cells) of a KV cache, f32[cells], to compare with positions."""
        return ops.arange(start=0.0, stop=float(self.step.cells))

    @cached_property
    def positions(self) -> Value:
        """The position of each new token in its sequence, f32[B, T, 1]."""
        return ops.reshape(ops.cast(self.pos, dtype=DType.F32), shape=(*self.pos.shape, 1))

    @cached_property
    def negative_positions(self) -> Value:
        """The negated position of each token, i32[B, T]; RoPE with these positions inverts the rotation."""
        return ops.cast(ops.scale(ops.cast(self.pos, dtype=DType.F32), scale=-1.0), dtype=DType.I32)

    def compute_position_quotient(self, ratio: int, offset: float) -> Value:
        """Compute ``(pos + offset) // ratio`` for each token position ``pos``, as float32 [B, T].

        Half a position is added before the division, so that rounding errors do not change the quotient.
        """
        pos = ops.cast(self.pos, dtype=DType.F32)
        return ops.floor(ops.scale(pos, scale=1.0 / ratio, bias=(offset + 0.5) / ratio))

    def compute_positions_in_block(self, ratio: int) -> Value:
        """Compute the position of each token inside its block of ``ratio`` tokens, ``pos % ratio``: i32[B*T]."""
        pos = ops.cast(self.pos, dtype=DType.F32)
        start = ops.scale(self.compute_position_quotient(ratio, 0.0), scale=float(ratio))
        return ops.reshape(ops.cast(ops.sub(pos, start), dtype=DType.I32), shape=(self.step.padded_token_count,))

    def build_mask_of_complete_blocks(self, ratio: int) -> Value:
        """Build the mask f32[B, T, blocks] that hides blocks of ``ratio`` tokens that are not complete yet at a token.

        A block is complete for a token if the block ends at this token or earlier.
        """
        last = ops.cast(ops.scale(self.compute_position_quotient(ratio, 1.0), scale=1.0, bias=-1.0), dtype=DType.I32)
        return ops.causal_mask(last, cells=-(-self.step.cells // ratio), name=f"block_mask.{ratio}")

    def scale_queries_by_temperature(self, q: Value, temperature: TemperatureScaling) -> Value:
        """Scale queries f32[B, T, heads, size] by a temperature that grows with the position ``pos`` of the token.

        The factor is ``1 + factor ln(1 + (pos + offset) // floor)``. ``temperature`` is (floor, factor, offset); `None`
        changes nothing.
        """
        if temperature is None:
            return q
        floor, factor, offset = temperature
        if self.step.cells + offset <= floor:  # the factor is 1 for all tokens
            return q
        query_scale = ops.scale(
            ops.log(ops.scale(self.compute_position_quotient(floor, offset), scale=1.0, bias=1.0)),
            scale=factor,
            bias=1.0,
        )
        return ops.mul(q, ops.reshape(query_scale, shape=(*self.pos.shape, 1, 1)))

    @cached_property
    def token_validity_mask(self) -> Value:
        """The mask that is 1 for tokens and 0 for padding, f32[B, T, 1, 1]."""
        return ops.reshape(self.valid, shape=(*self.pos.shape, 1, 1))

    @property
    def conv_rows(self) -> Value:
        return self.make_shared_integer_input("conv_rows", self.step.sequences, self.taps - 1)

    def make_shared_integer_input(self, name: str, *shape: int) -> Value:
        """Return the graph input ``name`` i32[shape]; later calls with this name return the same input."""
        return self._integer_inputs.setdefault(name, input(name, shape, DType.I32))

    def rows_to_sequences(self, x: Value, *shape: int) -> Value:
        """Reshape rows of tokens [B*T, n] to sequences [B, T, *shape]."""
        return ops.reshape(x, shape=(*self.step.grid, *shape))

    def sequences_to_rows(self, x: Value) -> Value:
        """Reshape sequences [B, T, ...] to rows of tokens [B*T, n]."""
        return ops.reshape(x, shape=(self.step.padded_token_count, x.spec.size // self.step.padded_token_count))

    def select_output_rows_unless_mtp(self, x: Value) -> Value:
        """Return the rows of ``x`` f32[B*T, n] for which logits are requested; return all if MTP blocks follow.

        MTP (multi-token prediction) blocks read every token. The result is f32[outputs, n], or ``x`` itself.
        """
        return self.select_output_rows(x) if self.step.output_kind in PLAIN_KINDS else x

    def select_output_rows(self, x: Value) -> Value:
        """Return the rows of ``x`` f32[B*T, n] for the tokens with requested logits: f32[outputs, n]."""
        return ops.get_rows(x, self.out_ids, name="wanted")

    def write_and_read_cache(
        self,
        name: str,
        new: Value,
        slot: Value | None = None,
        *,
        ratio: int = 1,
        attention_window: AttentionWindow = FULL_WINDOW,
        dtype: DType | None = None,
    ) -> Value:
        """Write new rows into a cache, and return the cells that attention reads, [B, cells, heads, size].

        The cache is a state [B*rows, heads*size] with ``count_cache_rows_with_spare`` rows per sequence. Padding writes
        a spare row.

        Args:
            name: Name of the state.
            new: The new rows f32[B, T, heads, size].
            slot: The cell that each row is written to; by default the cell of its token.
            ratio: Tokens per cell.
            attention_window: Cells outside this window may be overwritten.
            dtype: Dtype of the cache; by default the dtype of keys.

        Raises:
            ModelError: The head size is not a multiple of the block size of the dtype.
        """
        step, dtype = self.step, dtype or self.step.keys
        if step.blocks:
            raise ModelError(f"{name}: this kind of attention keeps its cells in order; leave out blocks")
        sequences, (heads, size) = step.sequences, new.shape[2:]
        _require_whole_quantisation_blocks(name, size, dtype)
        context, cells = -(-step.context // ratio), -(-step.cells // ratio)
        if ring := step.ring_cells(attention_window.cell_lifetime_tokens):
            context, cells = ring, min(ring, cells)
            slot = self.make_shared_integer_input(
                RingRowNumberInput(attention_window.cell_lifetime_tokens).input_name, step.padded_token_count
            )
        cache_rows = count_cache_rows_with_spare(context)
        old = state(name, (sequences * cache_rows, heads * size), dtype)
        rows = ops.reshape(new, shape=(math.prod(new.shape[:2]), heads * size))
        cache = ops.set_rows(old, rows, self.slot if slot is None else slot, name=f"{name}.new")
        self._updates[old] = cache
        known = ops.reshape(cache, shape=(sequences, cache_rows, heads * size))
        known = ops.slice_(known, axis=1, start=0, stop=cells)
        self.shared_values[name] = ops.reshape(known, shape=(sequences, cells, heads, size))
        return self.shared_values[name]

    def write_and_read_kv(
        self, layer: int, k: Value, v: Value, attention_window: AttentionWindow
    ) -> tuple[Value, Value]:
        """Write the new keys and values of a layer to its KV caches, and return all cells of both.

        Bidirectional attention has no cache, so it gets ``k`` and ``v`` themselves.
        """
        if not attention_window.is_causal:
            self.shared_values |= {f"cache_k.{layer}": k, f"cache_v.{layer}": v}
            return k, v
        if self.step.blocks:
            return self._write_and_return_block_pool(
                f"cache_k.{layer}", k, self.step.keys
            ), self._write_and_return_block_pool(f"cache_v.{layer}", v, self.step.values)
        keys = self.write_and_read_cache(f"cache_k.{layer}", k, attention_window=attention_window)
        return keys, self.write_and_read_cache(
            f"cache_v.{layer}", v, attention_window=attention_window, dtype=self.step.values
        )

    def _write_and_return_block_pool(self, name: str, new: Value, dtype: DType) -> Value:
        """Write new rows f32[B, T, heads, size] into a pool of blocks, and return the pool: [blocks, 64, heads, size].

        The pool is the state ``name`` [blocks*64, heads*size].
        """
        heads, size = new.shape[2:]
        _require_whole_quantisation_blocks(name, size, dtype)
        old = state(name, (self.step.blocks * BLOCK_KEYS, heads * size), dtype)
        rows = ops.reshape(new, shape=(self.step.padded_token_count, heads * size))
        self._updates[old] = pool = ops.set_rows(old, rows, self.slot, name=f"{name}.new")
        self.shared_values[name] = ops.reshape(pool, shape=(self.step.blocks, BLOCK_KEYS, heads, size))
        return self.shared_values[name]

    def find_block_table(self, attention_window: AttentionWindow) -> Value | None:
        """Return the blocks of each sequence in a pool of blocks, i32[B, `Step.table_columns`]; None without blocks."""
        if not self.step.blocks or not attention_window.is_causal:
            return None
        return self.make_shared_integer_input("table", self.step.sequences, self.step.table_columns)

    def attend_by_segment(
        self, attend: Callable[[StepGraphBuilder, Value, Value, Value], Value], q: Value, layer: int
    ) -> Value:
        """Compute attention over the caches of a layer, for a normal step or for each part of a mixed step.

        A mixed step has decoded tokens and a prompt, which attend one after the other; see `MixedStepGraphBuilder`.

        Args:
            attend: Maps a builder, queries, keys and values to the result of attention.
            q: The queries.
            layer: Number of the layer.
        """
        return attend(self, q, self.shared_values[f"cache_k.{layer}"], self.shared_values[f"cache_v.{layer}"])

    def run_mixer_by_segment(
        self, mixer: Callable[[StepGraphBuilder, Value], Value], x: Value, *, is_recurrent: bool
    ) -> Value:
        """Run a token mixer on rows f32[B*T, E]; in a mixed step, a recurrent one runs for each part separately."""
        return mixer(self, x)

    def prepend_previous_rows(self, name: str, new: Value, row_count: int) -> Value:
        """Put the last ``row_count`` rows of earlier runs before the rows ``new`` f32[B, T, c]: f32[B, row_count+T, c].

        The state ``name`` f32[B, row_count, c] keeps these rows from run to run. At the end of a run it gets the last
        rows that are not padding. The input ``conv_rows`` has the numbers of these rows.
        """
        old = self.make_sequence_state(name, row_count, new.shape[-1])
        both, rows = ops.concat(old, new, axis=1), self.conv_rows
        if row_count != self.taps - 1:
            rows = ops.slice_(rows, axis=1, start=0, stop=row_count)
        self._set_update(old, ops.get_rows(both, rows, name=f"{name}.new"))
        if self.step.reversible:
            self._updates[state(f"{name}.{self.step.tokens}{WINDOWS}", both.shape)] = both
        return both

    def make_sequence_state(self, name: str, *shape: int) -> Value:
        """Make a state f32[B, *shape] with one entry per sequence; `set_state` sets its value after the run."""
        return state(name, (self.step.sequences, *shape))

    @property
    def snapshot_count(self) -> int:
        """How many states a recurrent op must return for each sequence.

        A step that can be undone token by token needs the state after each token, another step only the last.
        """
        return self.step.tokens if self.step.reversible else 1

    def set_state(self, old: Value, new: Value) -> None:
        """Set the value that replaces a state at the end of the run: ``new`` f32[B, ...].

        In a step that can be undone token by token, ``new`` is f32[B, snapshots, ...] and has the state after several
        tokens. Its first entry is the new state, and all entries are saved.
        """
        if self.snapshot_count > 1:
            self._updates[state(f"{old.node.name}.{self.snapshot_count}{SNAPSHOTS}", new.shape)] = new
            new = ops.reshape(ops.slice_(new, axis=1, start=0, stop=1), shape=old.shape)
        self._set_update(old, new)

    def _set_update(self, old: Value, new: Value) -> None:
        self._updates[old] = new

    def set_state_and_place_nodes_first(self, old: Value, new: Value) -> None:
        """Set the new value of a state, and make the nodes that compute it the first of the graph."""
        self._updates = {old: new, **self._updates}

    def run_recurrence_and_set_state(
        self, rule: Callable[..., tuple[Value, Value]], operands: tuple[Value, ...], old: Value
    ) -> Value:
        """Apply a recurrence to the operands, set the new value of its state, and return its result.

        The op returns only the last state. If a reversible step needs the state after each token, the recurrence runs
        token by token.

        Args:
            rule: Maps operands and state to the result and the new state.
            operands: Operands [B, T, ...].
            old: The state.
        """
        if self.snapshot_count == 1:
            y, new = rule(*operands, old)
            self.set_state(old, new)
            return y
        snapshots, answers, new = [], [], old
        for t in range(self.step.tokens):
            y, new = rule(*(ops.slice_(x, axis=1, start=t, stop=t + 1) for x in operands), new)
            answers.append(y)
            snapshots.append(ops.reshape(new, shape=(new.shape[0], 1, *new.shape[1:])))
        self.set_state(old, reduce(partial(ops.concat, axis=1), reversed(snapshots)))
        return reduce(partial(ops.concat, axis=1), answers)

    def build_graph(self, outputs: Mapping[str, Value]) -> Graph:
        """Build the graph with the named ``outputs``, and with the new value of each state that `set_state` got."""
        return Graph(outputs, self._updates)
