"""Tiny models of random weights, with the results of PyTorch: fixtures of `architectures`.

    python -m hocket.tests.given.models.encoders [NAMES]      needs transformers, torch and gguf

Most are encoders. llama.cpp has no graph of GPT-J, and its Chameleon with Swin norms differs from the original.
Goldens are in float64, of transformers' own modules where it has the model. Parts that it lacks (ALiBi and two norms
of Jina 2, experts of Nomic) are added to the nearest module here.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from .architectures import add_key, pack_file, weights, write_file

SEED, VOCABULARY, WIDTH, HEADS, INNER = 7, 96, 32, 4, 40
COUNT = 24
"""Tokens, which leave the windows."""
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER}
POSITIONS = {"max_position_embeddings": 64}
BERT = {**SIZES, **POSITIONS, "num_hidden_layers": 2, "type_vocab_size": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 12, "num_heads": HEADS, "d_ff": INNER, "num_layers": 2}
KEYS: Mapping[str, object] = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
}
OF_ENCODERS: Mapping[str, object] = {"attention.causal": False, "pooling_type": 1}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-12}


@dataclass(frozen=True)
class Encoder:
    """A model of transformers, modified by `change`.

    The package ``gguf`` defines the names of its parameters in GGUF files, unless `names` does.
    """

    architecture: str
    model: str
    config: Mapping[str, object]
    keys: Mapping[str, object]
    blocks: int = 2
    change: Callable[[Any], None] = lambda model: None
    names: Mapping[str, str] = field(default_factory=dict)
    parameter: Callable[[str, Any], Any] = lambda title, value: value
    """Convert the values of the tensor ``title`` of the file to a parameter of the model."""
    decoder: bool = False
    run: Callable[[Any, Any], Any] = lambda model, ids: model(input_ids=ids).last_hidden_state


def experts(model: Any) -> None:
    """Give every second block of a NomicBert experts, and the others one matrix before their activation."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.fc2(F.gelu(self.fc1(x)))

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 4, bias=False)
            self.w1, self.w2 = (nn.Parameter(torch.zeros(4, n, m)) for n, m in ((INNER, WIDTH), (WIDTH, INNER)))

        def forward(self, x: Any) -> Any:
            shares, ids = self.layer(x).softmax(-1).topk(2)
            each = torch.einsum("xef,btxf->btxe", self.w2, F.gelu(torch.einsum("xfe,bte->btxf", self.w1, x)))
            chosen = each.gather(2, ids[..., None].expand(*ids.shape, WIDTH))
            return (chosen * shares[..., None]).sum(2)

    for i, layer in enumerate(model.layers):
        layer.mlp = Routed() if i % 2 else Dense()


def jina(model: Any) -> None:
    """Make Jina's second encoder of a BERT: ALiBi, gated units, norms of whole queries and keys, a second norm."""
    from torch import nn
    from torch.nn import functional as F

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(WIDTH, 2 * INNER, bias=False)

        def forward(self, x: Any) -> Any:
            gate, up = self.both(x).chunk(2, -1)
            return F.gelu(gate) * up

    class Twice(nn.Module):
        """The answer of attention is normalised with its residual twice."""

        def __init__(self, old: Any) -> None:
            super().__init__()
            self.old, self.norm = old, nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, answer: Any, x: Any) -> Any:
            return self.norm(self.old(answer, x) + x)

    model.embeddings.position_embeddings.weight.data.zero_()
    model.embeddings.position_embeddings.weight.requires_grad_(False)
    for layer in model.encoder.layer:
        own = layer.attention.self
        own.query, own.key = (nn.Sequential(x, nn.LayerNorm(WIDTH, eps=1e-12)) for x in (own.query, own.key))
        layer.attention.output = Twice(layer.attention.output)
        layer.intermediate = Gated()


def leaning(model: Any, ids: Any) -> Any:
    """Run a BERT with heads that add slopes times distances to their scores."""
    import torch

    places = torch.arange(ids.shape[1], dtype=torch.float64)
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64)
    mask = -slopes[:, None, None] * (places[:, None] - places).abs()
    return model(input_ids=ids, attention_mask=mask[None]).last_hidden_state


def projecting(model: Any) -> None:
    """Give a model the two matrices that EmbeddingGemma puts behind it."""
    from torch import nn

    model.dense_2, model.dense_3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)


