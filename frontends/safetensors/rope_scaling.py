"""The rotary embedding of a folder: metadata pairs, and tensors with divisors of frequencies.

The kinds are the values of ``rope_type`` in transformers. A divisor tensor has one float32 for each rotated pair.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import format_count
from ..gguf import Tensor
from ..gguf.mapped_file import MappedFile
from .derived_tensor import derive_tensor
from .families import FolderFamily
from .json_files import GGUF_REMEDY, JsonObject
from .write_gguf import Pair

KINDS_WITH_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")
MAX_YARN_SCALE = 1_000_000
"""The largest ``mscale`` and ``mscale_all_dim``; published files have at most 1."""
PHI3_KINDS = {"su": "longrope", "yarn": "longrope"}
"""Older names of LongRoPE in folders of phi3."""


def read_rope_parameters(config: JsonObject) -> JsonObject:
    """Return the parameters of the rotary embedding of full attention, with `rope_theta` and `rope_type`.

    Older files have them in ``rope_scaling`` and ``rope_theta``, newer ones in ``rope_parameters``.
    """
    rope = config.get_object_or_empty("rope_scaling")
    if not rope.pairs:
        rope = config.get_object_or_empty("rope_parameters")
    outer = rope
    if "full_attention" in rope.pairs:
        rope = rope.get_object_or_empty("full_attention")
        _require_default_rope_in_windowed_layers(config, outer, rope)
    kind = rope.get_text("rope_type", rope.get_text("type", "default"))
    if config.get_text("model_type", "") == "phi3":
        kind = PHI3_KINDS.get(kind, kind)
    pairs = dict(rope.pairs) | {
        "rope_type": kind,
        "rope_theta": rope.get_finite_number("rope_theta", config.get_finite_number("rope_theta", 1e4)),
        "truncate": outer.get_boolean("truncate", True),
    }
    if kind in KINDS_WITH_ORIGINAL_CONTEXT:
        whole = config.require_positive_integer("max_position_embeddings")
        stated = config.get_nonnegative_integer("original_max_position_embeddings")
        pairs["original_max_position_embeddings"] = (
            stated or rope.get_nonnegative_integer("original_max_position_embeddings") or whole
        )
    return JsonObject(config.path, pairs)


def _require_default_rope_in_windowed_layers(config: JsonObject, outer: JsonObject, full: JsonObject) -> None:
    """Raise `ModelError` if layers with a window have a rotary embedding that GGUF cannot express."""
    local = outer.get_object_or_empty("sliding_attention")
    is_gemma = config.get_text("model_type", "") == "gemma3_text"
    kind = local.get_text("rope_type", local.get_text("type", "default"))
    if local.pairs and (kind != "default" if is_gemma else dict(local.pairs) != dict(full.pairs)):
        raise config.make_error(f"rope_parameters of sliding_attention have the kind {kind[:40]!r}", GGUF_REMEDY)


def read_head_size(config: JsonObject) -> int:
    """Return the size of an attention head: ``head_dim``, or the model width divided by the number of heads."""
    size = config.get_nonnegative_integer("head_dim")
    return size or config.require_positive_integer("hidden_size") // config.require_positive_integer(
        "num_attention_heads"
    )


def read_rotated_size(family: FolderFamily, config: JsonObject) -> int:
    """Return the number of rotated elements of an attention head.

    Raises:
        ModelError: The number is odd, or not from 2 to the head size.
    """
    size = rotated = read_head_size(config)
    if family.rotary_share is not None:
        share = config.get_finite_number("partial_rotary_factor", family.rotary_share)
        share = read_rope_parameters(config).get_finite_number("partial_rotary_factor", share)
        rotated = int(size * share) if 0 < share <= 1 else 0
    if rotated % 2 or not 2 <= rotated <= 1 << 16:
        raise config.make_error(f"{rotated} of {size} elements of a head are rotated; need an even number")
    return rotated


def read_rope_pairs(family: FolderFamily, config: JsonObject) -> dict[str, Pair]:
    """Return the metadata pairs of the rotary embedding, without the prefix of the architecture.

    The kind ``dynamic`` has no effect up to ``max_position_embeddings``, which is the context length in GGUF.

    Raises:
        ModelError: The family has no such kind, or a number is out of range.
    """
    rope = read_rope_parameters(config)
    kind = rope.get_text("rope_type", "default")
    if kind not in family.rope_kinds:
        raise config.make_error(
            f"rope_type {kind[:40]!r} is not supported; need {', '.join(family.rope_kinds)}", GGUF_REMEDY
        )
    pairs: dict[str, Pair] = {}
    if kind == "linear":
        pairs |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.get_finite_number("factor", 1.0)}
    elif kind == "yarn":
        pairs |= _read_yarn_pairs(config, rope)
    elif kind == "longrope":
        if family.architecture != "phi3":  # as in llama.cpp's converter
            pairs["rope.scaling.type"] = kind
        pairs["rope.scaling.original_context_length"] = rope.require_positive_integer(
            "original_max_position_embeddings"
        )
        pairs["rope.scaling.attn_factor"] = _compute_longrope_magnitude(config, rope)
    return pairs | {"rope.freq_base": rope.get_finite_number("rope_theta", 1e4)}


def _read_rope_context_factor(config: JsonObject, rope: JsonObject) -> float:
    """Return the factor of RoPE's context extension: ``factor``, or the context divided by the original one."""
    context = config.require_positive_integer("max_position_embeddings")
    return rope.get_finite_number("factor", context / rope.require_positive_integer("original_max_position_embeddings"))


