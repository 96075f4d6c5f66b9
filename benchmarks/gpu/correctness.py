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

from hocket.conformance import Outcome, Suite, run_cases_of_suite
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.ops import REGISTRY
from hocket.ops.collectives import COLLECTIVES

from .harness import BenchmarkDevice, Case, ResultRow, compute_nmse

FIRST_CHECKED_OPS = (
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


def make_conformance_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    computed = [name for name, op in REGISTRY.items() if not op.is_view and name not in COLLECTIVES]
    for name in bench.select_size(
        sorted(computed, key=lambda name: (name not in FIRST_CHECKED_OPS, name)), ("add", "rms_norm")
    ):
        yield Case(name, partial(_check_op, bench, name))


def _check_op(bench: BenchmarkDevice, name: str) -> Iterator[ResultRow]:
    """Run the quick conformance cases of an op."""
    suite, start = Suite(str(bench.on), re.escape(name)), time.perf_counter()
    if bench.tiny:
        suite = Suite(str(bench.on), texts=tuple(case.text_without_seed for case in suite.generate_cases())[::60])
    results = run_cases_of_suite(suite)
    outcomes = Counter(result.outcome for result in results)
    row: ResultRow = {str(outcome): outcomes[outcome] for outcome in (Outcome.PASS, Outcome.FAIL, Outcome.UNSUPPORTED)}
    row |= {"no reference": outcomes[Outcome.NO_REFERENCE], "s": time.perf_counter() - start}
    yield row
    for result in [r for r in results if r.outcome is Outcome.FAIL][:5]:
        yield {"error": f"{result.case}: {result.why}"}


def make_fixture_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    index = {Path(entry["file"]).parent.name: entry for entry in json.loads((FIXTURES / "index.json").read_text())}
    there = sorted(path.parent.name for path in FIXTURES.glob("*/model.gguf"))
    for name in bench.select_size(there, ("qwen35",)):
        yield Case(name, partial(_check_fixture, bench, name, index[name]))


def _check_fixture(bench: BenchmarkDevice, name: str, entry: dict[str, object]) -> Iterator[ResultRow]:
    """Compare a model with its golden logits, in one batch, and with the second half token by token."""
    folder, count = FIXTURES / name, bench.select_size(None, 4)
    tokens = np.load(folder / "tokens.npy").tolist()[:count]
    golden = np.load(folder / "logits.npy").astype(np.float64)[:count]
    caches = {"cache_type_k": "f32", "cache_type_v": "f32"}  # as in the llama.cpp run that wrote the goldens
    session = Session(open_model(folder / "model.gguf"), on=DeviceGroup(devices=(str(bench.on),), **caches))
    batch = session.evaluate([tokens], every_position=True)[0]
    session.reset(0)
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    limit = entry["tol_half" if any(t[0] in "QIM" for t in entry["types"]) else "tol_f32"]
    errors = {"NMSE": compute_nmse(batch, golden), "NMSE by token": compute_nmse(stepped, golden)}
    yield {**errors, "limit": limit, "right": all(error <= limit for error in errors.values())}
