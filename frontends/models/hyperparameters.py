"""The hyperparameters of a model, layer by layer; `read_hyperparameters` reads them from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph import Value
from ...graph.lazy_dataclass import dataclass
from ..gguf.hyperparameter_keys import ArchitectureMetadata
from .inputs.family import FamilyTraits
from .inputs.graph_builder import StepGraphBuilder
from .inputs.step import PROMPT_ROW, STATE_TOKEN_KINDS, Batch, RingRowNumberInput, Step, make_prompt_table_input_name
from .inputs.weights import ModelWeights
from .layers.attention import Attention
from .layers.compressed_attention import CompressedAttention, TokenBlocks
from .layers.feed_forward import Activation, Norm
from .layers.latent_attention import LatentAttention
from .layers.moe import ExpertLayerHyperparameters
from .layers.ngram_embedding import NgramEmbedding


class GraphInputProvider(Protocol):
    """A part of a model, such as n-gram embeddings, that needs graph inputs of its own and builds their arrays.

    The arrays are built from each batch of tokens.
    """

    def build_inputs(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]: ...


class TokenMixer(Protocol):
    """A part of a layer through which tokens read other tokens of their sequence, such as attention or Mamba.

    It maps f32[B*T, E] to f32[B*T, E]. ``taps`` is the number of taps of its short convolution. It is 0 for a mixer
    that has no state except a cache.
    """

    @property
    def taps(self) -> int: ...
    @property
    def required_inputs(self) -> frozenset[str]: ...
    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The hyperparameters of one block: its token mixers, its activation, and its experts or dense FFN, if any.

    The results of several mixers are added up.
    """

    mixers: tuple[TokenMixer, ...]
    experts: ExpertLayerHyperparameters | None
    dense: bool
    has_feed_forward: bool
    """Whether the block has an FFN."""
    parallel: bool = False
    has_two_norms: bool = False
    """Whether a parallel block has a norm for each of its two parts."""
    activation: Activation = field(default=Activation())
    uses_half_precision_activation: bool = False
    """Whether the activation is computed in half precision, so that the last bits of its operand matter."""