def jina_names() -> Iterator[tuple[str, str]]:
    for i in range(2):
        layer, block = f"encoder.layer.{i}", f"blk.{i}"
        for ending in ("weight", "bias"):
            for name in ("query", "key"):
                yield f"{layer}.attention.self.{name}.0.{ending}", f"{block}.attn_{name[0]}.{ending}"
                yield f"{layer}.attention.self.{name}.1.{ending}", f"{block}.attn_{name[0]}_norm.{ending}"
            yield f"{layer}.attention.output.old.dense.{ending}", f"{block}.attn_output.{ending}"
            yield f"{layer}.attention.output.old.LayerNorm.{ending}", f"{block}.attn_output_norm.{ending}"
            yield f"{layer}.attention.output.norm.{ending}", f"{block}.attn_norm_2.{ending}"
        yield f"{layer}.intermediate.both.weight", f"{block}.ffn_up.weight"
    yield "embeddings.position_embeddings.weight", ""


def nomic_names() -> Iterator[tuple[str, str]]:
    for i in range(2):
        layer, block = f"layers.{i}", f"blk.{i}"
        for name in ("gate", "up", "down"):
            yield f"{layer}.mlp.{name}_proj.weight", f"{block}.ffn_{name}.weight"
        for ending in ("weight", "bias"):
            for name in "qkv":
                yield f"{layer}.self_attn.{name}_proj.{ending}", f"{block}.attn_qkv.{ending}"
            yield f"{layer}.self_attn.o_proj.{ending}", f"{block}.attn_output.{ending}"
            yield f"{layer}.post_attention_layernorm.{ending}", f"{block}.attn_output_norm.{ending}"
            yield f"{layer}.post_mlp_layernorm.{ending}", f"{block}.layer_output_norm.{ending}"
            yield f"{layer}.mlp.fc1.{ending}", f"{block}.ffn_up.{ending}"
            yield f"{layer}.mlp.fc2.{ending}", f"{block}.ffn_down.{ending}"
        yield f"{layer}.mlp.layer.weight", f"{block}.ffn_gate_inp.weight"
        yield f"{layer}.mlp.w1", f"{block}.ffn_up_exps.weight"
        yield f"{layer}.mlp.w2", f"{block}.ffn_down_exps.weight"


