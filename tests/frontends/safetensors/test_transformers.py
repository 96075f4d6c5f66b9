"""Folders that `transformers` saves have its logits in hocket, and so have their GGUF files."""

import json

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.safetensors import write_folder_as_gguf

from ...given.models.hugging_face import SIZES, TOKENS, compute_logits, compute_worst_nmse

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
SHARP_YARN = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
UNROUNDED_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7}
GPT_OSS = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
PHI3 = {"bos_token_id": 1, "eos_token_id": 2}
QWEN3_NEXT = {"head_dim": 32, "num_hidden_layers": 4, "shared_expert_intermediate_size": 48, **DELTA_NET, **EXPERTS}


def make_longrope(pairs: int, original: int) -> dict[str, object]:
    """LongRoPE; 24 tokens in a context of 64 use the long factors if the original context is shorter than 24."""
    return {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original},
        "short_factor": [1.0 + 0.01 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.3 * i for i in range(pairs)],
    }


CASES = [
    ("Llama", {"tie_word_embeddings": False}),
    ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("Llama", {"head_dim": 32, "rope_parameters": LINEAR}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
    (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7}),
    (
        "Qwen3Next",
        {
            **{"head_dim": 32, "num_hidden_layers": 4, **DELTA_NET},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
            **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        },
    ),
    ("Qwen3_5", {"head_dim": 32, "num_hidden_layers": 4, **DELTA_NET}),
    (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": YARN,
        },
    ),
    ("Phi3", {"sliding_window": None, **PHI3}),
]
UNUSUAL_CASES = {
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "yarn with betas": ("Llama", {"rope_parameters": SHARP_YARN}),
    "yarn without rounding": ("Qwen2", {"rope_parameters": UNROUNDED_YARN}),
    "llama3 in qwen2": ("Qwen2", {"rope_parameters": LLAMA3}),
    "long factors": ("Qwen3", {"head_dim": 16, "rope_parameters": make_longrope(8, 16)}),
    "short factors": ("Llama", {"rope_parameters": make_longrope(8, 64)}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "window": ("Mistral", {"sliding_window": 8}),
    "late windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "window in a layer": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, WINDOW, FULL]},
    ),
    "unnormalised experts": ("Qwen3Moe", {"head_dim": 32, "mlp_only_layers": [1], **EXPERTS}),
    "experts with windows": (
        "Qwen3Moe",
        {"head_dim": 32, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 8, **EXPERTS},
    ),
    "irregular delta nets": ("Qwen3Next", {**QWEN3_NEXT, "layer_types": [FULL, DELTA, DELTA, FULL]}),
    "dense delta nets": ("Qwen3Next", {**QWEN3_NEXT, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_5 experts": ("Qwen3_5Moe", QWEN3_NEXT),
    "gemma3 layers": (
        "Gemma3",
        {**GEMMA, "query_pre_attn_scalar": 24, "layer_types": [FULL, WINDOW, FULL, WINDOW, WINDOW, WINDOW, FULL]},
    ),
    "gemma3 period": ("Gemma3", {**GEMMA, "layer_types": [WINDOW, WINDOW, FULL] * 2 + [WINDOW]}),
    "gemma3 yarn": ("Gemma3", {**GEMMA, "rope_parameters": {FULL: YARN, WINDOW: PLAIN}}),
    "gpt-oss yarn": ("GptOss", {**GPT_OSS, "rope_parameters": YARN | {"truncate": False}}),
    "gpt-oss layers": (
        "GptOss",
        {**GPT_OSS, "rope_parameters": PLAIN, "layer_types": [FULL, FULL, WINDOW], "swiglu_limit": 2.0},
    ),
    "phi3 window": ("Phi3", {**PHI3, "sliding_window": 8}),
    "phi3 longrope": (
        "Phi3",
        {
            **{**PHI3, "hidden_size": 128, "original_max_position_embeddings": 16},
            "rope_parameters": make_longrope(12, 16) | {"partial_rotary_factor": 0.75},
        },
    ),
}


def make_config(family, changes):
    text = "Text" if family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else ""
    return getattr(transformers, f"{family}{text}Config")(**SIZES | changes)


def randomise(model):
    """Give norms and biases numbers that differ from 1 and 0, so that logits are not flat."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)


def require_equal_logits(model, folder, file, **save_options):
    model.save_pretrained(folder, **save_options)
    with torch.no_grad():
        golden = model.float()(torch.tensor([TOKENS])).logits[0].numpy()
    write_folder_as_gguf(folder, file)
    logits = [compute_logits(path) for path in (folder, file)]
    assert compute_worst_nmse(logits[0], golden) <= 1e-8
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("family", "changes"),
    [*CASES, *UNUSUAL_CASES.values()],
    ids=[*(f"{f}-{'-'.join(c)}" for f, c in CASES), *UNUSUAL_CASES],
)
def test_a_folder_and_its_gguf_file_have_the_logits_of_transformers(family, changes, tmp_path):
    torch.manual_seed(3)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class._from_config(make_config(family, changes), attn_implementation="eager").eval()
    randomise(model)
    require_equal_logits(model, tmp_path / "folder", tmp_path / "model.gguf")


VISION = {
    "Gemma3": {
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        **{"hidden_size": 32, "intermediate_size": 32},
    },
    "Qwen3_5": {
        **{"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
        **{"hidden_size": 32, "intermediate_size": 32},
    },
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Gemma3", GEMMA), ("Qwen3_5", {"head_dim": 32, "num_hidden_layers": 4, **DELTA_NET}), ("Qwen3_5Moe", QWEN3_NEXT)],
    ids=["gemma3", "qwen3_5", "qwen3_5_moe"],
)
def test_the_text_part_of_a_model_of_pictures_has_the_logits_of_transformers(family, changes, tmp_path):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        text_config=make_config(family, changes).to_dict(), vision_config=VISION[family.removesuffix("Moe")]
    )
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    for parameter in model.parameters():  # the frequencies stay float32
        parameter.data = parameter.data.to(torch.bfloat16)
    require_equal_logits(model, tmp_path / "folder", tmp_path / "model.gguf")


def test_joined_experts_in_several_files_have_the_logits_of_transformers(tmp_path):
    torch.manual_seed(3)
    model = transformers.Qwen3MoeForCausalLM(make_config("Qwen3Moe", {"head_dim": 32, **EXPERTS})).eval()
    randomise(model)
    folder = tmp_path / "folder"
    require_equal_logits(model, folder, tmp_path / "model.gguf", save_original_format=False, max_shard_size="60KB")
    assert len([*folder.glob("*.safetensors")]) > 1


@pytest.mark.parametrize(
    ("settings", "reshaped", "message"),
    [
        ({"linear_value_head_dim": 2**31 - 1}, (), "rows; at most 1048576 are accepted"),
        ({"rope_parameters": PLAIN | {"mrope_section": [2**70]}}, (), "need at most 4 numbers of pairs"),
        ({"rope_parameters": PLAIN | {"mrope_section": ["a", 3]}}, (), "need at most 4 numbers of pairs"),
        ({}, ("linear_attn.out_proj.weight", (1, 64, 96)), "which fits no blk.0.ssm_out.weight"),
        ({}, ("mlp.shared_expert_gate.weight", (64, 1)), "which fits no blk.0.ffn_gate_inp_shexp.weight"),
    ],
)
def test_a_damaged_folder_with_delta_nets_is_refused_in_one_line(settings, reshaped, message, tmp_path):
    model = transformers.Qwen3_5MoeForCausalLM(make_config("Qwen3_5Moe", QWEN3_NEXT))
    model.save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    tensors = safetensors_torch.load_file(weights)
    for name in [name for name in tensors if reshaped and name.endswith(reshaped[0])]:
        tensors[name] = tensors[name].reshape(reshaped[1])
    safetensors_torch.save_file(tensors, weights)
    with pytest.raises(ModelError) as caught:
        write_folder_as_gguf(tmp_path, tmp_path / "model.gguf")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