@dataclass(frozen=True, slots=True)
class HyperConnectionTraits:
    """The hyperparameters of hyper-connections, in which a model has ``count`` residual streams.

    The other fields are constants for the weights of the streams. ``iterations`` is the number of Sinkhorn iterations
    that normalise the mix among the streams.
    """

    count: int
    eps: float
    iterations: int
    magnitude: float

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata) -> HyperConnectionTraits:
        """Read the hyperparameters from the metadata; without keys there is one stream."""
        return cls(
            keys.read_count_or_default("hyper_connection.count", 1),
            keys.read_positive_zero_as_none("hyper_connection.epsilon") or 0.0,
            keys.read_count_or_default("hyper_connection.sinkhorn_iterations", 1),
            keys.read_positive_zero_as_none("hyper_connection.magnitude") or 1.0,
        )


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a model.

    The factors of embeddings, residuals and logits are 1, and the soft cap is 0, if the file has none.
    """

    family: FamilyTraits
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
    streams: HyperConnectionTraits = HyperConnectionTraits(1, 0.0, 1, 1.0)
    selected_tokens: int = 0
    """Tokens that sparse attention selects from a longer context; 0 for full attention."""
    span: int = 1
    """Blocks per stack, per entry of the residual bank, or per halving of the residual."""
    cycles: int = 1
    stored_blocks: int = 0
    """Blocks that the file has."""
    source: Mapping[int, int] = field(default_factory=dict)
    """For each block that runs more than once, the block of the file that has its matrices."""
    blocks_of: tuple[TokenBlocks, ...] = ()
    """The token blocks that caches hold as one key each, for each block length."""
    ngrams: NgramEmbedding | None = None
    windows: Mapping[int, int] = field(default_factory=dict)
    """For layers with a cache, the number of tokens after which a cell is never read again; 0 for full attention."""
    mtp_blocks: Hyperparameters | None = None
    """The MTP blocks in use, as hyperparameters of a model of their own."""
    draft_columns: int = 0
    """Columns of the draft input of each MTP block."""

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def max_convolution_taps(self) -> int:
        """The largest number of taps of all short convolutions, for `build_step_inputs`; 0 if there are none."""
        taps = max((mixer.taps for block in self.blocks for mixer in block.mixers), default=0)
        return max(taps, self.ngrams.convolution_history_token_count + 1) if self.ngrams else taps

    @cached_property
    def graph_input_providers(self) -> tuple[GraphInputProvider, ...]:
        """The parts of the model with graph inputs of their own, such as ring caches and n-gram embeddings."""
        rings = map(RingRowNumberInput, sorted({*self.windows.values()} - {0}))
        return (*rings, *self.blocks_of, *filter(None, (self.ngrams,)))

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """The names of the inputs from `build_step_inputs` that graphs of the model may require."""
        names = {"tokens", "out_ids"} if self.is_causal else {"tokens", "out_ids", "last"}
        return frozenset(names).union(*(mixer.required_inputs for block in self.blocks for mixer in block.mixers))

    def select_step_inputs(self, step: Step) -> frozenset[str]:
        """Return the names of the inputs from `build_step_inputs` that the graph of a step has.

        These are `required_inputs`, and ``table`` with a pool of blocks. If all caches of the step are ring caches, the
        graph needs no ``slot``. Steps of the output kinds ``token`` and ``sampled`` read their tokens from a state.
        """
        rolls = self.windows and all(map(step.ring_cells, self.windows.values()))
        absent = ({"slot"} if rolls else set()) | ({"tokens"} if step.output_kind in STATE_TOKEN_KINDS else set())
        tables = {"table"} if step.blocks else set()
        if step.prompt_tokens:
            tables |= {PROMPT_ROW} if self.max_convolution_taps else set()
            tables |= {make_prompt_table_input_name(0)} if "slot" in self.required_inputs and not rolls else set()
        return (self.required_inputs | tables) - absent

    @cached_property
    def can_mix_prompt_and_decode(self) -> bool:
        """Whether one step can read the prompt of one sequence and decode others; see `MixedStepGraphBuilder`."""
        keeps_order = LatentAttention | CompressedAttention
        return (
            self.is_causal
            and self.family.residuals != "shifting"
            and self.ngrams is None
            and self.mtp_blocks is None
            and not any(isinstance(mixer, keeps_order) for block in self.blocks for mixer in block.mixers)
        )

    def window_tokens(self, layer: int) -> int:
        """Return the attention window of a layer in tokens; 0 for full attention.

        A cache cell outside the window is never read again. Layer numbers after the last layer mean MTP blocks.
        """
        return self.windows[layer] if self.mtp_blocks is None else {**self.windows, **self.mtp_blocks.windows}[layer]

    def tokens_per_block_key(self, layer: int) -> int:
        """Return how many tokens share one block key in the cache of a layer with compressed attention.

        Layer numbers after the last layer mean MTP blocks.
        """
        blocks = self.blocks if self.mtp_blocks is None else (*self.blocks, *self.mtp_blocks.blocks)
        (blocks_of,) = (m.blocks for m in blocks[layer].mixers if isinstance(m, CompressedAttention) and m.blocks)
        return blocks_of.ratio

    @cached_property
    def is_causal(self) -> bool:
        return self.family.is_causal


def compute_window_of_each_cached_block(blocks: Mapping[int, Layer]) -> dict[int, int]:
    """Return the attention window in tokens of each block with a KV cache; 0 for full attention.

    A ring cache may overwrite a cell when it has left the window, because the cell is never read again.
    """
    cached = Attention | LatentAttention | CompressedAttention
    return {
        i: m.attention_window.cell_lifetime_tokens
        for i, block in blocks.items()
        for m in block.mixers
        if isinstance(m, cached)
    }


def collect_token_blocks(blocks: Iterable[Layer]) -> tuple[TokenBlocks, ...]:
    ratios = {
        m.blocks.ratio for block in blocks for m in block.mixers if isinstance(m, CompressedAttention) and m.blocks
    }
    return tuple(map(TokenBlocks, sorted(ratios)))
