"""A plan follows from the request alone: from nothing that was planned before in the process, or for other devices."""

from __future__ import annotations

import functools
import gc
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import Graph, input, state, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.serialisation.plan_json import plan_to_json

from ...given.graphs.layered import decoder
from ...given.graphs.wide_graphs import wide_graph
from ...given.plans.ways import SLOW

SPLIT_MODES = ("none", "layer", "tensor", "layer,tensor", "auto")
SHARES = ((), (0, 1), (3, 1))


def build_gated_block(rows: int, columns: int) -> Graph:
    """A block over a state; its sizes decide the split."""
    x, cache = input("x", (3, rows)), state("cache", (5, columns))
    up = ops.silu(ops.mul_mat(weight("up", (columns, rows)), ops.rms_norm(x)))
    new = ops.set_rows(cache, up, input("at", (3,), "i32"))
    down = ops.mul_mat(weight("down", (rows, columns)), ops.add(up, ops.slice_(new, axis=0, start=1, stop=4)))
    return Graph({"y": ops.add(x, down)}, {cache: new})


def build_overwritten_state() -> Graph:
    """A state that changes twice; its old and new entries are read after each change."""
    old, x = state("s", (5, 6)), input("x", (2, 6))
    one, two = input("i", (2,), "i32"), input("j", (2,), "i32")
    keys = ops.mul_mat(weight("wk", (6, 6)), x)
    first = ops.set_rows(old, keys, one)
    last = ops.set_rows(first, ops.add(ops.get_rows(old, one), ops.get_rows(first, two)), two)
    outputs = {"old": ops.mul_mat(old, keys), "first": ops.mul_mat(first, keys), "last": ops.mul_mat(last, keys)}
    return Graph({**outputs, "s": old, "n": last}, {old: last})


GRAPHS = {
    **{
        f"gated {rows} {columns}": functools.partial(build_gated_block, rows, columns)
        for rows, columns in ((6, 6), (6, 512))
    },
    "overwritten": build_overwritten_state,
    "decoder": functools.partial(decoder, 3),
    **{f"wide {seed}": functools.partial(wide_graph, seed) for seed in (1, 5)},
}


def requests() -> Iterator[tuple[str, str, Sequence[int], Hardware]]:
    for name in GRAPHS:
        for mode in SPLIT_MODES:
            for shares in SHARES if mode in ("layer", "tensor") else ((),):
                yield name, mode, shares, SLOW


def digest_plan(kind: str, name: str, mode: str, shares: Sequence[int], hardware: Hardware) -> str:
    """Return the digest of a plan as JSON, or the reason why there is none."""
    group = [find_device(f"{kind}:{number}") for number in range(4 if mode == "auto" else 2)]
    try:
        plan = plan_for_group(GRAPHS[name](), group, split_mode=mode, tensor_split=shares, hardware=hardware)
    except Exception as why:
        return f"{type(why).__name__}: {why}"
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()


def find_memoised() -> list[functools._lru_cache_wrapper]:
    """Return every memoised function of the package that is imported."""
    wrapper = type(functools.lru_cache(len))
    gc.unfreeze()  # conftest freezes all imports before the first test, and get_objects omits frozen objects
    found = [f for f in gc.get_objects() if type(f) is wrapper and str(f.__module__).startswith("hocket.")]
    gc.collect()
    gc.freeze()
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["numpy", "cuda-emulated"])
def test_a_plan_is_the_same_whatever_was_planned_before(kind):
    asked = list(requests())
    backwards = [digest_plan(kind, *request) for request in reversed(asked)][::-1]
    memoised = find_memoised()
    assert len(memoised) > 20
    alone = []
    for request in asked:
        for function in memoised:
            function.cache_clear()
        alone.append(digest_plan(kind, *request))
    differ = [request[:3] for request, one, other in zip(asked, backwards, alone, strict=True) if one != other]
    assert not differ
    refusals = {text for text in alone if ":" in text and "layer,tensor" not in text}
    assert not refusals


@pytest.mark.long
def test_a_plan_is_the_same_in_a_fresh_process():
    code = (
        f"import sys; from {__name__} import GRAPHS, SLOW, digest_plan; name, mode, *shares = sys.argv[1:];"
        "print(digest_plan('numpy', name, mode, tuple(map(int, shares)), SLOW))"
    )
    asked = [("gated 6 512", "tensor", (0, 1)), ("decoder", "layer", ()), ("wide 5", "auto", ())]
    for name in GRAPHS:  # fill the caches of this process
        digest_plan("numpy", name, "tensor", (), SLOW)
    here = [digest_plan("numpy", *request, SLOW) for request in asked]
    for (name, mode, shares), mine in zip(asked, here, strict=True):
        done = subprocess.run(
            [sys.executable, "-c", code, name, mode, *map(str, shares)], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == mine


STATES = [build_overwritten_state, *(functools.partial(build_gated_block, rows, 6) for rows in (6, 64))]


@pytest.mark.parametrize("shares", [(0, 1), (1, 0), (1, 0, 2), (0, 0, 1), (5, 1)])
@pytest.mark.parametrize("build", STATES, ids=["overwritten", "gated 6", "gated 64"])
def test_a_state_is_read_before_it_is_overwritten_where_a_device_has_nothing_of_it(build, shares):
    group = [find_device(f"cuda-emulated:{number}") for number in range(len(shares))]
    plan_for_group(build(), group, split_mode="tensor", tensor_split=shares, hardware=SLOW)
