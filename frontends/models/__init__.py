"""Model families: one file each, found by the architecture that a model file names.

`load_model` gives what every caller needs without knowing the family: graphs for steps, and their inputs for batches.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ..errors import ModelError
from ..gguf import Gguf
from . import gemma3, llama, qwen2, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe
from .step import Batch as Batch
from .step import Step as Step
from .step import step_inputs as step_inputs
from .weights import Weights as Weights


class Hyper(Protocol):
    """What the hyperparameters of every family tell."""

    @property
    def context_length(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def taps(self) -> int: ...


H = TypeVar("H", bound=Hyper)


@dataclass(frozen=True, slots=True)
class Family(Generic[H]):
    """How to read the hyperparameters of an architecture, and how to build its graph."""

    read: Callable[[Gguf], H]
    build: Callable[[H, Weights, Step], Graph]


ARCHITECTURES: Mapping[str, Family[Any]] = MappingProxyType(
    {
        "gemma3": Family(gemma3.Hyper.from_gguf, gemma3.build),
        "llama": Family(llama.Hyper.from_gguf, llama.build),
        "qwen2": Family(qwen2.read, qwen2.build),
        "qwen3": Family(qwen3.Hyper.from_gguf, qwen3.build),
        "qwen3moe": Family(qwen3moe.read, qwen3moe.build),
        "qwen3next": Family(qwen3next.read, qwen3next.build),
        "qwen35": Family(qwen35.Hyper.from_gguf, qwen35.build),
        "qwen35moe": Family(qwen35moe.read, qwen35moe.build),
    }
)
"""Every family, by ``general.architecture``."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model file and its family: what a caller may ask without knowing the architecture."""

    architecture: str
    gguf: Gguf
    hyper: Hyper
    weights: Weights

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

    def graph(self, step: Step) -> Graph:
        """The graph of ``step``; weights are bound by tensor name, inputs as `inputs` gives them.

        ModelError if the file lacks a tensor, has one of another shape, or one that would be ignored.
        """
        graph = ARCHITECTURES[self.architecture].build(self.hyper, self.weights, step)
        self.weights.refuse_leftovers(self.layers)
        return graph

    def inputs(self, step: Step, batch: Batch) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays for the inputs of ``graph(step)``, by name.  ModelError if the batch does not fit (see
        `step_inputs`) or a token is outside the vocabulary."""
        for new in batch.tokens:
            if len(new) and not (min(new) >= 0 and max(new) < self.vocabulary_size):
                raise ModelError(
                    f"batch: tokens run from {min(new)} to {max(new)}; need 0 to {self.vocabulary_size - 1}; "
                    "use the tokenizer of this model"
                )
        return step_inputs(step, batch, taps=self.hyper.taps)

    def __repr__(self) -> str:
        return f"Model({self.architecture}, {self.layers} layers, {self.gguf!r})"


def load_model(gguf: Gguf) -> Model:
    """The model in ``gguf``; hyperparameters are checked here, tensors when a graph is built.

    ModelError for an unknown architecture, or for hyperparameters that are missing or make no sense.
    """
    architecture = gguf.require("general.architecture", str)
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise ModelError(
            f"{gguf.path}: architecture {reprlib.repr(architecture)} is unknown; need one of {', '.join(ARCHITECTURES)}"
        )
    return Model(architecture, gguf, family.read(gguf), Weights(gguf))
