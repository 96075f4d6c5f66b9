"""Models: one decoder with the traits of a model family, which the architecture of a model file selects.

`load_model` returns a `Model`, which has the same interface for every family: the graphs of steps and their input
arrays.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ..adapters import NO_ADAPTERS, Adapters
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from ..gguf.hyperparameter_keys import ArchitectureMetadata
from .decoder import Decoder
from .families import FAMILIES
from .hyperparameters import Hyperparameters
from .inputs.family import FamilyTraits
from .inputs.graph_builder import NEXT_TOKEN_STATE, StepGraphBuilder
from .inputs.graph_builder import SNAPSHOTS as SNAPSHOTS
from .inputs.graph_builder import WINDOWS as WINDOWS
from .inputs.mixed_step import MixedStepGraphBuilder
from .inputs.step import MASKED_KIND, PLAIN_KINDS
from .inputs.step import Batch as Batch
from .inputs.step import Step as Step
from .inputs.step import build_step_inputs as build_step_inputs
from .inputs.token_choice import STEP_LOGITS_STATE, build_masked_candidate_graph
from .inputs.weights import ModelWeights as ModelWeights
from .layers.rwkv import RwkvDecoder
from .metadata_keys import require_supported_metadata_values
from .multi_token_prediction import MtpGraphBuilder
from .read_hyperparameters import add_mtp_hyperparameters, read_hyperparameters
from .residual_decoders import (
    AlternatingStacksDecoder,
    AlternatingUpdateDecoder,
    AttentionResidualsDecoder,
    EmbeddingSkipDecoder,
    GatedMeanStreamDecoder,
    HyperConnectionDecoder,
    PerLayerEmbeddingDecoder,
    PostNormDecoder,
)

IGNORED_SCALES = ("ffn_*.scale", "attn_gate.scale")
"""Patterns of optional scale tensors, of feed-forward networks and gates, that most architectures do not read."""
DECODERS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "": Decoder,
        "alternating": AlternatingUpdateDecoder,
        "banked": AttentionResidualsDecoder,
        "cycles": AlternatingStacksDecoder,
        "normed sums": PostNormDecoder,
        "per layer": PerLayerEmbeddingDecoder,
        "shifting": RwkvDecoder,
        "skip": EmbeddingSkipDecoder,
        "streams": HyperConnectionDecoder,
        "gated streams": GatedMeanStreamDecoder,
    }
)
"""Decoder classes by the kind of their residual stream, `FamilyTraits.residuals`."""
ARCHITECTURES: Mapping[str, FamilyTraits] = FAMILIES
"""The traits of every family by ``general.architecture``."""

REFUSED_FILES = (
    (
        "general.type",
        "mmproj",
        "a projector of pictures or sound (mmproj), which hocket cannot use; give the text model",
    ),
    ("general.architecture", "clip", "a projector of pictures (mmproj), which hocket cannot use; give the text model"),
    ("general.type", "adapter", "an adapter (LoRA); give it as lora=FILE together with the model"),
    ("adapter.type", "lora", "an adapter (LoRA); give it as lora=FILE together with the model"),
    ("general.type", "imatrix", "an importance matrix, which llama-quantize reads; give the model"),
    (
        "general.architecture",
        "controlvector",
        "a control vector; give it as control_vectors=FILE together with the model",
    ),
)
"""Metadata key, value and message for GGUF files that are not models."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model file with its hyperparameters and weights; the interface is the same for every architecture."""

    architecture: str
    gguf: Gguf
    hyper: Hyperparameters
    weights: ModelWeights
    adapters: Adapters = NO_ADAPTERS

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the model file and of its adapters, by leaf name."""
        return {**self.gguf.tensors, **self.adapters.tensors}

    @property
    def context_length(self) -> int:
        """The context length in tokens that the model was trained for."""
        return self.hyper.context_length

    @property
    def vocabulary_size(self) -> int:
        """Number of columns of the logits; the tokenizer may have fewer tokens."""
        return self.hyper.vocabulary_size

    @property
    def layer_count_without_mtp(self) -> int:
        """Number of decoder layers, without MTP blocks."""
        return self.hyper.layers

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has recurrent states, which must be zero at the start of a sequence."""
        return self.hyper.max_convolution_taps > 0

    @property
    def uses_half_precision_activation(self) -> bool:
        """Whether some activation function is computed in half precision (f16).

        The rounding makes differences in the last bits of its operand visible in the results.
        """
        return any(block.uses_half_precision_activation for block in self.hyper.blocks)

    @property
    def ngram_history_token_count(self) -> int:
        """How many earlier tokens of each sequence a `Batch` must contain for n-gram embeddings; 0 without them."""
        return self.hyper.ngrams.hash_history_token_count if self.hyper.ngrams else 0

    def attention_window_tokens(self, cache: str) -> int:
        """Return the attention window in tokens of the layer that has the state ``cache``.

        The result is 0 for full attention and for states that are no KV caches.
        """
        kind, _, layer = cache.rpartition(".")
        return self.hyper.window_tokens(int(layer)) if kind in ("cache_k", "cache_v") else 0

    def tokens_per_cell(self, cache: str) -> int:
        """Return how many tokens one row (cell) of a KV cache stands for.

        It is 1, or with compressed attention the number of tokens of a block.
        """
        kind, _, layer = cache.rpartition(".")
        return self.hyper.tokens_per_block_key(int(layer)) if kind == "cache_c" else 1

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and earlier tokens. Other models read a whole text in one step."""
        return self.hyper.is_causal

    @property
    def can_mix_prompt_and_decode(self) -> bool:
        """Whether one step can read the prompt of one sequence and decode one token of each other sequence."""
        return self.hyper.can_mix_prompt_and_decode

    @property
    def is_encoder_without_logits(self) -> bool:
        """Whether the model is an encoder: without an output matrix, its graphs return ``hidden`` rows, not logits."""
        return self.hyper.family.run_mode == "encoder"

    def with_mtp_blocks(self) -> Model:
        """Return the model together with its multi-token prediction (MTP) blocks.

        Steps with other output kinds than ``logits`` and ``hidden`` need these blocks.

        Raises:
            ModelError: The model has no MTP block, or one that hocket does not run.
        """
        return replace(
            self, hyper=add_mtp_hyperparameters(ArchitectureMetadata(self.gguf, self.architecture), self.hyper)
        )

    @property
    def mtp_block_count(self) -> int:
        """Number of multi-token prediction (MTP) blocks in use."""
        return self.hyper.mtp_blocks.layers if self.hyper.mtp_blocks else 0

    @property
    def draft_input_columns(self) -> int:
        """Number of columns of `Batch.draft_inputs`, the rows that all MTP blocks read with the next token."""
        return self.mtp_block_count * self.hyper.mtp_blocks.draft_columns if self.hyper.mtp_blocks else 0

    def is_sequence_state(self, state: str) -> bool:
        """Return whether a state belongs to the sequences, as KV caches and recurrent states do.

        States of MTP blocks, copies for rewinding, and the next token and the logits of a decode step do not.
        """
        if state in (NEXT_TOKEN_STATE, STEP_LOGITS_STATE) or state.endswith((SNAPSHOTS, WINDOWS)):
            return False
        return not self.is_mtp_state(state)

    def is_mtp_state(self, state: str) -> bool:
        """Return whether a state is a KV cache of a multi-token prediction (MTP) block."""
        return state.endswith(tuple(f".{self.layer_count_without_mtp + k}" for k in range(self.mtp_block_count)))

    def require_context_within_training(self, context: int, subject: str = "context") -> None:
        """Raise `ModelError` if ``context`` tokens are more than the context length that the model was trained for.

        `subject` is the name of the context in the error message.
        """
        if context > self.context_length:
            raise ModelError(
                f"{subject} is {context}, but the model was trained for {self.context_length}; choose less"
            )

    def graph(self, step: Step) -> Graph:
        """Build the graph of a step. Its weights are bound by tensor name; `inputs` returns the arrays of its inputs.

        Raises:
            ModelError: A tensor of the file is missing, has another shape, or would be ignored.
        """
        attended = self.hyper.selected_tokens
        if attended and step.context > attended:
            raise ModelError(
                f"{self.gguf.path}: this model chooses {attended} tokens of a context to attend to, and hocket runs it "
                f"only where that is all of them; use a context size of at most {attended}"
            )
        builder = MixedStepGraphBuilder if step.prompt_tokens else StepGraphBuilder
        frame = builder(step, taps=self.hyper.max_convolution_taps, steered=self.adapters.add_control_directions)
        if step.output_kind == MASKED_KIND:
            return build_masked_candidate_graph(frame, self.vocabulary_size)
        plain = step.output_kind in PLAIN_KINDS
        decoder = DECODERS[self.hyper.family.residuals](self.hyper, self.weights, frame)
        graph = decoder.build_graph() if plain else MtpGraphBuilder(decoder).build_graph()
        self.weights.require_no_unknown_unread_tensors(
            self.hyper.stored_blocks + (self.mtp_block_count if step.output_kind == "all" else 0)
        )
        return self.adapters.add_lora_changes(graph)

    def inputs(self, step: Step, batch: Batch) -> dict[str, npt.NDArray[np.generic]]:
        """Return the input arrays of ``graph(step)`` for a batch, by input name.

        Raises:
            ModelError: The batch does not fit the step, or a token is not in the vocabulary.
        """
        for new in (*batch.tokens, *(batch.prompt or ())[1:]):
            if len(new) and not (min(new) >= 0 and max(new) < self.vocabulary_size):
                raise ModelError(
                    f"batch: tokens run from {min(new)} to {max(new)}; need 0 to {self.vocabulary_size - 1}; "
                    "use the tokenizer of this model"
                )
        hyper = self.hyper.mtp_blocks if step.output_kind == "guess" else self.hyper
        assert hyper is not None
        arrays = build_step_inputs(step, batch, taps=hyper.max_convolution_taps, causal=hyper.is_causal)
        needs = hyper.select_step_inputs(step)
        arrays = {name: array for name, array in arrays.items() if name in needs}
        for feed in hyper.graph_input_providers:
            arrays |= feed.build_inputs(step, batch)
        if step.output_kind in ("both", "guess"):
            shape = (step.sequences, self.draft_input_columns)
            arrays["seen"] = np.zeros(shape, np.float32) if batch.draft_inputs is None else batch.draft_inputs
        return arrays

    def __repr__(self) -> str:
        return f"Model({self.architecture}, {format_count(self.layer_count_without_mtp, 'layer')}, {self.gguf!r})"


def load_model(gguf: Gguf) -> Model:
    """Load the model in a GGUF file. This checks the hyperparameters; building a graph checks the tensors.

    Raises:
        ModelError: The architecture is unknown, or hyperparameters are missing or invalid.
    """
    for key, value, remedy in REFUSED_FILES:
        if gguf.metadata.get(key) == value:
            raise ModelError(f"{gguf.path}: {key} is {value!r}, so the file is no model but {remedy}")
    architecture = gguf.require("general.architecture", str)
    family = ARCHITECTURES.get(architecture)
    if family is None:
        from difflib import get_close_matches  # 2 ms, needed for an unknown architecture only

        suggestions = ", ".join(get_close_matches(architecture, ARCHITECTURES, n=3, cutoff=0.4))
        raise ModelError(
            f"{gguf.path}: architecture {reprlib.repr(architecture)} is unknown; "
            f"need one of the {len(ARCHITECTURES)} in docs/models.md{suggestions and ', such as ' + suggestions}"
        )
    gguf = gguf.select_prefix_tensors_and_embedding(family.tensor_prefix) if family.tensor_prefix else gguf
    unread = family.ignores if family.has_feed_forward_scale else (*family.ignores, *IGNORED_SCALES)
    keys = ArchitectureMetadata(gguf, architecture)
    require_supported_metadata_values(keys)
    hyper = read_hyperparameters(keys, family)
    return Model(architecture, gguf, hyper, ModelWeights(gguf, unread, family.optional_tensors, hyper.source))
