"""The dtype of each tensor of a written file: the mixtures of llama-quantize, and the user's exceptions.

A mixture gives more bits to tensors with important errors. Its rules read the part of the model that a tensor is,
the position of its layer, and three facts of the architecture. Source of the facts: llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .file_types import FileType


class ModelPart(Enum):
    """The part of a model that a tensor belongs to; only parts that the mixture rules distinguish."""

    OUTPUT = "output"
    EMBEDDING = "token_embd"
    FUSED_QKV = "attn_qkv"
    LATENT_KV = "attn_kv_b"
    VALUE = "attn_v"
    KEY = "attn_k"
    QUERY = "attn_q"
    ATTENTION_OUTPUT = "attn_output"
    UP = "ffn_up"
    GATE = "ffn_gate"
    DOWN = "ffn_down"
    OTHER = "other"


EMBEDDING_NAMES = ("token_embd.weight", "per_layer_token_embd.weight")
PARTS_BY_PATTERN = (
    ("attn_qkv.weight", ModelPart.FUSED_QKV),
    ("attn_kv_b.weight", ModelPart.LATENT_KV),
    ("attn_v.weight", ModelPart.VALUE),
    ("attn_k.weight", ModelPart.KEY),
    ("attn_q.weight", ModelPart.QUERY),
    ("attn_output.weight", ModelPart.ATTENTION_OUTPUT),
    ("ffn_up", ModelPart.UP),
    ("ffn_gate", ModelPart.GATE),
    ("ffn_down", ModelPart.DOWN),
)
VALUE_PARTS = (ModelPart.VALUE, ModelPart.FUSED_QKV, ModelPart.LATENT_KV)
"""Parts that hold the value matrix of attention."""
EXCLUDED_NAMES = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj"),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight"),
    *(
        f"time_mix_{name}.weight"
        for name in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")
    ),
    *("time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight"),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger"),
    *("a.rvq.codebook", "mm.a.code_embd"),
)
"""Parts of names of tensors that keep their dtype: small tensors, and tensors that no product reads."""
EXCLUDED_WHOLE_NAMES = ("position_embd.weight", "token_types.weight")
EXCLUDED_NAMES_BY_ARCHITECTURE = {
    "glm5-next": (
        *("hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate"),
        *("indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight"),
        *("ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight"),
    )
}
Q8_NAMES_BY_ARCHITECTURE = {"glm5-next": ("attn_q_a", "attn_q_b", "nextn.eh_proj")}
"""Parts of names of tensors that have at least 8 bits."""
FALLBACK_DTYPES = {
    DType.IQ4_XS: DType.IQ4_NL,
    DType.IQ3_S: DType.IQ4_NL,
    DType.IQ3_XXS: DType.IQ4_NL,
    DType.IQ2_S: DType.IQ4_NL,
    DType.IQ2_XS: DType.IQ4_NL,
    DType.IQ2_XXS: DType.IQ4_NL,
    DType.IQ1_M: DType.IQ4_NL,
    DType.IQ1_S: DType.IQ4_NL,
    DType.Q1_0: DType.Q4_0,
    DType.Q2_0: DType.Q4_0,
    DType.NVFP4: DType.MXFP4,
    DType.Q2_K: DType.Q4_0,
    DType.Q3_K: DType.Q4_0,
    DType.TQ1_0: DType.Q4_0,
    DType.TQ2_0: DType.Q4_0,
    DType.Q4_K: DType.Q5_0,
    DType.Q5_K: DType.Q5_1,
    DType.Q6_K: DType.Q8_0,
}
"""The dtype with blocks of 32 for rows that are no whole number of longer blocks."""
FEW_BIT_KINDS = ("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""File types of fewer than 3 bits with code books, which have mixture rules of their own."""
LARGER_FEW_BIT_KINDS = ("IQ2_M", "IQ2_S")
"""The types among them with 3 bits where the others have 2."""
FIVE_BIT_OUTPUT_KINDS = (*FEW_BIT_KINDS, "IQ3_XXS")
"""File types with an output matrix of 5 bits."""
EMBEDDING_DTYPES = {
    **dict.fromkeys(FEW_BIT_KINDS, DType.Q2_K),
    **dict.fromkeys((*LARGER_FEW_BIT_KINDS, "IQ3_XXS"), DType.IQ3_S),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), DType.Q4_K),
}
"""The dtype of a token embedding that is not the output matrix, by file type."""
QUERY_AND_KEY = {"IQ3_XS": DType.IQ3_XXS, "IQ3_XXS": DType.IQ2_S}
"""The dtype of the query and key matrices of attention, by file type."""
IMPORTANCE_DTYPES = (DType.IQ3_XXS, DType.IQ2_S, DType.IQ2_XS, DType.IQ2_XXS, DType.IQ1_M, DType.IQ1_S)
"""Dtypes with few codes for a group of numbers, which need importances, as in llama-quantize."""
LARGE_LAYER_COUNTS = {"llama": 80, "deci": 80, "olmo": 80, "qwen2": 80, "jais2": 68}
"""Layers of models with 70 billion parameters, by architecture."""


