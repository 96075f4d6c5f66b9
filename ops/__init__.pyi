"""All ops with their types and docstrings, written from the registry by `python -m hocket.ops.stubs`."""

from collections.abc import Sequence

from ..graph.dtypes import DTypeLike
from ..graph.node import Value
from .composite import COMPOSITE_OPS as COMPOSITE_OPS
from .composite import add_windows as add_windows
from .composite import convolution as convolution
from .composite import interpolate as interpolate
from .composite import pool as pool
from .composite import transposed_convolution as transposed_convolution
from .declaration.op import Op as Op
from .declaration.op import op as op
from .declaration.samples import LegalRange as LegalRange
from .reference_run import as_reference_array as as_reference_array
from .reference_run import evaluate as evaluate
from .registry import OP_RULES as OP_RULES
from .registry import REGISTRY as REGISTRY
from .registry import op_of as op_of
from .registry import register as register
from .registry import verify as verify

def abs_(x: Value, *, name: str = "") -> Value:
    """Return the absolute value of each element. ggml: ``UNARY_OP_ABS``."""

def acc(a: Value, b: Value, *, offsets: Sequence[int], name: str = "") -> Value:
    """Add `b` to the region of `a` at `offsets`, which has the shape of `b`. ggml: ``ACC``.

    ggml names the region by byte strides and a byte offset.
    """

def accumulate(x: Value, *, kind: str, name: str = "") -> Value:
    """Compute the running max, min, sum or prod (`kind`) of each row, in the dtype of `x`.

    NumPy (Harris et al., 2020).
    """

def add(a: Value, b: Value, *, name: str = "") -> Value:
    """Add `b` to `a` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``ADD``.

    Entry i of an axis of `a` is combined with entry ``i mod size`` of the same axis of `b`.
    """

def add_id(a: Value, b: Value, ids: Value, *, first: int = 0, total: int = 0, name: str = "") -> Value:
    """Add to `a` the bias rows of chosen experts: ``a[t, i] + b[ids[t, i]]``. ggml: ``ADD_ID``.

    With `total` > 0, `b` is a shard of `total` experts that begins with expert `first`. For experts outside of the
    shard nothing is added.
    """

def arange(*, start: float, stop: float, step: float = 1.0, name: str = "") -> Value:
    """Return the numbers ``start + i * step`` from `start` to before `stop`. ggml: ``ARANGE``.

    Their count is ``ceil((stop - start) / step)``, computed in float64; ggml computes it in float32.
    """

def arccos(x: Value, *, name: str = "") -> Value:
    """Compute the inverse cosine in radians. ISO C, 1999."""

def arccosh(x: Value, *, name: str = "") -> Value:
    """Compute the inverse hyperbolic cosine. ISO C, 1999."""

def arcsin(x: Value, *, name: str = "") -> Value:
    """Compute the inverse sine in radians. ISO C, 1999."""

def arcsinh(x: Value, *, name: str = "") -> Value:
    """Compute the inverse hyperbolic sine. ISO C, 1999."""

def arctan(x: Value, *, name: str = "") -> Value:
    """Compute the inverse tangent in radians. ISO C, 1999."""

def arctanh(x: Value, *, name: str = "") -> Value:
    """Compute the inverse hyperbolic tangent. ISO C, 1999."""

def argmax(x: Value, *, name: str = "") -> Value:
    """Return the index of the largest entry of each row; of equal entries, the first index. ggml: ``ARGMAX``.

    The CPU backend of ggml returns the last index of equal entries; its tests have no equal entries.
    """

def argsort(x: Value, *, descending: bool = False, name: str = "") -> Value:
    """Return the indices that sort each row. Equal entries keep their order. ggml: ``ARGSORT``, which is unstable."""

def attention(
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    sinks: Value | None = None,
    table: Value | None = None,
    *,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    mask_heads: str = "one",
    pool: str = "none",
    name: str = "",
) -> Value:
    """Compute multi-head attention, ``softmax(cap(q k scale) + slope mask) v`` for each head.

    `query_heads` neighbouring heads of q share a key/value head. `cap(x)` is ``softcap tanh(x / softcap)`` where
    softcap > 0. A sink adds to the denominator of its head only. A row that is masked completely gives zeros.
    `mask_heads` states the masks of heads: ``one`` mask for all heads, ``each`` head has its own, or ``tiled``: head i
    has mask ``i mod m``. `slope` is one factor for each head: 1, or the slope of ALiBi if `max_bias` > 0 (Press et al.,
    2022). ggml: ``FLASH_ATTN_EXT``; Dao et al., 2022.

    With `pool` ``blocks``, k and v are pools of blocks of 64 keys, which all sequences share. Key s of sequence b is
    key ``s % 64`` of block ``table[b, s // 64]`` (Kwon et al., PagedAttention, 2023). The mask tells the number of
    keys; without a mask, all keys of the table count.
    """

