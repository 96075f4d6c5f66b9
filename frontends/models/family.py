"""A row of the table of architectures: what a decoder has that neither its metadata nor its tensors tell.

Everything else is read from the file: sizes, counts and scales from metadata (0 stands for unset, as llama.cpp's own
files have it); biases, norms of q and k, sinks, gates, experts, learned positions and one or several matrices for
q, k and v from the tensors that are there.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers that see only the last tokens: all but each ``period``-th (0: all), the first or the last of a period.

    ``size`` replaces what ``attention.sliding_window`` says where llama.cpp does, and ``default`` stands for a missing
    key.  Those layers rotate with the base
    ``rope.freq_base_swa``, by default ``base`` (None: that of the others), and with the scaling of the others if
    ``scaled``.  ``chunked`` layers see the tokens of their own chunk of so many positions instead.
    """

    period: int = 1
    whole_first: bool = False
    size: int | None = None
    default: int = 0
    base: float | None = None
    scaled: bool = True
    chunked: bool = False
    least_layers: int = 0
    """A model of any other number of layers has no windows, unless this is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Traits of an architecture; the defaults are those of LLaMA with rotated halves.

    Norms: ``norm`` is ``rms`` or ``layer``; with ``bare`` they have no weights.  A name of a norm is that of its
    tensor, with a ``?`` if blocks may lack it and empty if there is none: before and after mixer and feed-forward,
    after the embedding, before the output.
    ``parallel`` blocks add both parts to the same input: ``yes``, ``key`` (as ``use_parallel_residual`` says) or
    ``absent`` (if the block lacks the norm of the feed-forward).
    """

    norm: str = "rms"
    bare: bool = False
    attn_norm: str = "attn_norm"
    attn_post: str = ""
    ffn_norm: str = "ffn_norm"
    ffn_post: str = ""
    post_eps: float | None = None
    embedding_norm: str = ""
    output_norm: str = "output_norm"
    parallel: str = ""
    residual_after_norm: bool = False
    """The residual is what the norm before mixer or feed-forward gives, not what it takes."""

    embedding: float | str | None = None
    """What embeddings are multiplied by unless ``embedding_scale`` says so: a number, or ``width`` for its root."""
    residual: float | str | None = None
    """The same for what is added to the residual and ``residual_scale``; ``layers`` is 1.4 over their root."""
    logits: str = ""
    """Logits are multiplied (``times``) or divided (``over``) by ``logit_scale``."""
    logit_default: float | str | None = None
    softcap: float | None = None
    """Bound of the logits where ``final_logit_softcapping`` is missing; None if the key is not read."""

    rope: str = "neox"
    """Pairs that turn: ``neox``, ``normal``, ``none``; ``normal|mrope`` are normal without sections, else as neox."""
    rotated: str = "all"
    """Layers that rotate: ``all``, ``window``, ``window|dense``, ``window|plain`` (all, if there are no windows),
    ``every 4`` (not the last of four), ``every 4 first``, ``finetuned`` (as that key says), ``pattern``, ``of 32`` (in
    models of 32 layers; those of 40 have ALiBi, and others neither)."""
    half_rotation: bool = False
    """Layers without a window rotate half of the columns that ``rope.dimension_count`` gives."""
    whole_factors: bool = False
    """``rope_freqs`` and ``rope_factors_*`` divide the speeds of rotation only in layers without a window."""
    alpha: bool = False
    """Bases of rotation are stretched by ``rope.scaling.alpha`` (NTK-aware scaling)."""
    repeats: str = ""
    """The key that says how often the stack of blocks is run."""
    windows: Windows | None = None
    qk_norm: str = "maybe"
    """Norms of q and k: ``before`` or ``after`` rotation, ``maybe`` before it if the file has any, ``bare`` without
    weights after it, ``bare rotated`` so in layers that rotate alone."""
    head_norm_eps: float | None = None
    """Norms of q and k are layer norms with this eps; None if they are as the other norms."""
    scale: str = "head"
    """Scores are multiplied by ``attention.scale`` or: 1/sqrt of the ``head`` or ``rotated`` size, ``inverse`` of it,
    ``one``."""
    scale_of: int = 0
    """A model of so many layers scales scores by the width of a head's share."""
    score_cap: float | None = None
    """Bound of the scores where ``attn_logit_softcapping`` is missing; None if the key is not read."""
    alibi: float = 0.0
    runs: str = "steps"
    """Token by token in ``steps``; ``at once``, each token seeing all (diffusion); or as an ``encoder``, which does so
    and has no logits."""
    value_norm: bool = False
    temperature: tuple[int, float, float] | None = None
    """Floor, factor and offset of the temperature of queries (0: from metadata)."""
    gate: str = "sigmoid"
    """What the gate ``attn_gate`` of attention goes through."""
    gated_queries: bool = False
    """Each head of ``attn_q`` gives its query and then its gate."""

    cache_layers: int = 0
    """Only the first layers, of this number, have caches of their own; 0: ``attention.shared_kv_layers`` says it."""
    swin_norm: bool = False
    """Where ``swin_norm`` says so, the norms of mixer and feed-forward follow them."""

    unit: str = "silu"
    """Activation of feed-forwards: silu, gelu, gelu erf, relu, relu2, oai, xielu; ``gelu or relu``, which has no gate;
    ``gelu tanh``, which is not rounded."""
    sparse_gates: int = 0
    """The first feed-forwards, of this number, keep of their gates the largest twentieth of a normal distribution."""
    gating: str = "softmax"
    """How routers weigh: softmax, sigmoid, chosen (softmax over those chosen), or ``key``/``key sigmoid`` for
    ``expert_gating_func`` with that default."""
    normalised: bool | None = True
    """Whether routing weights are divided by their sum; None: ``expert_weights_norm``, by default not."""
    beside: str = ""
    """A dense feed-forward besides the experts: ``sum``, ``mean`` (over the root of two), ``residual``, ``normed``."""
    shared_gate: bool = False
    """Whether a sigmoid of the token gates the expert that answers all tokens."""
    mixture: str = ""
    """Routing that only one family has; see `moe`."""

    interleaved: bool = False
    """Only each so many blocks, as ``interleave_moe_layer_step`` says, read their experts."""

    mixer: str = "attention"
    """Of layers that are not recurrent: ``attention``, ``latent``, ``compressed``; ``single`` blocks have one part."""
    headless: bool = False
    """Layers may have no heads, and so no attention, or no key/value heads, and so a matrix instead."""
    recurrent: str = ""
    """The mixer of layers that `recurrent_where` names."""
    recurrent_where: str = "kv"
    """``kv``: no key/value heads; ``interval``: all but each so many; ``all``; ``both``: beside attention."""
    interval: int = 4
    delta_gate: str = "silu"
    """What gates the answer of a delta net: silu, sigmoid."""
    bounded_decay: float = 0.0
    """Kimi's delta rule bounds its log decay by ``kda.gate_lower_bound`` and a sigmoid: the sign of what goes in."""
    l2_eps: float | None = None
    """What the lengths of its queries and keys are kept above, if that is not the eps of norms."""
    log_multiplier: float = 1.0
    """What ``rope.scaling.yarn_log_multiplier`` is to be multiplied by."""
    sparse: str = ""
    """The keys whose product is how many tokens attention chooses: longer contexts are refused."""
    picture_tokens: bool = False
    """The vocabulary has tokens of pictures, which no text contains."""
    residuals: str = ""
    """Which decoder has its residuals: that of `decoder`, one of `residuals`, or that of `rwkv`."""
    stack: str = ""
    """What the names of its tensors begin with, if that is a stack of several."""

    hands_on: str = "normed"
    """What a block that guesses further tokens is given: the last ``residual``, or that ``normed``; all streams, where
    it has several of its own."""
    guess_norm: str = ""
    """The kind of its own last norm, if that is not ``norm``."""
    ignores: tuple[str, ...] = ()
    """Optional tensors that files may carry and that llama.cpp's graph does not read."""
    spare: tuple[str, ...] = ()
    """Tensors that some blocks need and others may carry for nothing."""
    scaled: bool = False
    """Whether ``.scale`` of feed-forwards and experts is read."""

    def with_post_norms(self) -> Family:
        """Return the traits with the norms behind mixer and feed-forward instead of before them."""
        return replace(self, attn_norm="", attn_post=self.attn_norm, ffn_norm="", ffn_post=self.ffn_norm)

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.runs == "steps"

    @property
    def attends(self) -> bool:
        """Whether layers attend, so that ``attention.causal`` of a file makes a difference."""
        return self.recurrent_where != "all"

    @property
    def sees_input(self) -> bool:
        """Whether a part of the feed-forward takes what the block took."""
        return self.beside == "residual" or self.mixture == "early router"
