"""Folders that `transformers` saves have its logits in hocket, and so have their GGUF files."""

import numpy as np
import pytest

from hocket.frontends.safetensors import write_folder_as_gguf

from ...given.models.hugging_face import SIZES, TOKENS, compute_logits, compute_worst_nmse

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
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
    ("Phi3", {"sliding_window": None, "bos_token_id": 1, "eos_token_id": 2}),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{f}-{'-'.join(c)}" for f, c in CASES])
def test_a_folder_and_its_gguf_file_have_the_logits_of_transformers(family, changes, tmp_path):
    torch.manual_seed(3)
    config_name, class_name = (
        f"{family}{'Text' if family in ('Gemma3', 'Qwen3_5') else ''}Config",
        f"{family}ForCausalLM",
    )
    config = getattr(transformers, config_name)(**SIZES | changes)
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that differ from 1 and 0, and logits that are not flat
            parameter.add_(torch.randn_like(parameter) * 0.08)
        golden = model(torch.tensor([TOKENS])).logits[0].numpy()
    folder, file = tmp_path / "folder", tmp_path / "model.gguf"
    model.save_pretrained(folder)
    write_folder_as_gguf(folder, file)
    logits = [compute_logits(path) for path in (folder, file)]
    assert compute_worst_nmse(logits[0], golden) <= 1e-8
    assert np.array_equal(logits[0], logits[1])
