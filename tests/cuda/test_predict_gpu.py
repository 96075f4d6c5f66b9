"""The script that writes predicted GPU times, run to its end on one shape and one weight type."""

from __future__ import annotations

import json
import pickle

import pytest

from hocket.backends.capabilities import OTHER_OPS
from hocket.backends.cupy.device import disassembly, nvrtc
from hocket.backends.cupy.predicted_speeds import load_predicted_speeds
from hocket.backends.cupy.time_model.launch_time import GPUS
from hocket.benchmarks.gpu import predict_times

from ..given.devices.emulation import needs_compiler
from ..given.devices.tools import needs

ADDED = "add 4096×4096"


class Sent:
    """A stand-in for a process pool that pickles functions and results.

    A fork of a process that has run kernels would wait for their threads for ever.
    """

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *why):
        pass

    def map(self, function, items):
        return (pickle.loads(pickle.dumps(function(of))) for of in items)


@pytest.mark.long
@needs_compiler
def test_what_is_predicted_is_written(tmp_path, monkeypatch):
    """Check that the script writes the committed file."""
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)
    of_all = predict_times.make_shapes
    monkeypatch.setattr(predict_times, "ProcessPoolExecutor", Sent)
    monkeypatch.setattr(predict_times, "make_shapes", lambda n: tuple(s for s in of_all(n) if s.name == ADDED))
    monkeypatch.setattr(predict_times, "OPS", {OTHER_OPS: (ADDED, None)})
    monkeypatch.setattr(predict_times, "DTYPES", ())
    known = json.loads(predict_times.TIMES.read_text("utf-8"))
    page = predict_times.TABLE.read_text("utf-8")
    for name in ("TABLE", "TIMES", "SPEEDS_FILE"):
        monkeypatch.setattr(predict_times, name, tmp_path / name)
    predict_times.main()
    written = json.loads((tmp_path / "TIMES").read_text("utf-8"))
    assert written == {ADDED: pytest.approx(known[ADDED], rel=0.1)}
    lines = (tmp_path / "TABLE").read_text("utf-8").removeprefix(predict_times.HEAD).splitlines()
    assert len(lines) == len(predict_times.LISTED_GPUS)
    assert page.startswith(predict_times.HEAD)
    speeds = json.loads((tmp_path / "SPEEDS_FILE").read_text("utf-8"))
    assert speeds.keys() == GPUS.keys()
    for kind, of in speeds.items():
        assert of["ops"]["bandwidth"][OTHER_OPS] == pytest.approx(
            load_predicted_speeds()[kind].ops.bandwidth[OTHER_OPS], rel=0.1
        )


SHAPES = {shape.name: shape for shape in predict_times.make_shapes(GPUS["h200"].multiprocessor_count)}
OUT_OF_REACH = {"q4_K 4096×4096, 1 token", "q8_0 4096×4096, 1 token", "bf16 4096×4096, 512 tokens"}
"""Of any kernel, by the model: docs/first-gpu.md says why."""


@pytest.mark.long(cases=1)
@pytest.mark.nightly(cases=4)
@needs_compiler
@pytest.mark.parametrize("name", SHAPES)
def test_what_an_h200_should_take_is_what_is_predicted_of_the_kernels_of_now(name):
    """Where kernels changed on purpose: ``python benchmarks/gpu/predict_times.py``."""
    needs(nvrtc.load_nvrtc, disassembly.find_nvdisasm)
    shape, known = SHAPES[name], json.loads(predict_times.TIMES.read_text("utf-8"))
    took = predict_times.sum_seconds(shape.predict_launches(shape.count_launches(GPUS["h200"].limits), "h200"))
    assert 1e6 * took == pytest.approx(known[name]["h200"], rel=0.1)
    share = shape.compute_share(took, "h200")
    assert name in OUT_OF_REACH or not shape.target_share or share >= shape.target_share
