"""The rotary embedding (RoPE) of a model: the pairs of columns and their frequencies, from the metadata."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

from .... import ops
from ....graph import Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.graph_builder import StepGraphBuilder
from ..inputs.weights import ModelWeights

SCALING_KINDS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of a rotary position embedding (RoPE), the attributes of `ops.rope`, which several layers share.

    Su et al., 2021; YaRN: Peng et al., 2023.
    """

    n_dims: int
    mode: str
    base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 0
    truncate: bool = True

    @classmethod
    def from_keys(
        cls,
        keys: ArchitectureMetadata,
        mode: str,
        head_size: int,
        dimensions: str = "rope.dimension_count",
        multiplier: float = 1.0,
    ) -> Rope:
        """Read the RoPE parameters from the metadata, with the defaults of ``llama_context`` of llama.cpp.

        Args:
            keys: The metadata.
            mode: ``normal`` or ``neox``.
            head_size: Columns of a head.
            dimensions: The key with the number of rotated columns.
            multiplier: Factor of ``rope.scaling.yarn_log_multiplier``.

        Raises:
            ModelError: A value is invalid.
        """
        n_dims = keys.read_count_or_default(dimensions, head_size)
        if n_dims % 2 or n_dims > head_size:
            raise keys.make_key_error(dimensions, f"is {n_dims}; need an even number of at most {head_size}")
        base = cls.read_frequency_base_above_1(keys, "rope.freq_base")
        scaling = keys.read_choice("rope.scaling.type", "linear", SCALING_KINDS)
        factor = (
            keys.read_positive_zero_as_none("rope.scaling.factor")
            or keys.read_positive_zero_as_none("rope.scale_linear")
            or 1.0
        )
        factor = 1.0 if scaling == "none" else factor
        attn_factor = keys.read_positive_zero_as_none("rope.scaling.attn_factor") or 1.0
        ext_factor = keys.read_float32_or_default("rope.scaling.yarn_ext_factor", -1.0)
        if ext_factor < 0.0:  # unset
            ext_factor = 1.0 if scaling == "yarn" else 0.0
        if not ext_factor:
            attn_factor *= keys.read_positive_zero_as_none("rope.scaling.yarn_attn_factor") or 1.0
            return cls(n_dims, mode, base, 1.0 / factor, attn_factor=attn_factor)
        if factor < 1.0:
            raise keys.make_key_error("rope.scaling.factor", f"is {factor}; YaRN needs at least 1")
        return cls(
            n_dims,
            mode,
            base,
            1.0 / factor,
            ext_factor=ext_factor,
            attn_factor=attn_factor * _compute_attn_factor_correction(keys, factor, multiplier),
            beta_fast=keys.read_positive_float32("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.read_positive_float32("rope.scaling.yarn_beta_slow", 1.0),
            original_context=read_original_context_length(keys),
            truncate=keys.read_flag("rope.scaling.yarn_truncate", True),
        )

    def with_half_as_many_rotated_columns(self, keys: ArchitectureMetadata) -> Rope:
        """Return the same RoPE with half as many rotated columns; raise `ModelError` if this number is odd."""
        if self.n_dims % 4:
            raise keys.make_key_error("rope.dimension_count", f"is {self.n_dims}; need a multiple of 4")
        return replace(self, n_dims=self.n_dims // 2)

    @staticmethod
    def read_frequency_base_above_1(keys: ArchitectureMetadata, name: str, default: float = 10000.0) -> float:
        """Read the frequency base from the key ``name``; raise `ModelError` unless it is above 1.

        A missing key gives `default`.
        """
        base = keys.read_positive_float32(name, default)
        if base <= 1.0:
            raise keys.make_key_error(name, f"is {base}; need a number above 1")
        return base

    def rotate_by_position(
        self, x: Value, pos: Value, factors: Value | None = None, *, name: str, offset: int = 0
    ) -> Value:
        """Rotate pairs of columns of ``x`` f32[B, T, heads, size] by angles that grow with the position.

        Args:
            x: The operand.
            pos: Positions i32[B, T].
            factors: Divisors of the frequencies, f32[n_dims/2].
            name: Name of the result.
            offset: First rotated column.
        """
        return ops.rope(x, pos, factors, **asdict(self), offset=offset, name=name)


def find_frequency_divisors(
    weights: ModelWeights, frame: StepGraphBuilder, rope: Rope, original_context: int, block: str
) -> Value | None:
    """Find the tensor with the divisors of the RoPE frequencies, f32[n_dims/2]; return `None` if the file has none.

    Llama 3.1 has one such vector. LongRoPE has one for contexts up to the original context, and one for longer ones.
    Files may have more entries than rotated pairs.
    """
    length = "long" if frame.step.context > original_context else "short"
    for stem in ("rope_freqs", f"rope_factors_{length}"):
        for name in (f"{stem}.weight", f"{block}.{stem}.weight"):
            if weights.has_used_tensor(name):
                whole = weights(name, weights.tensor_shape(name))
                count = rope.n_dims // 2
                return whole if whole.shape == (count,) else ops.slice_(whole, axis=0, start=0, stop=count)
    return None


def _compute_attn_factor_correction(keys: ArchitectureMetadata, factor: float, unit: float) -> float:
    """Compute a factor of attention scores for files with a YaRN multiplier of their own; 1 for other files.

    `ops.rope` multiplies by ``1 + 0.1 ln(factor)``. A file with the key ``rope.scaling.yarn_log_multiplier`` needs
    another number, which is reached by this further factor.

    Args:
        keys: The metadata.
        factor: The scaling factor of the context.
        unit: Factor of the multiplier in the metadata.
    """
    multiplier = keys.read_positive_zero_as_none("rope.scaling.yarn_log_multiplier")
    if multiplier is None:
        return 1.0
    multiplier *= unit
    # DeepSeek V2 has the same multiplier for both factors.
    own = multiplier if keys.architecture == "deepseek2" and multiplier != 1.0 else 1.0
    usual = 1.0 + 0.1 * math.log(factor)
    return (1.0 + 0.1 * own * math.log(factor)) / (1.0 + 0.1 * multiplier * math.log(factor)) / usual


def read_original_context_length(keys: ArchitectureMetadata) -> int:
    """Read the original context length in tokens: the trained length before the context was extended."""
    return keys.read_count_or_default("rope.scaling.original_context_length", keys.read_count("context_length"))


def choose_normal_or_neox_rope(keys: ArchitectureMetadata, rope: str) -> str:
    """Choose which columns RoPE rotates together: ``normal`` (neighbours) or ``neox`` (halves of a head).

    For text, the time, height and width of a token all equal its position, so multi-axis RoPE equals ``neox``. In
    some families only files with ``rope.dimension_sections`` have multi-axis RoPE.
    """
    plain, _, sectioned = rope.partition("|")
    if not sectioned:
        return plain
    key = f"{keys.architecture}.rope.dimension_sections"
    sections = keys.gguf.numbers(key)[:2].tolist() if keys.has("rope.dimension_sections") else [0]
    return "neox" if len(sections) > 1 and min(sections) > 0 else plain
