"""All ranks load the bytes that rank 0 has: of files, of arrays of the Python API and of packed weights that stay."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.distributed import RanksError
from hocket.frontends import run_config
from hocket.frontends.inference.device_group import DeviceGroup
from hocket.frontends.inference.model_digest import make_shared_mapping_key
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.scheduler.runtime.weight_digests import LEAF_BYTES, WORD_COLUMNS, compute_digest

from ..given.models.goldens import TINY
from ..given.ranks.thread_link import in_threads

SPLIT_GROUPS = {
    "tensor": DeviceGroup(devices=("cpu:0",), split_mode="tensor", threads=1),
    "layer": DeviceGroup(devices=("cpu:0",), split_mode="layer", threads=1),
    "uneven": DeviceGroup(devices=("cpu:0",), split_mode="tensor", tensor_split=(3.0, 1.0), threads=1),
    "layer,tensor": DeviceGroup(
        devices=("cpu:0@0", "cpu:1@0", "cpu:0@1", "cpu:1@1"), split_mode="layer,tensor", threads=1
    ),
    "none": DeviceGroup(devices=("cpu:0@1",), threads=1),
}
NIGHTLY_GROUPS = ("layer", "uneven", "none")
"""The nightly groups: "layer,tensor" and "tensor" have their layouts, too."""
LARGE = "blk.7.ffn_gate.weight"
"""A tensor of 78,336 bytes in the last block, with its end on the last rank in each split mode."""


def first_logits(path, on, world):
    session = Session(open_model(path), on=on, context=16, world=world)
    return session.evaluate([[3, 17, 5]])


@pytest.fixture
def other(tmp_path):
    """A copy of the model in which one byte at the end of a large tensor is another one."""
    path, tensor = tmp_path / "other.gguf", open_model(TINY).tensors[LARGE]
    data = bytearray(Path(TINY).read_bytes())
    data[tensor.offset + tensor.nbytes - 1] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "on",
    [
        pytest.param(on, marks=pytest.mark.nightly(cases=0) if name in NIGHTLY_GROUPS else (), id=name)
        for name, on in SPLIT_GROUPS.items()
    ],
)
def test_a_rank_with_one_other_byte_in_a_large_tensor_is_named(on, other):
    def run(world):
        with pytest.raises(RanksError, match=f"rank 1 on .* has other bytes of weight %{LARGE} than rank 0") as why:
            first_logits(other if world.rank else TINY, on, world)
        return str(why.value)

    assert len(set(in_threads(2, run))) == 1


@pytest.mark.long
@pytest.mark.parametrize("on", [SPLIT_GROUPS["tensor"], SPLIT_GROUPS["layer"]], ids=["tensor", "layer"])
def test_ranks_with_copies_of_a_file_run(on, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Path(TINY).read_bytes())
    one, two = in_threads(2, lambda world: first_logits(copy if world.rank else TINY, on, world))
    assert np.array_equal(one, two)


@pytest.mark.long
def test_bytes_of_one_file_that_all_ranks_map_are_read_once(monkeypatch):
    read = []
    monkeypatch.setattr(
        "hocket.scheduler.runtime.store.compute_digest", lambda *arguments: read.append(arguments) or b""
    )
    in_threads(2, lambda world: first_logits(TINY, SPLIT_GROUPS["tensor"], world))
    assert not read


def test_files_are_the_same_only_by_inode_and_on_one_machine(tmp_path, monkeypatch):
    one, two, linked = (tmp_path / name for name in ("one", "two", "linked"))
    for path in (one, two):
        path.write_bytes(Path(TINY).read_bytes())
        os.utime(path, (1, 1))
    linked.hardlink_to(one)
    first, second, same = ([open_model(path).tensors[LARGE].file] for path in (one, two, linked))
    assert make_shared_mapping_key(first) == make_shared_mapping_key(same) != make_shared_mapping_key(second)
    assert make_shared_mapping_key([replace(first[0], inode="")]) == ""
    monkeypatch.setattr("hocket.frontends.inference.model_digest.BOOT_ID_FILE", tmp_path / "absent")
    assert make_shared_mapping_key(first) == ""


def run_split(world, weights, split_mode, devices="numpy:0@0,numpy:0@1"):
    x = hocket.input("x", (2, 64))
    hidden = ops.silu(ops.mul_mat(hocket.weight("up", (128, 64)), x))
    graph = hocket.Graph({"y": ops.mul_mat(hocket.weight("down", (64, 128)), hidden)})
    plan = hocket.plan(graph, devices, split_mode=split_mode)
    store = hocket.Store(plan.group, world)
    for value in graph.weights:
        store.bind(value.node.name, weights[value.node.name], value.spec, plan.leaves[value.node.name])
    return hocket.Executor(plan, store).run({"x": np.ones((2, 64), np.float32)})["y"]


def weights_of(seed):
    draw = np.random.default_rng(seed).standard_normal
    return {"up": draw((128, 64), np.float32), "down": draw((64, 128), np.float32)}


@pytest.mark.parametrize("split_mode", ["tensor", "layer"])
def test_other_weights_of_a_rank_are_named(split_mode):
    def run(world):
        with pytest.raises(RanksError, match=r"rank 1 on .* has other bytes of weight %(up|down) than rank 0"):
            run_split(world, weights_of(world.rank), split_mode)

    in_threads(2, run)


def test_the_rank_with_other_weights_is_named_among_three():
    def run(world):
        with pytest.raises(RanksError, match=r"^rank 2 on .* has other bytes of weight %(up|down) than rank 0"):
            run_split(world, weights_of(world.rank // 2), "tensor", "numpy:0@0,numpy:0@1,numpy:0@2")

    in_threads(3, run)


@pytest.mark.parametrize("split_mode", ["tensor", "layer"])
def test_the_order_of_weights_in_memory_does_not_matter(split_mode):
    def run(world):
        order = np.asfortranarray if world.rank else np.ascontiguousarray
        return run_split(world, {name: order(one) for name, one in weights_of(0).items()}, split_mode)

    one, two = in_threads(2, run)
    assert np.array_equal(one, two)


@pytest.mark.long
def test_cached_packed_weights_carry_the_digest_of_their_source(other, tmp_path, monkeypatch):
    """A rank that maps weights which it packed before reads nothing of its file, and is named all the same."""
    on = replace(SPLIT_GROUPS["tensor"], keep_packed=True)
    monkeypatch.setattr(run_config, "cache_folder", lambda: tmp_path / "cache")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Path(TINY).read_bytes())

    def run(paths):
        return in_threads(2, lambda world: first_logits(paths[world.rank], on, world))

    first = run((TINY, copy))
    assert all(np.array_equal(*pair) for pair in zip(first, run((TINY, copy)), strict=True))
    for _ in range(2):
        with pytest.raises(RanksError, match=f"rank 1 on .* has other bytes of weight %{LARGE}"):
            run((TINY, other))


@pytest.mark.parametrize("at", [0, 7, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES + 4, -1])
def test_each_byte_of_an_array_changes_its_digest(at):
    array = np.zeros(2 * LEAF_BYTES + 5, np.uint8)
    before = compute_digest(array)
    array[at] = 1
    assert compute_digest(array) != before


@pytest.mark.parametrize("shape", [(8 * WORD_COLUMNS * 40,), (512, 1024), (96, 257), (3, 40, 50), (0, 4), (1, 9)])
def test_a_digest_depends_on_values_and_shape_alone(shape):
    array = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    strided = np.empty((*shape, 2), np.uint8)[..., 0]
    strided[...] = array
    assert compute_digest(array) == compute_digest(strided) == compute_digest(np.asfortranarray(array))
    assert compute_digest(array) != compute_digest(array.reshape(1, *shape))
    if len(array.reshape(-1)) > 8 and len(shape) > 1 and len(array) > 1:
        assert compute_digest(array) != compute_digest(array[::-1])


def test_rows_that_are_exchanged_change_a_digest():
    """Rows of a power of two, as in most models: the columns of a sum could divide their distance."""
    array = np.random.default_rng(1).standard_normal((256, 256), np.float32)
    for one, two in ((0, 1), (0, 128), (3, 11), (100, 228)):
        swapped = array.copy()
        swapped[[one, two]] = array[[two, one]]
        assert compute_digest(swapped) != compute_digest(array)


def test_bytes_of_other_types_differ():
    array = np.zeros(16, np.float32)
    assert compute_digest(array) != compute_digest(array.view(np.int32))
