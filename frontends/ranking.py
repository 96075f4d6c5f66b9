"""Scores of documents for a query, by a model with a rank head (a cross-encoder or a reranker).

Query and document are one text. The head maps the row of one of its tokens to a score:

1. The row is the first one, the last one for models of the Qwen 3 family, or the mean of all rows for ModernBERT.
2. ``cls.weight`` is a dense layer with tanh, or with GELU for ModernBERT; some models have none.
3. ``cls.norm.weight`` is a layer norm of its result, in ModernBERT.
4. ``cls.output.weight`` gives the score, or the logits of "yes" and "no" for models of the Qwen 3 family.

The GELU is the exact one, as in transformers; llama.cpp has its approximation by tanh here.

Source: the pooling type RANK and ``format_prompt_rerank`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ..graph.lazy_dataclass import dataclass
from ..ops.elementwise.activations import gelu_erf
from .errors import ModelError
from .gguf.chat import CHAT_TEMPLATE_KEY
from .gguf.reader import Gguf
from .gguf.tokenization.tokenizer import Tokenizer
from .gguf.tokenization.vocabulary import read_token_id_or_none
from .inference.pooling import FIRST_TOKEN_POOLING, MEAN_POOLING, RANK_POOLING
from .inference.prefill_chunks import F32
from .inference.session import Session

RANK_TEMPLATE_KEY = f"{CHAT_TEMPLATE_KEY}.rerank"
YES_NO_FAMILY = "qwen3"
"""Beginning of the names of architectures that score by the probability of the word "yes" after the last token."""
PLACEHOLDER_PATTERN = re.compile(r"\{query\}|\{document\}")
MODERN_BERT = "modern-bert"
"""The architecture with a GELU in its rank head, which scores the mean of all rows unless the file says otherwise."""
DEFAULT_NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class RankHead:
    """The rank head of a model.

    - `dense`: matrix f32[outputs, width] and bias f32[outputs] of the layer with an activation, or None.
    - `output`: matrix f32[labels, outputs] and bias f32[labels] of the last layer, or None.
    - `has_yes_no_labels`: whether the head reads the last row of a text, and gives logits of "yes" and "no".
    - `norm`: weight f32[outputs] and epsilon of the layer norm after the activation, or None.
    - `uses_gelu`: whether the activation is GELU in place of tanh.
    - `pools_mean`: whether the head reads the mean of all rows.
    """

    dense: tuple[F32, F32] | None
    output: tuple[F32, F32] | None
    has_yes_no_labels: bool
    norm: tuple[F32, float] | None = None
    uses_gelu: bool = False
    pools_mean: bool = False

    def score_token_rows(self, rows: F32) -> F32:
        """Return the score of a text as f32[1], from the rows of its tokens, f32[tokens, width]."""
        row = rows.mean(0, dtype=np.float64) if self.pools_mean else rows[-1 if self.has_yes_no_labels else 0]
        values = row.astype(np.float64)
        if self.dense is not None:
            values = self.dense[0] @ values + self.dense[1]
            values = np.asarray(gelu_erf.reference(values)) if self.uses_gelu else np.tanh(values)
            if self.norm is not None:
                centred = values - values.mean()
                values = centred / np.sqrt(np.square(centred).mean() + self.norm[1]) * self.norm[0]
        if self.output is not None:
            values = self.output[0] @ values + self.output[1]
        if self.has_yes_no_labels:
            powers = np.exp(values - values.max())
            values = powers / powers.sum()
        return np.asarray(values[:1], np.float32)


def read_rank_head(gguf: Gguf, architecture: str) -> RankHead:
    """Read the rank head of a model file.

    Raises:
        ModelError: The model has no rank head, or one of another form.
    """
    tensors = gguf.tensors
    is_ranker = gguf.metadata.get(f"{architecture}.pooling_type") == RANK_POOLING
    if not is_ranker or not ("cls.weight" in tensors or "cls.output.weight" in tensors):
        raise ModelError("this model has no head that ranks documents; use a reranker, such as bge-reranker-v2-m3")
    dense, output = (_read_matrix_and_bias_or_zero(gguf, name) for name in ("cls", "cls.output"))
    width = gguf.metadata.get(f"{architecture}.embedding_length")
    for name, layer in (("cls", dense), ("cls.output", output)):
        if layer is not None and layer[0].shape[1] != width:
            raise ModelError(f"{name}.weight has {layer[0].shape[1]} columns; need {width}")
        width = width if layer is None else layer[0].shape[0]
    is_modern = architecture == MODERN_BERT
    pooling = gguf.metadata.get(f"{architecture}.classifier.pooling_type", MEAN_POOLING if is_modern else None)
    if pooling not in (None, MEAN_POOLING, FIRST_TOKEN_POOLING):
        raise ModelError(
            f"{architecture}.classifier.pooling_type is {pooling!r:.40}; need {MEAN_POOLING} (mean) or "
            f"{FIRST_TOKEN_POOLING} (first)"
        )
    norm = _read_head_norm(gguf, architecture, dense)
    has_labels = architecture.startswith(YES_NO_FAMILY)
    return RankHead(dense, output, has_labels, norm, is_modern, pooling == MEAN_POOLING)


def _read_head_norm(gguf: Gguf, architecture: str, dense: tuple[F32, F32] | None) -> tuple[F32, float] | None:
    """Read the weight and the epsilon of the norm after the dense layer.

    Raises:
        ModelError: The weight has another length than the dense layer has outputs, or epsilon is no number.
    """
    if (tensor := gguf.tensors.get("cls.norm.weight")) is None or dense is None:
        return None
    weight, outputs = tensor.dequantise().reshape(-1), dense[0].shape[0]
    if weight.shape != (outputs,):
        raise ModelError(f"cls.norm.weight has {weight.size} elements; need {outputs}, one for each row of cls.weight")
    epsilon = gguf.metadata.get(f"{architecture}.attention.layer_norm_epsilon", DEFAULT_NORM_EPSILON)
    if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
        raise ModelError(f"{architecture}.attention.layer_norm_epsilon is {epsilon!r:.40}; need a number from 0 to 1")
    return weight, epsilon


def _read_matrix_and_bias_or_zero(gguf: Gguf, name: str) -> tuple[F32, F32] | None:
    """Read the matrix and the bias of a layer; None without a matrix. A missing bias is zero."""
    if f"{name}.weight" not in gguf.tensors:
        return None
    matrix = np.atleast_2d(gguf.tensors[f"{name}.weight"].dequantise())
    found = gguf.tensors.get(f"{name}.bias")
    bias = np.zeros(matrix.shape[0], np.float32) if found is None else found.dequantise().reshape(-1)
    if matrix.ndim != 2 or bias.shape != matrix.shape[:1]:
        raise ModelError(
            f"{name}.weight and {name}.bias have shapes {matrix.shape} and {bias.shape}; need one bias a row"
        )
    return matrix, bias


def encode_rank_text(metadata: Mapping[str, object], tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    """Tokenize a query and a document as one text, in the form of the rerank template of the model.

    Without a template the form is ``[BOS] query [EOS] [SEP] document [EOS]``, with the tokens that the model adds.

    Args:
        metadata: The metadata of the model file.
        tokenizer: The tokenizer of the model.
        query: The text to which a document may be an answer.
        document: The document.

    Raises:
        ModelError: The template is no text.
    """
    template = metadata.get(RANK_TEMPLATE_KEY)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{RANK_TEMPLATE_KEY} is a {type(template).__name__}; need a string")
    if template:
        values = {"{query}": query, "{document}": document}
        whole = PLACEHOLDER_PATTERN.sub(lambda match: values[match[0]], template)
        return tokenizer.encode(whole, add_special=False, parse_special=True)
    first, second = (tokenizer.encode(text, add_special=False) for text in (query, document))
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    eos = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*bos, *first, *eos, *_list_separator_tokens(metadata, tokenizer), *second, *eos]


def _list_separator_tokens(metadata: Mapping[str, object], tokenizer: Tokenizer) -> list[int]:
    """Return the separator token between two texts, in a list; the list is empty for a model without one.

    It is also empty for BERT, because the end token of the first text is the separator there.
    """
    if tokenizer.kind == "bert" or not metadata.get("tokenizer.ggml.add_sep_token"):
        return []
    separator = read_token_id_or_none(metadata, "seperator_token_id", tokenizer.n_tokens)
    return [] if separator is None else [separator]


class TextPooler(Protocol):
    """The interface of `hocket.Model` that ranking uses: a session, a tokenizer and pooled rows of texts."""

    @property
    def session(self) -> Session:
        """The session that has loaded the weights."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    def pool_texts(self, ids: Sequence[Sequence[int]], pool: Callable[[F32], F32]) -> F32:
        """Return the pooled row of each tokenized text; see `hocket.Model.pool_texts`."""


def rank_documents(model: TextPooler, query: str, documents: Sequence[str]) -> tuple[F32, int]:
    """Score each document as an answer to a query.

    Args:
        model: A model with a rank head.
        query: The query.
        documents: The documents.

    Returns:
        The scores, f32[documents], and the tokens of all texts. A higher score is a better document.

    Raises:
        ModelError: The model has no rank head, or a text exceeds the context.
    """
    source = model.session.model
    head = read_rank_head(source.gguf, source.architecture)
    texts = [encode_rank_text(source.gguf.metadata, model.tokenizer, query, document) for document in documents]
    return model.pool_texts(texts, head.score_token_rows)[:, 0], sum(map(len, texts))
