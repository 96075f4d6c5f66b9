"""Models of `torchvision`, unchanged: one device gives the results of PyTorch, and several devices give the same."""

from __future__ import annotations

import importlib.util

import pytest

import hocket

from ...given.tensors import nmse

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]

NAMES = (
    *("convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v3_small"),
    *("regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "vit_b_16"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_models_of_torchvision_equal_pytorch_on_one_to_four_devices(name):
    import torch

    from ...given.models.vision_models import make_model

    model, picture = make_model(name)
    with torch.no_grad():
        expected = model(picture)
    program = hocket.from_torch(torch.export.export(model, (picture,)))
    one = program.on("cpu:0")
    assert nmse(one(picture), expected) <= 1e-10
    for count in (2, 3, 4):
        sharded = program.on(",".join(f"cpu:{i}" for i in range(count)), split_mode="tensor")
        assert nmse(sharded(picture), one(picture)) <= 1e-10
