"""The gated delta nets of qwen3_next and qwen3_5 folders, with the order of heads that GGUF has.

A key head serves neighbouring value heads in the folder. In the architecture qwen35, value head i belongs to key head
``i mod key heads``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from ...graph.dtypes import DType
from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ...ops.quantisation import dequantise
from ..gguf import Tensor
from .derived_tensor import derive_tensor
from .json_files import JsonObject
from .write_gguf import Pair

DELTA_NET_NAME = re.compile(r"model\.layers\.(\d{1,5})\.linear_attn\.(.+)")
SHARED_GATE_NAME = re.compile(r"model\.layers\.(\d{1,5})\.mlp\.shared_expert_gate\.weight")
MAX_HEAD_ROWS = 1 << 20
"""The largest number of rows of all heads of a delta net; Qwen3-Next has 4,096."""
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeltaNetHeads:
    """The numbers and the sizes of key and value heads, and the order of value heads in GGUF.

    A folder stores the value heads of one key head next to each other. With `is_tiled`, GGUF stores the first value
    head of every key head, then the second one of every key head, and so on.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    is_tiled: bool

    def make_value_row_order(self, size: int) -> Indices:
        """Return, for each row of the value heads in the order of GGUF, its row index in the folder.

        A head has `size` rows.
        """
        rows = np.arange(self.values * size)
        return rows.reshape(self.keys, -1, size).swapaxes(0, 1).reshape(-1) if self.is_tiled else rows

    def make_qkv_row_order(self) -> Indices:
        """Return, for each row of queries, keys and values in the order of GGUF, its row index in the folder."""
        before = 2 * self.keys * self.key_size
        return np.concatenate([np.arange(before), before + self.make_value_row_order(self.value_size)])

    def split_qkv_rows_from_gate_rows(self) -> tuple[Indices, Indices]:
        """Split the rows of a joined matrix: return the rows of queries, keys and values, and the rows of gates.

        In such a matrix each key head has its rows of queries, keys, values and gates next to each other.
        """
        shared = self.values // self.keys * self.value_size
        sizes = np.cumsum([self.key_size, self.key_size, shared])
        rows = np.arange(self.keys * (2 * self.key_size + 2 * shared)).reshape(self.keys, -1)
        *inputs, gates = (part.reshape(-1) for part in np.split(rows, sizes, axis=1))
        return np.concatenate(inputs), gates


