"""Models evaluated exactly, in float64 by the definitions of the ops, and models with other metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hocket import ops
from hocket.frontends.gguf import Gguf
from hocket.frontends.models import Batch, Model, Step, load_model

from .goldens import F64, open_fixture

SAME = 1e-20
"""NMSE of float64 results that differ in the order of additions alone."""

STEP = Step(1, 2, 8, 8, 1)


class ExactRun:
    """A model evaluated exactly, with its states carried from step to step."""

    def __init__(self, model: Model, extra: Mapping[str, npt.ArrayLike] | None = None) -> None:
        self.model = model
        self.extra = extra or {}
        self.states: dict[str, F64] = {}
        self.weights: dict[str, F64] = {}
        self.outputs: Mapping[str, F64] = {}
        """All that the last step gave."""

    def __call__(self, step: Step, batch: Batch) -> F64:
        graph = self.model.graph(step)
        ops.verify(graph)
        for leaf in graph.weights:
            name = leaf.node.name
            if name not in self.weights and name not in self.extra:
                self.weights[name] = self.model.gguf.tensor(name).dequantise().astype(np.float64)
        inputs = self.model.inputs(step, batch)
        assert {leaf.node.name for leaf in graph.inputs} == set(inputs)
        outputs, new_states = ops.evaluate(graph, {**self.weights, **self.extra, **self.states, **inputs})
        self.states |= new_states
        self.outputs = outputs
        return outputs["logits"]


def compute_logits_in_one_batch(run: ExactRun, tokens: list[int], context: int = 0) -> F64:
    """Logits of every position, all in one batch."""
    n = len(tokens)
    step = Step(sequences=1, tokens=n, cells=n, context=context or n, outputs=n)
    return run(step, Batch([tokens], [0], [(0, i) for i in range(n)]))


def open_with_metadata(name: str, **keys: object) -> Gguf:
    """The fixture with other metadata; ``__`` in a keyword stands for a dot, None removes the key."""
    model = open_fixture(name)
    arch = model.metadata["general.architecture"]
    metadata = {**model.metadata, **{f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}}
    return replace(model, metadata={key: value for key, value in metadata.items() if value is not None})


def with_metadata(model: Model, **values: object) -> Model:
    """The model as if its file had these metadata of its architecture; ``__`` in a keyword stands for a dot."""
    changed_metadata = {f"{model.architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return load_model(replace(model.gguf, metadata={**model.gguf.metadata, **changed_metadata}))  # type: ignore[dict-item]
