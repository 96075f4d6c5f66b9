"""One mistake at a time in the table of architectures: a trait of a row is forgotten, so that it has its default.

    python -m hocket.tests.given.models.trait_faults      plants them all, prints the unnoticed ones

Most unnoticed faults change nothing in these files: traits that the metadata repeat, and windows or factors beyond
their few tokens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import numpy as np

from hocket import ops
from hocket.frontends import models
from hocket.frontends.errors import ModelError
from hocket.frontends.models import ARCHITECTURES, Batch, Step
from hocket.frontends.models.inputs.family import FamilyTraits
from hocket.frontends.open_model import open_model
from hocket.graph import GraphError

from .architectures import ALL, ROWS, golden, write_model
from .goldens import F64, nmse

MAX_NMSE = 1e-6
"""A larger error is noticed: a hundred times the error of a right row, and twenty times the error of a rounded GELU."""
PLANTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("qwen4exp-moe",),
        "attn_post": (
            "grok-moe",
            "plamo3-dense",
        ),
        "norms_without_weight": (
            "hrm_text-dense",
            "olmo-dense",
        ),
        "parallel_dense_ffn": (
            "arctic-moe",
            "gemma4-mixed",
        ),
        "bounded_decay": (
            "bailingmoe3-moe",
            "glm5-next-moe",
        ),
        "delta_gate": ("qwen4exp-moe",),
        "embedding": (
            "gemma-dense",
            "minicpm-moe",
        ),
        "embedding_norm": ("bloom-dense",),
        "ffn_norm": (
            "dbrx-moe",
            "gpt-oss-moe",
        ),
        "ffn_post": (
            "afmoe-moe",
            "gemma2-dense",
        ),
        "gate": ("laguna-moe",),
        "gated_queries": (
            "qwen35moe-moe",
            "qwen3next-moe",
        ),
        "gating": (
            "bailingmoe2-moe",
            "hy_v3-moe",
        ),
        "ignores": (
            "ernie4_5-moe",
            "ernie4_5-moe-moe",
        ),
        "mixer": (
            "deepseek2-moe",
            "nemotron_h-dense",
        ),
        "special_routing": ("grovemoe-moe",),
        "norm": (
            "codeshell-dense",
            "gptneox-dense",
        ),
        "normalises_routing": (
            "bailingmoe3-moe",
            "dots1-moe",
        ),
        "output_norm": (
            "lfm2-dense",
            "lfm2moe-moe",
        ),
        "parallel": (
            "command-r-dense",
            "plamo-dense",
        ),
        "qk_norm": (
            "hunyuan-dense-dense",
            "hunyuan-moe-moe",
        ),
        "recurrent": (
            "jamba-dense",
            "kimi-linear-moe",
        ),
        "recurrent_where": (
            "mamba-dense",
            "mamba2-dense",
        ),
        "residual": (
            "granite-dense",
            "granite-moe",
        ),
        "residual_after_norm": ("minimax-01-moe",),
        "residuals": (
            "bert-encoder",
            "hrm_text-dense",
            "kimi-k3-moe",
        ),
        "rope": (
            "arcee-dense",
            "chatglm-dense",
        ),
        "rotated_layers": (
            "baichuan-dense",
            "maple-moe",
        ),
        "scale": (
            "gemma4-mixed",
            "jais-dense",
        ),
        "has_feed_forward_scale": (
            "llama-dense",
            "mistral3-moe",
        ),
        "shared_gate": (
            "qwen2moe-moe",
            "qwen3next-moe",
        ),
        "softcap": (
            "gemma2-dense",
            "gemma4-mixed",
        ),
        "optional_tensors": (
            "mimo2-moe",
            "minimax-m3-moe",
        ),
        "tensor_prefix": ("t5-relu",),
        "activation": (
            "falcon-dense",
            "gemma-dense",
        ),
        "value_norm": ("gemma4-mixed",),
        "factors_in_global_layers_only": ("gemma4-mixed",),
        "windows": (
            "gemma-embedding-encoder",
            "modern-bert-encoder",
        ),
    }
)
"""Mistakes that tests plant: traits, and the fixtures that have to notice their loss."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row without one of its traits, which the fixture `model` should notice."""

    model: str
    trait: str
    row: FamilyTraits

    def __str__(self) -> str:
        return f"{self.model} without {self.trait}"


def faults(model: str) -> Iterator[Fault]:
    """Yield the faults of a fixture's row: each trait that can be forgotten."""
    row = ARCHITECTURES[architecture(model)]
    for field in fields(FamilyTraits):
        value = getattr(row, field.name)
        if value != field.default:
            yield Fault(model, field.name, replace(row, **{field.name: field.default}))
    windows = row.windows
    for field in fields(windows) if windows else ():
        if getattr(windows, field.name) != field.default:
            changed = replace(windows, **{field.name: field.default})  # type: ignore[type-var]
            yield Fault(model, f"windows.{field.name}", replace(row, windows=changed))


def architecture(model: str) -> str:
    return model.rsplit("-", 1)[0]


def is_noticed(fault: Fault, folder: Path) -> bool:
    """Whether the fixture, a file in `folder` by now, is refused, cannot be computed, or has other logits."""
    tokens, want = golden(fault.model)
    with patch.object(models, "ARCHITECTURES", {architecture(fault.model): fault.row}):
        try:
            model = open_model(folder / f"{fault.model}.gguf")
            count = len(tokens)
            step = Step(1, count, count, count, count)
            graph = model.graph(step)
            inputs = model.inputs(step, Batch([tokens], [0], [(0, i) for i in range(count)]))
        except (ModelError, GraphError):
            return True
    weights = {w.node.name: model.gguf.tensor(w.node.name).dequantise().astype(np.float64) for w in graph.weights}
    logits: F64 = next(iter(ops.evaluate(graph, {**weights, **inputs})[0].values()))
    return not nmse(logits[-ROWS:], want) <= MAX_NMSE


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        planted, missed = 0, list[str]()
        for name in ALL:
            path = write_model(name, Path(folder))
            for fault in faults(name):
                planted += 1
                if not is_noticed(fault, Path(folder)):
                    missed.append(str(fault))
            path.unlink()
    sys.stdout.write("".join(f"{fault}\n" for fault in missed))
    sys.stdout.write(f"{planted - len(missed)} of {planted} mistakes noticed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