ROTATED = {**LAYER_NORM, "rope.freq_base": 1000.0}
GEMMA = {
    **SIZES,
    **POSITIONS,
    **{"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 12},
    **{"sliding_window": 8, "use_bidirectional_attention": True},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
MODELS: Mapping[str, Encoder] = {
    "bert-encoder": Encoder("bert", "BertModel", BERT, LAYER_NORM),
    "nomic-bert-encoder": Encoder(
        "nomic-bert",
        "NomicBertModel",
        {**BERT, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        ROTATED,
        names=dict(nomic_names()),
    ),
    "nomic-bert-moe-encoder": Encoder(
        "nomic-bert-moe",
        "NomicBertModel",
        {**BERT, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        {**ROTATED, "expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2},
        change=experts,
        names=dict(nomic_names()),
    ),
    "jina-bert-v2-encoder": Encoder(
        "jina-bert-v2", "BertModel", BERT, LAYER_NORM, change=jina, names=dict(jina_names()), run=leaning
    ),
    "jina-bert-v3-encoder": Encoder(
        "jina-bert-v3",
        "JinaEmbeddingsV3Model",
        {**BERT, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 20000.0},
        names=dict(nomic_names()),
    ),
    "modern-bert-encoder": Encoder(
        "modern-bert",
        "ModernBertModel",
        {
            **SIZES,
            **POSITIONS,
            **{"num_hidden_layers": 4, "local_attention": 8, "layer_types": None, "pad_token_id": 0},
        },
        {
            "attention.layer_norm_epsilon": 1e-5,
            "rope.freq_base": 160000.0,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
        },
        blocks=4,
    ),
    "eurobert-encoder": Encoder(
        "eurobert",
        "EuroBertModel",
        {**SIZES, **POSITIONS, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
        {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": 2, "rope.freq_base": 10000.0},
    ),
    "gemma-embedding-encoder": Encoder(
        "gemma-embedding",
        "Gemma3TextModel",
        GEMMA,
        {
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count_kv": 2,
            **{"attention.key_length": 12, "attention.value_length": 12},
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e6,
        },
        blocks=3,
        change=projecting,
        names={f"dense_{i}.weight": f"dense_{i}.weight" for i in (2, 3)},
        parameter=lambda title, value: value - ("norm" in title),  # the file holds one more than the parameter
        run=lambda model, ids: model.dense_3(model.dense_2(model(input_ids=ids).last_hidden_state)),
    ),
    "t5encoder-gated": Encoder(
        "t5encoder",
        "T5EncoderModel",
        {**T5, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 12},
        {**{"attention.key_length": 12, "attention.value_length": 12}, "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "t5-relu": Encoder(
        "t5",
        "T5EncoderModel",
        {**T5, "feed_forward_proj": "relu", "relative_attention_num_buckets": 32},
        {**{"attention.key_length": 12, "attention.value_length": 12}, "attention.layer_norm_rms_epsilon": 1e-6},
    ),
}


def unpair_rows(title: str, value: Any) -> Any:
    """The rows of queries and keys of Chameleon: neighbours turn together in files, halves of a head in parameters."""
    if not fnmatch(title, "blk.*.attn_[qk]*"):
        return value
    heads = value if "norm" in title else value.reshape(-1, WIDTH // HEADS, WIDTH)
    return np.concatenate([heads[:, ::2], heads[:, 1::2]], axis=1).reshape(value.shape)


CHAMELEON = Encoder(
    "chameleon",
    "ChameleonForConditionalGeneration",
    {
        **SIZES,
        **POSITIONS,
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "vocabulary_map": {"<image>": 3}},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8}
        | {"latent_channels": 8, "num_embeddings": 8, "resolution": 16},
    },
    {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": 2, "swin_norm": False},
    parameter=unpair_rows,
    decoder=True,
    run=lambda model, ids: model(input_ids=ids).logits,
)
DECODERS: Mapping[str, Encoder] = {
    "gptj-dense": Encoder(
        "gptj",
        "GPTJForCausalLM",
        {
            **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_inner": INNER, "n_layer": 2},
            **{"n_positions": 64, "rotary_dim": 4},
        },
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4},
        decoder=True,
        run=lambda model, ids: model(input_ids=ids).logits,
    ),
    "chameleon-dense": CHAMELEON,
    "chameleon-swin": replace(
        CHAMELEON, config={**CHAMELEON.config, "swin_norm": True}, keys={**CHAMELEON.keys, "swin_norm": True}
    ),
}


def write(name: str) -> None:
    """A fixture: the file up to its data, tensors, tokens and hidden rows."""
    import gguf
    import torch
    import transformers

    of = {**MODELS, **DECODERS}[name]
    kind = getattr(transformers, of.model)
    config = kind.config_class(**of.config)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    of.change(model)
    model = model.double()
    numbers = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[of.architecture], of.blocks)
    writer = gguf.GGUFWriter(None, of.architecture)
    writer.add_block_count(of.blocks)
    for key, value in {**KEYS, **({} if of.decoder else OF_ENCODERS), **of.keys}.items():
        add_key(writer, f"{of.architecture}.{key}", value)
    parts: dict[str, list[Any]] = {}
    for path, parameter in model.named_parameters():
        own = "" if path.startswith(("pooler.", "model.vqmodel.")) else of.names.get(path)
        title = known.get_name(path, try_suffixes=(".weight", ".bias")) if own is None else own
        assert title is not None, path
        if title:
            parts.setdefault(title, []).append(parameter)
    for title, parameters in parts.items():
        shape = (sum(p.shape[0] for p in parameters), *parameters[0].shape[1:])
        value = weights(title, shape[::-1], SEED).reshape(shape)
        writer.add_tensor(title, value)
        ends = np.cumsum([p.shape[0] for p in parameters])[:-1]
        for parameter, part in zip(
            parameters, np.split(of.parameter(title, value.astype(np.float64)), ends), strict=True
        ):
            parameter.data = torch.tensor(part)
    tokens = np.random.RandomState(SEED).randint(1, VOCABULARY, COUNT)
    with torch.no_grad():
        rows = of.run(model, torch.tensor(tokens[None]))[0].numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_file(writer, path)
        pack_file(name, path, tokens, rows, SEED)
    sys.stdout.write(f"{name} {math.sqrt(float((rows**2).mean())):.3f}\n")


if __name__ == "__main__":
    for one in sys.argv[1:] or (*MODELS, *DECODERS):
        write(one)
