"""The delta net's launches on arrays of this process, and its recurrence in float64, said as plainly as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.backends.base import Tensor
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.device_limits import LARGEST_LIMITS, KernelLimits
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.recurrent import gated_delta_net as binding
from hocket.backends.fusion.operands import BoundInstruction, Operand
from hocket.graph.dtypes import DType

DTYPES = {"f": DType.F32, "i": DType.I32}
ORDERS = (0, 1, 7)
NOTHING = -123.0
"""The content of results before a run."""


def copy_aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def operand(x: np.ndarray) -> Operand:
    strides = tuple(s // x.itemsize for s in x.strides)
    return Operand(x.ctypes.data, Tensor(0, 0, x.shape, strides, DTYPES[x.dtype.kind]))


def run(items: Sequence[KernelLaunch], order: int = 0) -> None:
    driver = EmulatedDriver(order)
    driver.record(items, driver.device(0))()


@dataclass(frozen=True)
class Problem:
    """Operands of the delta rule, float32.

    Shapes: q, k [B,T,Hk,d], v [B,T,Hv,e], g [B,T,Hv,1 or d], beta [B,T,Hv], and states [B or slots,Hv,e,d].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    mapping: str = "tiled"
    snapshots: int = 1
    slots_in: np.ndarray | None = None
    slots_out: np.ndarray | None = None

    @property
    def pool(self) -> str:
        return "none" if self.slots_in is None else "read" if self.slots_out is None else "update"

    @property
    def tokens(self) -> int:
        return self.v.shape[1]


