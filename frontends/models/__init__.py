"""Models: one decoder whose traits stand in a table, found by the architecture that a model file names.

`load_model` gives what every caller needs without knowing the family: graphs for steps, and their inputs for batches.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ...graph.lazy_dataclass import dataclass
from ..adapters import NO_ADAPTERS, Adapters
from ..errors import ModelError
from ..gguf import Gguf, Tensor
from ..gguf.hyperparameter_keys import ArchitectureKeys
from ..step import Batch as Batch
from ..step import Step as Step
from ..step import step_inputs as step_inputs
from .ahead import LookingAhead
from .decoder import Decoder
from .families import FAMILIES
from .family import Family
from .frame import SNAPSHOTS as SNAPSHOTS
from .frame import WINDOWS as WINDOWS
from .frame import Frame
from .hyper import Hyper
from .layers.residuals import Alternating, Banked, Cycles, GatedStreams, NormedSums, PerLayer, Skipping, Streams
from .layers.rwkv import Shifting
from .metadata_keys import check_defaults
from .reading import read_ahead, read_hyper
from .weights import Weights as Weights

SCALES = ("ffn_*.scale", "attn_gate.scale")
"""Scales of feed-forwards and gates, which most architectures do not read."""
DECODERS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "": Decoder,
        "alternating": Alternating,
        "banked": Banked,
        "cycles": Cycles,
        "normed sums": NormedSums,
        "per layer": PerLayer,
        "shifting": Shifting,
        "skip": Skipping,
        "streams": Streams,
        "gated streams": GatedStreams,
    }
)
"""Decoders by what `Family.residuals` says."""
ARCHITECTURES: Mapping[str, Family] = FAMILIES
"""Every family, by ``general.architecture``."""

OTHER_FILES = (
    (
        "general.type",
        "mmproj",
        "a projector of pictures or sound (mmproj), which hocket cannot use; give the text model",
    ),
    ("general.architecture", "clip", "a projector of pictures (mmproj), which hocket cannot use; give the text model"),
    ("general.type", "adapter", "an adapter (LoRA); give it with --lora (Python: lora) together with the model"),
    ("adapter.type", "lora", "an adapter (LoRA); give it with --lora (Python: lora) together with the model"),
    ("general.type", "imatrix", "an importance matrix, which llama-quantize reads; give the model"),
    (
        "general.architecture",
        "controlvector",
        "a control vector; give it with --control-vector (Python: control_vectors) together with the model",
    ),
)
"""Keys of GGUF files that are no models: their values, and the kind and the use of the file."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model file and its family: what a caller may ask without knowing the architecture."""

    architecture: str
    gguf: Gguf
    hyper: Hyper
    weights: Weights
    adapters: Adapters = NO_ADAPTERS

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the file and of the adapters, by the names of their leaves."""
        return {**self.gguf.tensors, **self.adapters.tensors}

    @property
    def context_length(self) -> int:
        """Tokens the model was trained to see."""
        return self.hyper.context_length

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits, which may be more than the tokenizer has tokens."""
        return self.hyper.vocabulary_size

    @property
    def layers(self) -> int:
        return self.hyper.layers

    @property
    def is_recurrent(self) -> bool:
        """Whether states other than the cache remember a sequence, so that the host must zero them for a new one."""
        return self.hyper.taps > 0

    @property
    def looks_up(self) -> bool:
        """Whether an activation is looked up in half precision, so that last bits of sums tell."""
        return any(block.looks_up for block in self.hyper.blocks)

    @property
    def remembers(self) -> int:
        """Tokens of a sequence that a batch must know before its new ones."""
        return self.hyper.ngrams.remembers if self.hyper.ngrams else 0

    def window(self, cache: str) -> int:
        """How many tokens the layer sees whose state is ``cache``: 0 for all, and for states that are no cache."""
        kind, _, layer = cache.rpartition(".")
        return self.hyper.window(int(layer)) if kind in ("cache_k", "cache_v") else 0

    def cell_tokens(self, cache: str) -> int:
        """Tokens for which one cell of the state ``cache`` stands: 1, or the tokens of a block."""
        kind, _, layer = cache.rpartition(".")
        return self.hyper.block_tokens(int(layer)) if kind == "cache_c" else 1

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only those before it; others see all at once, so there are no steps."""
        return self.hyper.causal

    @property
    def is_encoder(self) -> bool:
        """Whether its graphs give ``hidden`` rows alone, whatever a step asks for: it has no output matrix."""
        return self.hyper.family.runs == "encoder"

    def guessing(self) -> Model:
        """The model together with the blocks that guess further tokens (MTP), as steps that give more than ``logits``
        or ``hidden`` need them.  ModelError if it has no such block, or one that hocket does not run."""
        return replace(self, hyper=read_ahead(ArchitectureKeys(self.gguf, self.architecture), self.hyper))

    @property
    def guessers(self) -> int:
        """How many of its blocks that guess further tokens are used."""
        return self.hyper.ahead.layers if self.hyper.ahead else 0

    @property
    def handed(self) -> int:
        """Columns of `Batch.seen`."""
        return self.guessers * self.hyper.ahead.handed if self.hyper.ahead else 0

    def is_own(self, state: str) -> bool:
        """Whether a state belongs to a sequence, not to guesses or to what takes tokens back."""
        guessing = tuple(f".{self.layers + k}" for k in range(self.guessers))
        return not state.endswith((SNAPSHOTS, WINDOWS, *guessing))

    def check_context(self, context: int) -> None:
        """Raises `ModelError` for a context longer than the model was trained for."""
        if context > self.context_length:
            raise ModelError(
                f"context size is {context}, but the model was trained for {self.context_length}; choose less"
            )

    def graph(self, step: Step) -> Graph:
        """The graph of ``step``; weights are bound by tensor name, inputs as `inputs` gives them.

        ModelError if the file lacks a tensor, has one of another shape, or one that would be ignored.
        """
        attended = self.hyper.attended
        if attended and step.context > attended:
            raise ModelError(
                f"{self.gguf.path}: this model chooses {attended} tokens of a context to attend to, and hocket runs it "
                f"only where that is all of them; use a context size of at most {attended}"
            )
        frame = Frame(step, taps=self.hyper.taps, steered=self.adapters.add_directions)
        plain = step.gives in ("logits", "hidden")
        decoder = DECODERS[self.hyper.family.residuals](self.hyper, self.weights, frame)
        graph = decoder.graph() if plain else LookingAhead(decoder).graph()
        self.weights.refuse_leftovers(self.hyper.stored + (self.guessers if step.gives == "all" else 0))
        return self.adapters.apply_to_graph(graph)

    def inputs(self, step: Step, batch: Batch) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays for the inputs of ``graph(step)``, by name.  ModelError if the batch does not fit (see
        `step_inputs`) or a token is outside the vocabulary."""
        for new in batch.tokens:
            if len(new) and not (min(new) >= 0 and max(new) < self.vocabulary_size):
                raise ModelError(
                    f"batch: tokens run from {min(new)} to {max(new)}; need 0 to {self.vocabulary_size - 1}; "
                    "use the tokenizer of this model"
                )
        hyper = self.hyper.ahead if step.gives == "guess" else self.hyper
        assert hyper is not None
        arrays = step_inputs(step, batch, taps=hyper.taps, causal=hyper.causal)
        needs = hyper.inputs(step)
        arrays = {name: array for name, array in arrays.items() if name in needs}
        for feed in hyper.feeds:
            arrays |= feed.arrays(step, batch)
        if step.gives in ("both", "guess"):
            shape = (step.sequences, self.handed)
            arrays["seen"] = np.zeros(shape, np.float32) if batch.seen is None else batch.seen
        return arrays

    def __repr__(self) -> str:
        return f"Model({self.architecture}, {self.layers} layers, {self.gguf!r})"


