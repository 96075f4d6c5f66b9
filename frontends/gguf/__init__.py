"""GGUF model files: reading, dequantising, tokenizers and chat templates."""

from ...ops.quantisation import bf16_to_f32 as bf16_to_f32
from ...ops.quantisation import dequantise as dequantise
from ...ops.quantisation import f32_to_bf16 as f32_to_bf16
from .metadata import LazyMetadataArray as LazyMetadataArray
from .reader import Gguf as Gguf
from .reader import open_gguf as open_gguf
from .tensor import Tensor as Tensor
