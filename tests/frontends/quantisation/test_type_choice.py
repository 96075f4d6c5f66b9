"""The mixtures of quantised files, against llama-quantize b11434 (``tests/goldens/quantisation/mixtures.txt``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from hocket.backends.cpu.kernels.quantisers.row_quantiser import WRITABLE_DTYPES
from hocket.frontends.errors import ModelError
from hocket.frontends.quantisation.file_types import FILE_TYPES, parse_file_type
from hocket.frontends.quantisation.type_choice import (
    FALLBACK_DTYPES,
    ModelFacts,
    TypeRequest,
    choose_dtypes,
    fit_dtype_to_columns,
    is_quantisable,
)
from hocket.graph.dtypes import DType

GOLDEN = Path(__file__).parents[2] / "goldens" / "quantisation" / "mixtures.txt"
LAYERS, WIDTH = 16, 256
FACTS = {
    "llama": ModelFacts("llama", LAYERS, query_groups=4),
    "gqa1": ModelFacts("llama", LAYERS, query_groups=1),
    "moe8": ModelFacts("llama", LAYERS, expert_count=8, query_groups=4),
    "moe4": ModelFacts("llama", LAYERS, expert_count=4, query_groups=4),
    "falcon": ModelFacts("falcon", LAYERS, query_groups=4),
}
"""The models of the golden file: 16 layers of width 256; ``gqa1`` has no output matrix, ``falcon`` a fused one."""


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    dtype: DType = DType.F32


def list_weights(model: str) -> list[Weight]:
    experts = (FACTS[model].expert_count,) if FACTS[model].expert_count else ()
    suffix = "_exps" if experts else ""
    attention = ["attn_qkv"] if model == "falcon" else ["attn_q", "attn_k", "attn_v"]
    weights = [] if model == "gqa1" else [Weight("output.weight", (64, WIDTH))]
    weights += [Weight("token_embd.weight", (64, WIDTH)), Weight("output_norm.weight", (WIDTH,))]
    for i in range(LAYERS):
        weights += [Weight(f"blk.{i}.{name}.weight", (WIDTH, WIDTH)) for name in (*attention, "attn_output")]
        names = (f"ffn_{name}{suffix}" for name in ("gate", "up", "down"))
        weights += [Weight(f"blk.{i}.{name}.weight", (*experts, WIDTH, WIDTH)) for name in names]
        weights += [Weight(f"blk.{i}.attn_norm.weight", (WIDTH,))]
    return weights


def describe_mixture(model: str, file_type: str, **wishes: object) -> str:
    """The dtypes by name without the layer, equal ones of neighbours counted, in the form of the golden file."""
    weights = list_weights(model)
    dtypes = choose_dtypes(weights, TypeRequest(parse_file_type(file_type), **wishes), FACTS[model])
    columns: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        if "norm" not in name:
            columns.setdefault(re.sub(r"blk\.\d+\.|\.weight", "", name), []).append(str(dtype).lower())
    runs = {name: [(text, len([*equal])) for text, equal in groupby(column)] for name, column in columns.items()}
    return ", ".join(
        f"{name}={of[0][0] if len(of) == 1 else ' '.join(f'{n}*{text}' for text, n in of)}" for name, of in runs.items()
    )


GOLDENS = dict(line.split(": ") for line in GOLDEN.read_text().splitlines())


@pytest.mark.parametrize("case", GOLDENS)
def test_each_tensor_has_the_dtype_that_llama_quantize_gives_it(case):
    model, file_type = case.split()
    got, want = describe_mixture(model, file_type), GOLDENS[case]
    assert dict(part.split("=") for part in got.split(", ")) == dict(part.split("=") for part in want.split(", "))


def test_the_golden_file_has_all_types_that_are_mixtures():
    known = {case.split()[1] for case in GOLDENS}
    assert known == {name.lower() for name in FILE_TYPES} - {"f32", "f16", "q2_k_s", "q4_1", "q5_1"}
    assert {one.dtype for one in FILE_TYPES.values()} <= set(WRITABLE_DTYPES)


def test_order_in_the_file_does_not_change_the_mixture():
    request, weights = TypeRequest(parse_file_type("q4_k_m")), list_weights("llama")
    first = choose_dtypes(weights, request, FACTS["llama"])
    assert choose_dtypes(weights[::-1], request, FACTS["llama"]) == first


def test_importances_change_the_early_down_matrices():
    weights, facts = list_weights("llama"), ModelFacts("llama", LAYERS, query_groups=4, has_importances=True)
    with_them = choose_dtypes(weights, TypeRequest(parse_file_type("q4_0")), facts)
    assert [with_them[f"blk.{i}.ffn_down.weight"] for i in (0, 1, 2)] == [DType.Q4_1, DType.Q4_1, DType.Q4_0]
    with_them = choose_dtypes(weights, TypeRequest(parse_file_type("iq4_xs")), facts)
    assert with_them["blk.0.ffn_down.weight"] is DType.IQ4_XS


def test_large_models_store_values_in_more_bits():
    weights = [Weight(f"blk.{i}.attn_v.weight", (WIDTH, WIDTH)) for i in range(80)]
    request = TypeRequest(parse_file_type("q4_k_m"))
    large, small = (ModelFacts("llama", 80, query_groups=groups) for groups in (8, 1))
    assert DType.Q4_K not in choose_dtypes(weights, request, large).values()
    assert DType.Q4_K in choose_dtypes(weights, request, small).values()


def test_wishes_of_the_user_come_before_the_mixture():
    assert set(re.findall(r"=(\w+)", describe_mixture("llama", "q4_k_m", is_pure=True))) == {"q4_k"}
    overrides = [(re.compile("ffn_(up|down)"), DType.Q8_0), (re.compile(r"blk\.1\d\.ffn"), DType.Q2_K)]
    got = describe_mixture("llama", "q4_k_m", overrides=overrides)
    assert "ffn_gate=10*q4_k 6*q2_k" in got
    assert "ffn_up=q8_0, ffn_down=q8_0" in got
    got = describe_mixture("llama", "q4_k_m", output_dtype=DType.Q8_0, embedding_dtype=DType.BF16)
    assert got.startswith("output=q8_0, token_embd=bf16, ")
    assert describe_mixture("gqa1", "q4_k_m", output_dtype=DType.Q5_K).startswith("token_embd=q5_k")
    assert describe_mixture("llama", "q4_k_m", keeps_output=True).startswith("output=f32, ")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_q.weight", (8, 8), True),
        ("blk.0.attn_q.weight", (1, 8), False),
        ("blk.0.attn_q.bias", (8, 8), False),
        ("blk.0.ffn_gate_inp.weight", (8, 8), False),
        ("blk.0.attn_norm.weight", (8, 8), False),
        ("position_embd.weight", (8, 8), False),
        ("blk.0.time_mix_w1.weight", (8, 8), False),
        ("blk.0.hc_base.weight", (8, 8), True),
    ],
)
def test_only_matrices_that_products_read_are_quantised(name, shape, expected):
    assert is_quantisable(Weight(name, shape), "llama") is expected
    assert not is_quantisable(Weight(name, shape, DType.I32), "llama")
    assert not is_quantisable(Weight("blk.0.hc_base.weight", (8, 8)), "glm5-next")


def test_rows_without_whole_blocks_have_smaller_blocks_or_floats():
    for dtype, smaller in FALLBACK_DTYPES.items():
        assert fit_dtype_to_columns(dtype, 512) is dtype
        assert fit_dtype_to_columns(dtype, 288) is smaller
        assert fit_dtype_to_columns(dtype, 40) is DType.F16
    assert fit_dtype_to_columns(DType.Q8_0, 40) is DType.F16


def test_types_are_named_in_any_case_and_others_are_refused_by_name():
    assert parse_file_type("q4_k").name == "Q4_K_M"
    with pytest.raises(ModelError, match=r"^type NVFP4: it is a dtype of tensors, but not a type of files; give "):
        parse_file_type("nvfp4")
    with pytest.raises(ModelError, match=r"^there is no type 'q4_k_n'; did you mean Q4_K_"):
        parse_file_type("q4_k_n")