def read_delta_net_heads(config: JsonObject) -> DeltaNetHeads:
    """Return the heads of the delta nets that ``config.json`` describes.

    Raises:
        ModelError: A number is missing or too large, or the value heads are no multiple of the key heads.
    """
    keys, values, key_size, value_size = (
        config.require_positive_integer(f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    if values % keys:
        raise config.make_error(f"linear_num_value_heads is {values}; need a multiple of linear_num_key_heads, {keys}")
    if (rows := max(keys * key_size, values * value_size)) > MAX_HEAD_ROWS:
        raise config.make_error(f"the heads of delta nets have {rows} rows; at most {MAX_HEAD_ROWS} are accepted")
    return DeltaNetHeads(keys, values, key_size, value_size, config.get_text("model_type", "") != "qwen3_next")


def read_delta_net_pairs(config: JsonObject) -> dict[str, Pair]:
    """Return the metadata of delta nets, without the prefix of the architecture.

    The list ``attention.recurrent_layers`` is there if layers with full attention have no fixed interval.

    Raises:
        ModelError: A number is missing, or a layer has another kind.
    """
    heads, layers = read_delta_net_heads(config), config.require_positive_integer("num_hidden_layers")
    kinds = config.get_list_or_empty("layer_types")
    interval = config.get_nonnegative_integer("full_attention_interval") or (
        kinds.index("full_attention") + 1 if "full_attention" in kinds else 4
    )
    if kinds and (len(kinds) < layers or not {*map(str, kinds)} <= {"full_attention", "linear_attention"}):
        raise config.make_error(
            f"layer_types needs full_attention or linear_attention for each of {format_count(layers, 'layer')}"
        )
    is_recurrent = [kind == "linear_attention" for kind in kinds[:layers]]
    irregular: dict[str, Pair] = {}
    if is_recurrent and is_recurrent != [(i + 1) % interval != 0 for i in range(layers)]:
        irregular["attention.recurrent_layers"] = is_recurrent
    return irregular | {
        "ssm.conv_kernel": config.require_positive_integer("linear_conv_kernel_dim"),
        "ssm.state_size": heads.key_size,
        "ssm.group_count": heads.keys,
        "ssm.time_step_rank": heads.values,
        "ssm.inner_size": heads.values * heads.value_size,
        "full_attention_interval": interval,
    }


def convert_delta_net_tensor(config: JsonObject, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Convert a tensor of a delta net in a folder to its GGUF tensors, by name.

    The gate of a shared expert is converted too. Other tensors give none.

    Raises:
        ModelError: The tensor has another shape than the heads of ``config.json``.
    """
    if match := SHARED_GATE_NAME.fullmatch(name):
        return _derive_reordered_tensor(
            tensor, f"blk.{int(match[1])}.ffn_gate_inp_shexp.weight", tensor.shape[-1:], is_float=True
        )
    match = DELTA_NET_NAME.fullmatch(name)
    if match is None:
        return {}
    heads, prefix, kind = read_delta_net_heads(config), f"blk.{int(match[1])}.", match[2]
    whole, joined = heads.make_qkv_row_order(), heads.split_qkv_rows_from_gate_rows()
    by_value, by_head = heads.make_value_row_order(heads.value_size), heads.make_value_row_order(1)
    rows: dict[str, tuple[tuple[str, Indices], ...]] = {
        "in_proj_qkvz.weight": (("attn_qkv.weight", joined[0]), ("attn_gate.weight", joined[1])),
        "in_proj_ba.weight": (("ssm_ba.weight", np.arange(2 * heads.values)),),
        "in_proj_qkv.weight": (("attn_qkv.weight", whole),),
        "in_proj_z.weight": (("attn_gate.weight", by_value),),
        "in_proj_a.weight": (("ssm_alpha.weight", by_head),),
        "in_proj_b.weight": (("ssm_beta.weight", by_head),),
        "conv1d.weight": (("ssm_conv1d.weight", whole),),
        "A_log": (("ssm_a", by_head),),
        "dt_bias": (("ssm_dt.bias", by_head),),
        "norm.weight": (("ssm_norm.weight", np.arange(heads.value_size)),),
    }
    if kind == "out_proj.weight":
        _require_length(tensor, -1, len(by_value))
        return _derive_reordered_tensor(tensor, f"{prefix}ssm_out.weight", tensor.shape, order=by_value, axis=1)
    converted: dict[str, Tensor] = {}
    for own, order in rows.get(kind, ()):
        _require_length(tensor, 0, sum(len(part) for _, part in rows[kind]))
        shape = (len(order), *(tensor.shape[2:] if kind == "conv1d.weight" else tensor.shape[1:]))
        is_float, change = len(shape) == 1 or kind == "conv1d.weight", _negate_exponential if kind == "A_log" else None
        converted |= _derive_reordered_tensor(
            tensor, prefix + own, shape, order=order, is_float=is_float, change=change
        )
    return converted


def _require_length(tensor: Tensor, axis: int, length: int) -> None:
    if tensor.shape[axis] != length:
        raise tensor.file.make_error(
            f"tensor {tensor.name} has the shape {list(tensor.shape)}; need {format_count(length, 'entry', 'entries')}"
        )


def _negate_exponential(elements: np.ndarray) -> np.ndarray:
    """Return ``-exp(elements)``: the decay rates of heads, which a folder stores as logarithms (``A_log``)."""
    return -np.exp(elements)


def _derive_reordered_tensor(
    tensor: Tensor,
    name: str,
    shape: tuple[int, ...],
    *,
    order: Indices | None = None,
    axis: int = 0,
    is_float: bool = False,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """Derive a tensor of GGUF with reordered entries from a tensor of a folder; return it by its name.

    Args:
        tensor: The tensor of the folder.
        name: The name in GGUF.
        shape: The shape in GGUF.
        order: The entry of `tensor` for each entry along `axis`; by default all in their order.
        axis: The axis of these entries.
        is_float: Whether the elements become float32.
        change: A function of float32 elements that computes the new ones.

    Raises:
        ModelError: The tensor has another shape than these entries.
    """
    size = tensor.shape[axis] if axis < len(tensor.shape) else 0
    if prod(shape) * size != prod(tensor.shape) * (size if order is None else len(order)):
        raise tensor.file.make_error(f"tensor {tensor.name} has the shape {list(tensor.shape)}, which fits no {name}")
    dtype = DType.F32 if is_float else tensor.dtype
    moved = "" if order is None else f"axis {axis} from {order[:: max(1, len(order) // 64)].tolist()} and "
    compute = partial(_compute_elements, tensor.dtype, dtype, shape, order, axis, change)
    description = f"{moved}{change.__name__ if change else 'no change'} as {dtype} {shape}"
    return {name: derive_tensor(tensor, name, shape=shape, dtype=dtype, change=description, compute=compute)}


def _compute_elements(
    source: DType,
    dtype: DType,
    shape: tuple[int, ...],
    order: Indices | None,
    axis: int,
    change: Callable[[np.ndarray], np.ndarray] | None,
    elements: np.ndarray,
) -> np.ndarray:
    if dtype is not source:
        elements = dequantise(elements, source)
    if change is not None:
        elements = change(elements)
    return (elements if order is None else elements.take(order, axis=axis)).reshape(shape)