class ShapedTensor(Protocol):
    """A tensor with a name, a shape in NumPy order, and a dtype."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that mixture rules read.

    `query_groups` is the number of query heads for each key head, or 0.
    """

    architecture: str
    layer_count: int
    expert_count: int = 0
    query_groups: int = 1
    has_importances: bool = False

    @property
    def has_70b_size(self) -> bool:
        """Whether llama.cpp calls the size of the model 70B."""
        large = LARGE_LAYER_COUNTS.get(self.architecture) == self.layer_count
        return large and not (self.architecture == "llama" and self.query_groups == 1)


@dataclass(frozen=True, slots=True)
class TypeRequest:
    """The wishes of a user for the dtypes of tensors.

    Attributes:
        file_type: The type of the file.
        is_pure: Whether all tensors have the dtype of the file, without a mixture.
        overrides: Patterns that are searched in names, with a dtype each; the first match applies.
        output_dtype: The dtype of the output matrix.
        embedding_dtype: The dtype of the token embedding.
        keeps_output: Whether ``output.weight`` keeps its dtype.
    """

    file_type: FileType
    is_pure: bool = False
    overrides: Sequence[tuple[re.Pattern[str], DType]] = ()
    output_dtype: DType | None = None
    embedding_dtype: DType | None = None
    keeps_output: bool = False


def find_model_part(name: str) -> ModelPart:
    """Return the part of a model that the tensor with this name belongs to."""
    if name == "output.weight":
        return ModelPart.OUTPUT
    if name in EMBEDDING_NAMES:
        return ModelPart.EMBEDDING
    return next((part for pattern, part in PARTS_BY_PATTERN if pattern in name), ModelPart.OTHER)


def is_quantisable(tensor: ShapedTensor, architecture: str) -> bool:
    """Return whether a tensor is a float matrix, for products or look-ups, that a conversion may quantise."""
    name = tensor.name
    excluded = (*EXCLUDED_NAMES, *EXCLUDED_NAMES_BY_ARCHITECTURE.get(architecture, ()))
    axes = len(tensor.shape) - next((i for i, n in enumerate(tensor.shape) if n > 1), len(tensor.shape))
    is_float = tensor.dtype.is_quantised or tensor.dtype in (DType.F32, DType.F16, DType.BF16)
    return (
        axes > 1
        and is_float
        and name.endswith("weight")
        and name not in EXCLUDED_WHOLE_NAMES
        and not any(part in name for part in excluded)
    )


