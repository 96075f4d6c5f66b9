"""Folders of FP8 and MXFP4 weights have the logits of `transformers` on weights that are dequantised in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.safetensors import open_folder, write_folder_as_gguf

from ...given.models.hugging_face import SIZES, TOKENS, compute_logits, compute_worst_nmse

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

BLOCK = (32, 16)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_model(kind: str, **changes: Any) -> Any:
    """A model of `transformers` with random weights, norms that differ from 1 and biases that differ from 0."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def save(folder: Path, model: Any, tensors: dict[str, Any], quantisation: dict[str, Any]) -> Path:
    folder.mkdir()
    settings = {**model.config.to_dict(), "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(settings))
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    return folder


def decode_e4m3(byte: int) -> float:
    """IEEE-like: 4 bits of exponent with bias 7, 3 bits of fraction."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    magnitude = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
    return -magnitude if byte & 128 else magnitude


def write_fp8(
    folder: Path, model: Any, block: tuple[int, int] = BLOCK, suffix: str = "_scale_inv", **options: Any
) -> Path:
    """Write the projections as FP8 in blocks, and give the model the dequantised weights.

    A block of 0 rows or columns is the whole matrix. `are_powers` rounds the scales up to powers of two.
    """
    are_powers = options.pop("are_powers", False)
    tensors: dict[str, Any] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = parameter.clone().contiguous()
            continue
        rows, columns = parameter.shape
        sizes = (block[0] or rows, block[1] or columns)
        counts = (-(-rows // sizes[0]), -(-columns // sizes[1]))
        scales = torch.empty(counts)
        stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        golden = np.empty((rows, columns))
        for i, j in np.ndindex(*counts):
            part = np.s_[i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
            largest = parameter[part].abs().max() / 448
            scales[i, j] = 2.0 ** torch.ceil(torch.log2(largest)) if are_powers else largest
            stored[part] = (parameter[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values = np.vectorize(decode_e4m3)(stored[part].view(torch.uint8).numpy().astype(int))
            golden[part] = values * np.float64(scales[i, j])
        parameter.copy_(torch.from_numpy(golden))
        tensors |= {name: stored, f"{name}{suffix}": scales.reshape(()) if counts == (1, 1) else scales}
    quantisation = options or {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}
    return save(folder, model, tensors, quantisation)


def write_mxfp4(folder: Path, model: Any) -> Path:
    """Write the experts as random MXFP4 blocks, and give the model the dequantised weights."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.clone().contiguous()
            continue
        experts, columns, rows = parameter.shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(121, 125, (experts, rows, columns // 32), np.uint8)
        values = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).reshape(experts, rows, columns // 32, 32)
        values = (values * 2.0 ** (scales[..., None].astype(np.float64) - 127)).reshape(experts, rows, columns)
        parameter.copy_(torch.from_numpy(values.swapaxes(1, 2)))
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    return save(folder, model, tensors, {"quant_method": "mxfp4"})


LLAMA: dict[str, Any] = {"head_dim": 16}
GPT_OSS = {
    **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def check_logits(folder: Path, model: Any, file: Path) -> None:
    with torch.no_grad():
        golden = model(torch.tensor([TOKENS])).logits[0].numpy()
    write_folder_as_gguf(folder, file)
    logits = [compute_logits(path) for path in (folder, file)]
    assert compute_worst_nmse(logits[0], golden) <= 1e-8
    assert np.array_equal(*logits)


@pytest.mark.parametrize("changes", [LLAMA, {**LLAMA, "intermediate_size": 104}], ids=["whole", "part of a block"])
def test_fp8_weights_are_dequantised_with_the_scale_of_their_block(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("Llama", **changes)
    check_logits(write_fp8(tmp_path / "folder", model), model, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("block", "suffix", "quantisation"),
    [
        ((0, 0), "_scale_inv", {"quant_method": "fp8", "activation_scheme": "static"}),
        ((0, 0), "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ((1, 0), "_scale", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        (
            BLOCK,
            "_scale",
            {
                **{"quant_method": "compressed-tensors", "format": "float-quantized"},
                "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [*BLOCK]}}},
            },
        ),
    ],
    ids=["whole matrix", "modelopt", "rows", "compressed blocks"],
)
def test_fp8_scales_belong_to_matrices_rows_or_blocks(
    block: tuple[int, int], suffix: str, quantisation: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model("Llama", **LLAMA)
    folder = write_fp8(tmp_path / "folder", model, block, suffix, **quantisation)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    of_activations = {"model.layers.0.mlp.up_proj.input_scale": torch.tensor(2.0)}
    safetensors_torch.save_file(tensors | of_activations, folder / "model.safetensors")
    check_logits(folder, model, tmp_path / "model.gguf")


def test_fp8_weights_with_powers_of_two_as_scales_are_exact_in_bf16(tmp_path: Path) -> None:
    model = make_model("Llama", **LLAMA)
    folder = write_fp8(tmp_path / "folder", model, are_powers=True)
    check_logits(folder, model, tmp_path / "model.gguf")
    tensor = open_folder(folder).tensors["blk.0.ffn_down.weight"]
    assert str(tensor.dtype) == "bf16"
    assert np.array_equal(tensor.dequantise(), model.model.layers[0].mlp.down_proj.weight.detach().numpy())


def test_mxfp4_experts_keep_their_bits(tmp_path: Path) -> None:
    model = make_model("GptOss", **GPT_OSS)
    folder = write_mxfp4(tmp_path / "folder", model)
    check_logits(folder, model, tmp_path / "model.gguf")
    down = open_folder(folder).tensors["blk.0.ffn_down_exps.weight"]
    assert (str(down.dtype), down.shape) == ("mxfp4", (4, 64, 96))


def test_tensors_of_the_same_bytes_have_different_identities_in_caches(tmp_path: Path) -> None:
    """The gate and up matrices of gpt-oss are rows of one tensor; a cache of packed weights must not mix them up."""
    tensors = open_folder(write_mxfp4(tmp_path / "folder", make_model("GptOss", **GPT_OSS))).tensors.values()
    assert len({t.cache_identity for t in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("quantisation", "left_out", "message"),
    [
        ({"quant_method": "awq"}, "", "quant_method 'awq' is not supported; need fp8, compressed-tensors"),
        ({"quant_method": "fp8"}, "", "has the shape [2, 6], which does not fit blocks"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "", "need 'float-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "", "quant_algo of modelopt is 'NVFP4'; need 'FP8'"),
        ({"quant_method": "fp8", "weight_block_size": [32, True]}, "", "needs two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8]}, "", "has the shape [2, 6], which does not fit blocks"),
        ({}, "_scale_inv", "down_proj.weight has no scales"),
        ({}, "down_proj.weight", "down_proj.weight has no bytes"),
    ],
)
def test_a_damaged_fp8_folder_is_refused_in_one_line(
    quantisation: dict[str, Any], left_out: str, message: str, tmp_path: Path
) -> None:
    model = make_model("Llama", **LLAMA)
    folder = write_fp8(tmp_path / "folder", model)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = quantisation or settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    if left_out:
        del tensors[next(name for name in tensors if name.endswith(left_out) and "down_proj" in name)]
        safetensors_torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fp8_scales_that_are_fp8_themselves_are_refused(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "folder", make_model("Llama", **LLAMA))
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    tensors = {name: t.to(torch.float8_e4m3fn) if name.endswith("_scale_inv") else t for name, t in tensors.items()}
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="_scale_inv has FP8 scales; use the original weights"):
        open_folder(folder)


def test_mxfp4_blocks_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path / "folder", make_model("GptOss", **GPT_OSS))
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    tensors = {name: t.reshape(-1) if name.endswith("_blocks") else t for name, t in tensors.items()}
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="does not fit blocks of shape"):
        open_folder(folder)


def add_tensor(folder: Path, suffix: str, make: Callable[[str], str]) -> None:
    """Store a tensor with a name that ends with `suffix` once more, under the name that `make` makes of it."""
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    safetensors_torch.save_file({**tensors, make(name): tensors[name].clone()}, folder / "model.safetensors")


def test_an_mxfp4_weight_beside_its_blocks_is_refused(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path / "folder", make_model("GptOss", **GPT_OSS))
    add_tensor(folder, "down_proj_blocks", lambda name: name.removesuffix("_blocks"))
    with pytest.raises(ModelError, match=r"down_proj and \S+down_proj_blocks state the same weight; need one of them;"):
        open_folder(folder)


def test_two_scales_of_an_fp8_weight_are_refused(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "folder", make_model("Llama", **LLAMA))
    add_tensor(folder, "down_proj.weight_scale_inv", lambda name: name.removesuffix("_inv"))
    with pytest.raises(ModelError, match=r"_scale and \S+_scale_inv state the same weight; need one of them;"):
        open_folder(folder)


@pytest.mark.parametrize(("number", "renamed", "missing"), [(3, 5, 3), (0, 4, 0), (1, 4, 1)])
def test_expert_numbers_with_gaps_are_refused(number: int, renamed: int, missing: int, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    folder, model = tmp_path / "folder", make_model("Qwen3Moe", **sizes)
    old, new = (f"mlp.experts.{n}.up_proj" for n in (number, renamed))
    model.save_pretrained(folder)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    assert any(old in name for name in tensors)
    safetensors_torch.save_file(
        {name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError, match=rf"has no expert {missing}, but expert {renamed}; need numbers from 0 to 3;"):
        open_folder(folder)
