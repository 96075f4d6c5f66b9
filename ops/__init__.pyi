"""All ops with their types and docstrings, written from the registry by `python -m hocket.ops.stubs`."""

from collections.abc import Sequence

from ..graph.dtypes import DTypeLike
from ..graph.node import Value
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
    """``|x|``. ggml: ``UNARY_OP_ABS``."""

def acc(a: Value, b: Value, *, offsets: Sequence[int], name: str = "") -> Value:
    """`a` with `b` added to the region at `offsets` with the shape of `b`.

    ggml: ``ACC``, which names the region by byte strides and a byte offset.
    """

def accumulate(x: Value, *, kind: str, name: str = "") -> Value:
    """The running max, min, sum or prod (`kind`) of each row, in the dtype of `x`.

    NumPy (Harris et al., 2020).
    """

def add(a: Value, b: Value, *, name: str = "") -> Value:
    """``a + b``; `b` tiles into `a` (index modulo size). ggml: ``ADD``."""

def add_id(a: Value, b: Value, ids: Value, *, first: int = 0, total: int = 0, name: str = "") -> Value:
    """`a` plus the rows of `b` of chosen experts: ``a[t, i] + b[ids[t, i]]``.

    With `total` experts in all, `b` has the experts from `first` on; for other experts nothing is added. ggml:
    ``ADD_ID``.
    """

def arange(*, start: float, stop: float, step: float = 1.0, name: str = "") -> Value:
    """``start + i step`` for each i with a value before `stop`. ggml: ``ARANGE``.

    The number of values is ``ceil((stop - start) / step)``, in float64; ggml rounds to float32.
    """

def arccos(x: Value, *, name: str = "") -> Value:
    """Inverse cosine in radians. ISO C, 1999."""

def arccosh(x: Value, *, name: str = "") -> Value:
    """Inverse hyperbolic cosine. ISO C, 1999."""

def arcsin(x: Value, *, name: str = "") -> Value:
    """Inverse sine in radians. ISO C, 1999."""

def arcsinh(x: Value, *, name: str = "") -> Value:
    """Inverse hyperbolic sine. ISO C, 1999."""

def arctan(x: Value, *, name: str = "") -> Value:
    """Inverse tangent in radians. ISO C, 1999."""

def arctanh(x: Value, *, name: str = "") -> Value:
    """Inverse hyperbolic tangent. ISO C, 1999."""

def argmax(x: Value, *, name: str = "") -> Value:
    """The index of the largest entry of each row; of equal entries, the first index. ggml: ``ARGMAX``.

    The CPU backend of ggml returns the last index of equal entries; its tests have no equal entries.
    """

def argsort(x: Value, *, descending: bool = False, name: str = "") -> Value:
    """Indices that sort each row; equal entries keep their order. ggml: ``ARGSORT``, which is unstable."""

def attention(
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    sinks: Value | None = None,
    *,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    mask_heads: str = "one",
    name: str = "",
) -> Value:
    """``softmax(cap(q k scale) + slope mask) v`` per head; `query_heads` neighbours of q share a key/value head.

    `cap(x)` is ``softcap tanh(x / softcap)`` where softcap > 0. A sink adds to the denominator of its head only. A
    row that is masked completely gives zeros. `mask_heads` states the masks of heads: ``one`` mask for all heads,
    ``each`` head has its own, or ``tiled``: head i has mask ``i mod m``. Slopes are 1 unless `max_bias` > 0 (ALiBi:
    Press et al., 2022). ggml: ``FLASH_ATTN_EXT``; Dao et al., 2022.
    """

