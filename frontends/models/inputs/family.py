"""The traits of a model family: the properties of a decoder that neither metadata nor tensors of a file show.

All else comes from the file. Metadata give sizes, counts and scales (0 means unset, as in files of llama.cpp). The
tensors that are present show biases, norms of q and k, sinks, gates, experts, learned positions, and whether q, k and
v have one matrix or several.
"""

from __future__ import annotations

from dataclasses import replace

from ....graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWindowPattern:
    """Which layers of a model have an attention window: all except each ``period``-th one (0: all layers).

    - ``is_global_first``: the layer without a window is the first of a period, not the last.
    - ``size``: replaces ``attention.sliding_window`` where llama.cpp does so; ``default`` stands for a missing key.
    - ``base``: the default of ``rope.freq_base_swa``, the RoPE base of layers with a window. `None` means the base of
      the other layers.
    - ``uses_rope_scaling``: layers with a window have the RoPE scaling of the other layers.
    - ``is_chunked``: a token attends only to its own chunk of window size.
    """

    period: int = 1
    is_global_first: bool = False
    size: int | None = None
    default: int = 0
    base: float | None = None
    uses_rope_scaling: bool = True
    is_chunked: bool = False
    required_layers: int = 0
    """If not 0, only models with this number of layers have windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """The traits of a model architecture; the defaults are the traits of LLaMA, with the RoPE mode ``neox``.

    ``norm`` is the kind of norm: ``rms`` or ``layer``, without weights if ``norms_without_weight``. The fields that
    name norms (before and after mixer and FFN, after the embedding, before the output) are tensor names. An empty name
    means no norm; a ``?`` at the end means that some blocks may lack it.

    ``parallel`` blocks add the results of mixer and FFN to the same input. It is ``yes``, ``key`` (as the key
    ``use_parallel_residual`` says) or ``absent`` (if the block has no FFN norm).
    """

    norm: str = "rms"
    norms_without_weight: bool = False
    attn_norm: str = "attn_norm"
    attn_post: str = ""
    ffn_norm: str = "ffn_norm"
    ffn_post: str = ""
    post_eps: float | None = None
    embedding_norm: str = ""
    output_norm: str = "output_norm"
    parallel: str = ""
    residual_after_norm: bool = False
    """The residual is the result of the norm before mixer or FFN, not its operand."""

    embedding: float | str | None = None
    """Factor of embeddings without the key ``embedding_scale``: a number, or ``width`` for the root of the width."""
    residual: float | str | None = None
    """Factor of values added to the residual without the key ``residual_scale``.

    A number, or ``layers`` for 1.4 divided by the root of the layer count.
    """
    logits: str = ""
    """Whether logits are multiplied (``times``) or divided (``over``) by ``logit_scale``."""
    logit_default: float | str | None = None
    softcap: float | None = None
    """Soft cap of the logits without the key ``final_logit_softcapping``; `None` if the key is not read."""

    rope: str = "neox"
    """RoPE mode: ``neox``, ``normal`` or ``none``; ``normal|mrope`` is normal without sections, else neox."""
    rotated_layers: str = "all"
    """Layers with RoPE.

    - ``all``.
    - ``window``: layers with a window.
    - ``window|dense``: also the leading dense layers.
    - ``window|plain``: all layers if no layer has a window.
    - ``every 4``: all except the last of four layers.
    - ``every 4 first``: all except the first of four layers.
    - ``finetuned``: as the key ``rope.scaling.finetuned`` says.
    - ``pattern``: as the key ``attention.rope_pattern`` says.
    - ``of 32``: models of 32 layers; models of 40 layers have ALiBi, other models neither.
    """
    half_rotation: bool = False
    """Layers without a window rotate half of the columns of ``rope.dimension_count``."""
    factors_in_global_layers_only: bool = False
    """``rope_freqs`` and ``rope_factors_*`` divide frequencies only in layers without a window."""
    alpha: bool = False
    """``rope.scaling.alpha`` stretches the RoPE base (NTK-aware scaling)."""
    repeat_key: str = ""
    """The key with the number of times that the stack of blocks runs."""
    windows: AttentionWindowPattern | None = None
    qk_norm: str = "maybe"
    """Norms of q and k.

    - ``before`` or ``after`` RoPE.
    - ``maybe``: before RoPE if the file has such norms.
    - ``bare``: after RoPE, without weights.
    - ``bare rotated``: the same, in layers with RoPE only.
    """
    head_norm_eps: float | None = None
    """The eps of the norms of q and k, which are layer norms then; `None` if they are like the other norms."""
    scale: str = "head"
    """Factor of the scores without the key ``attention.scale``.

    - ``head`` or ``rotated``: 1 over the root of the head size or of the rotated columns.
    - ``inverse``: 1 over the head size.
    - ``one``: 1.
    - ``output``: the key ``attention.output_scale``.
    """
    scale_of: int = 0
    """Models with this number of layers scale scores as if the head size were width over head count."""
    score_cap: float | None = None
    """Soft cap of the scores without the key ``attn_logit_softcapping``; `None` if the key is not read."""
    alibi: float = 0.0
    run_mode: str = "steps"
    """``steps``: token by token. ``at once``: bidirectional (diffusion). ``encoder``: bidirectional, without logits."""
    value_norm: bool = False
    temperature: tuple[int, float, float] | None = None
    """Floor, factor and offset of the temperature scaling of queries (0: from metadata)."""
    gate: str = "sigmoid"
    """The function of the output gate ``attn_gate`` of attention."""
    gated_queries: bool = False
    """Each head of ``attn_q`` has the columns of its query and then the columns of its gate."""

    cache_layers: int = 0
    """Number of first layers that have caches of their own; 0: the key ``attention.shared_kv_layers`` says it."""
    swin_norm: bool = False
    """If the key ``swin_norm`` is set, the norms of mixer and FFN come after them."""

    activation: str = "silu"
    """Activation of the FFN: silu, gelu, gelu erf, relu, relu2, oai, xielu and others.

    ``gelu or relu`` is relu in an FFN without a gate. ``gelu tanh`` is not rounded to half precision.
    """
    sparse_gates: int = 0
    """The number of first layers with sparse gates: they keep the largest 5 % of a normal distribution."""
    gating: str = "softmax"
    """Router weights: softmax, sigmoid, chosen (softmax over the chosen experts), or ``key`` or ``key sigmoid``.

    The last two read ``expert_gating_func``, with the defaults softmax and sigmoid.
    """
    normalises_routing: bool | None = True
    """Whether routing weights are divided by their sum; `None`: the key ``expert_weights_norm``, by default not."""
    parallel_dense_ffn: str = ""
    """A dense FFN parallel to the experts: ``sum``, ``mean`` (sum over the root of two), ``residual``, ``normed``."""
    shared_gate: bool = False
    """Whether a sigmoid of the token gates the shared expert."""
    special_routing: str = ""
    """Routing that only one family has; see `moe`."""

    has_interleaved_experts: bool = False
    """Only each n-th block reads its experts, with n from the key ``interleave_moe_layer_step``."""

    mixer: str = "attention"
    """Mixer of layers that are not recurrent: ``attention``, ``latent``, ``compressed``.

    ``single``: a block has a mixer or an FFN, not both.
    """
    allows_headless_layers: bool = False
    """Layers may have 0 heads and then no attention, or 0 key/value heads and then one matrix instead of attention."""
    recurrent: str = ""
    """The mixer of the recurrent layers, see `recurrent_where`."""
    recurrent_where: str = "kv"
    """The recurrent layers.

    - ``kv``: layers without key/value heads.
    - ``interval``: all except each `interval`-th.
    - ``all``.
    - ``both``: all, in parallel to attention.
    """
    interval: int = 4
    delta_gate: str = "silu"
    """Activation of the output gate of a delta net: silu, sigmoid."""
    bounded_decay: float = 0.0
    """Sign of the operand of the sigmoid in Kimi's bounded log decay; 0 for decays without a bound.

    The bound is the key ``kda.gate_lower_bound``.
    """
    l2_eps: float | None = None
    """The eps of the L2 norms of queries and keys in Kimi's delta rule; `None` for the eps of the norms."""
    log_multiplier: float = 1.0
    """Factor of ``rope.scaling.yarn_log_multiplier``."""
    sparse_keys: str = ""
    """Metadata keys; their product is the number of tokens that sparse attention selects.

    Longer contexts are refused.
    """
    picture_tokens: bool = False
    """The vocabulary has tokens of pictures, which no text contains."""
    residuals: str = ""
    """The decoder class by its residual stream: a key of `DECODERS`."""
    tensor_prefix: str = ""
    """The prefix of tensor names, if a file has several stacks."""

    draft_input: str = "normed"
    """Input of MTP blocks: the last ``residual``, or its norm (``normed``).

    Blocks with several residual streams get all streams.
    """
    draft_norm: str = ""
    """The kind of the last norm of MTP blocks, if it is not `norm`."""
    ignores: tuple[str, ...] = ()
    """Patterns of optional tensors that the graph of llama.cpp does not read."""
    optional_tensors: tuple[str, ...] = ()
    """Patterns of tensors that some blocks need and other blocks may have without using them."""
    has_feed_forward_scale: bool = False
    """Whether ``.scale`` tensors of FFNs and experts are read."""

    def with_post_norms(self) -> FamilyTraits:
        """Return these traits with post-norms: the norms come after mixer and FFN instead of before them."""
        return replace(self, attn_norm="", attn_post=self.attn_norm, ffn_norm="", ffn_post=self.ffn_norm)

    @property
    def is_causal(self) -> bool:
        """Whether attention is causal: a token attends to earlier tokens and itself only."""
        return self.run_mode == "steps"

    @property
    def uses_attention(self) -> bool:
        """Whether some layers use attention, so that the key ``attention.causal`` matters."""
        return self.recurrent_where != "all"

    @property
    def needs_block_input_in_ffn(self) -> bool:
        """Whether the FFN also reads the residual as it was before the mixers, the input of the block."""
        return self.parallel_dense_ffn == "residual" or self.special_routing == "early router"
