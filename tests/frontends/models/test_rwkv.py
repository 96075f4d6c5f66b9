"""RWKV 6 and 7 against the recurrences of the papers, and against themselves: in steps, on devices, taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.chat import render_chat, select_chat_template
from hocket.frontends.gguf.tokenization.rwkv_tokenizer import LongestMatchTokenizer
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.rewind import keep_first_tokens_of_last_step
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Batch, Step
from hocket.frontends.open_model import open_model

from ...given.models import rwkv
from ...given.models.exact import SAME, ExactRun, compute_logits_in_one_batch
from ...given.models.goldens import F64, nmse
from ...given.models.rwkv import TOKENS

EXACT = DeviceGroup(exact=True)
FORMS = [*((kind, {}) for kind in rwkv.KINDS), ("rwkv6", {"fused": False}), ("arwkv7", {"gate": False})]


def reference_logits(kind: str, **form: bool) -> F64:
    reference = rwkv.Reference(kind, **form)
    return np.stack([reference(token) for token in TOKENS])


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_logits_equal_those_of_the_recurrences_in_the_papers(kind: str, form: dict[str, bool], tmp_path: Path) -> None:
    model = open_model(rwkv.write_rwkv_model(kind, tmp_path / "model.gguf", **form))
    assert nmse(compute_logits_in_one_batch(ExactRun(model), TOKENS), reference_logits(kind, **form)) <= SAME


@pytest.mark.parametrize("kind", rwkv.KINDS)
def test_padded_steps_side_by_side_equal_one_batch(kind: str, tmp_path: Path) -> None:
    model, want = open_model(rwkv.write_rwkv_model(kind, tmp_path / "model.gguf")), reference_logits(kind)
    run, at, got = ExactRun(model), 0, list[F64]()
    # The other sequence idles, and a run of four may hold fewer tokens.
    for new in (TOKENS[:3], TOKENS[3:4], TOKENS[4:8], TOKENS[8:]):
        step = Step(2, 1 if len(new) == 1 else 4, 16, 16, 4)
        got += list(run(step, Batch([[], new], [0, at], [(1, i) for i in range(len(new))]))[: len(new)])
        at += len(new)
    assert nmse(np.array(got), want) <= SAME


@pytest.mark.long
@pytest.mark.parametrize("kind", rwkv.KINDS)
def test_devices_share_the_heads_and_a_saved_state_goes_on(kind: str, tmp_path: Path) -> None:
    model, want = open_model(rwkv.write_rwkv_model(kind, tmp_path / "model.gguf")), reference_logits(kind)
    sharded = Session(model, on=DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", exact=True), context=32)
    assert nmse(sharded.evaluate([TOKENS[:-1]], every_position=True)[0], want[:-1]) <= 1e-10
    assert str(sharded.plan(sharded.make_step(1, 1)).leaves["wkv_state.1"]) == "S1(2|2)"
    save_state(sharded, [TOKENS[:-1]], tmp_path / "state")
    one = Session(model, on=EXACT, context=32)
    load_state(one, tmp_path / "state")
    assert nmse(one.evaluate([TOKENS[-1:]])[0], want[-1:]) <= 1e-10


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [*rwkv.KINDS[:2], *(pytest.param(kind, marks=pytest.mark.nightly(cases=0)) for kind in rwkv.KINDS[2:])]
)
def test_compiled_kernels_remember_as_the_papers_say(kind: str, tmp_path: Path) -> None:
    session = Session(open_model(rwkv.write_rwkv_model(kind, tmp_path / "model.gguf")), context=32)
    parts = [session.evaluate([new], every_position=True)[0] for new in (TOKENS[:5], *([t] for t in TOKENS[5:]))]
    assert nmse(np.concatenate(parts), reference_logits(kind)) <= 1e-9
    ran = session.executor(session.make_step(1, 1)).list_kernel_names()
    assert sum(name.startswith("linear_attention.") for name in ran) == rwkv.LAYERS
    assert "NumPy" not in ran


@pytest.mark.parametrize("kind", ["rwkv6", "rwkv7"])
def test_tokens_are_taken_back(kind: str, tmp_path: Path) -> None:
    session = Session(open_model(rwkv.write_rwkv_model(kind, tmp_path / "model.gguf")), on=EXACT, context=32)
    session.evaluate([TOKENS[:3]])
    session.evaluate([[*TOKENS[3:5], 7, 7]], every_position=True, reversible=True)
    keep_first_tokens_of_last_step(session, 2)
    assert nmse(session.evaluate([TOKENS[5:]], every_position=True)[0], reference_logits(kind)[5:]) <= 1e-10


def test_the_longest_token_comes_first_and_bytes_come_back(tmp_path: Path) -> None:
    metadata = open_model(rwkv.write_rwkv_model("rwkv7", tmp_path / "model.gguf")).gguf.metadata
    tokenizer = tokenizer_from_metadata(metadata)
    text = "abcd\n\n\t你 the\\'\"\0"
    ids = tokenizer.encode(text.replace("d", ""))
    written = ["abc", "\\n\\n", "\\t", "\\xe4\\xbd\\xa0", " the", "\\\\", "\\'", '"', "\\x00"]
    assert [rwkv.VOCABULARY[i] for i in ids] == written
    assert tokenizer.decode(ids) == text.replace("d", "")
    assert b"".join(map(tokenizer.token_bytes, range(1, len(rwkv.VOCABULARY)))).startswith(b"ababab" + b"c \n\t\r\\'\"")
    assert tokenizer.token_bytes(rwkv.VOCABULARY.index("\\xff")) == b"\xff"
    # "abcd" begins with the longer "abc", so "bcd" is never seen, and nothing begins with d.
    with pytest.raises(ModelError, match="no token for the byte 0x64; use a whole vocabulary"):
        tokenizer.encode("abcd")
    assert tokenizer.eos_ids == {0, rwkv.VOCABULARY.index("\\n\\n")}
    assert tokenizer.encode("<s>a") == [0, 1]


def test_a_template_that_is_only_named_is_known() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi "}]
    rendered = render_chat(select_chat_template({"tokenizer.chat_template": "rwkv-world"}), messages, bos="", eos="")
    assert rendered == "System: Be kind.\n\nUser: Hi\n\nAssistant:"


def test_a_byte_without_a_token_may_have_one_that_stands_for_it() -> None:
    assert LongestMatchTokenizer(["a", "aab"], 7).encode("aaab!a").ids == [0, 1, 7, 0]


def test_a_head_size_that_does_not_fill_the_width_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rwkv, "SIZE", 24)
    path = rwkv.write_rwkv_model("rwkv7", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"wkv\.head_size is 24; need a divisor of embedding_length 64"):
        open_model(path)
