"""A session: sequences of tokens over one model, with their states and one plan per bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Backend, Device, find
from ..distributed import SINGLE_PROCESS, World
from ..graph import require, validate_arguments
from ..graph.validation import ANY, BOOL, CALLABLE, NONE, TEXT, ArgumentKind, instance_of, integer_between, list_of
from ..scheduler import Executor, InterruptsKept, Plan, Store, kept_plan
from ..scheduler.shared_speeds import shared_speeds
from .devices import ONE_DEVICE, WIRES, Group, spelled
from .errors import ModelError
from .exactness import graphs_of
from .identity import model_digest
from .laying_out import Progress as Progress
from .laying_out import laid_out, load_weights
from .models import Batch, Model, Step
from .parts import (
    Before,
    Part,
    Reading,
    are_several,
    bucket,
    equal_sizes,
    joined,
    outputs_of,
    parts_of,
    read_behind,
    room_of,
    sizes_in_turn,
    split_rows,
    stages_that_follow,
    token_ids,
    wanted,
)
from .text_limits import check_room
from .watch import Seen, Watch

if TYPE_CHECKING:
    from ..scheduler import Difference, Pipeline, Trace

F32 = npt.NDArray[np.float32]
FEWEST_CELLS = 256
"""Tokens of the smallest context bucket; each larger bucket is twice as long."""
DEFAULT_CONTEXT = 4096
DEFAULT_BATCH = 512
COUNT, NATURAL = integer_between(-(2**31), 2**31), integer_between(0)


class Session:
    """Runs batches of new tokens for a fixed number of sequences and keeps the states of the sequences.

    A plan is built once per (token bucket, context bucket, output count) and reused; buckets are powers of two. All
    plans share weights and states. Threads that share a session run one call at a time; separate sessions run in
    parallel. A session made `like` another one of the same model uses its devices and weights, and has its own states.
    Each rank of `world` makes the same session and calls, gets the same results, and loads the weights of its own
    devices. `watch` reports matching values after every step. `recent` has the last tokens per sequence for n-gram
    models. `planning_seconds` includes kernel compilation. Raises `ModelError` for a request that does not fit the
    model.
    """

    @validate_arguments(
        ModelError,
        model=instance_of(Model),
        on=instance_of(Group),
        like=ArgumentKind("a Session or None", lambda v: v is None or isinstance(v, Session)),
        sequences=COUNT,
        context=COUNT | NONE,
        batch=COUNT,
        watch=instance_of(Watch) | NONE,
        on_progress=CALLABLE | NONE,
        world=instance_of(World),
    )
    def __init__(
        self,
        model: Model,
        *,
        on: Group = ONE_DEVICE,
        like: Session | None = None,
        sequences: int = 1,
        context: int | None = None,
        batch: int = DEFAULT_BATCH,
        watch: Watch | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.model, self.sequences, self.watch = model, sequences, watch
        self.world: World = world if like is None else like.world
        self.context = min(model.context_length, DEFAULT_CONTEXT) if context is None else context
        self.batch = min(batch, self.context) if model.is_causal else self.context  # a text is one batch
        for name, value in (("sequences", sequences), ("context size", self.context), ("batch size", batch)):
            if value < 1:
                raise ModelError(f"{name} is {value}; it must be at least 1")
        model.check_context(self.context)
        self.on: Group = on if like is None else like.on
        self._graph = graphs_of(model, self.on)
        self._wire, self._caches = WIRES[self.on.wire], self.on.caches
        if self.world.size > 1:
            own = f"one with the digest {model_digest(model)[:16]}"
            self.world.require_agreement("model", own, "give all ranks the same file")
        self._place = tuple((pattern, spelled(device, self.on)) for pattern, device in self.on.place)
        self._gives = "both" if model.guessers else "logits"
        self._one = self.step(1, 1, sequences)
        self._whole = replace(self._one, gives="all") if model.guessers else self._one
        """The step that reads all weights; all other plans keep its layout of the weights."""
        self.group: list[tuple[Backend, Device]]  # mode `none` may use fewer devices
        if like is None:
            largest = self.step(bucket(self.batch), self.context, sequences)
            may_follow = model.is_causal and not model.guessers and watch is None
            self._first = laid_out(
                on, self.world, self._place, self._graph, self._whole, largest, may_follow=may_follow
            )
            self.group = self._first.group
            self._speeds = shared_speeds(self.group, self.world)
            self.store = Store(self.group, self.world, on.packed)
        else:
            self.group, self._speeds = like.group, like._speeds
            self._first = like.plan(self._whole)
            self.store = like.store.beside()
        if watch is not None:
            from ..scheduler import matching

            matching(self._first.graph, watch.pattern)  # fails before loading
        self.lengths = [0] * sequences
        self.recent: list[list[int]] = [[] for _ in range(sequences)]
        self.seen = [np.zeros((1, model.handed), np.float32)] * sequences if model.guessers else []
        """Per sequence the rows [rows, `Model.draft_columns`] that MTP blocks read with the next token."""
        self.reversible: Before | None = None
        """The last step, if it was reversible."""
        self._executors: dict[Step, Executor] = {}
        self._pipelines: dict[Step, Pipeline] = {}
        self._plans: dict[Step, Plan] = like._plans if like is not None and like.watch is watch else {}
        self.trace: Trace | None = None
        self.planning = 0.0
        if like is None:
            load_weights(self.store, model, self._first, on_progress)
        self.store.buffers(self._first)  # allocates the states as zeros

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
        """Append new tokens to each sequence and return the logits of each sequence.

        Raises `ModelError` if a sequence would exceed the context; nothing is changed then.

        Args:
            tokens: New tokens per sequence; an idle sequence has an empty list and gets 0 rows.
            every_position: Return f32[new tokens, vocabulary] instead of f32[1, vocabulary] for the last token.
            hidden: Return the input rows of the output matrix, f32[..., width], instead of logits.
            reversible: Let `rewinding.rewind_last_step` shorten this call, which may have one batch of tokens at most.
        """
        given = [token_ids(i, new) for i, new in enumerate(tokens)]
        with self.store.turn:
            self.check(given, hidden)
            longest = max(map(len, given))
            sizes = self.part_sizes(longest, max(self.lengths), reversible)
            if len(sizes) == 1:  # the path of every decoded token
                return self._run(given, every_position, hidden, reversible)
            if reversible and longest:
                raise ModelError(
                    f"{longest} tokens are more than a batch of {self.batch}; only a batch can be taken back"
                )
            parts = parts_of(given, sizes)
            runs: Iterable[list[F32]] = (self._run(part, every_position, hidden, False) for part in parts)
            if self._follow_each_other(longest):
                runs = self._run_in_turn(parts, every_position, hidden)
            return joined(given, parts, runs, every_position, self.no_rows(hidden))

    @validate_arguments(ModelError, tokens=NATURAL, behind=NATURAL, every_position=BOOL, reversible=BOOL)
    def prepare(self, tokens: int, *, behind: int = 0, every_position: bool = False, reversible: bool = False) -> None:
        """Build the plans and kernels for `tokens` more tokens of sequence 0, `behind` tokens after its present end."""
        length = self.lengths[0] + behind
        sizes = self.part_sizes(tokens, length, reversible)
        follow = len(sizes) > 1 and self._follow_each_other(tokens, reversible)
        outputs = outputs_of(parts_of([[0] * tokens], sizes), every_position, False)
        for count, gives in zip(sizes, outputs, strict=True):
            length += count
            step = self._step_for(count, length, every_position, gives if follow else self._gives, reversible, follow)
            _ = self.pipeline(step) if follow else self.executor(step)

    def _run(self, part: Part, every_position: bool, hidden: bool, reversible: bool) -> list[F32]:
        longest = max(n + len(new) for n, new in zip(self.lengths, part, strict=True))
        gives = "hidden" if hidden else self._gives
        step = self._step_for(max(map(len, part)), longest, every_position, gives, reversible)
        executor = self._executors.get(step) or self.executor(step)
        seen = np.concatenate([rows[-1:] for rows in self.seen]) if self.seen else None
        rows = wanted(part) if every_position else None
        inputs = self.model.inputs(step, Batch(part, self.lengths, rows, self.recent, seen))
        with InterruptsKept():  # states and lengths belong together
            given = executor.run(inputs)
            self.reversible = Before(step, self.lengths, self.recent, part) if reversible else None
            self.advance(part)
            if self.seen and not hidden:
                self.seen = split_rows(given["hidden"], part, every_position, self.seen)
        if self.watch is not None:
            from ..scheduler import taken

            self.watch.see(Seen.of(taken(given), self.lengths[0] - len(part[0]), len(part[0])))
        output = given["hidden" if hidden else "logits"]
        return split_rows(output, part, every_position, [self.no_rows(hidden)] * self.sequences)

    def _follow_each_other(self, tokens: int, reversible: bool = False) -> bool:
        """Return whether chunks run pipelined: no chunk needs results of the previous one, and nothing watches."""
        alone = not are_several(tokens) or reversible or self.seen or self.watch is not None or self.trace is not None
        return not alone and self.model.is_causal and self._stages > 1

    def part_sizes(self, tokens: int, behind: int, reversible: bool = False) -> tuple[int, ...]:
        """Return the chunk sizes for `tokens` new tokens of a sequence that already has `behind` tokens."""
        if not self._follow_each_other(tokens, reversible):
            return equal_sizes(tokens, self.batch)

        def plan_of(count: int, length: int) -> Plan:
            return self.plan(self._step_of(count, length, self.sequences, self._gives))

        return sizes_in_turn(tokens, behind, self.batch, self._cells, plan_of)

    @cached_property
    def _stages(self) -> int:
        return stages_that_follow(self._first)

    def _run_in_turn(self, parts: Sequence[Part], every_position: bool, hidden: bool) -> list[list[F32]]:
        from ..scheduler import in_turn

        reading = self.reading(parts, every_position, hidden)
        runs = self.runs(reading)
        with InterruptsKept():  # states and lengths belong together
            return self.settle(reading, in_turn(runs))

    def reading(self, parts: Sequence[Part], every_position: bool = False, hidden: bool = False) -> Reading:
        lengths, recent, outputs = self.lengths, self.recent, outputs_of(parts, every_position, hidden)
        steps, inputs = [], []
        for part, gives in zip(parts, outputs, strict=True):
            batch = Batch(part, lengths, wanted(part) if every_position else None, recent)
            lengths, recent = read_behind(part, lengths, recent, self.model.remembers)
            steps.append(self._step_for(max(map(len, part)), max(lengths), every_position, gives, follow=True))
            inputs.append(self.model.inputs(steps[-1], batch))
        return Reading(parts, steps, inputs, outputs, every_position, lengths, recent)

    def runs(self, reading: Reading) -> list[tuple[Pipeline, Mapping[str, npt.NDArray[Any]]]]:
        """Return the bound plan and the inputs of each chunk, for the pipelined runs of the scheduler."""
        return [(self.pipeline(step), inputs) for step, inputs in zip(reading.steps, reading.inputs, strict=True)]

    def has_planned(self, reading: Reading) -> bool:
        """Return whether every step of a chunked prefill is already bound to a pipeline."""
        return all(step in self._pipelines for step in reading.steps)

    def settle(self, reading: Reading, given: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[list[F32]]:
        """Advance the sequences after all chunks have run, and return the rows of each chunk per sequence."""
        self.reversible, self.lengths, self.recent = None, reading.lengths, reading.recent
        return reading.rows_of(given, [self.no_rows(False)] * self.sequences)

    def no_rows(self, hidden: bool) -> F32:
        """Return the rows of an idle sequence: f32[0, width] if `hidden`, else f32[0, vocabulary]."""
        return np.zeros((0, self.model.hyper.width if hidden else self.model.vocabulary_size), np.float32)

    def advance(self, part: Part) -> None:
        """Add the tokens of a chunk to the lengths and the recent tokens of the sequences."""
        self.lengths, self.recent = read_behind(part, self.lengths, self.recent, self.model.remembers)

    def check(self, tokens: Sequence[Sequence[int]], hidden: bool = False, first: int = 0) -> None:
        """Raise `ModelError` for tokens that `evaluate` refuses. `first` is the number of sequence 0 in messages."""
        if self.model.is_encoder and not hidden:
            encoder = f"{self.model.architecture} is an encoder: it makes vectors of whole texts"
            raise ModelError(f"{encoder} and has no logits of what follows; use `hocket embed`")
        if len(tokens) != self.sequences:
            raise ModelError(f"got tokens for {len(tokens)} sequences, the session has {self.sequences}")
        for i, (length, new) in enumerate(zip(self.lengths, tokens, strict=True), first):
            text = "the text" if self.sequences == 1 and not first else f"sequence {i}"
            check_room(self.model, self.context, text, length + len(new))
            if new and (length or len(new) > self.batch) and not self.model.is_causal:
                raise ModelError(
                    f"sequence {i} would grow in steps, but this model sees all tokens at once; "
                    "evaluate whole texts in one batch, as `hocket logits` and `hocket embed` do"
                )

    def is_cache(self, name: str) -> bool:
        """Return whether a state has one row per cell of each sequence plus a spare row, not one entry per sequence."""
        return bool(self.store.state(name).shape[0] == self.sequences * self.cells(name) + 1)

    def cells(self, cache: str) -> int:
        """Return the cells of a sequence in a cache: one per token or token block, or the ring cache."""
        return self._one.ring(self.model.window(cache)) or -(-self.context // self.model.cell_tokens(cache))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions with the states of the sequences; a `MicroBatchedSession` has several."""
        return (self,)

    @property
    def places(self) -> tuple[range, ...]:
        """The numbers of the sequences in each of `sessions`."""
        return (range(self.sequences),)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that belong to the sequences."""
        return tuple(filter(self.model.is_own, self.store.states))

    @validate_arguments(ModelError, tokens=COUNT, length=COUNT, outputs=COUNT, gives=TEXT | NONE, turn=NATURAL)
    def step(self, tokens: int, length: int, outputs: int = 1, gives: str | None = None, turn: int = 0) -> Step:
        """Return the step for a bucket of `tokens` new tokens, up to `length`; `gives` is a `Step.output_kind`."""
        return self._step_of(tokens, length, outputs, gives or self._gives, turn=turn)

    def _step_of(
        self, tokens: int, length: int, outputs: int, gives: str, reversible: bool = False, turn: int = 0
    ) -> Step:
        cells, most = self._cells(length), bucket(self.batch)
        return _step(self.sequences, tokens, cells, self.context, outputs, gives, most, reversible, turn, *self._caches)

    def _cells(self, length: int) -> int:
        """Return the context bucket of a run after which the longest sequence has `length` tokens."""
        return min(self.context, max(FEWEST_CELLS, bucket(length)))

    def _step_for(
        self, tokens: int, length: int, every_position: bool, gives: str, reversible: bool = False, follow: bool = False
    ) -> Step:
        room = room_of(tokens, self.batch) if follow else self._room(tokens)
        outputs = self.sequences * (room if every_position else 1)
        return self._step_of(room, length, outputs, gives, reversible)

    def _room(self, tokens: int) -> int:
        """Return the token bucket of a run; with a value watch the exact count, since statistics skip padding."""
        return bucket(tokens) if self.watch is None else tokens

    @validate_arguments(ModelError, step=instance_of(Step))
    def plan(self, step: Step) -> Plan:
        """Return the plan of a step over the present layout of weights and states, with watched values as outputs."""
        if step == self._whole and self.watch is None:
            return self._first
        if step not in self._plans:
            graph = self._graph(step)
            if self.watch is not None:
                from ..scheduler import matching, observed

                graph = observed(graph, matching(graph, self.watch.pattern))
            hardware = self._speeds.hardware(graph)
            self._plans[step] = kept_plan(graph, self.group, place=self._place, like=self._first, hardware=hardware)
        return self._plans[step]

    @validate_arguments(ModelError, tokens=list_of(ANY, "a sequence of tokens"), device=TEXT)
    def judge(self, tokens: Sequence[int], device: str) -> Iterator[Difference]:
        """Append tokens in one step, and compare each value with the same op on another device."""
        given = token_ids(0, tokens)
        with self.store.turn:
            self.check([given])
            step = self.step(len(given), self.lengths[0] + len(given))
            raw = {name: tensor.raw for name, tensor in self.model.tensors.items()}
            from ..scheduler import Judge

            judge = Judge(self.plan(step), self.store, raw, find(device), place=self._place)
            yield from judge.run(self.model.inputs(step, Batch([given], self.lengths, None, self.recent)))
            self.advance([given])

    @validate_arguments(ModelError, step=instance_of(Step))
    def executor(self, step: Step) -> Executor:
        """Return the plan of a step, bound to the memory of this session; the first call binds it."""
        with self.store.turn:
            if step not in self._executors:
                start = time.perf_counter()
                label = f"{step.tokens} token{'s' * (step.tokens > 1)}, {step.cells} cells"
                self._executors[step] = Executor(self.plan(step), self.store, wire=self._wire, label=label)
                self._executors[step].trace = self.trace
                self.planning += time.perf_counter() - start
            return self._executors[step]

    def pipeline(self, step: Step) -> Pipeline:
        """Return the plan of a step, bound for pipelined runs; the first call binds it."""
        if step not in self._pipelines:
            from ..scheduler import Pipeline

            start = time.perf_counter()
            staying = {name for name in self.states if self.is_cache(name) and self.cells(name) == self.context}
            self._pipelines[step] = Pipeline(self.plan(step), self.store, wire=self._wire, staying=staying)
            self.planning += time.perf_counter() - start
        return self._pipelines[step]

    @contextmanager
    def tracing(self, trace: Trace | None = None) -> Iterator[Trace]:
        """Time every instruction of the runs in this context; the first run may raise `PlanError`."""
        from ..scheduler import Trace

        before, trace = self.trace, trace or Trace()
        self._follow(trace)
        try:
            yield trace
        finally:
            self._follow(before)

    def _follow(self, trace: Trace | None) -> None:
        with self.store.turn:
            self.trace = trace
            for executor in self._executors.values():
                executor.trace = trace

    def __repr__(self) -> str:
        devices, count = ", ".join(str(device) for _, device in self.group), self.sequences
        held = f"{count} sequences" if count > 1 else f"{self.lengths[0]} tokens"
        return f"Session({self.model!r} on {devices}, {held} in a context of {self.context})"

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that are bound so far."""
        return tuple(self._executors)

    def reset(self, sequence: int) -> None:
        """Forget the tokens of a sequence and zero its rows in every state."""
        require(ModelError, "reset", "sequence", sequence, integer_between(0, self.sequences - 1))
        with self.store.turn:
            self.lengths[sequence], self.recent[sequence] = 0, []
            self.seen[sequence : sequence + 1] = [0 * rows[-1:] for rows in self.seen[sequence : sequence + 1]]
            for name in self.store.states:
                state = self.store.state(name)
                rows = state.shape[0] // self.sequences
                state[sequence * rows : (sequence + 1) * rows] = 0


_step = lru_cache(maxsize=64)(Step)
"""Returns a shared `Step`: there are few, and every token asks for one."""
