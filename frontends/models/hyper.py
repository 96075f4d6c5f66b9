"""The hyperparameters of a model, settled layer by layer; module `reading` takes them from a file."""

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
    """What needs inputs of its own for each batch, by name."""

    def arrays(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]: ...


class Mixer(Protocol):
    """What lets tokens of a sequence see each other in one layer: f32[B*T, E] to f32[B*T, E].

    ``taps`` of its short convolution, 0 if it keeps no state but a cache.
    """

    @property
    def taps(self) -> int: ...
    @property
    def needs(self) -> frozenset[str]: ...
    def __call__(self, weights: Weights, frame: Frame, layer: int, x: Value) -> Value: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A block: mixers, whose answers are added up, and experts or a dense feed-forward, if any."""

    mixers: tuple[Mixer, ...]
    experts: Experts | None
    dense: bool
    feeds: bool
    """Whether there is a feed-forward at all."""
    parallel: bool = False
    norms_twice: bool = False
    """Whether a parallel block has a norm for each of its parts."""
    unit: Unit = field(default=Unit())
    looks_up: bool = False
    """Whether its activation is looked up in half precision, where last bits tell."""


@dataclass(frozen=True, slots=True)
class StreamTraits:
    """Of hyper-connections: how many residual streams, and what their weights are made with."""

    count: int
    eps: float
    iterations: int
    magnitude: float


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a model.  Factors of embeddings, of what joins the residual and of logits are 1, and the bound
    of the logits is 0, where there are none."""

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
    """Ranges [start, stop) of tokens that are never drawn: their logits are the lowest float32."""
    streams: StreamTraits = StreamTraits(1, 0.0, 1, 1.0)
    attended: int = 0
    """Tokens that attention chooses from a longer context; 0 if it sees all."""
    span: int = 1
    """Blocks between two sums that are kept, of a stack, or behind which the residual is halved."""
    cycles: int = 1
    stored: int = 0
    """Blocks that the file has."""
    source: Mapping[int, int] = field(default_factory=dict)
    """Whose matrices blocks have that are run more than once."""
    blocks_of: tuple[Blocks, ...] = ()
    """The blocks of tokens that caches hold as one key, of each length that layers have."""
    ngrams: Ngrams | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    """Behind how many tokens layers with a cache never see a cell again, 0 for those that see all."""
    ahead: Hyper | None = None
    """The blocks that guess further tokens, as those of a model of their own, if they are to be used."""
    handed: int = 0
    """Columns of what each of these blocks is given beside a token."""

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def taps(self) -> int:
        """Taps of the convolutions, which `step_inputs` asks for; 0 if there are none."""
        taps = max((mixer.taps for block in self.blocks for mixer in block.mixers), default=0)
        return max(taps, self.ngrams.kept + 1) if self.ngrams else taps

    @cached_property
    def feeds(self) -> tuple[Feed, ...]:
        """What gives inputs beside those of `step_inputs`."""
        rings = map(Ring, sorted({*self.windows.values()} - {0}))
        return (*rings, *self.blocks_of, *filter(None, (self.ngrams,)))

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs of its graphs."""
        names = {"tokens", "out_ids"} if self.causal else {"tokens", "out_ids", "last"}
        return frozenset(names).union(*(mixer.needs for block in self.blocks for mixer in block.mixers))

    def inputs(self, step: Step) -> frozenset[str]:
        """Those of `step_inputs` that the graph of a step has."""
        rolls = self.windows and all(map(step.ring, self.windows.values()))
        return self.needs - {"slot"} if rolls else self.needs

    def window(self, layer: int) -> int:
        """Behind how many tokens a layer, perhaps one that guesses, never sees a cell again."""
        return self.windows[layer] if self.ahead is None else {**self.windows, **self.ahead.windows}[layer]

    def block_tokens(self, layer: int) -> int:
        """Tokens of a block in the cache of a layer, perhaps one that guesses."""
        blocks = self.blocks if self.ahead is None else (*self.blocks, *self.ahead.blocks)
        (blocks_of,) = (m.blocks for m in blocks[layer].mixers if isinstance(m, Compressed) and m.blocks)
        return blocks_of.ratio

    @cached_property
    def causal(self) -> bool:
        return self.family.causal