def load_model(gguf: Gguf) -> Model:
    """The model in ``gguf``; hyperparameters are checked here, tensors when a graph is built.

    ModelError for an unknown architecture, or for hyperparameters that are missing or make no sense.
    """
    for key, value, remedy in OTHER_FILES:
        if gguf.metadata.get(key) == value:
            raise ModelError(f"{gguf.path}: {key} is {value!r}, so the file is no model but {remedy}")
    architecture = gguf.require("general.architecture", str)
    family = ARCHITECTURES.get(architecture)
    if family is None:
        from difflib import get_close_matches  # 2 ms that only strangers pay

        near = ", ".join(get_close_matches(architecture, ARCHITECTURES, n=3, cutoff=0.4))
        raise ModelError(
            f"{gguf.path}: architecture {reprlib.repr(architecture)} is unknown; "
            f"need one of the {len(ARCHITECTURES)} in docs/models.md{near and ', such as ' + near}"
        )
    gguf = gguf.sub_model(family.stack) if family.stack else gguf
    unread = family.ignores if family.scaled else (*family.ignores, *SCALES)
    keys = ArchitectureKeys(gguf, architecture)
    check_defaults(keys)
    hyper = read_hyper(keys, family)
    return Model(architecture, gguf, hyper, Weights(gguf, unread, family.spare, hyper.source))