def broadcast(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """Repeat axes of size 1 and new leading axes to `shape` without a copy. ggml: implied by stride 0."""

def calculate(a: Value, b: Value, *, kind: str, name: str = "") -> Value:
    """Compute the integer operation `kind` of `a` and `b` elementwise, in the dtype of `a`.

    `kind` is ``add``, ``sub``, ``mul``, ``floor_div``, ``trunc_div``, ``floor_mod``, ``trunc_mod``, ``max``, ``min``,
    ``and``, ``or``, ``xor``, ``shift_left`` or ``shift_right``. `b` is repeated as tiles to the shape of `a`. Division
    by 0 gives 0. NumPy (Harris et al., 2020).
    """

def cast(x: Value, *, dtype: DTypeLike, name: str = "") -> Value:
    """Convert the numbers to another dtype, rounded to nearest even. ggml: ``CPY`` to a tensor of that type.

    A quantised dtype has the scales that GGML's CPU backend chooses (`ops.block_quantisers` by the range of a block,
    `ops.super_block_quantisers` by a search).
    """

def causal_mask(pos: Value, *, cells: int, window: int = 0, name: str = "") -> Value:
    """Build the causal attention mask: 0 where a token may attend to a KV cache cell, else -inf.

    The token at position `pos` may attend to cell s if ``pos - window < s <= pos``. Cell s of a sequence has position
    s. `window` counts the token itself; 0 means no window. ggml: no op, llama.cpp fills its KQ mask on the host.
    """

def ceil(x: Value, *, name: str = "") -> Value:
    """Round up to an integer. ggml: ``UNARY_OP_CEIL``."""

def clamp(x: Value, *, min: float, max: float, name: str = "") -> Value:
    """Clamp all elements to the range from `min` to `max`; -0 is less than +0. ggml: ``CLAMP``."""

def compare(a: Value, b: Value, *, kind: str, name: str = "") -> Value:
    """Compare `a` with `b` elementwise: 1 where the comparison `kind` is true, else 0.

    `kind` is ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``. `b` is repeated as tiles to the shape of `a`. For a NaN,
    only ``ne`` is true. IEEE 754, 2019.
    """

def concat(a: Value, b: Value, *, axis: int, name: str = "") -> Value:
    """Concatenate `a` and `b` along one axis. ggml: ``CONCAT``."""

def cont(x: Value, *, name: str = "") -> Value:
    """Copy `x` to contiguous memory. The planner inserts this op where a kernel cannot read a view. ggml: ``CONT``."""

def cos(x: Value, *, name: str = "") -> Value:
    """Compute the cosine of `x` in radians. ggml: ``COS``."""

def cosh(x: Value, *, name: str = "") -> Value:
    """Compute the hyperbolic cosine. ISO C, 1999."""

def count_equal(a: Value, b: Value, *, name: str = "") -> Value:
    """Count the indices at which `a` and `b` have equal entries, as a scalar. ggml: ``COUNT_EQUAL``."""

def cumsum(x: Value, *, name: str = "") -> Value:
    """Compute running sums along the last axis: entry i is the sum of entries 0 to i. ggml: ``CUMSUM``."""

def diag(x: Value, *, name: str = "") -> Value:
    """Build square matrices with the rows of `x` on their diagonals, and zeros elsewhere. ggml: ``DIAG``.

    ggml has a further axis of size 1.
    """

def diag_mask_inf(x: Value, *, n_past: int, name: str = "") -> Value:
    """Apply a causal mask: set ``x[row, column]`` to -inf where column > row + `n_past`. ggml: ``DIAG_MASK_INF``.

    Rows are the tokens after `n_past` earlier ones; columns are the tokens that they attend to.
    """

def div(a: Value, b: Value, *, name: str = "") -> Value:
    """Divide `a` by `b` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``DIV``."""

def dsv4_hc_comb(mixes: Value, scale: Value, base: Value, *, n_iter: int, eps: float = 1e-06, name: str = "") -> Value:
    """Compute nearly doubly stochastic mixing matrices [..., from, to] of n residual streams (hyper-connections).

    The last n² entries of a row of `mixes` are the logits of its matrix.

    1. ``softmax(mixes scale[2] + base)`` over `to`, plus eps.
    2. Divide by the sums over `from`, plus eps.
    3. Repeat ``n_iter - 1`` times: divide by the sums over `to`, then over `from`, each plus eps.

    Sinkhorn and Knopp, 1967. ggml: ``DSV4_HC_COMB``, with n = 4; Xie et al., mHC: manifold-constrained
    hyper-connections, 2025.
    """

def dsv4_hc_post(x: Value, residual: Value, post: Value, comb: Value | None = None, *, name: str = "") -> Value:
    """Update the residual streams after a layer: ``out[to] = x post[to] + sum_from residual[from] comb[from, to]``.

    `x` is the output of the layer. Without `comb`, streams do not mix. ggml: ``DSV4_HC_POST``.
    """

def dsv4_hc_pre(x: Value, weights: Value, *, gated: bool = False, scale: float = 1.0, name: str = "") -> Value:
    """Mix n residual streams into the input of a layer (hyper-connections): ``scale sum_h x[h] weights[h]``.

    With `gated`, weights are logits of sigmoids, one for each element of each stream. ggml: ``DSV4_HC_PRE``.
    """

def elu(x: Value, *, name: str = "") -> Value:
    """Compute the exponential linear unit (ELU): `x` where it is positive, ``e ** x - 1`` elsewhere.

    ggml: ``UNARY_OP_ELU``; Clevert et al., 2015.
    """

def erf(x: Value, *, name: str = "") -> Value:
    """Compute the error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t^2)`` from 0 to `x`. ISO C, 1999."""

def exp(x: Value, *, name: str = "") -> Value:
    """Compute the exponential function ``e ** x``. ggml: ``UNARY_OP_EXP``."""

def expm1(x: Value, *, name: str = "") -> Value:
    """Compute ``e ** x - 1``, exact near 0, too. ggml: ``UNARY_OP_EXPM1``, which subtracts."""

def fill(x: Value, *, value: float, name: str = "") -> Value:
    """Return an array filled with `value`, with the shape and dtype of `x`; `x` is not read. ggml: ``FILL``."""

def floor(x: Value, *, name: str = "") -> Value:
    """Round down to an integer. ggml: ``UNARY_OP_FLOOR``."""

def gated_delta_net(
    q: Value,
    k: Value,
    v: Value,
    g: Value,
    beta: Value,
    state: Value,
    slots_in: Value | None = None,
    slots_out: Value | None = None,
    *,
    heads: str = "tiled",
    snapshots: int = 1,
    pool: str = "none",
    exact: bool = True,
    name: str = "",
) -> tuple[Value, Value]:
    """Apply the gated delta rule to all tokens in order; return the outputs and the state after the last token.

    Per token and value head: ``S *= exp(g)``; ``S += beta (v - S k) k^T``; ``o = S q / sqrt(d)``. `S` is [value,
    key]. `g` is a log decay per head, or per key channel (KDA). Value head j reads key head ``j mod h`` (tiled) or
    ``j div r`` (interleaved). Rows of q and k are normalised by the caller. ggml: ``GATED_DELTA_NET``; Yang et al.,
    2024.

    With `snapshots` K > 1 the second result is [..., K, heads, e, d]. Snapshot s is the state s tokens before the
    end; snapshots before the first token are zeros, which ggml leaves unwritten. With `pool` ``"update"``, `state` is
    a pool of states. The result is the pool with new rows ``slots_out[i]`` or ``slots_out[i, s]``; see
    `ops.recurrent.state_pools`.

    Without `exact`, a backend may round the factors of its products to bfloat16.
    """

def gated_linear_attn(
    k: Value, v: Value, q: Value, g: Value, state: Value, *, scale: float, name: str = ""
) -> tuple[Value, Value]:
    """Apply linear attention with a decay per key channel; return the outputs and the state after the last token.

    Per token and head: ``S = g * S + k v^T``; ``y = scale S^T q``; `S` is [key, value]. `g` is the decay
    itself, not its logarithm. ggml: ``GATED_LINEAR_ATTN``; Yang et al., 2023.
    """

def gather(x: Value, ids: Value, *, name: str = "") -> Value:
    """Gather entries of each row of `x` by index: ``x[..., ids[..., i]]``. NumPy's ``take_along_axis``, 2018."""

def geglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """Compute the gated unit ``gelu(gate) * up``, GELU in its tanh approximation. ggml: ``GLU_OP_GEGLU``.

    Shazeer, GLU variants, 2020.
    """

def geglu_erf(gate: Value, up: Value, *, name: str = "") -> Value:
    """Compute the gated unit ``gelu_erf(gate) * up``, with the exact GELU. ggml: ``GLU_OP_GEGLU_ERF``."""

def geglu_quick(gate: Value, up: Value, *, name: str = "") -> Value:
    """Compute the gated unit ``gelu_quick(gate) * up``, with the sigmoid GELU. ggml: ``GLU_OP_GEGLU_QUICK``."""

def gelu(x: Value, *, name: str = "") -> Value:
    """Compute the Gaussian error linear unit (GELU) in its tanh approximation.

    ggml: ``UNARY_OP_GELU``; Hendrycks and Gimpel, 2016. The expression computes ``0.5 x (1 + tanh(u))`` as
    ``x sigmoid(2 u)``, which stays exact where tanh(u) is near -1.
    """

def gelu_erf(x: Value, *, name: str = "") -> Value:
    """Compute the exact Gaussian error linear unit (GELU) ``0.5 x (1 + erf(x / sqrt(2)))``.

    ggml: ``UNARY_OP_GELU_ERF``; Hendrycks and Gimpel, 2016. `normal_cdf` stays exact for negative `x`.
    """

def gelu_quick(x: Value, *, name: str = "") -> Value:
    """Compute the sigmoid approximation of GELU, ``x * sigmoid(1.702 x)``. ggml: ``UNARY_OP_GELU_QUICK``.

    Hendrycks and Gimpel, 2016.
    """

def get_rows(table: Value, ids: Value, *, name: str = "") -> Value:
    """Gather rows of `table` by index: ``table[ids]``. The result is f32. ggml: ``GET_ROWS``."""

def glu(
    x: Value, *, kind: str, swapped: bool = False, alpha: float = 1.702, limit: float = 7.0, name: str = ""
) -> Value:
    """Compute the gated unit `kind` of the two halves of the last axis: first the gate, then the up projection.

    With `swapped`, the gate is the second half. ggml: ``GLU`` with one source. Each kind is the op of that name. Only
    swiglu_oai and swiglu_clamp read `alpha` or `limit`.
    """

def group_norm(x: Value, *, groups: int, eps: float = 1e-06, name: str = "") -> Value:
    """Normalise groups of neighbouring channels to mean 0 and variance 1, as `norm`. ggml: ``GROUP_NORM``.

    A group is normalised over its channels and the last two axes; channels are the axis before these. If `groups` does
    not divide the channels, the last groups are smaller or empty, as in ggml. Wu and He, 2018.
    """

def hardsigmoid(x: Value, *, name: str = "") -> Value:
    """Compute the hard sigmoid: ``(x + 3) / 6``, clamped to the range from 0 to 1. ggml: ``UNARY_OP_HARDSIGMOID``."""

def hardswish(x: Value, *, name: str = "") -> Value:
    """Compute the hard swish ``x * hardsigmoid(x)``. ggml: ``UNARY_OP_HARDSWISH``; Howard et al., 2019."""

def l2_norm(x: Value, *, eps: float = 1e-06, clamp: bool = False, name: str = "") -> Value:
    """Normalise each row to length 1: ``x / sqrt(sum(x^2) + eps)``.

    With `clamp`, the divisor is ``max(sqrt(sum(x^2)), eps)``, which is ggml's ``L2_NORM``. Delta nets use the form
    without `clamp` (llama.cpp: rms_norm, then scale). Rows are the last axis.
    """

def leaky_relu(x: Value, *, negative_slope: float, name: str = "") -> Value:
    """Compute the leaky ReLU: `x` where it is positive, ``negative_slope * x`` elsewhere. ggml: ``LEAKY_RELU``."""

def lightning_indexer(q: Value, k: Value, weights: Value, mask: Value, *, name: str = "") -> Value:
    """Score each key for each query of sparse attention: ``sum_h weights[t, h] relu(q[t, h] . k[s]) + mask[t, s]``.

    All heads share one key. `weights` has the scale factors. ggml: ``LIGHTNING_INDEXER``; DeepSeek-V3.2, 2025.
    """

def log(x: Value, *, name: str = "") -> Value:
    """Compute the natural logarithm. ggml: ``LOG``."""

def log1p(x: Value, *, name: str = "") -> Value:
    """Compute the natural logarithm of ``1 + x``, exact near 0. ISO C, 1999."""

def mask_bits(x: Value, bits: Value, *, name: str = "") -> Value:
    """Replace the entries of `x` by -inf if their bit is 0: bit ``i % 32`` of word ``i // 32``. llguidance, 2025."""

def maximum(a: Value, b: Value, *, name: str = "") -> Value:
    """Compute the elementwise maximum; `b` is repeated as tiles to the shape of `a`.

    The result is NaN if one of the two numbers is NaN, and +0 is larger than -0. IEEE 754, 2019.
    """

def mean(x: Value, *, name: str = "") -> Value:
    """Compute the mean of each row; the row becomes an axis of size 1. An empty row gives 0. ggml: ``MEAN``."""

def minimum(a: Value, b: Value, *, name: str = "") -> Value:
    """Compute the elementwise minimum; `b` is repeated as tiles to the shape of `a`.

    The result is NaN if one of the two numbers is NaN, and -0 is smaller than +0. IEEE 754, 2019.
    """

def mul(a: Value, b: Value, *, name: str = "") -> Value:
    """Multiply `a` by `b` elementwise; `b` is repeated as tiles to the shape of `a`. ggml: ``MUL``."""

def mul_mat(w: Value, x: Value, *, ordered: bool = False, exact: bool = True, name: str = "") -> Value:
    """Multiply the rows of `x` by the transposed weight: ``x @ w.T``. ggml: ``MUL_MAT``.

    Leading axes of `w` divide the leading axes of `x`: one weight serves neighbouring entries. With `ordered`, the
    planner does not shard the summed axis, so the last bit of a sum does not depend on the number of devices. Without
    `exact`, a backend may round `x` to the dtype of 16-bit weights.
    """

def mul_mat_id(
    w: Value, x: Value, ids: Value, *, first: int = 0, total: int = 0, exact: bool = True, name: str = ""
) -> Value:
    """Multiply rows of `x` by the transposed weights of chosen experts: ``out[t, i] = w[ids[t, i]] @ x[t, i mod v]``.

    Only chosen experts are read. An id outside the experts is an error of the run. With `total` > 0, `w` is a shard of
    `total` experts that begins with expert `first`; the result for experts outside of the shard is zero. `exact` is as
    in `mul_mat`. ggml: ``MUL_MAT_ID``; Shazeer et al., 2017.
    """

def neg(x: Value, *, name: str = "") -> Value:
    """Return ``-x``. ggml: ``UNARY_OP_NEG``."""

def norm(x: Value, *, eps: float = 1e-05, name: str = "") -> Value:
    """Normalise each row to mean 0 and variance 1 (layer norm without weights): ``(x - mean) / sqrt(variance + eps)``.

    Rows are the last axis. ggml: ``NORM``; Ba et al., 2016.
    """

def out_prod(a: Value, b: Value, *, name: str = "") -> Value:
    """Sum the outer products of the rows of `b` and of `a`: ``b.T @ a``. ggml: ``OUT_PROD``.

    Leading axes of `a` divide the leading axes of `b`, as the weights of `mul_mat` do.
    """

def pad(x: Value, *, left: Sequence[int], right: Sequence[int], circular: bool = False, name: str = "") -> Value:
    """Pad each axis i with ``left[i]`` zeros before and ``right[i]`` zeros after its entries. ggml: ``PAD``.

    With `circular`, the padding has the entries of the axis, cyclically. ``ggml_pad_ext`` and ``ggml_pad_ext_circular``
    count axes from the last.
    """

def pad_reflect_1d(x: Value, *, left: int, right: int, name: str = "") -> Value:
    """Pad the last axis with its mirror image; the outermost entry itself is not repeated. ggml: ``PAD_REFLECT_1D``."""

def permute(x: Value, *, axes: Sequence[int], name: str = "") -> Value:
    """Permute the axes: axis i of the result is axis ``axes[i]`` of `x`. ggml: ``PERMUTE``.

    ggml counts axes from the last.
    """

def power(a: Value, b: Value, *, name: str = "") -> Value:
    """Raise `a` to the power `b` elementwise; `b` is repeated as tiles to the shape of `a`. IEEE 754, 2019."""

def reduce(x: Value, *, kind: str, name: str = "") -> Value:
    """Reduce each row to its max, min, sum or prod (chosen by `kind`), as an axis of size 1, in the dtype of `x`.

    To sum floats, `sum_rows` permits the planner to shard the rows into partial sums; this op does not. NumPy (Harris
    et al., 2020).
    """

def reglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """Compute the gated unit ``relu(gate) * up``. ggml: ``GLU_OP_REGLU``; Shazeer, GLU variants, 2020."""

def relu(x: Value, *, name: str = "") -> Value:
    """Compute the rectified linear unit (ReLU) ``max(x, 0)``; a zero result is +0. ggml: ``UNARY_OP_RELU``."""

def repeat(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """Repeat `x` as tiles to `shape`: entry i of an axis is ``x[i % size]``. ggml: ``REPEAT``."""

def reshape(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """Give the same elements another shape, in row-major order. ggml: ``RESHAPE``."""

def rms_norm(x: Value, *, eps: float = 1e-06, name: str = "") -> Value:
    """Normalise each row by its root mean square: ``x / sqrt(mean(x^2) + eps)``. ggml: ``RMS_NORM``.

    Rows are the last axis. Zhang and Sennrich, 2019.
    """

def roll(x: Value, *, shifts: Sequence[int], name: str = "") -> Value:
    """Shift each axis i cyclically by ``shifts[i]`` entries. ggml: ``ROLL``."""

def rope(
    x: Value,
    pos: Value,
    factors: Value | None = None,
    *,
    n_dims: int,
    mode: str = "normal",
    base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
    truncate: bool = True,
    offset: int = 0,
    name: str = "",
) -> Value:
    """Apply rotary position embedding: rotate pairs of elements of each head by angles that grow with the position.

    The angle of pair i is ``pos * base^(-2i/n_dims) * freq_scale / factors[i]``. Pairs are neighbours (2i, 2i+1) in
    mode ``normal`` and halves (i, i + n_dims/2) in mode ``neox``, counted from `offset`. `n_dims` elements are rotated.
    `ext_factor` > 0 mixes in unscaled angles and scales the magnitude (YaRN: Peng et al., 2023). `truncate` rounds the
    ends of the ramp between scaled and unscaled angles to whole pairs, as ggml does. ggml: ``ROPE``; Su et al., 2021.
    """

def rope_multi(
    x: Value,
    pos: Value,
    factors: Value | None = None,
    *,
    n_dims: int,
    sections: Sequence[int],
    mode: str = "mrope",
    base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
    truncate: bool = True,
    offset: int = 0,
    name: str = "",
) -> Value:
    """Apply rotary position embedding with four positions per token: time, height, width and a further one.

    They are ``pos[0]`` to ``pos[3]``. Pairs are halves, as in mode ``neox`` of `rope`. `mode` assigns a position to
    each pair:

    * ``mrope``: the first ``sections[0]`` pairs have the time, the next ``sections[1]`` the height, and so on; after
      the last section the sections repeat.
    * ``imrope``: pairs 3i, 3i + 1 and 3i + 2 have time, height and width, each up to the size of its section.
    * ``vision``: as ``mrope``, on the whole head, with n_dims half of it; the angles start again in each section.

    ggml: ``ROPE`` (``ggml_rope_multi``); Wang et al., 2024.
    """

def round_(x: Value, *, name: str = "") -> Value:
    """Round to the nearest integer, halves away from zero; a zero keeps the sign of `x`. ggml: ``UNARY_OP_ROUND``.

    In contrast, NumPy rounds halves to even.
    """

def rwkv_wkv6(
    k: Value, v: Value, r: Value, bonus: Value, decay: Value, state: Value, *, name: str = ""
) -> tuple[Value, Value]:
    """Apply the token mixing of RWKV 6 to all tokens; return the outputs and the state after the last token.

    Per token and head: ``y = (S + (bonus * k) v^T)^T r``; ``S = decay * S + k v^T``, `decay` and `bonus` per key
    channel; `S` is [key, value]. ggml: ``RWKV_WKV6`` (bonus: ``tf``, decay: ``td``); Peng et al., 2024.
    """

def rwkv_wkv7(
    r: Value, decay: Value, k: Value, v: Value, a: Value, b: Value, state: Value, *, name: str = ""
) -> tuple[Value, Value]:
    """Apply the token mixing of RWKV 7 to all tokens; return the outputs and the state after the last token.

    It is a generalised delta rule. Per token and head: ``S = S diag(decay) + (S a) b^T + v k^T``; ``y = S r``; `S` is
    [value, key]. ggml: ``RWKV_WKV7`` (decay: ``w``); Peng et al., 2025.
    """

def sample_token(
    logits: Value,
    ids: Value,
    limit: Value,
    numbers: Value,
    bias: Value | None = None,
    occurrences: Value | None = None,
    *,
    name: str = "",
) -> Value:
    """Sample a token of each row of candidates by bias, penalties, top-k, top-p, min-p and temperature, in this order.

    A candidate has a token in `ids` and its logit. A token that occurs several times is one candidate. `limit` is the
    k of top-k. `numbers` has the bits of float64 numbers: temperature, top_p, min_p, the penalties for repetition,
    presence and frequency, and a number from 0 to 1 that selects the token. `bias` and `occurrences` belong to the
    last candidates: biases are added to the logit of the token, and each occurrence is one among the recent tokens. A
    NaN counts as -inf. llama.cpp: ``llama_sampler_chain``, 2024.
    """

def scale(x: Value, *, scale: float, bias: float = 0.0, name: str = "") -> Value:
    """Multiply all elements by a number and add another: ``x * scale + bias``. ggml: ``SCALE``.

    The sum is rounded once. A `bias` of 0 is added as -0, so that a zero keeps its sign.
    """

def scatter(into: Value, ids: Value, src: Value, *, reduce: str = "set", name: str = "") -> Value:
    """Scatter `src` into each row of `into`: entry i is stored at, or combined with, entry ``ids[..., i]``.

    `reduce` is ``set``, ``add``, ``mul``, ``max`` or ``min``. If an index repeats, ``set`` stores one of its entries,
    and the others combine all of them. NumPy's ``put_along_axis``, 2018.
    """

def set_(a: Value, b: Value, *, offsets: Sequence[int], name: str = "") -> Value:
    """Replace the region of `a` at `offsets`, which has the shape of `b`, by `b`. ggml: ``SET``.

    ggml names the region by byte strides and a byte offset.
    """

def set_rows(into: Value, rows: Value, ids: Value, *, name: str = "") -> Value:
    """Replace row ``ids[i]`` of `into` by row i of `rows`, converted to the dtype of `into`. ggml: ``SET_ROWS``.

    If a row number repeats, one of its rows is stored; of blocks on CUDA, parts of several rows may be.
    """

def sgn(x: Value, *, name: str = "") -> Value:
    """Return the sign of each element as -1, +0 or 1. ggml: ``UNARY_OP_SGN``."""

def sigmoid(x: Value, *, name: str = "") -> Value:
    """Compute the sigmoid function ``1 / (1 + exp(-x))``. ggml: ``UNARY_OP_SIGMOID``."""

def silu(x: Value, *, name: str = "") -> Value:
    """Compute the sigmoid linear unit (SiLU) ``x * sigmoid(x)``. ggml: ``UNARY_OP_SILU``."""

def sin(x: Value, *, name: str = "") -> Value:
    """Compute the sine of `x` in radians. ggml: ``SIN``."""

def sinh(x: Value, *, name: str = "") -> Value:
    """Compute the hyperbolic sine. ISO C, 1999."""

def slice_(x: Value, *, axis: int, start: int, stop: int, name: str = "") -> Value:
    """Take the entries from `start` to before `stop` of one axis. ggml: ``VIEW``, which counts bytes."""

def softmax(
    x: Value,
    mask: Value | None = None,
    sinks: Value | None = None,
    *,
    scale: float = 1.0,
    max_bias: float = 0.0,
    mask_heads: str = "one",
    name: str = "",
) -> Value:
    """Compute the softmax of scaled and masked scores, ``softmax(x * scale + slope * mask)``. ggml: ``SOFT_MAX_EXT``.

    x: scores [..., heads, tokens, keys], at least three axes. `slope` is one factor for each head: 1, or the slope of
    ALiBi if `max_bias` > 0 (Press et al., 2022). `mask_heads` states the masks of heads: ``one`` mask for all heads,
    ``each`` head has its own, or ``tiled``: head i has mask ``i mod m``, as in ggml. A row that is masked completely
    gives zeros. A sink adds to the denominator of its head only.
    """

def softplus(x: Value, *, name: str = "") -> Value:
    """Compute the softplus ``log(1 + exp(x))``, which is `x` itself for large `x`. ggml: ``UNARY_OP_SOFTPLUS``."""

def solve_tri(a: Value, b: Value, *, name: str = "") -> Value:
    """Solve the triangular system ``a x = b`` for x, with lower triangular `a`. ggml: ``SOLVE_TRI``.

    Entries of `a` above its diagonal are not read.
    """

def sqr(x: Value, *, name: str = "") -> Value:
    """Square each element. ggml: ``SQR``."""

def sqrt(x: Value, *, name: str = "") -> Value:
    """Compute the square root. ggml: ``SQRT``."""

def ssm_conv(x: Value, w: Value, *, name: str = "") -> Value:
    """Apply a causal depthwise convolution over tokens: ``out[t, c] = sum_j w[c, j] x[t + j, c]``. ggml: ``SSM_CONV``.

    The first ``taps - 1`` rows of `x` belong to earlier tokens.
    """

def ssm_scan(
    x: Value,
    dt: Value,
    a: Value,
    b: Value,
    c: Value,
    state: Value,
    slots_in: Value | None = None,
    slots_out: Value | None = None,
    *,
    snapshots: int = 1,
    pool: str = "none",
    name: str = "",
) -> tuple[Value, Value]:
    """Apply a selective state space model (Mamba) to all tokens; return the outputs and the state after the last token.

    Per token and head, with ``dt = softplus(dt)``: ``S = exp(dt a) S + dt x b^T``; ``y = S c``. `S` is [channel,
    state]. `a` has one number per head (Mamba-2: Dao and Gu, 2024) or one per column of `S` (Mamba-1: Gu and Dao,
    2023, with one channel per head). Of the heads, r neighbours share `b` and `c`. `snapshots` and `pool` are as in
    `gated_delta_net`. ggml: ``SSM_SCAN``; its ids are `slots_in` with `pool` ``"read"``.
    """

def step(x: Value, *, name: str = "") -> Value:
    """Return the step function: 1 where ``x > 0``, else 0. ggml: ``UNARY_OP_STEP``."""

def sub(a: Value, b: Value, *, name: str = "") -> Value:
    """Subtract `b` from `a` elementwise. `b` is repeated as tiles to the shape of `a`. ggml: ``SUB``."""

def sum_(x: Value, *, name: str = "") -> Value:
    """Sum all entries to a scalar. ggml: ``SUM``."""

def sum_rows(x: Value, *, name: str = "") -> Value:
    """Sum each row; the row becomes an axis of size 1. ggml: ``SUM_ROWS``."""

def swiglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """Compute the gated unit ``silu(gate) * up``. ggml: ``GLU_OP_SWIGLU``; Shazeer, GLU variants, 2020."""

def swiglu_clamp(gate: Value, up: Value, *, limit: float, name: str = "") -> Value:
    """Compute the clamped SwiGLU ``silu(min(gate, limit)) * clip(up, -limit, limit)``. ggml: ``GLU_OP_SWIGLU_CLAMP``.

    DeepSeek V4 has this gated unit.
    """

def swiglu_oai(gate: Value, up: Value, *, alpha: float = 1.702, limit: float = 7.0, name: str = "") -> Value:
    """Compute the clamped SwiGLU of gpt-oss: ``g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)``.

    ``g = min(gate, limit)``: the gate is clamped from above only. ggml: ``GLU_OP_SWIGLU_OAI``; gpt-oss.
    """

def tan(x: Value, *, name: str = "") -> Value:
    """Compute the tangent of `x` in radians. ISO C, 1999."""

def tanh(x: Value, *, name: str = "") -> Value:
    """Compute the hyperbolic tangent. ggml: ``UNARY_OP_TANH``."""

def timestep_embedding(timesteps: Value, *, dim: int, max_period: int = 10000, name: str = "") -> Value:
    """Compute the sinusoidal embedding of timesteps: `dim` cosines and sines for each timestep.

    The first half has the cosines of ``t max_period^(-j / h)`` for j below ``h = dim // 2``, the second half their
    sines. If `dim` is odd, a 0 follows. ggml: ``TIMESTEP_EMBEDDING``; Nichol and Dhariwal, GLIDE, 2021.
    """

def top_k(x: Value, *, k: int, name: str = "") -> Value:
    """Return the indices of the `k` largest entries of each row. The largest comes first. ggml: ``TOP_K``.

    Equal entries keep their order. In ggml the order is undefined, and its CPU backend swaps the first two indices. A
    backend may return any order; tests compare sets.
    """

def transpose(x: Value, *, name: str = "") -> Value:
    """Exchange the last two axes. ggml: ``TRANSPOSE``."""

def tri(x: Value, *, kind: str, name: str = "") -> Value:
    """Keep one triangle of each square matrix, and set the other entries to zero. ggml: ``TRI``.

    `kind` is ``upper_diag``, ``upper``, ``lower_diag`` or ``lower``; ``upper`` and ``lower`` exclude the diagonal.
    """

def trunc(x: Value, *, name: str = "") -> Value:
    """Round towards zero to an integer. ggml: ``UNARY_OP_TRUNC``."""

def where(truth: Value, a: Value, b: Value, *, name: str = "") -> Value:
    """Select elements: `a` where `truth` is not 0, else `b`. The result has the dtype of `a`.

    `a` and `b` are broadcast to the shape of `truth`. NumPy's ``where`` (Harris et al., 2020).
    """

def windows(
    x: Value,
    *,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    value: float = 0.0,
    name: str = "",
) -> Value:
    """Collect sliding windows of `x` (im2col), for convolutions and pooling. ggml: ``IM2COL``, ``IM2COL_3D``.

    `x` is [images, channels, axes ...]. The result is [images, windows, channels, entries of a window], with windows
    and their entries in row-major order. Axes are padded with `left` and `right` entries of `value`. A product with
    weights is a convolution; a maximum over the last axis is a max pooling.
    """

def xielu(x: Value, *, alpha_n: float, alpha_p: float, beta: float, eps: float, name: str = "") -> Value:
    """Compute the xIELU activation: ``p x^2 + beta x`` where x > 0, else ``n (expm1(min(x, eps)) - x) + beta x``.

    ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``. ``ggml_xielu`` has the same parameters and stores
    p and n in the node. ggml: ``UNARY_OP_XIELU``; Huang and Schlag, 2024.
    """