def find_layer_number_or_minus_1(name: str) -> int:
    """Return the layer number in the name of a tensor; -1 if there is none."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def choose_dtypes(tensors: Iterable[ShapedTensor], request: TypeRequest, facts: ModelFacts) -> dict[str, DType]:
    """Choose the dtype of each tensor for a request; return the dtypes by name, in the order of the tensors.

    A chosen dtype may have blocks that do not divide the rows; `fit_dtype_to_columns` then replaces it.

    Raises:
        ModelError: A layer number is beyond the layers of the model.
    """
    known = list(tensors)
    mixture = _MixtureRules(request, facts, known)
    # llama.cpp counts the tensors of a part in the order of layers, not in the order of the file.
    ordered = sorted(known, key=lambda t: (find_layer_number_or_minus_1(t.name), t.name))
    chosen = {t.name: mixture.choose(t) for t in ordered}
    return {t.name: chosen[t.name] for t in known}


def fit_dtype_to_columns(dtype: DType, columns: int) -> DType:
    """Return `dtype` if its blocks divide rows of `columns` elements, otherwise the dtype that replaces it."""
    if columns % dtype.block == 0:
        return dtype
    smaller = FALLBACK_DTYPES.get(dtype, dtype)
    return DType.F16 if columns % smaller.block else smaller


def gets_more_bits(layer: int, layers: int) -> bool:
    """Return whether the ``_M`` file types give a layer more bits.

    They do so for the first and last eighth of the layers, and for every third layer between.
    """
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


class _MixtureRules:
    """Chooses the dtype of each tensor of one model by the mixture rules of llama-quantize.

    A mixture gives more bits to important tensors. Its rules depend on how many value and down matrices came before, so
    an instance counts them.
    """

    def __init__(self, request: TypeRequest, facts: ModelFacts, tensors: Sequence[ShapedTensor]) -> None:
        self.request, self.facts = request, facts
        parts = Counter(find_model_part(t.name) for t in tensors)
        self.value_count = sum(parts[part] for part in VALUE_PARTS)
        self.is_tied = not parts[ModelPart.OUTPUT]
        self.seen: Counter[str] = Counter()

    def choose(self, tensor: ShapedTensor) -> DType:
        request, part = self.request, find_model_part(tensor.name)
        if not is_quantisable(tensor, self.facts.architecture):
            return tensor.dtype
        if part is ModelPart.OUTPUT and request.keeps_output:
            return tensor.dtype
        override = next((dtype for pattern, dtype in request.overrides if pattern.search(tensor.name)), None)
        is_named = override is not None and tensor.name != EMBEDDING_NAMES[0]  # an embedding of single layers
        if part is ModelPart.EMBEDDING and request.embedding_dtype is not None and not is_named:
            return request.embedding_dtype
        if part is ModelPart.OUTPUT and request.output_dtype is not None:
            return request.output_dtype
        dtype = request.file_type.dtype
        if not dtype.is_quantised:
            return override or dtype
        return override or (dtype if request.is_pure else self._mix(tensor, part))

    def _mix(self, tensor: ShapedTensor, part: ModelPart) -> DType:
        names = Q8_NAMES_BY_ARCHITECTURE.get(self.facts.architecture, ())
        if any(name in tensor.name for name in names):
            return DType.Q8_0
        kind, default = self.request.file_type.name, self.request.file_type.dtype
        if part is ModelPart.OUTPUT or (self.is_tied and part is ModelPart.EMBEDDING):
            return self._choose_output_or_tied_embedding_dtype(tensor, default)
        if kind == "MXFP4_MOE":
            has_experts = len(tensor.shape) > 2 and tensor.shape[-3] > 1
            return DType.MXFP4 if has_experts else DType.Q8_0
        if part is ModelPart.EMBEDDING:
            return EMBEDDING_DTYPES.get(kind, default)
        if kind in FEW_BIT_KINDS:
            return self._choose_low_bit_dtype(kind, part, default)
        if part in VALUE_PARTS:
            return self._choose_attention_value_dtype(kind, default)
        eight = self.facts.expert_count == 8
        if part is ModelPart.KEY:
            return DType.Q8_0 if eight else QUERY_AND_KEY.get(kind, default)
        if part is ModelPart.QUERY:
            return QUERY_AND_KEY.get(kind, default)
        if part in (ModelPart.GATE, ModelPart.UP):
            layer, layers = self._count_or_read_layer_number(tensor, part.value), self.facts.layer_count
            is_middle = layers // 8 <= layer < 7 * layers // 8
            return DType.IQ3_XXS if kind == "IQ3_XS" and is_middle else default
        if part is ModelPart.DOWN:
            return self._choose_ffn_down_dtype(tensor, kind, default)
        if part is ModelPart.ATTENTION_OUTPUT:
            if self.facts.architecture == "falcon":
                return DType.Q4_K if kind == "Q3_K_L" else default
            return (ATTENTION_OUTPUT_OF_8_EXPERTS if eight else ATTENTION_OUTPUT).get(kind, default)
        return default

    def _choose_output_or_tied_embedding_dtype(self, tensor: ShapedTensor, default: DType) -> DType:
        """Return the dtype of the output matrix, or of a token embedding that is also the output matrix."""
        if self.request.output_dtype is not None:
            return self.request.output_dtype
        has_8_bits = self.facts.architecture == "falcon" or tensor.shape[-1] % default.block
        if has_8_bits or default in (DType.Q8_0, DType.MXFP4):
            return DType.Q8_0
        return DType.Q5_K if self.request.file_type.name in FIVE_BIT_OUTPUT_KINDS else DType.Q6_K

    def _choose_low_bit_dtype(self, kind: str, part: ModelPart, default: DType) -> DType:
        """Return the dtype of a matrix in a file type of fewer than 3 bits with code books."""
        more_bits = DType.IQ3_S if kind in LARGER_FEW_BIT_KINDS else DType.Q2_K
        experts = self.facts.expert_count
        if part in VALUE_PARTS:
            return DType.Q4_K if self.facts.query_groups >= 4 or experts >= 4 else more_bits
        if part is ModelPart.KEY and experts == 8:
            return DType.Q4_K
        if part is ModelPart.DOWN:
            number, self.seen["down"] = self.seen["down"], self.seen["down"] + 1
            return more_bits if number < self.facts.layer_count // 8 else default
        if part is ModelPart.ATTENTION_OUTPUT:
            if experts == 8:
                return DType.Q5_K
            if kind in LARGER_FEW_BIT_KINDS:
                return DType.IQ3_S
            return DType.IQ2_XXS if kind in ("IQ1_S", "IQ1_M") else default
        return default

    def _count_or_read_layer_number(self, tensor: ShapedTensor, part: str) -> int:
        """Return the layer of a tensor: the number of tensors of its part before it, as llama-quantize counts.

        In a model with experts it is the number in the name, because a layer may have one tensor for each expert.

        Raises:
            ModelError: The number in the name is beyond the layers of the model.
        """
        layer, self.seen[part] = self.seen[part], self.seen[part] + 1
        if self.facts.expert_count > 1:  # files with one tensor for each expert have several of them in a layer
            layer = find_layer_number_or_minus_1(tensor.name)
            if not 0 <= layer < self.facts.layer_count:
                raise ModelError(f"tensor {tensor.name}: its layer is {layer}; need 0 to {self.facts.layer_count - 1}")
        return layer

    def _choose_attention_value_dtype(self, kind: str, default: DType) -> DType:
        """Return the dtype of an attention value matrix, which is small and matters much for the error."""
        number, self.seen["value"] = self.seen["value"], self.seen["value"] + 1
        is_grouped, dtype = self.facts.query_groups >= 4, default
        if kind == "Q2_K":
            dtype = DType.Q4_K if is_grouped else DType.Q3_K
        elif kind == "IQ3_M" or (kind in ("Q2_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS") and is_grouped):
            dtype = DType.Q4_K
        elif kind == "IQ3_XXS" and not self.facts.has_importances:
            dtype = DType.IQ3_S
        elif kind == "Q3_K_M":
            dtype = DType.Q5_K if number < 2 else DType.Q4_K
        elif kind == "Q3_K_L" or (kind in ("IQ4_NL", "IQ4_XS") and is_grouped):
            dtype = DType.Q5_K
        elif kind in ("Q4_K_M", "Q5_K_M") and gets_more_bits(number, self.value_count):
            dtype = DType.Q6_K
        elif kind == "Q4_K_S" and number < 4:
            dtype = DType.Q5_K
        if self.facts.has_70b_size and dtype in (DType.Q3_K, DType.Q4_K):
            dtype = DType.Q5_K
        return DType.Q8_0 if self.facts.expert_count == 8 else dtype

    def _choose_ffn_down_dtype(self, tensor: ShapedTensor, kind: str, default: DType) -> DType:
        """Return the dtype of a down matrix of a feed-forward layer."""
        layers, falcon = self.facts.layer_count, self.facts.architecture == "falcon"
        layer = self._count_or_read_layer_number(tensor, "down")
        is_early, has_more = layer < layers // 8, gets_more_bits(layer, layers)
        if kind == "Q3_K_M":
            if layer < layers // 16:
                return DType.Q5_K
            return DType.Q4_K if not falcon or has_more else DType.Q3_K
        if kind == "IQ3_XXS" and not self.facts.has_importances:
            return DType.Q4_K if is_early else DType.Q3_K
        if kind == "Q4_K_M" and falcon:
            return DType.Q6_K if layer < layers // 16 else DType.Q5_K if has_more else DType.Q4_K
        rules: Mapping[str, tuple[bool, DType]] = {
            "Q2_K": (True, DType.Q3_K),
            "Q2_K_S": (is_early, DType.Q4_K),
            "IQ3_M": (is_early or (self.facts.expert_count == 8 and has_more), DType.Q4_K),
            "Q3_K_L": (True, DType.Q4_K if falcon else DType.Q5_K),
            "Q4_K_M": (has_more, DType.Q6_K),
            "Q5_K_M": (has_more, DType.Q6_K),
            "Q4_K_S": (is_early and not falcon, DType.Q5_K),
            "IQ4_NL": (is_early and not self.facts.has_importances, DType.Q5_K),
            "IQ4_XS": (is_early and not self.facts.has_importances, DType.Q5_K),
            "Q4_0": (is_early and self.facts.has_importances, DType.Q4_1),
            "Q5_0": (is_early and self.facts.has_importances, DType.Q5_1),
        }
        applies, dtype = rules.get(kind, (False, default))
        return dtype if applies else default


ATTENTION_OUTPUT = {
    "Q2_K": DType.Q3_K,
    "Q3_K_M": DType.Q4_K,
    "Q3_K_L": DType.Q5_K,
    "IQ3_M": DType.Q4_K,
    "IQ3_XXS": DType.IQ3_S,
}
"""The dtype of the output matrix of attention, by file type."""
ATTENTION_OUTPUT_OF_8_EXPERTS = dict.fromkeys(
    (
        *("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS"),
        *("IQ3_S", "IQ3_M", "IQ3_XS", "IQ3_XXS"),
    ),
    DType.Q5_K,
)
