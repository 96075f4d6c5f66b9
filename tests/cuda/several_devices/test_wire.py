"""Large sums that are sent in bfloat16: their error is bounded, and other results do not change."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.collectives import program_collectives as meetings
from hocket.backends.cupy.device.driver import KernelSource
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.kernels import collective
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError
from hocket.ops.quantisation import decode_array, encode_array

from ...given.devices.devices_meet import CollectiveRig, all_reduce_case, same, through_the_host
from ...given.devices.emulation import needs_compiler, replace_and_compile
from ...given.fakes.fake_nccl import backend_of
from ...given.models.goldens import nmse

pytestmark = needs_compiler
MIN_BYTES = 64


@pytest.fixture(params=["peers", "nccl", "both"])
def backend(request, monkeypatch):
    monkeypatch.setattr(meetings, "MIN_NARROW_ELEMENTS", MIN_BYTES)
    if request.param == "peers":
        yield EmulatedBackend()
    else:
        monkeypatch.setattr("hocket.backends.cupy.collectives.transport.MIN_LIBRARY_BYTES", 1024)
        yield backend_of(monkeypatch, are_peers=request.param == "both")[0]
        cuda_driver._compile_and_load_module.cache_clear()


def round_to_bf16(x):
    return decode_array(encode_array(x, DType.BF16), DType.BF16).astype(np.float32)


@pytest.mark.parametrize("shape", [(MIN_BYTES,), (7, 143), (129, 257)])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_the_error_of_a_large_sum_is_within_its_bound_and_equal_on_all(n, inplace, shape, backend):
    parts = all_reduce_case(n, shape, inplace=inplace)
    terms = [own[0].source.astype(np.float64) for own in parts]
    rig = CollectiveRig(backend, parts, wire=DType.BF16)
    for _ in range(3):
        sums = rig.run()
        assert len({own[0].tobytes() for own in sums}) == 1
        off = np.abs(sums[0][0] - sum(terms))
        assert (off <= (n + 1) * 2.0**-8 * sum(map(np.abs, terms))).all()
        assert off.any()
        assert (round_to_bf16(sums[0][0]) == sums[0][0]).all()


def test_over_peer_addresses_only_terms_and_their_sum_are_rounded(monkeypatch):
    monkeypatch.setattr(meetings, "MIN_NARROW_ELEMENTS", MIN_BYTES)
    parts = all_reduce_case(3, (5, 201))
    a, b, c = (round_to_bf16(own[0].source) for own in parts)
    same([CollectiveRig(EmulatedBackend(), parts, wire=DType.BF16).run()[0]], [[round_to_bf16(a + b + c)]])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_small_sums_and_those_of_integers_keep_all_their_bits(dtype, backend, monkeypatch):
    parts = all_reduce_case(2, (MIN_BYTES - 1,) if dtype is np.float32 else (999,), dtype)
    same(CollectiveRig(backend, parts, wire=DType.BF16).run(), through_the_host(monkeypatch, parts))


def test_nothing_is_rounded_unless_asked_for(backend, monkeypatch):
    parts = all_reduce_case(2, (999,))
    same(CollectiveRig(backend, parts).run(), through_the_host(monkeypatch, parts))


PLANTS = {
    "values are cut off, not rounded": (
        "put(a.to[i], a.from[i]);",
        "a.to[i].bits = (u16)(__float_as_uint(a.from[i]) >> 16);",
    ),
    "the last value stays behind": ("if (i < a.count) put(", "if (i + 1 < a.count) put("),
    "sums are rounded after every term": (
        "total[e] = plus(total[e], widened(x.at[e]));",
        "put(pack.at[e], plus(total[e], widened(x.at[e]))), total[e] = widened(pack.at[e]);",
    ),
    "a result is read before it is there": ("a.to[i] = to_float(a.from[i]);", "a.to[i] = to_float(a.from[i ^ 1]);"),
}


@pytest.mark.long
@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_that_is_planted_in_rounded_sums_is_found(name, monkeypatch):
    names = ("sum_parts<bf16_bits>", "narrow", "widen", "begin_run", "meet_all")
    monkeypatch.setattr(collective, "SOURCE", replace_and_compile(KernelSource("collective.cu", names), *PLANTS[name]))
    with pytest.raises(AssertionError):
        test_over_peer_addresses_only_terms_and_their_sum_are_rounded(monkeypatch)


def test_a_lost_device_leaves_no_result_of_a_rounded_sum(monkeypatch):
    monkeypatch.setattr(meetings, "MIN_NARROW_ELEMENTS", MIN_BYTES)
    rig = CollectiveRig(EmulatedBackend(), all_reduce_case(2, (999,)), wire=DType.BF16)
    right = rig.run()
    targets = [rig.backend.view(rig.buffers[rank][0], rig.tensors[rank][0][1]) for rank in range(2)]
    for target in targets:
        target[...] = np.nan
    with pytest.raises(BackendError, match=r"device 1 did not arrive within 0\.3 s"):
        rig.run_without(1)
    assert all(np.isnan(target).all() for target in targets)
    same(rig.run(), right)


@pytest.mark.long
def test_a_model_keeps_its_tokens_with_rounded_sums_and_exact_ones_are_refused(monkeypatch):
    monkeypatch.setattr(meetings, "MIN_NARROW_ELEMENTS", MIN_BYTES)
    devices = ("cuda-emulated:0", "cuda-emulated:1")

    def logits(wire):
        return Session(
            open_model(None), on=DeviceGroup(devices=devices, split_mode="tensor", wire=wire), context=64
        ).evaluate([[1, 2, 3]])[0]

    plain, sent = logits("f32"), logits("bf16")
    off = nmse(sent, plain)
    assert 0 < off < 1e-3
    with pytest.raises(ModelError, match="exact=True excludes wire='bf16'"):
        Session(open_model(None), on=DeviceGroup(devices=devices, exact=True, wire="bf16"))
