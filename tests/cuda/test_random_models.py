"""Random models of large shapes are written only where they fit."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from hocket.benchmarks.gpu import random_models
from hocket.benchmarks.gpu.harness import NothingToMeasure

GIB = 1 << 30


@pytest.mark.parametrize(
    ("disk", "device", "message"),
    [
        (40 * GIB, 140 * GIB, r"the weights have 45\.1 GB; .* has 41\.9"),
        (0, None, r"the weights have 45\.1 GB; .* has 0\.0"),
        (100 * GIB, 44 * GIB, r"the weights have 45\.1 GB; the device has 47\.2"),
    ],
)
def test_a_model_that_does_not_fit_is_not_written(disk, device, message, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk))
    with pytest.raises(NothingToMeasure, match=message):
        random_models.write_qwen3_next(tmp_path, random_models.QWEN3_NEXT_ALL_LAYERS, device)
    assert not list(tmp_path.iterdir())


def test_a_model_that_fits_has_all_its_weights(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(random_models, "fill_with_random_weights", lambda path: written.append(path) or path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=50 * GIB))
    path = random_models.write_qwen3_next(tmp_path, random_models.QWEN3_NEXT_ALL_LAYERS, 141 * 10**9)
    assert written == [path] == [*tmp_path.iterdir()]