def broadcast(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """Repeat axes of size 1 (and new leading axes) without copying. ggml: implied by stride 0."""

def calculate(a: Value, b: Value, *, kind: str, name: str = "") -> Value:
    """Integer operation `kind`: add, sub, mul, floor_div, trunc_div, floor_mod, trunc_mod, max, min, and, or, xor,
    shift_left, shift_right.

    `b` tiles into `a`; the result has the dtype of `a`. Division by 0 gives 0. NumPy (Harris et al., 2020).
    """

def cast(x: Value, *, dtype: DTypeLike, name: str = "") -> Value:
    """The same numbers in another dtype, rounded to nearest even. ggml: ``CPY`` to a tensor of that type."""

def causal_mask(pos: Value, *, cells: int, window: int = 0, name: str = "") -> Value:
    """0 where the token at position `pos` may attend to cache cell s (``pos - window < s <= pos``), else -inf.

    Cell s of a sequence has position s. `window` counts the token itself; 0 means no window.
    ggml: no op, llama.cpp fills its KQ mask on the host.
    """

def ceil(x: Value, *, name: str = "") -> Value:
    """The next integer above. ggml: ``UNARY_OP_CEIL``."""

def clamp(x: Value, *, min: float, max: float, name: str = "") -> Value:
    """`x` clamped to `min` and `max`; -0 is less than +0. ggml: ``CLAMP``."""

def compare(a: Value, b: Value, *, kind: str, name: str = "") -> Value:
    """1 where a comparison is true, else 0: `kind` is eq, ne, lt, le, gt or ge; `b` tiles into `a`.

    For a NaN, only ne is true. IEEE 754, 2019.
    """

def concat(a: Value, b: Value, *, axis: int, name: str = "") -> Value:
    """`a` followed by `b` along one axis. ggml: ``CONCAT``."""

def cont(x: Value, *, name: str = "") -> Value:
    """A contiguous copy; the planner inserts it where a kernel cannot read a view. ggml: ``CONT``."""

def cos(x: Value, *, name: str = "") -> Value:
    """Cosine of `x` in radians. ggml: ``COS``."""

def cosh(x: Value, *, name: str = "") -> Value:
    """Hyperbolic cosine. ISO C, 1999."""

def count_equal(a: Value, b: Value, *, name: str = "") -> Value:
    """The number of indices with equal entries of `a` and `b`, a scalar. ggml: ``COUNT_EQUAL``."""

def cumsum(x: Value, *, name: str = "") -> Value:
    """Running sums along the last axis: entry i is the sum of entries 0 to i. ggml: ``CUMSUM``."""

def diag(x: Value, *, name: str = "") -> Value:
    """Matrices with the rows of `x` on their diagonals, zeros elsewhere. ggml: ``DIAG``, without its axis of size 1."""

def diag_mask_inf(x: Value, *, n_past: int, name: str = "") -> Value:
    """`x` with -inf where the column exceeds the row by more than `n_past`. ggml: ``DIAG_MASK_INF``.

    Rows are the tokens after `n_past` earlier ones; columns are the tokens that they attend to.
    """

def div(a: Value, b: Value, *, name: str = "") -> Value:
    """``a / b`` elementwise; `b` tiles into `a`. ggml: ``DIV``."""

def dsv4_hc_comb(mixes: Value, scale: Value, base: Value, *, n_iter: int, eps: float = 1e-06, name: str = "") -> Value:
    """The mixing matrices [..., from, to] of n residual streams, nearly doubly stochastic, from the last n² logits.

    1. ``softmax(mixes scale[2] + base)`` over `to`, plus eps.
    2. Divide by the sums over `from`, plus eps.
    3. Repeat ``n_iter - 1`` times: divide by the sums over `to`, then over `from`, each plus eps.

    Sinkhorn and Knopp, 1967. ggml: ``DSV4_HC_COMB``, with n = 4; Xie et al., mHC: manifold-constrained
    hyper-connections, 2025.
    """

def dsv4_hc_post(x: Value, residual: Value, post: Value, comb: Value | None = None, *, name: str = "") -> Value:
    """The residual streams after a layer: ``out[to] = x post[to] + sum_from residual[from] comb[from, to]``.

    Without `comb`, streams do not mix. ggml: ``DSV4_HC_POST``.
    """

def dsv4_hc_pre(x: Value, weights: Value, *, gated: bool = False, scale: float = 1.0, name: str = "") -> Value:
    """The input of a layer from n residual streams: ``scale sum_h x[h] weights[h]``.

    With `gated`, weights are logits of sigmoids, one for each element of each stream. ggml: ``DSV4_HC_PRE``.
    """

def elu(x: Value, *, name: str = "") -> Value:
    """`x` where it is positive, ``e ** x - 1`` elsewhere. ggml: ``UNARY_OP_ELU``; Clevert et al., 2015."""

def erf(x: Value, *, name: str = "") -> Value:
    """The error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t^2)`` from 0 to `x`. ISO C, 1999."""

def exp(x: Value, *, name: str = "") -> Value:
    """``e ** x``. ggml: ``UNARY_OP_EXP``."""

def expm1(x: Value, *, name: str = "") -> Value:
    """``e ** x - 1``, exact near 0, too; ggml subtracts. ggml: ``UNARY_OP_EXPM1``."""

def fill(x: Value, *, value: float, name: str = "") -> Value:
    """An array of `value` with the shape and dtype of `x`; entries of `x` are not read. ggml: ``FILL``."""

def floor(x: Value, *, name: str = "") -> Value:
    """The next integer below. ggml: ``UNARY_OP_FLOOR``."""

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
    """The gated delta rule over all tokens; returns the outputs and the state after the last token.

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
    """Linear attention with a decay per key channel; returns the outputs and the state after the last token.

    Per token and head: ``S = g * S + k v^T``; ``y = scale S^T q``; `S` is [key, value]. `g` is the decay
    itself, not its logarithm. ggml: ``GATED_LINEAR_ATTN``; Yang et al., 2023.
    """

def gather(x: Value, ids: Value, *, name: str = "") -> Value:
    """Entries of each row of `x` by number: ``x[..., ids[..., i]]``. NumPy's ``take_along_axis``, 2018."""

def geglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """``gelu(gate) * up`` with the tanh approximation. ggml: ``GLU_OP_GEGLU``; Shazeer, GLU variants, 2020."""

def geglu_erf(gate: Value, up: Value, *, name: str = "") -> Value:
    """``gelu_erf(gate) * up``. ggml: ``GLU_OP_GEGLU_ERF``."""

def geglu_quick(gate: Value, up: Value, *, name: str = "") -> Value:
    """``gelu_quick(gate) * up``. ggml: ``GLU_OP_GEGLU_QUICK``."""

def gelu(x: Value, *, name: str = "") -> Value:
    """Gaussian error linear unit, tanh approximation. ggml: ``UNARY_OP_GELU``; Hendrycks and Gimpel, 2016.

    ``0.5 x (1 + tanh(u))`` is written as ``x sigmoid(2 u)``, which stays exact where tanh(u) is near -1.
    """

def gelu_erf(x: Value, *, name: str = "") -> Value:
    """Gaussian error linear unit, ``0.5 x (1 + erf(x / sqrt(2)))``. ggml: ``UNARY_OP_GELU_ERF``.

    Hendrycks and Gimpel, 2016. Written with erfc, which stays exact for negative `x`.
    """

def gelu_quick(x: Value, *, name: str = "") -> Value:
    """``x * sigmoid(1.702 x)``. ggml: ``UNARY_OP_GELU_QUICK``; Hendrycks and Gimpel, 2016."""

def get_rows(table: Value, ids: Value, *, name: str = "") -> Value:
    """Rows of `table` by number, as f32: ``table[ids]``. ggml: ``GET_ROWS``."""

def glu(
    x: Value, *, kind: str, swapped: bool = False, alpha: float = 1.702, limit: float = 7.0, name: str = ""
) -> Value:
    """The gated unit `kind` of the two halves of the last axis: gate, then up; with `swapped` up, then gate.

    ggml: ``GLU`` with one source, each kind the op of that name; `alpha` and `limit` are read by swiglu_oai and
    swiglu_clamp only.
    """

def group_norm(x: Value, *, groups: int, eps: float = 1e-06, name: str = "") -> Value:
    """`norm` over groups of neighbouring channels and the last two axes; channels are the axis before these.

    ggml: ``GROUP_NORM``. If `groups` does not divide the channels, the last groups are smaller or empty, as in ggml.
    Wu and He, 2018.
    """

def hardsigmoid(x: Value, *, name: str = "") -> Value:
    """``(x + 3) / 6``, clamped to 0 and 1. ggml: ``UNARY_OP_HARDSIGMOID``."""

def hardswish(x: Value, *, name: str = "") -> Value:
    """``x * hardsigmoid(x)``. ggml: ``UNARY_OP_HARDSWISH``; Howard et al., 2019."""

def l2_norm(x: Value, *, eps: float = 1e-06, clamp: bool = False, name: str = "") -> Value:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis; with `clamp` ``x / max(sqrt(sum(x^2)), eps)``.

    ggml's ``L2_NORM`` is the clamped form; delta nets use the other one (llama.cpp: rms_norm, then scale).
    """

def leaky_relu(x: Value, *, negative_slope: float, name: str = "") -> Value:
    """`x` where it is positive, ``negative_slope * x`` elsewhere. ggml: ``LEAKY_RELU``."""

def lightning_indexer(q: Value, k: Value, weights: Value, mask: Value, *, name: str = "") -> Value:
    """The score of each key for each query: ``sum_h weights[t, h] relu(q[t, h] . k[s]) + mask[t, s]``.

    All heads share one key. `weights` has the scale factors. ggml: ``LIGHTNING_INDEXER``; DeepSeek-V3.2, 2025.
    """

def log(x: Value, *, name: str = "") -> Value:
    """Natural logarithm. ggml: ``LOG``."""

def log1p(x: Value, *, name: str = "") -> Value:
    """Natural logarithm of ``1 + x``, exact near 0. ISO C, 1999."""

def maximum(a: Value, b: Value, *, name: str = "") -> Value:
    """The larger of two numbers, or NaN if one of them is NaN; +0 is larger than -0. `b` tiles into `a`.

    IEEE 754, 2019.
    """

def mean(x: Value, *, name: str = "") -> Value:
    """The mean of each row, as an axis of size 1; the mean of an empty row is 0. ggml: ``MEAN``."""

def minimum(a: Value, b: Value, *, name: str = "") -> Value:
    """The smaller of two numbers, or NaN if one of them is NaN; -0 is smaller than +0. `b` tiles into `a`.

    IEEE 754, 2019.
    """

def mul(a: Value, b: Value, *, name: str = "") -> Value:
    """``a * b`` elementwise; `b` tiles into `a`. ggml: ``MUL``."""

def mul_mat(w: Value, x: Value, *, ordered: bool = False, exact: bool = True, name: str = "") -> Value:
    """Rows of `x` times the transposed weight, ``x @ w.T``. ggml: ``MUL_MAT``.

    Leading axes of `w` divide the leading axes of `x`: one weight serves neighbouring entries. With `ordered`, the
    terms of a sum are not sharded, so that its last bit does not depend on the number of devices. Without `exact`, a
    backend may round `x` to the dtype of weights of 16 bits.
    """

def mul_mat_id(
    w: Value, x: Value, ids: Value, *, first: int = 0, total: int = 0, exact: bool = True, name: str = ""
) -> Value:
    """Rows of `x` times the transposed weights of chosen experts: ``out[t, i] = w[ids[t, i]] @ x[t, i mod v]``.

    Only chosen experts are read. An id outside the experts is an error of the run. With `total` experts in all, `w` has
    the experts from `first` on; for other experts the result is zero. `exact` is as in `mul_mat`. ggml:
    ``MUL_MAT_ID``; Shazeer et al., 2017.
    """

def neg(x: Value, *, name: str = "") -> Value:
    """``-x``. ggml: ``UNARY_OP_NEG``."""

def norm(x: Value, *, eps: float = 1e-05, name: str = "") -> Value:
    """``(x - mean) / sqrt(variance + eps)`` over the last axis. ggml: ``NORM``; Ba et al., 2016, without weights."""

def pad(x: Value, *, left: Sequence[int], right: Sequence[int], circular: bool = False, name: str = "") -> Value:
    """`x` with ``left[i]`` and ``right[i]`` zeros before and after axis i; with `circular`, its own entries cyclically.

    ggml: ``PAD`` (ggml_pad_ext, ggml_pad_ext_circular, which count axes from the last).
    """

def pad_reflect_1d(x: Value, *, left: int, right: int, name: str = "") -> Value:
    """`x` with the last axis extended by its mirror image, without the outer entry. ggml: ``PAD_REFLECT_1D``."""

def permute(x: Value, *, axes: Sequence[int], name: str = "") -> Value:
    """Axis i of the result is axis ``axes[i]`` of `x`. ggml: ``PERMUTE`` (which counts axes from the last)."""

def power(a: Value, b: Value, *, name: str = "") -> Value:
    """``a ** b``; `b` tiles into `a`. IEEE 754, 2019."""

def reduce(x: Value, *, kind: str, name: str = "") -> Value:
    """The max, min, sum or prod (`kind`) of each row in the dtype of `x`, as an axis of size 1.

    For floats, `sum_rows` permits partial sums. NumPy (Harris et al., 2020).
    """

def reglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """``relu(gate) * up``. ggml: ``GLU_OP_REGLU``; Shazeer, GLU variants, 2020."""

def relu(x: Value, *, name: str = "") -> Value:
    """``max(x, 0)``, or +0 where that is zero. ggml: ``UNARY_OP_RELU``."""

def repeat(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """`x` repeated as tiles to `shape`: entry i of an axis is ``x[i % size]``. ggml: ``REPEAT``."""

def reshape(x: Value, *, shape: Sequence[int], name: str = "") -> Value:
    """The same elements in row-major order under another shape. ggml: ``RESHAPE``."""

def rms_norm(x: Value, *, eps: float = 1e-06, name: str = "") -> Value:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis. ggml: ``RMS_NORM``; Zhang and Sennrich, 2019."""

def roll(x: Value, *, shifts: Sequence[int], name: str = "") -> Value:
    """`x` with axis i shifted cyclically by ``shifts[i]``. ggml: ``ROLL``."""

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
    offset: int = 0,
    name: str = "",
) -> Value:
    """Rotate pairs of `n_dims` elements by angles ``pos * base^(-2i/n_dims) * freq_scale / factors[i]``.

    Pairs are neighbours (2i, 2i+1) in mode ``normal`` and halves (i, i + n_dims/2) in mode ``neox``, counted from
    `offset`. `ext_factor` > 0 mixes in unscaled angles and scales the magnitude (YaRN: Peng et al., 2023).
    ggml: ``ROPE``; Su et al., 2021.
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
    offset: int = 0,
    name: str = "",
) -> Value:
    """`rope` with four positions per token: ``pos[0]`` time, 1 height, 2 width, 3 a further one.

    Pairs are halves, as in ``neox``. `mode` assigns a position to each pair:

    * ``mrope``: the first ``sections[0]`` pairs have the time, the next ``sections[1]`` the height, and so on; after
      the last section the sections repeat.
    * ``imrope``: pairs 3i, 3i + 1 and 3i + 2 have time, height and width, each up to the size of its section.
    * ``vision``: as ``mrope``, on the whole head, with n_dims half of it; the angles start again in each section.

    ggml: ``ROPE`` (``ggml_rope_multi``); Wang et al., 2024.
    """

def round_(x: Value, *, name: str = "") -> Value:
    """The nearest integer, halves away from zero (not to even, as NumPy does), with the sign of `x`.

    ggml: ``UNARY_OP_ROUND``.
    """

def rwkv_wkv6(
    k: Value, v: Value, r: Value, bonus: Value, decay: Value, state: Value, *, name: str = ""
) -> tuple[Value, Value]:
    """The token mixing of RWKV 6; returns the outputs and the state after the last token.

    Per token and head: ``y = (S + (bonus * k) v^T)^T r``; ``S = decay * S + k v^T``, `decay` and `bonus` per key
    channel; `S` is [key, value]. ggml: ``RWKV_WKV6`` (bonus: ``tf``, decay: ``td``); Peng et al., 2024.
    """

def rwkv_wkv7(
    r: Value, decay: Value, k: Value, v: Value, a: Value, b: Value, state: Value, *, name: str = ""
) -> tuple[Value, Value]:
    """The token mixing of RWKV 7, a generalised delta rule; returns the outputs and the state after the last token.

    Per token and head: ``S = S diag(decay) + (S a) b^T + v k^T``; ``y = S r``; `S` is [value, key].
    ggml: ``RWKV_WKV7`` (decay: ``w``); Peng et al., 2025.
    """

def scale(x: Value, *, scale: float, bias: float = 0.0, name: str = "") -> Value:
    """``x * scale + bias``. ggml: ``SCALE``. A `bias` of 0 is not added, so that a zero keeps its sign."""

def scatter(into: Value, ids: Value, src: Value, *, reduce: str = "set", name: str = "") -> Value:
    """`into` with entry ``ids[..., i]`` of each row replaced by entry i of `src`, or combined with it by `reduce`.

    If a number repeats, ``set`` stores one of its entries; add, mul, max and min combine all of them. NumPy's
    ``put_along_axis``, 2018.
    """

def set_(a: Value, b: Value, *, offsets: Sequence[int], name: str = "") -> Value:
    """`a` with the region at `offsets` with the shape of `b` replaced by `b`.

    ggml: ``SET``, which names the region by byte strides and a byte offset.
    """

def set_rows(into: Value, rows: Value, ids: Value, *, name: str = "") -> Value:
    """`into` with row ``ids[i]`` replaced by row i of `rows`, in its dtype. ggml: ``SET_ROWS``.

    If an id repeats, one of its rows is stored.
    """

def sgn(x: Value, *, name: str = "") -> Value:
    """-1, +0 or 1, by the sign of `x`. ggml: ``UNARY_OP_SGN``."""

def sigmoid(x: Value, *, name: str = "") -> Value:
    """``1 / (1 + exp(-x))``. ggml: ``UNARY_OP_SIGMOID``."""

def silu(x: Value, *, name: str = "") -> Value:
    """``x * sigmoid(x)``. ggml: ``UNARY_OP_SILU``."""

def sin(x: Value, *, name: str = "") -> Value:
    """Sine of `x` in radians. ggml: ``SIN``."""

def sinh(x: Value, *, name: str = "") -> Value:
    """Hyperbolic sine. ISO C, 1999."""

def slice_(x: Value, *, axis: int, start: int, stop: int, name: str = "") -> Value:
    """Entries `start` to `stop` (exclusive) of one axis. ggml: ``VIEW`` (which counts bytes)."""

def softmax(
    x: Value,
    mask: Value | None = None,
    sinks: Value | None = None,
    *,
    scale: float = 1.0,
    max_bias: float = 0.0,
    name: str = "",
) -> Value:
    """``softmax(x * scale + slope * mask)`` over the last axis. ggml: ``SOFT_MAX_EXT``.

    x: scores [..., heads, tokens, keys], at least three axes. `slope` is one factor for each head: 1, or the
    slope of ALiBi if `max_bias` > 0 (Press et al., 2022). A row that is masked completely gives zeros.
    """

def softplus(x: Value, *, name: str = "") -> Value:
    """``log(1 + exp(x))``, which is `x` itself for large `x`. ggml: ``UNARY_OP_SOFTPLUS``."""

def solve_tri(a: Value, b: Value, *, name: str = "") -> Value:
    """The x of ``a x = b`` for lower triangular `a`; entries above its diagonal are not read. ggml: ``SOLVE_TRI``."""

def sqr(x: Value, *, name: str = "") -> Value:
    """``x * x``. ggml: ``SQR``."""

def sqrt(x: Value, *, name: str = "") -> Value:
    """Square root. ggml: ``SQRT``."""

def ssm_conv(x: Value, w: Value, *, name: str = "") -> Value:
    """Causal depthwise convolution, ``out[t, c] = sum_j w[c, j] x[t + j, c]``. ggml: ``SSM_CONV``.

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
    """A selective state space model over all tokens; returns the outputs and the state after the last token.

    Per token and head, with ``dt = softplus(dt)``: ``S = exp(dt a) S + dt x b^T``; ``y = S c``. `S` is [channel,
    state]. `a` has one number per head (Mamba-2: Dao and Gu, 2024) or one per column of `S` (Mamba-1: Gu and Dao,
    2023, with one channel per head). Of the heads, r neighbours share `b` and `c`. `snapshots` and `pool` are as in
    `gated_delta_net`. ggml: ``SSM_SCAN``; its ids are `slots_in` with `pool` ``"read"``.
    """

