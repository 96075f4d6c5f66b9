"""Names of NumPy, PyTorch and ggml, with the ops of hocket that compute the same; for messages and the op reference."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OPS_BY_OTHER_NAME: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("dot", "einsum", "linear", "matmul"), ("mul_mat",)),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("convolution",)),
        **dict.fromkeys(("conv_1d_dw", "conv_2d", "conv_2d_dw", "conv_3d"), ("convolution",)),
        **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("transposed_convolution",)),
        **dict.fromkeys(("conv_transpose_1d", "conv_transpose_2d"), ("transposed_convolution",)),
        **dict.fromkeys(("unfold", "im2col", "im2col_3d"), ("windows",)),
        **dict.fromkeys(("fold", "col2im", "col2im_1d"), ("add_windows",)),
        **dict.fromkeys(
            ("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"), ("pool",)
        ),
        **dict.fromkeys(("pool_1d", "pool_2d"), ("pool",)),
        **dict.fromkeys(("resize", "upsample", "upscale"), ("interpolate",)),
        **dict.fromkeys(("embedding", "index_select", "take"), ("get_rows",)),
        **dict.fromkeys(("layer_norm",), ("norm",)),
        **dict.fromkeys(("cat", "concatenate", "hstack", "vstack"), ("concat",)),
        **dict.fromkeys(("stack",), ("reshape", "concat")),
        **dict.fromkeys(("broadcast_to", "expand"), ("broadcast",)),
        **dict.fromkeys(("expand_dims", "flatten", "squeeze", "unsqueeze", "view"), ("reshape",)),
        **dict.fromkeys(("moveaxis", "movedim", "swapaxes"), ("permute",)),
        **dict.fromkeys(("contiguous", "copy"), ("cont",)),
        **dict.fromkeys(("astype", "to"), ("cast",)),
        **dict.fromkeys(("full", "ones", "zeros"), ("fill",)),
        **dict.fromkeys(("clip",), ("clamp",)),
        **dict.fromkeys(("topk",), ("top_k",)),
        **dict.fromkeys(("sort",), ("argsort", "gather")),
        **dict.fromkeys(("amax", "amin", "max", "min", "prod"), ("reduce",)),
        **dict.fromkeys(("cummax", "cummin", "cumprod"), ("accumulate",)),
        **dict.fromkeys(("eq", "equal", "ge", "greater", "gt", "le", "less", "lt", "ne", "not_equal"), ("compare",)),
        **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder"), ("calculate",)),
        **dict.fromkeys(("pow",), ("power",)),
        **dict.fromkeys(("scaled_dot_product_attention",), ("attention",)),
        **dict.fromkeys(("take_along_axis",), ("gather",)),
        **dict.fromkeys(("put_along_axis",), ("scatter",)),
    }
)
"""Ops of hocket by a name of NumPy, PyTorch or ggml; several ops are applied one after the other."""
