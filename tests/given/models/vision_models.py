"""Models of `torchvision` with random weights: their constructors and the size of their picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = MappingProxyType(
    {
        "convnext_tiny": (64, {}),
        "densenet121": (64, {}),
        "efficientnet_b0": (64, {}),
        "googlenet": (96, {"aux_logits": False, "init_weights": False}),
        "mnasnet0_5": (64, {}),
        "mobilenet_v3_small": (64, {}),
        "regnet_y_400mf": (64, {}),
        "resnet18": (64, {}),
        "shufflenet_v2_x0_5": (64, {}),
        "squeezenet1_1": (64, {}),
        "swin_t": (64, {}),
        "vit_b_16": (32, {"image_size": 32}),
    }
)

_BACKBONE = {"weights_backbone": None}
MORE_MODELS: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]] = MappingProxyType(
    {
        "alexnet": ((1, 3, 64, 64), {}),
        "deeplabv3_mobilenet_v3_large": ((1, 3, 64, 64), _BACKBONE),
        "efficientnet_v2_s": ((1, 3, 64, 64), {}),
        "fcn_resnet50": ((1, 3, 64, 64), _BACKBONE),
        "inception_v3": ((1, 3, 96, 96), {"aux_logits": False, "init_weights": False}),
        "lraspp_mobilenet_v3_large": ((1, 3, 64, 64), _BACKBONE),
        "mobilenet_v2": ((1, 3, 64, 64), {}),
        "r3d_18": ((1, 3, 4, 32, 32), {}),
        "resnext50_32x4d": ((1, 3, 64, 64), {}),
        "swin3d_t": ((1, 3, 4, 32, 32), {}),
        "swin_v2_t": ((1, 3, 64, 64), {}),
        "vgg11": ((1, 3, 32, 32), {}),
    }
)
"""One model of each further kind, with the shape of its picture or film."""

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def make_importable() -> None:
    """Declare the compiled ops that `torchvision` describes on import, where they cannot be loaded.

    Its wheel of PyPI needs PyTorch's for CUDA. With the wheel for processors its compiled half is missing; then its
    import fails, and every import of it in `transformers` as well. The models here do not call these ops.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(next(Path(found.origin).parent.glob("_C*.so"))))
    except (OSError, StopIteration):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def make_model(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model and a picture.

    Parameters that begin as zeros or ones are random, so that they hide no mistakes.
    """
    make_importable()
    from torchvision import models

    torch.manual_seed(0)
    shape, options = MORE_MODELS[name] if name in MORE_MODELS else ((1, 3, *[MODELS[name][0]] * 2), MODELS[name][1])
    model = models.get_model(name, weights=None, num_classes=10, **options).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d | torch.nn.BatchNorm3d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.05)
    return model, torch.randn(shape)
