"""A session: sequences of tokens over one model, with their states and one plan per bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...backends.base import Backend, Device
from ...distributed import SINGLE_PROCESS, World
from ...graph import require, validate_arguments
from ...graph.validation import ANY, BOOL, CALLABLE, NONE, TEXT, ArgumentKind, instance_of, integer_between, list_of
from ...scheduler import DeferredInterrupts, Executor, ImmediateInterrupts, Plan, Store, plan_with_cache
from ...scheduler.costs.rank_speeds import agree_on_slowest_rank_speeds
from ..errors import ModelError
from ..models import Batch, Model, Step
from ..run_config import DEFAULT_BATCH, ONE_DEVICE, TRANSFER_DTYPES, DeviceGroup
from ..text_limits import make_non_causal_append_error, require_next_token_logits, require_tokens_fit_context
from .cache_rows import is_per_cell_cache, zero_sequence_states
from .device_group import resolve_device_name_for_exact_results
from .model_digest import compute_model_digest
from .model_layout import LoadProgress as LoadProgress
from .model_layout import load_weights_largest_first, plan_model_layout
from .precision import make_step_graph_builder
from .prefill_chunks import (
    F32,
    PipelinedPrefill,
    PrefillChunk,
    ReversibleStep,
    advance_lengths_and_recent_tokens,
    choose_logits_or_only_hidden,
    choose_pipelined_chunks,
    convert_to_token_ids,
    count_useful_pipeline_stages,
    is_long_enough_to_chunk,
    join_chunk_rows,
    list_sequence_token_pairs,
    next_power_of_two,
    round_up_to_chunk_size,
    split_into_full_chunks,
    split_output_rows,
    split_tokens_into_chunks,
)
from .value_watch import StepWatch, compare_values_with_device, trace_runs

if TYPE_CHECKING:
    from ...scheduler import Trace, ValueDifference

MIN_CONTEXT_BUCKET = 256
"""Tokens of the smallest context bucket; each larger bucket is twice as long."""
DEFAULT_CONTEXT = 4096
COUNT, NATURAL, INTEGER = integer_between(1, 2**31), integer_between(0), integer_between(-(2**31), 2**31)


class Session:
    """Runs new tokens of one or several sequences through a model, and keeps the states of the sequences.

    A plan is built once per (token bucket, context bucket, output count) and reused; buckets are powers of two. No
    bucket has fewer than `min_tokens` (1) new tokens per sequence. All plans share weights and states. Threads that
    share a session run one call at a time; separate sessions run in parallel. A session made `like` another one shares
    its devices and weights, but has its own states. With `first_sequence` it instead runs the sequences of `like` from
    this number on, in the memory of `like`; only its lengths are its own. With `blocks`, all KV caches
    are pools of blocks, and `tables` has the blocks of each sequence; see `Step.blocks`.

    Each rank of `world` makes the same session and calls, gets the same results, and loads the weights of its devices.
    `watch` observes values of every step. `recent` has the last tokens per sequence, for n-gram models.
    `planning_seconds` includes kernel compilation. Raises `ModelError` for a request that does not fit.
    """

    @validate_arguments(
        ModelError,
        model=instance_of(Model),
        on=instance_of(DeviceGroup),
        like=ArgumentKind("a Session or None", lambda v: v is None or isinstance(v, Session)),
        first_sequence=NATURAL | NONE,
        sequences=COUNT,
        context=COUNT | NONE,
        batch=COUNT,
        blocks=NATURAL,
        watch=instance_of(StepWatch) | NONE,
        on_progress=CALLABLE | NONE,
        world=instance_of(World),
    )
    def __init__(
        self,
        model: Model,
        *,
        on: DeviceGroup = ONE_DEVICE,
        like: Session | None = None,
        first_sequence: int | None = None,
        sequences: int = 1,
        context: int | None = None,
        batch: int = DEFAULT_BATCH,
        blocks: int = 0,
        watch: StepWatch | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.model, self.sequences, self.watch, self.min_tokens = model, sequences, watch, 1
        self.blocks, self.tables = blocks, [list[int]() for _ in range(sequences)]
        self.world: World = world if like is None else like.world
        self.context = min(model.context_length, DEFAULT_CONTEXT) if context is None else context
        self.batch = min(batch, self.context) if model.is_causal else self.context  # a text is one batch
        model.require_context_within_training(self.context)
        self.on: DeviceGroup = on if like is None else like.on
        self._graph = make_step_graph_builder(model, self.on)
        self._wire, self._cache_dtypes = TRANSFER_DTYPES[self.on.wire], self.on.cache_dtypes
        if self.world.size > 1:
            own = f"one with the digest {compute_model_digest(model)[:16]}"
            self.world.require_agreement("model", own, "give all ranks the same file")
        self._rules = tuple(
            (rule, resolve_device_name_for_exact_results(name, self.on)) for rule, name in self.on.place
        )
        self._gives = "both" if model.mtp_block_count else "logits"
        self._token_step = self.make_step(1, 1, sequences)
        self._full_step = replace(self._token_step, output_kind="all") if model.mtp_block_count else self._token_step
        """The step that reads all weights; all other plans keep its layout of the weights."""
        self.group: list[tuple[Backend, Device]]  # mode `none` may use fewer devices
        if like is None:
            largest = self.make_step(next_power_of_two(self.batch), self.context, sequences)
            can_pipeline = model.is_causal and not model.mtp_block_count and watch is None
            self._layout_plan = plan_model_layout(
                on, self.world, self._rules, self._graph, self._full_step, largest, can_pipeline=can_pipeline
            )
            self.group = self._layout_plan.group
            self._speeds = agree_on_slowest_rank_speeds(self.group, self.world)
            self.store = Store(self.group, self.world, on.packed_weight_files)
        else:
            self.group, self._speeds = like.group, like._speeds
            self._layout_plan = like.plan(self._full_step)
            if first_sequence is None:
                self.store = like.store.share_weights()
            else:
                pools = [name for name in like.state_names if blocks and like.is_per_cell_cache(name)]
                self.store = like.store.view_sequences(first_sequence, sequences, like.sequences, pools)
        if watch is not None:
            watch.require_watched_values(self._layout_plan.graph)  # before loading
        self.lengths = [0] * sequences
        self.recent: list[list[int]] = [[] for _ in range(sequences)]
        first_rows = np.zeros((1, model.draft_input_columns), np.float32)
        self.mtp_rows = [first_rows] * sequences if model.mtp_block_count else []
        """Per sequence the rows [rows, `Model.draft_input_columns`] that MTP blocks read with the next token."""
        self.reversible_step: ReversibleStep | None = None  # the last step, if it was reversible
        self._executors: dict[Step, Executor] = {}
        self._pipelines: dict[Step, Executor] = {}
        self._plans: dict[Step, Plan] = like._plans if like is not None and like.watch is watch else {}
        self.trace: Trace | None = None
        self.planning_seconds = 0.0
        if like is None:
            load_weights_largest_first(self.store, model, self._layout_plan, on_progress)
        self.store.buffers(self._layout_plan)  # allocates the states as zeros

    @validate_arguments(
        ModelError,
        tokens=list_of(ANY, "a sequence of sequences of tokens"),
        every_position=BOOL,
        hidden=BOOL,
        reversible=BOOL,
    )
    def evaluate(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        every_position: bool = False,
        hidden: bool = False,
        reversible: bool = False,
    ) -> list[F32]:
        """Append new tokens to each sequence, and return the logits of each sequence.

        Raises `ModelError` if a sequence would exceed the context; nothing is changed then.

        Args:
            tokens: New tokens per sequence; an idle sequence has an empty list and gets 0 rows.
            every_position: Return f32[new tokens, vocabulary] instead of f32[1, vocabulary] for the last token.
            hidden: Return the input rows of the output matrix, f32[..., width], instead of logits.
            reversible: Let `rewind.keep_first_tokens_of_last_step` shorten this call of at most one batch of tokens.
        """
        token_ids = [convert_to_token_ids(i, new) for i, new in enumerate(tokens)]
        with self.store.device_lock:
            self.require_evaluable_tokens(token_ids, hidden)
            longest = max(map(len, token_ids))
            sizes = self.choose_chunk_sizes(longest, max(self.lengths), reversible)
            if len(sizes) == 1:  # the path of every decoded token
                return self._run_chunk(token_ids, every_position, hidden, reversible)
            if reversible and longest:
                raise ModelError(f"{longest} tokens are more than a batch of {self.batch}; only a batch can be rewound")
            parts = split_tokens_into_chunks(token_ids, sizes)
            runs: Iterable[list[F32]] = (self._run_chunk(part, every_position, hidden, False) for part in parts)
            if self._can_pipeline_chunks(longest):
                runs = self._run_pipelined(parts, every_position, hidden)
            return join_chunk_rows(token_ids, parts, runs, every_position, self.create_empty_idle_rows(hidden))

    @validate_arguments(ModelError, tokens=NATURAL, behind=NATURAL, every_position=BOOL, reversible=BOOL)
    def compile_plans_for_tokens(
        self, tokens: int, *, behind: int = 0, every_position: bool = False, reversible: bool = False
    ) -> None:
        """Build plans and kernels for `tokens` more tokens of sequence 0, from `behind` tokens after its end."""
        length = self.lengths[0] + behind
        sizes = self.choose_chunk_sizes(tokens, length, reversible)
        follow = len(sizes) > 1 and self._can_pipeline_chunks(tokens, reversible)
        parts = split_tokens_into_chunks([[0] * tokens], sizes)
        outputs = choose_logits_or_only_hidden(parts, every_position, False)
        for count, gives in zip(sizes, outputs, strict=True):
            length += count
            step = self._step_for(count, length, every_position, gives if follow else self._gives, reversible, follow)
            _ = self.pipelined_executor(step) if follow else self.executor(step)

    def _run_chunk(self, part: PrefillChunk, every_position: bool, hidden: bool, reversible: bool) -> list[F32]:
        longest = max(n + len(new) for n, new in zip(self.lengths, part, strict=True))
        gives = "hidden" if hidden else self._gives
        step = self._step_for(max(map(len, part)), longest, every_position, gives, reversible)
        executor = self._executors.get(step) or self.executor(step)
        seen = np.concatenate([rows[-1:] for rows in self.mtp_rows]) if self.mtp_rows else None
        rows = list_sequence_token_pairs(part) if every_position else None
        inputs = self.model.inputs(step, Batch(part, self.lengths, rows, self.recent, seen, self.tables))
        with DeferredInterrupts():  # states and lengths belong together
            results = executor.run(inputs)
            self.reversible_step = ReversibleStep(step, self.lengths, self.recent, part) if reversible else None
            self.record_evaluated_chunk(part)
            if self.mtp_rows and not hidden:
                self.mtp_rows = split_output_rows(results["hidden"], part, every_position, self.mtp_rows)
        if self.watch is not None:
            self.watch.pass_on_step_outputs(results, self.lengths[0] - len(part[0]), len(part[0]))
        output = results["hidden" if hidden else "logits"]
        return split_output_rows(output, part, every_position, [self.create_empty_idle_rows(hidden)] * self.sequences)

    def _can_pipeline_chunks(self, tokens: int, reversible: bool = False) -> bool:
        """Whether chunks run pipelined: on several stages, but not with MTP blocks, watch, trace or reversible step."""
        if reversible or self.mtp_rows or self.watch is not None or self.trace is not None:
            return False
        return is_long_enough_to_chunk(tokens) and self.model.is_causal and self._pipeline_depth > 1

    def choose_chunk_sizes(self, tokens: int, past_tokens: int, reversible: bool = False) -> tuple[int, ...]:
        """Choose the chunk sizes for `tokens` new tokens of a sequence that already has `past_tokens` tokens."""
        if not self._can_pipeline_chunks(tokens, reversible):
            return split_into_full_chunks(tokens, self.batch)
        return choose_pipelined_chunks(
            tokens, past_tokens, self.batch, self._round_up_to_context_bucket, self._plan_chunk
        )

    def _plan_chunk(self, tokens: int, length: int) -> Plan:
        return self.plan(self._step_of(tokens, length, self.sequences, self._gives))

    @cached_property
    def _pipeline_depth(self) -> int:
        return count_useful_pipeline_stages(self._layout_plan)

    def _run_pipelined(self, parts: Sequence[PrefillChunk], every_position: bool, hidden: bool) -> list[list[F32]]:
        from ...scheduler import run_pipelined

        reading = self.make_chunked_prefill(parts, every_position, hidden)
        runs = self.bind_chunks(reading)
        with DeferredInterrupts():  # states and lengths belong together
            return self.end_prefill(reading, run_pipelined(runs))

    def make_chunked_prefill(
        self, parts: Sequence[PrefillChunk], every_position: bool = False, hidden: bool = False
    ) -> PipelinedPrefill:
        lengths, recent = self.lengths, self.recent
        outputs = choose_logits_or_only_hidden(parts, every_position, hidden)
        steps, inputs = [], []
        for part, gives in zip(parts, outputs, strict=True):
            pairs = list_sequence_token_pairs(part) if every_position else None
            batch = Batch(part, lengths, pairs, recent, tables=self.tables)
            lengths, recent = advance_lengths_and_recent_tokens(
                part, lengths, recent, self.model.ngram_history_token_count
            )
            steps.append(self._step_for(max(map(len, part)), max(lengths), every_position, gives, follow=True))
            inputs.append(self.model.inputs(steps[-1], batch))
        return PipelinedPrefill(parts, steps, inputs, outputs, every_position, lengths, recent)

    def bind_chunks(self, prefill: PipelinedPrefill) -> list[tuple[Executor, Mapping[str, npt.NDArray[Any]]]]:
        """Bind the plans of all chunks of a prefill for pipelined runs; return each executor with its inputs."""
        return list(zip(map(self.pipelined_executor, prefill.steps), prefill.inputs, strict=True))

    def has_bound_pipelines(self, prefill: PipelinedPrefill) -> bool:
        """Whether the plans of all chunks of a prefill are already bound to this session for pipelined runs."""
        return all(step in self._pipelines for step in prefill.steps)

    def end_prefill(self, prefill: PipelinedPrefill, runs: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[list[F32]]:
        """Finish a prefill after its chunks have run: record its tokens, and return the logits by chunk, sequence."""
        self.reversible_step, self.lengths, self.recent = None, prefill.lengths, prefill.recent
        return prefill.split_chunk_rows_by_sequence(runs, [self.create_empty_idle_rows(False)] * self.sequences)

    def create_empty_idle_rows(self, hidden: bool) -> F32:
        """Return the empty rows that an idle sequence gets: f32[0, width] if `hidden`, else f32[0, vocabulary]."""
        return np.zeros((0, self.model.hyper.width if hidden else self.model.vocabulary_size), np.float32)

    def record_evaluated_chunk(self, chunk: PrefillChunk) -> None:
        """Record that a chunk has been evaluated: add its tokens to the lengths and the recent tokens of sequences."""
        count = self.model.ngram_history_token_count
        self.lengths, self.recent = advance_lengths_and_recent_tokens(chunk, self.lengths, self.recent, count)

    def require_evaluable_tokens(self, tokens: Sequence[Sequence[int]], hidden: bool = False, first: int = 0) -> None:
        """Raise `ModelError` for tokens that `evaluate` refuses; `first` is the number of sequence 0 in messages."""
        if not hidden:
            require_next_token_logits(self.model)
        if len(tokens) != self.sequences:
            raise ModelError(f"sequences: got tokens for {len(tokens)}, the session has {self.sequences}")
        for i, (length, new) in enumerate(zip(self.lengths, tokens, strict=True), first):
            text = "the text" if self.sequences == 1 and not first else f"sequence {i}"
            require_tokens_fit_context(self.model, self.context, text, length + len(new))
            if new and (length or len(new) > self.batch) and not self.model.is_causal:
                raise make_non_causal_append_error(i)

    def is_per_cell_cache(self, name: str) -> bool:
        """Whether a state is a cache with a row for each cell of a sequence, as opposed to one entry per sequence."""
        return is_per_cell_cache(name)

    def cell_count(self, cache: str) -> int:
        """Return the number of cells of a sequence in a cache: one per token or token block; a ring cache has fewer."""
        ring = self._token_step.ring_cells(self.model.attention_window_tokens(cache))
        return ring or -(-self.context // self.model.tokens_per_cell(cache))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that have the states of the sequences: only this one; a `MicroBatchedSession` has several."""
        return (self,)

    @property
    def sequence_ranges(self) -> tuple[range, ...]:
        """The range of sequence numbers in each of `sessions`."""
        return (range(self.sequences),)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states that belong to the sequences."""
        return tuple(filter(self.model.is_sequence_state, self.store.states))

    @validate_arguments(ModelError, tokens=INTEGER, length=INTEGER, outputs=INTEGER, kind=TEXT | NONE, block=NATURAL)
    def make_step(self, tokens: int, length: int, outputs: int = 1, kind: str | None = None, block: int = 0) -> Step:
        """Return the step of `tokens` new tokens in the context bucket of `length`; `kind` is its `output_kind`."""
        return self._step_of(tokens, length, outputs, kind or self._gives, turn=block)

    def _step_of(
        self, tokens: int, length: int, outputs: int, gives: str, reversible: bool = False, turn: int = 0
    ) -> Step:
        cells, batch = self._round_up_to_context_bucket(length), next_power_of_two(self.batch)
        shape = self.sequences, tokens, cells, self.context, outputs
        return _step(*shape, gives, batch, reversible, turn, *self._cache_dtypes, blocks=self.blocks)

    def _round_up_to_context_bucket(self, length: int) -> int:
        """Return the context bucket, a power of two, for a longest sequence of `length` tokens after the run."""
        return min(self.context, max(MIN_CONTEXT_BUCKET, next_power_of_two(length)))

    def _step_for(
        self, tokens: int, length: int, every_position: bool, gives: str, reversible: bool = False, follow: bool = False
    ) -> Step:
        room = round_up_to_chunk_size(tokens, self.batch) if follow else self._round_up_to_token_bucket(tokens)
        outputs = self.sequences * (room if every_position else 1)
        return self._step_of(room, length, outputs, gives, reversible)

    def _round_up_to_token_bucket(self, tokens: int) -> int:
        """Return the token bucket of a run: a power of two, or `tokens` itself with a value watch (no padding)."""
        return next_power_of_two(max(tokens, self.min_tokens)) if self.watch is None else tokens

    @validate_arguments(ModelError, step=instance_of(Step))
    def plan(self, step: Step) -> Plan:
        """Return the plan of a step, in the model layout, with watched values as outputs; the first call builds it."""
        if step == self._full_step and self.watch is None:
            return self._layout_plan
        if step not in self._plans:
            graph = self._graph(step)
            if self.watch is not None:
                graph = self.watch.add_watched_outputs(graph)
            hardware = self._speeds.hardware_for_graph(graph)
            like, place = self._layout_plan, self._rules
            self._plans[step] = plan_with_cache(graph, self.group, place=place, like=like, hardware=hardware)
        return self._plans[step]

    @validate_arguments(ModelError, tokens=list_of(ANY, "a sequence of tokens"), device=TEXT)
    def compare_with_device(self, tokens: Sequence[int], device: str) -> Iterator[ValueDifference]:
        """Append tokens in one step; yield how each value differs if its op runs on `device` with the same operands."""
        new = convert_to_token_ids(0, tokens)
        with self.store.device_lock:
            self.require_evaluable_tokens([new])
            step = self.make_step(len(new), self.lengths[0] + len(new))
            inputs = self.model.inputs(step, Batch([new], self.lengths, None, self.recent, None, self.tables))
            yield from compare_values_with_device(self.store, self.model, self.plan(step), inputs, device, self._rules)
            self.record_evaluated_chunk([new])

    @validate_arguments(ModelError, step=instance_of(Step))
    def executor(self, step: Step) -> Executor:
        """Return the executor of a step, its plan bound to the memory of this session; the first call binds it."""
        with self.store.device_lock, ImmediateInterrupts():
            if step not in self._executors:
                start = time.perf_counter()
                self._executors[step] = Executor(self.plan(step), self.store, wire=self._wire, label=step.label)
                self._executors[step].trace = self.trace
                self.planning_seconds += time.perf_counter() - start
            return self._executors[step]

    def pipelined_executor(self, step: Step) -> Executor:
        """Return the executor of a step for pipelined runs, bound to this session's memory; the first call binds it."""
        if step not in self._pipelines:
            start = time.perf_counter()
            caches = filter(self.is_per_cell_cache, self.state_names)
            staying = {name for name in caches if self.cell_count(name) == self.context}
            self._pipelines[step] = Executor(
                self.plan(step), self.store, wire=self._wire, pipelined=True, staying=staying
            )
            self.planning_seconds += time.perf_counter() - start
        return self._pipelines[step]

    def tracing(self, trace: Trace | None = None) -> AbstractContextManager[Trace]:
        """Trace instruction times of runs in this context; the first run raises `PlanError` if a backend cannot."""
        return trace_runs(self.set_trace, self.trace, trace)

    def set_trace(self, trace: Trace | None) -> None:
        """Set the trace that receives the times of all following runs."""
        with self.store.device_lock:
            self.trace = trace
            for executor in self._executors.values():
                executor.trace = trace

    def __repr__(self) -> str:
        devices, count = ", ".join(str(device) for _, device in self.group), self.sequences
        contents = f"{count} sequences" if count > 1 else f"length {self.lengths[0]}"
        return f"Session({self.model!r} on {devices}, {contents} in a context of {self.context})"

    @property
    def planned_steps(self) -> tuple[Step, ...]:
        """The steps that have an executor so far."""
        return (*self._executors,)

    def reset(self, sequence: int) -> None:
        """Forget the tokens of a sequence and zero its rows in every state; unused cells of caches are zeros.

        Lost states can be used again when all sequences are reset.

        Raises:
            StatesLostError: The states are lost, and a device that has not stopped may still write to them.
        """
        require(ModelError, "reset", "sequence", sequence, integer_between(0, self.sequences - 1))
        with self.store.device_lock:
            length, self.lengths[sequence], self.recent[sequence] = self.lengths[sequence], 0, []
            self.mtp_rows[sequence : sequence + 1] = [0 * rows[-1:] for rows in self.mtp_rows[sequence : sequence + 1]]
            zero_sequence_states(self, sequence, length)
            if self.store.lost_states.reason and not any(self.lengths):
                self.store.zero_states()


_step = lru_cache(maxsize=64)(Step)
"""Returns a shared `Step`: there are few, and every token asks for one."""
