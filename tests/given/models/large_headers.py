"""GGUF files of large models without their weights: all that a plan needs."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter, quant_shape_to_byte_shape


def write_header(path, architecture, numbers, tensors):
    """A GGUF file without its weights: `tensors` gives shape (in NumPy order) and type by name."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model("no_vocab")  # llama.cpp opens it, too
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in numbers.items():
        add[type(value)](f"{architecture}.{key}", value)
    for name, (shape, kind) in tensors.items():
        if kind == Q.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            stored = quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return str(path)


def llama(path, layers, width, heads, inner):
    """Write the shapes of a Llama 3, with eight key heads for any size."""
    kv_heads, vocabulary = 8, 128256
    kv_width = width // heads * kv_heads
    numbers = {
        **{"block_count": layers, "context_length": 8192, "embedding_length": width, "feed_forward_length": inner},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads, "vocab_size": vocabulary},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5, "rope.dimension_count": width // heads},
    }
    matrices = {
        **{"attn_q": (width, width), "attn_k": (kv_width, width), "attn_v": (kv_width, width)},
        **{"attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width)},
        "ffn_down": (width, inner),
    }
    tensors = {"token_embd.weight": ((vocabulary, width), Q.Q4_0), "output_norm.weight": ((width,), Q.F32)}
    tensors["output.weight"] = ((vocabulary, width), Q.Q6_K)
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}.weight": ((width,), Q.F32) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{i}.{name}.weight": (shape, Q.Q4_0) for name, shape in matrices.items()}
    return write_header(path, "llama", numbers, tensors)


def llama_8b(path, layers=32):
    """The shapes of Llama-3-8B."""
    return llama(path, layers, 4096, 32, 14336)


def llama_70b(path, layers=80):
    """The shapes of Llama-3-70B."""
    return llama(path, layers, 8192, 64, 28672)


def llama_405b(path, layers=126):
    """The shapes of Llama-3.1-405B."""
    return llama(path, layers, 16384, 128, 53248)


def qwen_235b(path, layers=94):
    """The shapes of Qwen3-235B-A22B."""
    width, heads, kv_heads, size, experts, inner, vocabulary = 4096, 64, 4, 128, 128, 1536, 151936
    numbers = {
        **{"block_count": layers, "context_length": 40960, "embedding_length": width, "vocab_size": vocabulary},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": size},
        **{"attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
        **{"rope.dimension_count": size, "expert_count": experts, "expert_used_count": 8},
        **{"expert_feed_forward_length": inner, "feed_forward_length": inner},
    }
    matrices = {
        **{"attn_q": (heads * size, width), "attn_k": (kv_heads * size, width), "attn_v": (kv_heads * size, width)},
        **{"attn_output": (width, heads * size), "ffn_gate_exps": (experts, inner, width)},
        **{"ffn_up_exps": (experts, inner, width), "ffn_down_exps": (experts, width, inner)},
    }
    vectors = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q_norm": (size,), "attn_k_norm": (size,)}
    vectors["ffn_gate_inp"] = (experts, width)
    tensors = {"token_embd.weight": ((vocabulary, width), Q.Q4_0), "output_norm.weight": ((width,), Q.F32)}
    tensors["output.weight"] = ((vocabulary, width), Q.Q6_K)
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}.weight": (shape, Q.F32) for name, shape in vectors.items()}
        tensors |= {f"blk.{i}.{name}.weight": (shape, Q.Q4_0) for name, shape in matrices.items()}
    return write_header(path, "qwen3moe", numbers, tensors)


def qwen_80b(path, layers=48):
    """The shapes of Qwen3-Next-80B-A3B."""
    width, heads, kv_heads, size, experts, inner, vocabulary = 2048, 16, 2, 256, 512, 512, 151936
    keys, values, state = 16, 32, 128
    numbers = {
        **{"block_count": layers, "context_length": 262144, "embedding_length": width, "vocab_size": vocabulary},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": size},
        **{"attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7},
        **{"rope.dimension_count": 64, "expert_count": experts, "expert_used_count": 10},
        **{"expert_feed_forward_length": inner, "expert_shared_feed_forward_length": inner},
        **{"ssm.conv_kernel": 4, "ssm.inner_size": values * state, "ssm.state_size": state},
        **{"ssm.time_step_rank": values, "ssm.group_count": keys, "full_attention_interval": 4},
    }
    channels = (2 * keys + values) * state
    experts_of = {
        **{"ffn_gate_exps": (experts, inner, width), "ffn_up_exps": (experts, inner, width)},
        **{"ffn_down_exps": (experts, width, inner), "ffn_gate_shexp": (inner, width)},
        **{"ffn_up_shexp": (inner, width), "ffn_down_shexp": (width, inner)},
    }
    recurrent = {
        **{"attn_qkv": (channels, width), "attn_gate": (values * state, width), "ssm_out": (width, values * state)},
        "ssm_ba": (2 * values, width),
    }
    attention = {
        **{"attn_q": (2 * heads * size, width), "attn_k": (kv_heads * size, width)},
        **{"attn_v": (kv_heads * size, width), "attn_output": (width, heads * size)},
    }
    vectors = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
    vectors |= {"ffn_gate_inp.weight": (experts, width), "ffn_gate_inp_shexp.weight": (width,)}
    of_recurrent = {"ssm_conv1d.weight": (channels, 4), "ssm_dt.bias": (values,), "ssm_a": (values,)}
    of_recurrent |= {"ssm_norm.weight": (state,)}
    of_attention = {"attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,)}
    tensors = {"token_embd.weight": ((vocabulary, width), Q.Q4_0), "output_norm.weight": ((width,), Q.F32)}
    tensors["output.weight"] = ((vocabulary, width), Q.Q6_K)
    for i in range(layers):
        attends = i % 4 == 3
        matrices = experts_of | (attention if attends else recurrent)
        small = vectors | (of_attention if attends else of_recurrent)
        tensors |= {f"blk.{i}.{name}.weight": (shape, Q.Q4_0) for name, shape in matrices.items()}
        tensors |= {f"blk.{i}.{name}": (shape, Q.F32) for name, shape in small.items()}
    return write_header(path, "qwen3next", numbers, tensors)


LARGE = {"llama": llama_70b, "qwen3next": qwen_80b}
SHAPES = {
    "Llama-3-8B": llama_8b,
    "Llama-3-70B": llama_70b,
    "Qwen3-Next-80B-A3B": qwen_80b,
    "Qwen3-235B-A22B": qwen_235b,
}
