"""Plans for hardware that is not there, and for models of which there is only a header."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter, quant_shape_to_byte_shape

from hocket import ops
from hocket.cli import main
from hocket.frontends.models import Step
from hocket.frontends.open import open_model
from hocket.frontends.planning import step_graph
from hocket.graph import BackendError, Graph, PlanError, input, weight
from hocket.scheduler import load, plan_for
from hocket.scheduler.fits import memory_problem
from hocket.scheduler.simulate import LINKS, MACHINES, simulate

SECONDS = 5.0
"""What planning a large model may cost on two cores."""

# ------------------------------------------------------------------------------------- headers of models that are large


def write_header(path, architecture, numbers, tensors):
    """A GGUF file without its weights: `tensors` gives shape (in NumPy order) and type by name."""
    writer = GGUFWriter(path, architecture)
    add = {int: writer.add_uint32, float: writer.add_float32}
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


def llama_70b(path, layers=80):
    """The shapes of Llama-3-70B."""
    width, heads, kv_heads, inner, vocabulary = 8192, 64, 8, 28672, 128256
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


@pytest.fixture(scope="module", params=LARGE)
def large(request, tmp_path_factory):
    """A large model of which there is only the header."""
    return LARGE[request.param](tmp_path_factory.mktemp("header") / f"{request.param}.gguf")


def test_a_large_model_is_planned_for_eight_devices_in_five_seconds(large, capsys):
    start = time.process_time()
    assert main(["plan", large, "--simulate", "h200:8,nvlink", "-c", "4096"]) == 0
    taken = time.process_time() - start
    out = capsys.readouterr().out
    assert "a run estimated" in out
    assert re.search(r"h200:7 +\d", out)
    assert taken < SECONDS, f"{taken:.1f} s of processor time"


def test_auto_predicts_for_eight_devices_no_more_than_for_one(large):
    graph, _ = step_graph(large, context=4096, tokens=1)
    simulation = simulate("h200:8,nvlink")
    one = plan_for(graph, simulation.group[:1], hardware=simulation.hardware)
    many = plan_for(graph, simulation.group, split_mode="auto", hardware=simulation.hardware)
    assert memory_problem(one) is None
    assert many.cost.total <= one.cost.total * (1 + 1e-9)


@pytest.mark.parametrize("devices", ["h200:2,nvlink", "h200:2,ethernet", "rtx4090:4,pcie4", "cpu:2"])
def test_auto_never_predicts_more_than_one_device_where_that_fits(devices, tmp_path):
    for path in (llama_70b(tmp_path / "a.gguf", layers=2), qwen_80b(tmp_path / "b.gguf", layers=4)):
        graph, _ = step_graph(path, context=1024, tokens=1)
        simulation = simulate(devices)
        one = plan_for(graph, simulation.group[:1], hardware=simulation.hardware)
        many = plan_for(graph, simulation.group, split_mode="auto", hardware=simulation.hardware)
        assert memory_problem(one) is None
        assert many.cost.total <= one.cost.total * (1 + 1e-9)


def test_a_context_that_does_not_fit_comes_with_one_that_does(tmp_path, capsys):
    path = llama_70b(tmp_path / "model.gguf", layers=40)
    flags = ["--simulate", "rtx4090", "-c"]
    assert main(["plan", path, *flags, "8192"]) == 0
    path = llama_70b(tmp_path / "larger.gguf", layers=46)
    assert main(["plan", path, *flags, "8192"]) == 1
    fitting = int(re.search(r"--ctx-size (\d+)", capsys.readouterr().err)[1])
    assert 1024 <= fitting < 8192
    assert main(["plan", path, *flags, str(fitting)]) == 0
    assert main(["plan", path, *flags, str(fitting + 256)]) == 1


def test_weights_that_do_not_fit_come_with_the_number_of_devices_that_would_do(tmp_path, capsys):
    path = llama_70b(tmp_path / "model.gguf")
    assert main(["plan", path, "--simulate", "rtx3090:1", "-c", "1024"]) == 1
    said = capsys.readouterr().err
    number = int(re.search(r"use (\d+) such devices", said)[1])
    assert "fewer bits" in said
    assert main(["plan", path, "--simulate", f"rtx3090:{number}", "-c", "1024", "--split-mode", "tensor"]) == 0


def test_devices_of_no_split_are_told_of_the_modes_that_split(tmp_path, capsys):
    path = llama_70b(tmp_path / "model.gguf")
    assert main(["plan", path, "--simulate", "rtx3090:2", "-c", "1024", "--split-mode", "none"]) == 1
    assert "--split-mode tensor" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("text", "devices", "link"),
    [
        ("h200:8,nvlink", 8, "nvlink"),
        ("cpu:2", 2, "memory"),
        ("rtx3090:2,pcie4", 2, "pcie4"),
        ("h100", 1, "nvlink"),
        ("a100:4,ethernet", 4, "ethernet"),
        ("rtx4090:1,rtx3090:1,pcie5", 2, "pcie5"),
    ],
)
def test_hardware_is_read_from_its_name(text, devices, link):
    simulation = simulate(text)
    assert len({str(d) for _, d in simulation.group}) == devices
    assert simulation.hardware.link_latency == LINKS[link].latency
    for backend, device in simulation.group:
        assert device.memory == MACHINES[backend.kind].memory


@pytest.mark.parametrize(
    "text",
    ["", "abacus:3", "h200:0", "h200:-1", "h200:x", "h200:1:2", "nvlink", "h200,nvlink,pcie4", "h200:999", "h200:٣"],
)
def test_unknown_hardware_is_refused_with_what_is_known(text):
    with pytest.raises(PlanError) as why:
        simulate(text)
    assert "h200" in str(why.value)
    assert "nvlink" in str(why.value)
    assert "\n" not in str(why.value)


def test_devices_of_several_kinds_are_judged_by_the_slowest():
    mixed = simulate("h200:1,cpu:1,pcie4").hardware
    assert mixed.flops == MACHINES["cpu"].flops
    assert mixed.link_bandwidth == LINKS["pcie4"].bandwidth


def test_a_simulated_device_refuses_to_run_and_says_why():
    x = input("x", (4,))
    made = plan_for(Graph({"y": ops.add(x, weight("w", (4,)))}), simulate("h200:1").group)
    with pytest.raises(BackendError, match="h200 is simulated and cannot allocate"):
        load(made, {"w": np.ones(4, np.float32)})


def test_a_simulated_device_keeps_weights_as_the_file_has_them(tmp_path):
    path = llama_70b(tmp_path / "model.gguf", layers=1)
    model = open_model(path, header_only=True)
    graph = model.graph(Step(1, 1, 64, 64, 1))
    made = plan_for(graph, simulate("h200:1").group)
    assert made.lanes[0].memory()["weight"] == sum(v.spec.nbytes for v in graph.weights)
