"""LoRA adapters and control vectors: the same numbers as a model file with the changes, over any devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.model_digest import compute_model_digest
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.language_model import Model as Language
from hocket.frontends.models import Model
from hocket.frontends.open_model import open_adapted_model, open_model
from hocket.frontends.run_config import RunConfig

from ...given.models.goldens import TINY, nmse, path_of
from ...given.models.rewritten import Array, tensors_of, write_fixture

DEVICE_GROUPS = [
    ("reference:0", "none"),
    ("reference:0,reference:1", "tensor"),
    ("reference:0,reference:1,reference:2", "tensor"),
    ("reference:0,reference:1", "layer"),
]
SAME = 1e-20
"""NMSE of float64 results that differ in the order of additions alone."""
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
RANK = 4


def adapter(path: Path, architecture: str, tensors: Mapping[str, Array], alpha: float = 0.0, **others: str) -> Path:
    """A file of tensors that says it is a LoRA adapter."""
    writer = GGUFWriter(path, architecture)
    for key, text in ({"general.type": "adapter", "adapter.type": "lora"} | others).items():
        writer.add_string(key, text)
    if alpha:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def factors(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> dict[str, Array]:
    """Both factors of a change, of few bits, so that float32 holds the changed matrix exactly."""

    def few(*shape: int) -> Array:
        return (rng.integers(-2, 3, shape) / 32).astype(np.float32)

    *lead, m, k = shape
    if name == "token_embd.weight":
        return {f"{name}.lora_a": few(m, RANK), f"{name}.lora_b": few(k, RANK)}
    return {f"{name}.lora_a": few(*lead, RANK, k), f"{name}.lora_b": few(*lead, m, RANK)}


def change(name: str, tensors: Mapping[str, Array]) -> Array:
    a, b = (tensors[f"{name}.lora_{letter}"].astype(np.float64) for letter in "ab")
    return a @ b.T if name == "token_embd.weight" else b @ a


def logits(model: Model, devices: str = "reference:0", mode: str = "none") -> Array:
    session = Session(model, on=DeviceGroup(devices=tuple(devices.split(",")), split_mode=mode), context=8)
    return session.evaluate([TOKENS], every_position=True)[0]


FEW_TENSORS = ("token_embd", "blk.1.attn_q", "blk.1.ffn_up_exps", "blk.1.ffn_down_exps")
"""A table, a matrix dealt by rows, and experts dealt either way."""


@pytest.mark.parametrize(
    ("name", "groups", "chosen"),
    [
        ("llama-moe", DEVICE_GROUPS[:1], FEW_TENSORS),
        *(pytest.param(name, DEVICE_GROUPS, (), marks=pytest.mark.long()) for name in ("llama", "llama-moe", "qwen35")),
    ],
)
def test_two_adapters_equal_the_merged_model(
    name: str, groups: list[tuple[str, str]], chosen: tuple[str, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    tensors = {t: array.astype(np.float16).astype(np.float32) for t, array in tensors_of(name).items()}
    base = write_fixture(tmp_path / "base.gguf", name, tensors)
    matrices = [t for t, array in tensors.items() if array.ndim > 1 and "conv" not in t and t.startswith(chosen or "")]
    merged, files = dict(tensors), []
    for names, alpha, scale in ((matrices, 8.0, 0.25), (matrices[::3], 0.0, -0.5)):
        pairs = {t: factors(rng, t, tensors[t].shape) for t in names}
        for t, pair in pairs.items():
            merged[t] = (merged[t] + scale * (alpha / RANK or 1.0) * change(t, pair)).astype(np.float32)
        both = {t: array for pair in pairs.values() for t, array in pair.items()}
        files.append((adapter(tmp_path / f"{alpha}.gguf", base.architecture, both, alpha), scale))
    expected = logits(write_fixture(tmp_path / "merged.gguf", name, merged))
    adapted = open_adapted_model(RunConfig(base.gguf.path, lora=files))
    for group in groups:
        assert nmse(logits(adapted, *group), expected) < SAME, group
    assert nmse(logits(base), expected) > 1e-3


def directions(path: Path, some: Mapping[int, Array]) -> Path:
    return adapter(path, "controlvector", {f"direction.{n}": vector for n, vector in some.items()})


@pytest.mark.parametrize("span", [None, (2, 2)])
def test_control_vectors_equal_biases_behind_blocks(span: tuple[int, int] | None, tmp_path: Path) -> None:
    rng, tensors = np.random.default_rng(2), tensors_of("qwen35")
    one, two, three = (rng.integers(-8, 9, len(tensors["output_norm.weight"])).astype(np.float32) / 8 for _ in "123")
    files = [
        (directions(tmp_path / "a.gguf", {1: one, 2: two}), 0.5),
        (directions(tmp_path / "b.gguf", {2: three}), -2.0),
    ]
    tensors["blk.2.ffn_down.bias"] = two / 2 - 2 * three
    if span is None:
        tensors["blk.1.ffn_down.bias"] = one / 2
    expected = logits(write_fixture(tmp_path / "biased.gguf", "qwen35", tensors))
    steered = open_adapted_model(RunConfig(path_of("qwen35"), control_vectors=files, control_layers=span))
    assert nmse(logits(steered, *DEVICE_GROUPS[0]), expected) < SAME


@pytest.mark.long
def test_commands_and_python_apply_adapters_equally(tmp_path: Path) -> None:
    base, rng = open_model(TINY), np.random.default_rng(3)
    name = "blk.1.ffn_down.weight"
    lora = adapter(
        tmp_path / "a:b.gguf", base.architecture, factors(rng, name, base.gguf.tensor(name).shape), alpha=8.0
    )
    vector = directions(tmp_path / "c.gguf", {1: np.full(base.hyper.width, 0.25, np.float32)})
    out = tmp_path / "logits.npy"
    flags = ["--lora", f"{lora}:0.5", "--control-vector", str(vector), "--control-vector-layer-range", "1", "1"]
    assert main(["logits", TINY, "--tokens", "3,1,4", *flags, "--out", str(out)]) == 0
    with Language(TINY, lora=[(lora, 0.5)], control_vectors=[vector], control_layers=(1, 1)) as model:
        assert np.array_equal(model.logits([3, 1, 4]), np.load(out))
    with Language(TINY) as model:
        assert nmse(model.logits([3, 1, 4]), np.load(out)) > 1e-3


def test_models_with_other_adapters_are_others(tmp_path: Path) -> None:
    shape = tensors_of("llama")[Q].shape
    files = [adapter(tmp_path / f"{i}.gguf", "llama", factors(np.random.default_rng(i), Q, shape)) for i in (0, 1)]
    kinds = ([], [files[0]], [files[1]], [(files[0], 0.5)], files)
    assert len(
        {compute_model_digest(open_adapted_model(RunConfig(path_of("llama"), lora=some))) for some in kinds}
    ) == len(kinds)


Q = "blk.1.attn_q.weight"
A, B = np.zeros((RANK, 64), np.float32), np.zeros((64, RANK), np.float32)
PAIR = {f"{Q}.lora_a": A, f"{Q}.lora_b": B}
WRONG: dict[str, tuple[dict[str, Array], dict[str, str], str]] = {
    "architecture": (PAIR, {"general.architecture": "qwen3"}, "general.architecture is 'qwen3'; need 'llama'"),
    "type": (PAIR, {"adapter.type": "dora"}, "adapter.type is 'dora'; need 'lora'"),
    "model": (PAIR, {"general.type": "model"}, "general.type is 'model'; need 'adapter'"),
    "half": ({f"{Q}.lora_a": A}, {}, "need .lora_a and .lora_b"),
    "suffix": (PAIR | {"blk.0.attn_norm.weight": B}, {}, "there is []; need .lora_a and .lora_b"),
    "unknown": ({"blk.7.x.lora_a": A, "blk.7.x.lora_b": B}, {}, "'blk.7.x' changes nothing in"),
    "shape": (PAIR | {f"{Q}.lora_b": B[:-1]}, {}, "whose product is no change of it"),
    "turned": ({f"{Q}.lora_a": B, f"{Q}.lora_b": A}, {}, "whose product is no change of it"),
    "vector": (PAIR | {f"{Q}.lora_a": A[0]}, {}, "whose product is no change of it"),
    "norm": (
        {"output_norm.weight.lora_a": A, "output_norm.weight.lora_b": B}, {}, "whose product is no change of it",
    ),
    "integers": (PAIR | {f"{Q}.lora_a": A.astype(np.int32)}, {}, f"tensor {Q}.lora_a is i32"),
    "empty": ({}, {}, "has no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_cost_one_line(case: str, tmp_path: Path) -> None:
    tensors, keys, message = WRONG[case]
    keys = dict(keys)
    path = adapter(tmp_path / "x.gguf", keys.pop("general.architecture", "llama"), tensors, **keys)
    with pytest.raises(ModelError) as refusal:
        open_adapted_model(RunConfig(path_of("llama"), lora=[path]))
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_matrices_that_are_not_read_as_such_are_refused(tmp_path: Path) -> None:
    name = "blk.0.ssm_conv1d.weight"
    pair = factors(np.random.default_rng(1), name, tensors_of("qwen35")[name].shape)
    model = open_adapted_model(RunConfig(path_of("qwen35"), lora=[adapter(tmp_path / "x.gguf", "qwen35", pair)]))
    with pytest.raises(ModelError, match=r"reads blk.0.ssm_conv1d.weight in .*conv.*, where hocket cannot change it"):
        Session(model, on=DeviceGroup(devices=("reference:0",)), context=8)


@pytest.mark.parametrize(
    ("some", "span", "message"),
    [
        ({1: 32}, None, r"direction.1 is f32\[32\]; need f32\[64\]"),
        ({0: 64}, None, r"'direction.0'; need direction.1 to direction.2"),
        ({3: 64}, None, r"'direction.3'; need direction.1 to direction.2"),
        ({1: 64}, (2, 2), "no direction for layers 2 to 2"),
        ({1: 64}, (2, 1), r"control_layers=\(2, 1\): need two of 1 to 2 in order"),
        (None, (1, 2), "is for control vectors; give control_vectors=FILE"),
    ],
)
def test_wrong_control_vectors_cost_one_line(
    some: dict[int, int] | None, span: tuple[int, int] | None, message: str, tmp_path: Path
) -> None:
    vectors = {n: np.zeros(width, np.float32) for n, width in (some or {}).items()}
    files = [] if some is None else [directions(tmp_path / "v.gguf", vectors)]
    with pytest.raises(ModelError, match=message):
        open_adapted_model(RunConfig(path_of("qwen35"), control_vectors=files, control_layers=span))


def test_a_scale_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-p", "It", "--lora", "x.gguf:nan"])
    assert "need a file and perhaps a number, as tone.gguf:0.5" in capsys.readouterr().err
