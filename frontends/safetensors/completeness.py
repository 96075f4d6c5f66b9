"""Checks that a folder has the tensors of all layers, with the sizes that ``config.json`` states.

A tensor that only some layers have is optional in a GGUF file, such as a bias. In a folder it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..gguf import Tensor
from .json_files import JsonObject

BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")
STATED_SIZES = {
    "token_embd.weight": ("vocab_size", 1),
    "ffn_gate.weight": ("intermediate_size", 1),
    "ffn_down_shexp.weight": ("shared_expert_intermediate_size", 0),
    "ffn_gate_exps.weight": ("moe_intermediate_size", 1),
    "ffn_gate_inp.weight": ("num_experts", 1),
}
"""By the name of a tensor in GGUF, without its block: a key of ``config.json``, and whether it counts rows."""


def require_complete_layers(config: JsonObject, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` if a layer has no tensors, or lacks a tensor that a layer of the same kind has.

    The kinds are attention with or without a delta net, each with or without experts.
    """
    count = config.require_positive_integer("num_hidden_layers")
    parts: dict[int, set[str]] = {}
    for name in tensors:
        if match := BLOCK_NAME.fullmatch(name):
            if int(match[1]) >= count:
                raise config.make_error(f"num_hidden_layers is {count}, but tensor {name} is there")
            parts.setdefault(int(match[1]), set()).add(match[2])
    if len(parts) < count:
        missing_layer = next(i for i in range(count) if i not in parts)
        raise config.make_error(f"num_hidden_layers is {count}, but layer {missing_layer} has no tensors")
    first_layers: dict[tuple[bool, ...], int] = {}
    for i, names in sorted(parts.items()):
        if config.get_text("model_type", "") != "phi3" and "ffn_up.weight" in names and "ffn_gate.weight" not in names:
            raise config.make_error(f"layer {i} has up_proj, but no gate_proj")
        kind = ("ssm_out.weight" in names, "ffn_gate_inp.weight" in names)
        other = first_layers.setdefault(kind, i)
        if difference := names ^ parts[other]:
            have, lack = (other, i) if difference & parts[other] else (i, other)
            missing = min(difference & parts[have])
            raise config.make_error(f"layer {lack} has no tensor {missing!r}, but layer {have} has it")


def require_stated_sizes(config: JsonObject, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` if a tensor has another size than the one that ``config.json`` states.

    Other sizes are compared when the model is built; these would only be wrong in a converted file.
    """
    for name, tensor in tensors.items():
        match = BLOCK_NAME.fullmatch(name)
        key, is_row_count = STATED_SIZES.get(match[2] if match else name, ("", 0))
        stated = config.get_nonnegative_integer(key) if key else None
        if stated and tensor.shape[-2 if is_row_count else -1 :][:1] != (stated,):
            raise config.make_error(f"{key} is {stated}, but tensor {name} has the shape {list(tensor.shape)}")
