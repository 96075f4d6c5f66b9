"""Models in several processes give the results of one device in every split mode, and each rank reads its own part."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.cli import main
from hocket.frontends.inference import prefill_chunks
from hocket.frontends.inference.device_group import DeviceGroup
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import Session
from hocket.frontends.open_model import open_model
from hocket.graph.errors import PlanError

from ..given.models.goldens import FIXTURES, TINY, nmse
from ..given.ranks.mpi import hocket_in, needs_mpi
from ..given.ranks.thread_link import in_threads

MODEL = FIXTURES / "qwen35" / "model.gguf"
TOKENS = [3, 17, 5, 9, 11, 2, 40, 8]
SPLITS = {
    "tensor": DeviceGroup(devices=("numpy:0",), split_mode="tensor"),
    "layer": DeviceGroup(devices=("numpy:0",), split_mode="layer"),
    "uneven": DeviceGroup(devices=("numpy:0",), split_mode="tensor", tensor_split=(3.0, 1.0)),
    "two devices on a rank": DeviceGroup(devices=("numpy:0@0", "numpy:1@0", "numpy:0@1"), split_mode="tensor"),
    "layers, each cut on a rank": DeviceGroup(
        devices=("numpy:0@0", "numpy:1@0", "numpy:0@1", "numpy:1@1"), split_mode="layer,tensor"
    ),
    "one rank idle": DeviceGroup(devices=("numpy:0@1",)),
}


def logits(session):
    """Of a prompt, and of two tokens after it."""
    first = session.evaluate([TOKENS[:6]], every_position=True)
    return np.concatenate([*first, *session.evaluate([TOKENS[6:7]]), *session.evaluate([TOKENS[7:]])])


@pytest.mark.long
@pytest.mark.parametrize("on", SPLITS.values(), ids=SPLITS)
def test_ranks_compute_what_one_device_does(on):
    model = open_model(MODEL)
    alone = logits(Session(model, on=DeviceGroup(devices=("numpy:0",)), context=16))
    everyones = in_threads(2, lambda world: logits(Session(model, on=on, context=16, world=world)))
    for one in everyones:
        assert nmse(one, alone) <= 1e-10
        assert np.array_equal(one, everyones[0])


def test_parts_of_a_prompt_follow_each_other_through_ranks(monkeypatch):
    monkeypatch.setattr(prefill_chunks, "MIN_CHUNK_TOKENS", 2)
    monkeypatch.setattr(prefill_chunks, "list_allowed_chunk_sizes", lambda max_tokens: (2,))
    model = open_model(MODEL)
    alone = logits(Session(model, on=DeviceGroup(devices=("numpy:0",)), context=16))

    def run(world):
        session = Session(model, on=SPLITS["layer"], context=16, world=world)
        results = logits(session)
        assert session._pipelines
        return results

    assert all(nmse(one, alone) <= 1e-10 for one in in_threads(2, run))


def test_a_rank_reads_its_own_part_of_the_weights():
    model = open_model(MODEL)
    stores = in_threads(2, lambda world: Session(model, on=SPLITS["tensor"], context=16, world=world).store)
    whole = Session(model, on=DeviceGroup(devices=("numpy:0",)), context=16).store.loaded_byte_count
    assert all(0 < store.loaded_byte_count < 0.7 * whole for store in stores)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_goes_on_in_any_number_of_ranks(ranks, tmp_path):
    model, path, split = open_model(MODEL), tmp_path / "state", SPLITS["tensor"]

    def first(world):
        session = Session(model, on=split, context=16, world=world)
        session.evaluate([TOKENS[:6]])
        save_state(session, [TOKENS[:6]], path)

    def second(world):
        session = Session(model, on=split, context=16, world=world)
        assert load_state(session, path) == [TOKENS[:6]]
        return np.concatenate([*session.evaluate([TOKENS[6:7]]), *session.evaluate([TOKENS[7:]])])

    in_threads(2, first)
    alone = logits(Session(model, on=DeviceGroup(devices=("numpy:0",)), context=16))[-2:]
    assert all(nmse(one, alone) <= 1e-10 for one in in_threads(ranks, second))


def test_other_inputs_on_another_rank_are_noticed():
    x = hocket.input("x", (2, 8))
    graph = hocket.Graph({"y": ops.mul_mat(hocket.weight("w", (8, 8)), x)})

    def run(world):
        plan = hocket.plan(graph, "numpy:0@0,numpy:0@1", split_mode="tensor")
        store = hocket.Store(plan.group, world)
        store.bind("w", np.eye(8), graph.weights[0].spec, plan.leaves["w"])
        executor = hocket.Executor(plan, store)
        same = np.ones((2, 8))
        assert np.array_equal(executor.run({"x": same})["y"], same)
        with pytest.raises(hocket.BackendError, match=r"rank 1 on .* has another run: inputs .* run the same inputs"):
            executor.run({"x": same * world.rank})

    in_threads(2, run)


def test_devices_of_ranks_that_are_not_there_are_refused(capsys):
    x = hocket.input("x", (2, 8))
    plan = hocket.plan(hocket.Graph({"y": ops.silu(x)}), "numpy:0@0,numpy:0@1", split_mode="layer")
    with pytest.raises(PlanError, match=r"numpy:0@1 is one of process 1, but the last one is 0; start more"):
        hocket.load(plan, {})
    assert main(["logits", str(MODEL), "--tokens", "1", "--out", "x", "--devices", "numpy:0@1"]) == 2
    assert "device numpy:0@1: one process runs; start 2 or more, as mpiexec -n 2" in capsys.readouterr().err
    with pytest.raises(hocket.BackendError, match="after the @ comes the number of a process, as in numpy:0@1"):
        hocket.plan(plan.graph, "numpy:0@x")


@needs_mpi
@pytest.mark.long
def test_the_command_runs_in_two_processes():
    words = ("run", TINY, "-n", 4, "--temp", 0, "-p", "a", "--devices", "numpy:0", "--ignore-eos")
    done = hocket_in(2, *words, "--split-mode", "tensor")
    assert done.code == 0, done
    assert done.out == hocket_in(1, *words).out


@pytest.mark.nightly(cases=4)
@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("split", [("tensor",), ("layer",), ("tensor", "--tensor-split", "3,1")], ids=" ".join)
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35"])
def test_logits_over_mpi_are_those_of_one_device(name, split, ranks, tmp_path):
    words = ("logits", FIXTURES / name / "model.gguf", "--tokens", ",".join(map(str, TOKENS)), "--exact", "--step")
    for count, out, more in ((1, "alone", ()), (ranks, "ranks", ("--split-mode", *split))):
        done = hocket_in(count, *words, "--out", tmp_path / out, *more)
        assert done.code == 0, done
    assert nmse(np.load(tmp_path / "ranks"), np.load(tmp_path / "alone")) <= 1e-10


@needs_mpi
@pytest.mark.long
def test_compiled_ranks_compute_what_compiled_devices_do():
    words = ("run", "-n", 4, "--temp", 0, "-p", "Once upon", "--split-mode", "tensor", "-t", 1)
    alone = hocket_in(1, *words, "--devices", "cpu:0,cpu:1")
    assert re.match("Once upon .", alone.out)
    assert hocket_in(2, *words).out == hocket_in(2, *words, "--devices", "cpu:0@0,cpu:0@1").out == alone.out