def _read_yarn_pairs(config: JsonObject, rope: JsonObject) -> dict[str, Pair]:
    factor = _read_rope_context_factor(config, rope)
    pairs: dict[str, Pair] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.require_positive_integer("original_max_position_embeddings"),
    }
    for source, name in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if rope.pairs.get(source) is not None:
            pairs[f"rope.scaling.{name}"] = rope.get_finite_number(source, 1.0)
    usual = _compute_yarn_magnitude(factor, 1.0)
    scales = [rope.get_finite_number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if not all(0 <= scale <= MAX_YARN_SCALE for scale in scales):
        raise rope.make_error(f"mscale and mscale_all_dim are {scales}; need numbers of 0 to {MAX_YARN_SCALE}")
    ratio = math.prod(_compute_yarn_magnitude(factor, m) ** sign for m, sign in zip(scales, (1, -1), strict=True))
    magnitude = rope.get_finite_number("attention_factor", ratio if all(scales) else usual)
    if magnitude != usual:
        pairs["rope.scaling.attn_factor"] = magnitude / usual
    if not rope.get_boolean("truncate", True):
        pairs["rope.scaling.yarn_truncate"] = False
    return pairs


def _compute_yarn_magnitude(factor: float, scale: float) -> float:
    """Return the factor of cosine and sine in YaRN: ``1 + 0.1 scale ln(factor)`` (Peng et al., 2023)."""
    return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0


def _compute_longrope_magnitude(config: JsonObject, rope: JsonObject) -> float:
    """Return the factor of cosine and sine in LongRoPE: ``sqrt(1 + ln(factor) / ln(original context))``."""
    factor, context = (
        _read_rope_context_factor(config, rope),
        rope.require_positive_integer("original_max_position_embeddings"),
    )
    usual = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 < context else 1.0
    return rope.get_finite_number("attention_factor", usual)


def make_rope_divisor_tensors(family: FolderFamily, config: JsonObject) -> dict[str, Tensor]:
    """Return the tensors with divisors of rotary frequencies, by their names in GGUF; only two kinds have them.

    - ``llama3``: ``rope_freqs.weight`` for all contexts.
    - ``longrope``: ``rope_factors_short.weight`` up to the original context, ``rope_factors_long.weight`` above it.

    Raises:
        ModelError: A number is missing or out of range.
    """
    rope, size = read_rope_parameters(config), read_rotated_size(family, config)
    kind = rope.get_text("rope_type", "")
    divisors: dict[str, np.ndarray | Sequence[float]] = {}
    if kind == "llama3":
        divisors["rope_freqs.weight"] = _compute_llama3_divisors(rope, size)
    elif kind == "longrope":
        for length in ("long", "short"):
            divisors[f"rope_factors_{length}.weight"] = _read_divisors(rope, f"{length}_factor", size // 2)
    return {name: _make_constant_tensor(config, name, values) for name, values in divisors.items()}


def _compute_llama3_divisors(rope: JsonObject, size: int) -> np.ndarray:
    """Return the divisors of Llama 3.1: short waves have 1, long waves have `factor`, and a ramp lies between."""
    factor, low, high = (
        rope.get_finite_number(key, default)
        for key, default in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    context = rope.require_positive_integer("original_max_position_embeddings")
    theta = rope.get_finite_number("rope_theta", 1e4)
    if min(factor, low, theta) <= 0 or high <= low:
        raise rope.make_error("the llama3 rope parameters need 0 < low_freq_factor < high_freq_factor")
    waves = 2 * math.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = (context / waves - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, middle))


def _read_divisors(rope: JsonObject, key: str, count: int) -> Sequence[float]:
    values = rope.get_list_or_empty(key)
    numbers = [float(v) for v in values if isinstance(v, int | float) and 1e-6 < v < 1e6 and not isinstance(v, bool)]
    if len(numbers) != len(values) or len(numbers) != count:
        raise rope.make_error(
            f"{key} has {format_count(len(values), 'entry', 'entries')}; need {count} positive numbers"
        )
    return numbers


def _make_constant_tensor(config: JsonObject, name: str, values: np.ndarray | Sequence[float]) -> Tensor:
    """Return a float32 vector that is in no file of the folder."""
    elements = np.asarray(values, "<f4")
    data = mmap.mmap(-1, elements.nbytes)
    data[:] = elements.tobytes()
    # release() of anonymous memory would lose the elements, so they are returned at each read
    file = MappedFile(config.path, data, elements.nbytes, zlib.crc32(elements.tobytes()))
    source = Tensor(name, elements.shape, DType.F32, file, 0)
    return derive_tensor(
        source, name, shape=source.shape, dtype=DType.F32, change="rope factors", compute=lambda _: elements
    )
