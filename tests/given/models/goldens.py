"""The models of ``fixtures``, with their golden logits from llama.cpp, and how logits are compared."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hocket.frontends.gguf import Gguf, open_gguf
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph import Graph

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
FIXTURES, GOLDENS = TESTS / "fixtures", TESTS / "goldens"
TINY = str(ROOT / "data" / "hocket-tiny-q8_0.gguf")
"""The model that the package ships."""
TINY_GOLDENS = GOLDENS / "hocket_tiny"
"""The goldens of llama.cpp for it."""

INDEX: dict[str, dict[str, Any]] = {
    row["file"].split("/")[0]: row for row in json.loads((FIXTURES / "index.json").read_text("utf-8"))
}
"""The known facts of each model: its types, and the measured and allowed distance from the golden logits."""

TYPE_CHOSEN = ("qwen3-q8_0", "qwen3-q4_k_m")
"""Of the models that differ in the types of their weights alone, one with blocks of 32 and one of 256 values."""
NAMES_OF_EACH_GRAPH = [
    pytest.param(name, marks=pytest.mark.nightly(cases=0)) if "qwen3-" in name and name not in TYPE_CHOSEN else name
    for name in INDEX
]
"""The models as cases of a test of their graphs. Further types of weights of one graph are nightly cases."""

_FLOAT = {name: row for name, row in INDEX.items() if set(row["types"]) == {"F16", "F32"}}
DENSE = tuple(name for name, row in _FLOAT.items() if row["router_gap"] is None)
"""Models of plain floats without experts."""
MIXTURES = tuple(name for name in _FLOAT if name not in DENSE)
"""Models of plain floats with experts."""

F64 = npt.NDArray[np.float64]


def layers_with_experts(name: str) -> int:
    return sum(tensor.endswith("ffn_gate_inp.weight") for tensor in open_fixture(name).tensors)


def path_of(name: str) -> Path:
    return FIXTURES / name / "model.gguf"


def decode_graph(name: str) -> Graph:
    """The step of one token, with 64 before it."""
    return open_model(path_of(name), header_only=True).graph(Step(1, 1, 64, 64, 1))


def open_fixture(name: str) -> Gguf:
    return open_gguf(path_of(name))


def tokens_of(name: str) -> list[int]:
    tokens: list[int] = np.load(FIXTURES / name / "tokens.npy").tolist()
    return tokens


def golden(name: str) -> tuple[list[int], F64]:
    """Tokens, and the logits of llama.cpp at each of them."""
    return tokens_of(name), np.load(FIXTURES / name / "logits.npy").astype(np.float64)


def allowed_nmse(name: str) -> float:
    """The NMSE that a backend may have which rounds activations to 8 bits before they meet quantised weights."""
    row = INDEX[name]
    return float(row["tol_half" if any(t[0] in "QIM" for t in row["types"]) else "tol_f32"])


FLOAT_CACHES = {"cache_type_k": "f32", "cache_type_v": "f32"}
"""Options of a `Group` with results that are compared with exact ones."""


def nmse(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Return the larger NMSE of all rows and of the worst row, relative to the squares of `want`."""
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert x.shape == y.shape
    error, power = np.square(x - y).sum(-1), np.square(y).sum(-1)
    return float(max(error.sum() / power.sum(), (error / power).max()))


@cache
def single_device_logits(name: str, exact: bool = False) -> npt.NDArray[np.float32]:
    """The logits of one device, all tokens in one batch."""
    session = Session(open_model(path_of(name)), on=DeviceGroup(exact=exact, **FLOAT_CACHES))
    return session.evaluate([tokens_of(name)], every_position=True)[0]