def step(x: Value, *, name: str = "") -> Value:
    """1 where ``x > 0``, else 0. ggml: ``UNARY_OP_STEP``."""

def sub(a: Value, b: Value, *, name: str = "") -> Value:
    """``a - b``; `b` tiles into `a`. ggml: ``SUB``."""

def sum_(x: Value, *, name: str = "") -> Value:
    """The sum of all entries, a scalar. ggml: ``SUM``."""

def sum_rows(x: Value, *, name: str = "") -> Value:
    """The sum of each row, as an axis of size 1. ggml: ``SUM_ROWS``."""

def swiglu(gate: Value, up: Value, *, name: str = "") -> Value:
    """``silu(gate) * up``. ggml: ``GLU_OP_SWIGLU``; Shazeer, GLU variants, 2020."""

def swiglu_clamp(gate: Value, up: Value, *, limit: float, name: str = "") -> Value:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)``. ggml: ``GLU_OP_SWIGLU_CLAMP``; DeepSeek V4."""

def swiglu_oai(gate: Value, up: Value, *, alpha: float = 1.702, limit: float = 7.0, name: str = "") -> Value:
    """``g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)`` for ``g = min(gate, limit)``.

    `gate` is clamped from above only. ggml: ``GLU_OP_SWIGLU_OAI``; gpt-oss.
    """

def tan(x: Value, *, name: str = "") -> Value:
    """Tangent of `x` in radians. ISO C, 1999."""

def tanh(x: Value, *, name: str = "") -> Value:
    """Hyperbolic tangent. ggml: ``UNARY_OP_TANH``."""

def timestep_embedding(timesteps: Value, *, dim: int, max_period: int = 10000, name: str = "") -> Value:
    """Cosines, then sines, of ``t max_period^(-j / h)`` for j below ``h = dim // 2``; a last 0 if `dim` is odd.

    ggml: ``TIMESTEP_EMBEDDING``; Nichol and Dhariwal, GLIDE, 2021.
    """

def top_k(x: Value, *, k: int, name: str = "") -> Value:
    """Indices of the `k` largest entries of each row, largest first, equal entries in order. ggml: ``TOP_K``.

    In ggml the order is undefined, and its CPU backend swaps the first two indices. A backend may return any order;
    tests compare sets.
    """

def transpose(x: Value, *, name: str = "") -> Value:
    """Exchange the last two axes. ggml: ``TRANSPOSE``."""

def tri(x: Value, *, kind: str, name: str = "") -> Value:
    """A triangle of each square matrix, with zeros elsewhere.

    `kind` has the names of ggml; "lower" and "upper" exclude the diagonal. ggml: ``TRI``.
    """

def trunc(x: Value, *, name: str = "") -> Value:
    """The next integer towards zero. ggml: ``UNARY_OP_TRUNC``."""

def where(truth: Value, a: Value, b: Value, *, name: str = "") -> Value:
    """`a` where `truth` is not 0, else `b`, in the dtype of `a`; both are broadcast to `truth`.

    NumPy's ``where`` (Harris et al., 2020).
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
    """Windows of `x` [images, channels, axes ...] as [images, windows, channels, entries of a window], each row-major.

    Axes are padded with `left` and `right` entries of `value`. A product with weights is a convolution; a maximum over
    the last axis is a max pooling. ggml: ``IM2COL``, ``IM2COL_3D``.
    """

def xielu(x: Value, *, alpha_n: float, alpha_p: float, beta: float, eps: float, name: str = "") -> Value:
    """``p x^2 + beta x`` where x > 0, else ``n (expm1(min(x, eps)) - x) + beta x``. ggml: ``UNARY_OP_XIELU``.

    ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``. ``ggml_xielu`` has the same parameters and stores
    p and n in the node. Huang and Schlag, 2024.
    """
