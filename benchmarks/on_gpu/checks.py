"""Check correctness on the device: the conformance kit on every op, and whole models against logits of llama.cpp."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hocket.conformance import Outcome, Suite, run_suite
from hocket.frontends.open import open_model
from hocket.frontends.session import Group, Session
from hocket.ops import REGISTRY
from hocket.ops.collectives import COLLECTIVES

from .bench import Bench, Case, Row, normalised_error

FIRST = (
    "gated_delta_net",
    "attention",
    "mul_mat",
    "mul_mat_id",
    "rms_norm",
    "rope",
    "get_rows",
    "set_rows",
    "ssm_conv",
)
"""Ops that are checked first, in case the time runs out."""
FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"


def conformance_cases(bench: Bench) -> Iterator[Case]:
    computed = [name for name, op in REGISTRY.items() if not op.is_view and name not in COLLECTIVES]
    for name in bench.choose(sorted(computed, key=lambda name: (name not in FIRST, name)), ("add", "rms_norm")):
        yield Case(name, partial(_conformance, bench, name))


def _conformance(bench: Bench, name: str) -> Iterator[Row]:
    """Run the quick conformance cases of an op."""
    suite, start = Suite(str(bench.on), re.escape(name)), time.perf_counter()
    if bench.tiny:
        suite = Suite(str(bench.on), texts=tuple(case.text for case in suite.cases())[::60])
    results = run_suite(suite)
    outcomes = Counter(result.outcome for result in results)
    row: Row = {str(outcome): outcomes[outcome] for outcome in (Outcome.PASS, Outcome.FAIL, Outcome.UNSUPPORTED)}
    row |= {"no reference": outcomes[Outcome.NO_REFERENCE], "s": time.perf_counter() - start}
    yield row
    for result in [r for r in results if r.outcome is Outcome.FAIL][:5]:
        yield {"error": f"{result.case}: {result.why}"}


def fixture_cases(bench: Bench) -> Iterator[Case]:
    index = {Path(entry["file"]).parent.name: entry for entry in json.loads((FIXTURES / "index.json").read_text())}
    there = sorted(path.parent.name for path in FIXTURES.glob("*/model.gguf"))
    for name in bench.choose(there, ("qwen35",)):
        yield Case(name, partial(_fixture, bench, name, index[name]))


def _fixture(bench: Bench, name: str, entry: dict[str, object]) -> Iterator[Row]:
    """Compare a model with its golden logits, in one batch, and with the second half token by token."""
    folder, count = FIXTURES / name, bench.choose(None, 4)
    tokens = np.load(folder / "tokens.npy").tolist()[:count]
    golden = np.load(folder / "logits.npy").astype(np.float64)[:count]
    caches = {"cache_type_k": "f32", "cache_type_v": "f32"}  # as in the llama.cpp run that wrote the goldens
    session = Session(open_model(folder / "model.gguf"), on=Group((str(bench.on),), **caches))
    batch = session.evaluate([tokens], every_position=True)[0]
    session.reset(0)
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    limit = entry["tol_half" if any(t[0] in "QIM" for t in entry["types"]) else "tol_f32"]
    errors = {"NMSE": normalised_error(batch, golden), "NMSE by token": normalised_error(stepped, golden)}
    yield {**errors, "limit": limit, "right": all(error <= limit for error in errors.values())}