def problem(seed: int, size: int, key_heads: int, heads: int, tokens: int, batch: int = 1, **kind) -> Problem:
    """Return random operands as in ggml's tests.

    Options: `channels` (a decay per key channel), `permuted`, `values` (their size), and fields of `Problem`.
    `strong` is the share of decays as strong as ggml's; the others leave something of a state for the next chunks.
    `hard` means keys almost parallel, all written in full, without decay.
    """
    rng = np.random.default_rng(seed)
    channels, permuted = kind.pop("channels", False), kind.pop("permuted", False)
    values, strong, hard = kind.pop("values", size), kind.pop("strong", 0.01), kind.pop("hard", False)

    def unit(*shape: int) -> np.ndarray:
        x = rng.uniform(-1, 1, shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    random_arrays = {
        "q": unit(batch, tokens, key_heads, size),
        "k": unit(batch, tokens, key_heads, size),
        "v": rng.uniform(-0.3, 5, (batch, tokens, heads, values)),
        "g": rng.uniform(-20, -1e-4, (batch, tokens, heads, size if channels else 1)),
        "beta": rng.uniform(0, 1, (batch, tokens, heads)),
    }
    random_arrays["g"] *= np.where(rng.random(random_arrays["g"].shape) < strong, 1, 0.01)
    if hard:
        keys = unit(batch, 1, key_heads, size) + 0.1 * random_arrays["k"]
        random_arrays["k"] = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        random_arrays["g"], random_arrays["beta"] = (
            -1e-3 * rng.random(random_arrays["g"].shape),
            rng.uniform(0.95, 1, random_arrays["beta"].shape),
        )
    if kind.get("slots_in") is None:
        kind.setdefault("state", rng.uniform(-1, 1, (batch, heads, values, size)))
    arrays = {name: copy_aligned(x.astype(np.float32)) for name, x in random_arrays.items()}
    arrays["state"] = copy_aligned(np.asarray(kind.pop("state"), np.float32))
    if permuted:  # heads lie outside of tokens
        arrays |= {n: copy_aligned(arrays[n].swapaxes(1, 2)).swapaxes(1, 2) for n in "qkv"}
    return Problem(**arrays, **kind)


def reference(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B,T,Hv,e] and states as the op gives them, in float64."""
    q, k, v, g, beta, pool = (x.astype(np.float64) for x in (p.q, p.k, p.v, p.g, p.beta, p.state))
    batch, tokens, heads, _ = v.shape
    repeat = heads // q.shape[2]
    of = [h % q.shape[2] if p.mapping == "tiled" else h // repeat for h in range(heads)]
    s = pool[p.slots_in] if p.slots_in is not None else pool.copy()
    out, past = np.zeros_like(v), [s.copy()]
    for t in range(tokens):
        s = s * np.exp(g[:, t])[:, :, None, :]
        delta = (v[:, t] - np.einsum("bhed,bhd->bhe", s, k[:, t, of])) * beta[:, t, :, None]
        s = s + delta[..., None] * k[:, t, of][:, :, None, :]
        out[:, t] = np.einsum("bhed,bhd->bhe", s, q[:, t, of]) / np.sqrt(q.shape[-1])
        past.append(s.copy())
    last = past[:0:-1] or past
    if p.slots_out is not None:
        for i in range(min(p.snapshots, len(last))):
            pool[p.slots_out.reshape(batch, -1)[:, i]] = last[i]
        return out, pool
    snapshots = [last[i] if i < len(last) else np.zeros_like(s) for i in range(p.snapshots)]
    return out, np.stack(snapshots, axis=1) if p.snapshots > 1 else snapshots[0]


@dataclass(frozen=True)
class BoundProblem:
    """Launches of one problem, and where they leave their results."""

    items: list[KernelLaunch]
    out: np.ndarray
    new: np.ndarray
    fault: np.ndarray

    @property
    def kernels(self) -> list[str]:
        return [launch.kernel.name.split("<")[0] for launch in self.items]


def bind(
    p: Problem,
    *,
    exact: bool = True,
    in_place: bool = False,
    launch: Callable | None = None,
    limits: KernelLimits = LARGEST_LIMITS,
) -> BoundProblem:
    """The launches of the op; `launch` replaces ``launch_delta_rule``."""
    out = copy_aligned(np.full(p.v.shape, NOTHING, np.float32))
    state_shape = (p.v.shape[0], *([p.snapshots] if p.snapshots > 1 else []), *p.state.shape[1:])
    new = (
        p.state
        if in_place
        else copy_aligned(np.full(p.state.shape if p.pool == "update" else state_shape, NOTHING, np.float32))
    )
    slots = [None if x is None else operand(x) for x in (p.slots_in, p.slots_out)]
    src = (*(operand(x) for x in (p.q, p.k, p.v, p.g, p.beta, p.state)), *slots)
    attrs = {"heads": p.mapping, "snapshots": p.snapshots, "pool": p.pool}
    call = BoundInstruction("gated_delta_net", src, (operand(out), operand(new)), attrs, 0)
    rule = binding.DeltaRuleOperands(*src[:5], operand(out), p.mapping == "tiled")
    room, fault = copy_aligned(np.zeros(scratch_bytes(call, rule, exact, limits), np.uint8)), np.zeros(2, np.int64)
    places = {"scratch_address": room.ctypes.data, "fault_address": fault.ctypes.data}
    launches = LaunchBuilder(upload_array=lambda array: array.ctypes.data, limits=limits, **places)
    (launch or binding.launch_delta_rule)(launches, call, rule, exact)
    ALIVE_ARRAYS.extend((room, p))
    return BoundProblem(launches.items, out, new, fault)


ALIVE_ARRAYS: list[object] = []
"""Memory that launches know by its address only."""


def scratch_bytes(call: BoundInstruction, rule: binding.Rule, exact: bool, limits: KernelLimits) -> int:
    launches = LaunchBuilder(upload_array=lambda array: 1, limits=limits)
    binding.launch_delta_rule(launches, call, rule, exact)
    return launches.scratch_bytes


def compute_worst_errors(got: np.ndarray, expected: np.ndarray) -> tuple[float, float, float]:
    """Normalised mean square error of all, of the worst row, and the worst element against the mean size of its head.

    Rows and elements much smaller than others of their head count as a hundredth of these: they are differences."""
    got, error = got.astype(np.float64), (got - expected) ** 2
    if not np.isfinite(got).all():
        return np.inf, np.inf, np.inf
    head = (
        np.mean(expected**2, axis=tuple(range(1, expected.ndim - 1)) if expected.ndim == 4 else -1, keepdims=True)
        + 1e-30
    )
    head = head.mean(axis=-1, keepdims=True)
    rows = error.mean(axis=-1) / np.maximum((expected**2).mean(axis=-1), head[..., 0] * 1e-2)
    return error.sum() / max((expected**2).sum(), 1e-30), rows.max(initial=0), np.sqrt((error / head).max(initial=0))


def check(p: Problem, bound: BoundProblem, limit: float, order: int = 0) -> float:
    """Run the launches and compare; the worst error.  Everything that is not NaN before may be after."""
    expected_out, expected_state = reference(p)
    run(bound.items, order)
    errors = [compute_worst_errors(bound.out, expected_out), compute_worst_errors(bound.new, expected_state)]
    for whole, row, element in errors:
        assert whole <= limit, f"{p.tokens} tokens: {whole:.1e}"
        assert row <= 30 * limit, f"{p.tokens} tokens, a row: {row:.1e}"
        assert element <= 30 * np.sqrt(limit), f"{p.tokens} tokens, an element: {element:.1e}"
    assert not bound.fault.any()
    return max(f[0] for f in errors)


def with_slots(p: Problem, slots: int, slots_in: Sequence[int], slots_out: object = None, seed: int = 1) -> Problem:
    """Return the problem on a pool of `slots` states."""
    pool = np.random.default_rng(seed).uniform(-1, 1, (slots, *p.state.shape[1:])).astype(np.float32)
    out = None if slots_out is None else np.array(slots_out, np.int32)
    return replace(p, state=copy_aligned(pool), slots_in=np.array(slots_in, np.int32), slots_out=out)
