"""The hyperparameters of a model, by layer; module `reading` reads them from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph import Value
from ...graph.lazy_dataclass import dataclass
from ..step import Batch, Ring, Step
from .family import Family
from .frame import Frame
from .layers.blocks import Norm, Unit
from .layers.compressed import Blocks, Compressed
from .layers.moe import Experts
from .layers.ngrams import Ngrams
from .weights import Weights


class Feed(Protocol):
    """A part of a model with inputs of its own, and the function that builds their arrays for each batch."""

    def arrays(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]: ...


class Mixer(Protocol):
    """A part of a layer that lets tokens of a sequence read each other: f32[B*T, E] to f32[B*T, E].

    ``taps`` is the number of taps of its short convolution; 0 if it has no state except a cache.
    """

    @property
    def taps(self) -> int: ...
    @property
    def needs(self) -> frozenset[str]: ...
    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A block: mixers with results that are added up, and experts or a dense FFN, if any."""

    mixers: tuple[Mixer, ...]
    experts: Experts | None
    dense: bool
    feeds: bool
    """Whether the block has an FFN."""
    parallel: bool = False
    norms_twice: bool = False
    """Whether a parallel block has a norm for each of its two parts."""
    unit: Unit = field(default=Unit())
    looks_up: bool = False
    """Whether the activation is computed in half precision, so that the last bits of its operand matter."""


@dataclass(frozen=True, slots=True)
class StreamTraits:
    """Hyper-connections: the number of residual streams, and the constants of their weights."""

    count: int
    eps: float
    iterations: int
    magnitude: float


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a model.

    The factors of embeddings, residuals and logits are 1, and the soft cap is 0, if the file has none.
    """

    family: Family
    context_length: int
    vocabulary_size: int
    width: int
    norm: Norm
    blocks: tuple[Layer, ...]
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0
    hidden_tokens: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop) of tokens that are never generated: their logits are the lowest float32."""
    streams: StreamTraits = StreamTraits(1, 0.0, 1, 1.0)
    attended: int = 0
    """Tokens that sparse attention selects from a longer context; 0 for full attention."""
    span: int = 1
    """Blocks per stack, per entry of the residual bank, or per halving of the residual."""
    cycles: int = 1
    stored: int = 0
    """Blocks that the file has."""
    source: Mapping[int, int] = field(default_factory=dict)
    """For each block that is run more than once, the block with its matrices."""
    blocks_of: tuple[Blocks, ...] = ()
    """The token blocks that caches hold as one key each, for each block length."""
    ngrams: Ngrams | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    """For layers with a cache, the number of tokens after which a cell is never read again; 0 for full attention."""
    ahead: Hyper | None = None
    """The MTP blocks in use, as hyperparameters of a model of their own."""
    handed: int = 0
    """Columns of the draft input of each MTP block."""

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def taps(self) -> int:
        """Taps of the convolutions, for `step_inputs`; 0 if there are none."""
        taps = max((mixer.taps for block in self.blocks for mixer in block.mixers), default=0)
        return max(taps, self.ngrams.kept + 1) if self.ngrams else taps

    @cached_property
    def feeds(self) -> tuple[Feed, ...]:
        """The parts of the model with inputs of their own."""
        rings = map(Ring, sorted({*self.windows.values()} - {0}))
        return (*rings, *self.blocks_of, *filter(None, (self.ngrams,)))

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs from `step_inputs` that the graphs of the model may have."""
        names = {"tokens", "out_ids"} if self.causal else {"tokens", "out_ids", "last"}
        return frozenset(names).union(*(mixer.needs for block in self.blocks for mixer in block.mixers))

    def inputs(self, step: Step) -> frozenset[str]:
        """Return the inputs from `step_inputs` that the graph of a step has."""
        rolls = self.windows and all(map(step.ring, self.windows.values()))
        return self.needs - {"slot"} if rolls else self.needs

    def window(self, layer: int) -> int:
        """Return the number of tokens after which a layer (also of MTP) never reads a cell again."""
        return self.windows[layer] if self.ahead is None else {**self.windows, **self.ahead.windows}[layer]

    def block_tokens(self, layer: int) -> int:
        """Return the tokens per block in the cache of a layer, also of MTP."""
        blocks = self.blocks if self.ahead is None else (*self.blocks, *self.ahead.blocks)
        (blocks_of,) = (m.blocks for m in blocks[layer].mixers if isinstance(m, Compressed) and m.blocks)
        return blocks_of.ratio

    @cached_property
    def causal(self) -> bool:
        return self.family.causal
