"""`hocket.Model`: the examples of its docstrings, and calls that disturb neither each other nor themselves."""

from __future__ import annotations

import doctest
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.frontends import language_model
from hocket.frontends.inference.pooling import RANK_POOLING, choose_pooling_function
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ..given.models import architectures
from ..given.models.goldens import FIXTURES, TINY, allowed_nmse, golden, nmse, open_fixture, path_of
from ..given.models.spelled import write_llama


@pytest.fixture(scope="module")
def model():
    with hocket.Model(context=128, threads=1) as new_model:
        yield new_model


@pytest.mark.long
def test_what_docstrings_show_is_what_happens(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"hocket": hocket, "model": model, "np": np}
    examples = [t for t in doctest.DocTestFinder().find(language_model.Model, "Model", globs=space) if t.examples]
    assert len(examples) >= 8
    runner = doctest.DocTestRunner()
    assert not sum(runner.run(test).failed for test in examples)


def test_a_completion_says_why_it_ended(model):
    prompt, text = "It is a truth", "".join(model.generate("It is a truth", max_tokens=8, temperature=0))
    limited = model.complete(prompt, max_tokens=8, temperature=0)
    assert (limited.text, limited.finish_reason, len(limited.tokens)) == (text, "length", 8)
    assert limited.prompt_tokens == len(model.tokenize(prompt))
    stopped = model.complete(prompt, max_tokens=8, temperature=0, stop=" am")
    assert (stopped.text, stopped.finish_reason, len(stopped.tokens)) == (" which I", "stop", 3)
    third = limited.tokens[2].id
    ended = model.complete(prompt, max_tokens=8, temperature=0, bias=[(next(iter(model.tokenizer.eos_ids)), 1e6)])
    assert (ended.text, ended.finish_reason, ended.tokens) == ("", "stop", ())
    assert model.complete(prompt, max_tokens=3, temperature=0).tokens[-1].id == third
    chosen = model.complete(prompt, max_tokens=3, temperature=0, stop=" am").finish_reason
    assert chosen == "stop", "a stop string in the last token that is allowed"
    with hocket.Model(context=np.int64(16), threads=np.int32(1)) as small:
        full = small.complete(prompt, max_tokens=-1, temperature=0, ignore_eos=True)
        assert small.complete(prompt, max_tokens=np.int64(50), temperature=0, ignore_eos=True) == full
    assert (full.finish_reason, full.prompt_tokens + len(full.tokens)) == ("length", 17), "the last is not evaluated"


@pytest.mark.parametrize("alone", [False, True])
def test_alternatives_are_the_tokens_with_the_largest_logits(model, alone):
    prompt = model.tokenize("It is a truth")
    options = {"context_shift": True} if alone else {}  # a context shift needs a session of its own
    (token,) = model.complete(prompt, max_tokens=1, temperature=0, top_logprobs=5, **options).tokens
    logits = model.logits(prompt)[-1].astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-logprobs)[:5]
    assert [index for index, _ in token.alternatives] == best.tolist()
    assert [value for _, value in token.alternatives] == pytest.approx(logprobs[best].tolist(), abs=1e-5)
    assert token.alternatives[0] == (token.id, token.logprob)
    assert next(model.tokens(prompt, max_tokens=1, **options)).alternatives == ()


@pytest.mark.long
def test_a_batch_gives_each_prompt_what_it_gets_alone(model):
    prompts = ["It is", "She was not", "Mr. Darcy"]
    options = {"max_tokens": 6, "seed": 3}
    assert model.generate_batch(prompts, **options) == ["".join(model.generate(p, **options)) for p in prompts]


@pytest.mark.long
def test_a_draft_changes_no_text_and_its_memory_counts(model):
    options = {"max_tokens": 12, "seed": 3}
    prompts = ["It is", "It is a truth", "She was not"]
    alone = ["".join(model.generate(p, **options)) for p in prompts]
    with hocket.Model(context=128, threads=1, draft=TINY, draft_max=3) as both:
        assert ["".join(both.generate(p, **options)) for p in prompts] == alone
        assert ["".join(piece) for piece in zip(*(both.generate(p, **options) for p in prompts[:2]), strict=True)]
        assert both.memory["cpu:0"]["weight"] == 2 * model.memory["cpu:0"]["weight"]
        with pytest.raises(hocket.ModelError, match="leave out draft and draft_max, or context_shift"):
            next(both.generate("It is", context_shift=True))
    with pytest.raises(hocket.ModelError, match="same vocabulary"):
        hocket.Model(draft=path_of("llama"))


def test_a_notebook_shows_a_model_as_a_table(model):
    html = model._repr_html_()
    assert "<th>context</th><td>128 tokens</td>" in html
    assert "<th>cpu:0</th><td>weight 3.9 MiB, " in html


def test_generations_that_overlap_do_not_disturb_each_other(model):
    prompts = ["It is", "She was not", "Mr. Darcy"]
    alone = ["".join(model.generate(p, max_tokens=6, temperature=0)) for p in prompts]
    turns = zip(*(model.generate(p, max_tokens=6, temperature=0) for p in prompts), strict=True)
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == alone
    with ThreadPoolExecutor(3) as threads:
        texts = threads.map(lambda p: "".join(model.generate(p, max_tokens=6, temperature=0)), prompts)
        assert list(texts) == alone


@pytest.mark.long
def test_a_prompt_that_goes_on_is_read_from_where_the_last_one_ended(monkeypatch):
    """The states of the recurrent layers are saved at multiples of 16 tokens."""
    read = []
    evaluate = Session.evaluate

    def evaluate_and_count(session, tokens, **options):
        read.append(sum(map(len, tokens)))
        return evaluate(session, tokens, **options)

    with hocket.Model(context=128, threads=1) as model:
        ids = model.tokenize("It is a truth that " * 8)
        assert len(ids) > 40
        whole = "".join(model.generate(ids, max_tokens=4, temperature=0))
    with hocket.Model(context=128, threads=1) as model:
        list(model.generate(ids[:35], max_tokens=1))
        monkeypatch.setattr(Session, "evaluate", evaluate_and_count)
        assert "".join(model.generate(ids, max_tokens=4, temperature=0)) == whole
    assert sum(read) == len(ids) - 32 + 3


def test_stop_strings_end_the_text_before_them(model):
    text = "".join(model.generate("It is a truth", max_tokens=8, temperature=0))
    assert text == " which I am not at all in love"
    for stop in (" at a", "not", ["in", "I am"], "love", "t a"):
        first = min(text.index(s) for s in ([stop] if isinstance(stop, str) else stop))
        assert "".join(model.generate("It is a truth", max_tokens=8, temperature=0, stop=stop)) == text[:first]
        assert model.generate_batch(["It is a truth"], max_tokens=8, temperature=0, stop=stop) == [text[:first]]
    assert "".join(model.generate("It is a truth", max_tokens=8, temperature=0, stop="lover")) == text


def test_logits_and_scores_are_the_goldens():
    tokens, want = golden("qwen3")
    with hocket.Model(FIXTURES / "qwen3" / "model.gguf", exact=True) as model:
        assert nmse(model.logits(tokens), want) <= allowed_nmse("qwen3")
        expected = want[:-1] - np.log(np.exp(want[:-1].astype(np.float64)).sum(-1, keepdims=True))
        assert np.allclose(model.score(tokens), expected[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("devices", ["numpy:0", "numpy:0,numpy:1"])
def test_embeddings_are_what_the_output_matrix_reads(devices):
    """The matrix, times each token's vector, gives the logits; their mean is the embedding."""
    tokens, want = golden("qwen3")
    gguf = open_fixture("qwen3")
    table = gguf.tensors["output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"]
    with hocket.Model(FIXTURES / "qwen3" / "model.gguf", devices=devices, split_mode="tensor", exact=True) as model:
        one = np.stack([model.embed([tokens[: i + 1]], normalise=False)[0] * (i + 1) for i in range(4)])
        hidden = np.diff(one, axis=0, prepend=0)
        assert nmse(hidden @ table.dequantise().T, want[:4]) <= 1e-9
        both = model.embed([tokens[:3], tokens[:7]])
        assert np.allclose(np.linalg.norm(both, axis=-1), 1)
        assert np.allclose(both[0], model.embed([tokens[:3]])[0], atol=1e-6)


def test_an_encoder_makes_a_vector_of_a_whole_text_and_has_no_logits(tmp_path):
    tokens, want = architectures.golden("bert-encoder")
    path = architectures.write_model("bert-encoder", tmp_path)
    session = Session(open_model(path), on=DeviceGroup(exact=True), batch=4)
    (rows,) = session.evaluate([tokens], every_position=True, hidden=True)
    assert nmse(rows[-len(want) :], want) <= 1e-10
    with hocket.Model(path, exact=True, batch=4) as model:
        assert np.allclose(model.embed([tokens[:3], tokens], normalise=False)[1], rows.mean(0), atol=1e-5)
        with pytest.raises(hocket.ModelError, match="bert is an encoder: it makes vectors"):
            model.logits(tokens)


def test_a_file_that_ranks_pairs_of_texts_embeds_none():
    with pytest.raises(hocket.ModelError, match=r"4 \(rank\): it scores pairs of texts"):
        choose_pooling_function(RANK_POOLING)


def test_a_saved_state_goes_on_elsewhere(model, tmp_path):
    whole = "".join(model.generate("It is a truth", max_tokens=8, temperature=0))
    first = "".join(model.generate("It is a truth", max_tokens=3, temperature=0))
    model.save(tmp_path / "state")
    with hocket.Model(context=64, devices="cpu:0,cpu:1", split_mode="tensor") as other:
        ids = other.load(tmp_path / "state")
        assert other.detokenize(ids) == "It is a truth" + first
        assert first + "".join(other.generate(ids, max_tokens=5, temperature=0)) == whole


def test_it_says_in_one_line_what_it_is_and_what_it_holds(model):
    assert repr(model).endswith("hocket-tiny-q8_0.gguf': qwen35 on cpu:0, 8 layers, context 128)")
    assert model.memory["cpu:0"]["weight"] > 4_000_000
    assert repr(model.plan).startswith("Plan(")
    for name in ("Executor", "Session", "Store"):
        assert name not in repr(model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: m.generate(3), "prompt is 3"),
        (lambda m: m.generate("a", max_token=3), "no option 'max_token'; did you mean max_tokens"),
        (lambda m: m.generate("a", max_tokens="3"), "max_tokens is '3'"),
        (lambda m: m.generate("a", stop=3), "stop is 3"),
        (lambda m: m.generate("a", temperature=-1), "temperature is -1"),
        (lambda m: list(m.generate("")), "the prompt is empty"),
        (lambda m: list(m.generate([10**9])), "need 0 to 2047"),
        (lambda m: list(m.generate("a " * 200)), "the context holds 128"),
        (lambda m: m.generate_batch(["a", ""]), "prompt 1 is empty"),
        (lambda m: m.generate_batch("text"), "a sequence of prompts"),
        (lambda m: m.chat("hi"), "no chat template"),
        (lambda m: m.embed(["a", ""]), "text 2 of 2 has no tokens"),
        (lambda m: m.embed(["a", "it is " * 99]), r"text 2 of 2 has \d+ tokens, but the context holds 128"),
        (lambda m: m.pool_texts(3, np.mean), r"Model.pool_texts: ids is 3; it must be a sequence of sequences"),
        (lambda m: m.pool_texts(["it"], np.mean), "ids is"),
        (lambda m: m.pool_texts([["it"]], np.mean), "tokens of sequence 0"),
        (lambda m: m.pool_texts([[1]], 3), "Model.pool_texts: pool is 3; it must be a function"),
        (lambda m: m.pool_texts([[1]]), "Model.pool_texts: missing a required argument: 'pool'"),
        (lambda m: m.pool_texts([[1], [1, 2]], lambda rows: rows), "pool must give NumPy arrays of one shape"),
        (lambda m: m.pool_texts([[1], [1, 2]], lambda rows: None), "pool must give NumPy arrays of one shape"),
        (lambda m: m.load(3), "path is 3"),
        (lambda m: hocket.Model(3), "path is 3"),
        (lambda m: hocket.Model(devices=3), "devices is 3"),
        (lambda m: hocket.Model(context=0), "context is 0"),
    ],
)
def test_errors_are_reported_in_one_line(model, wrong, message):
    with pytest.raises(hocket.ModelError, match=message):
        wrong(model)


def test_a_closed_model_says_so():
    model = hocket.Model(context=32)
    pieces = model.generate("It is", max_tokens=3)
    model.close()
    for use in (lambda: list(pieces), lambda: model.memory, lambda: model.embed("a"), lambda: model.plan):
        with pytest.raises(hocket.ModelError, match="the model is closed"):
            use()
    assert "closed" in repr(model)


@pytest.mark.long
def test_embed_writes_what_the_model_embeds(capsys, monkeypatch):
    texts = ["a ball", "a dance"]
    with hocket.Model(TINY) as model:
        expected = model.embed(texts)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert main(["embed", TINY]) == 0
    vectors = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["embed", TINY]) == 2
    assert "got no text; give some with -p" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_a_text_longer_than_a_batch_has_the_vector_of_a_batch_that_holds_it(tmp_path, kind):
    path = write_llama(tmp_path / "pooled.gguf", pooling=kind)
    texts = ["a dance " * 12, "b", "yes yes " * 9]
    for devices in ("cpu:0", "cpu:0,cpu:1"):
        vectors = []
        for batch in (128, 16):
            with hocket.Model(path, devices=devices, split_mode="layer", batch=batch, exact=True) as model:
                assert len(model.tokenize(texts[0])) > 16
                vectors += [model.embed(texts), np.concatenate([model.embed(text) for text in texts])]
        for other in vectors[1:]:
            np.testing.assert_allclose(other, vectors[0], atol=2e-5)


@pytest.mark.long
def test_hidden_rows_of_parts_have_the_width_of_the_model(model):
    session = Session(open_model(TINY), sequences=2, context=64, batch=8)
    long, idle = session.evaluate([list(range(1, 30)), []], every_position=True, hidden=True)
    assert (long.shape, idle.shape) == ((29, 192), (0, 192))
    assert session.evaluate([[], [1]])[0].shape == (0, 2048)


@pytest.mark.long
def test_parts_that_follow_each_other_embed_as_one(model):
    text = "It is a truth universally acknowledged, that " * 20
    with hocket.Model(context=512) as whole, hocket.Model(context=512, batch=64, devices="cpu:0,cpu:1,cpu:2") as parts:
        assert len(whole.tokenize(text)) > 128
        assert float(whole.embed(text)[0] @ parts.embed(text)[0]) > 0.9999


def test_embed_names_the_line_that_has_no_text(capsys, monkeypatch):
    for text, line in (("a ball\r\n\r\na dance\n", 2), ("a\n\n", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(text, newline="\n"))
        assert main(["embed", TINY]) == 2
        assert f"line {line} of" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffa ball\n"))
    assert main(["embed", TINY]) == 0
    marked = capsys.readouterr().out
    assert main(["embed", TINY, "-p", "a ball"]) == 0
    assert capsys.readouterr().out == marked


def test_an_error_names_the_tokens_and_the_limit_of_an_encoder(tmp_path):
    path = architectures.write_model("bert-encoder", tmp_path)
    with hocket.Model(path) as model:
        length = model.context + 5
        with pytest.raises(hocket.ModelError, match=f"text 1 of 1 has {length} tokens, .* holds {model.context}"):
            model.embed([[5] * length])
        with pytest.raises(hocket.ModelError, match=f"{length} tokens, .* holds {model.context}; shorten the text$"):
            Session(open_model(path)).evaluate([[5] * length], hidden=True)


@pytest.mark.long
def test_a_context_that_shifts_begins_with_the_end_of_a_long_prompt(model):
    prompt = model.tokenize("It is a truth universally acknowledged, that " * 30)
    with hocket.Model(context=32, threads=1) as short:
        tokens = list(short.tokens(prompt, max_tokens=40, temperature=0, context_shift=True))
        first = next(short.tokens(prompt[-16:], max_tokens=1, temperature=0))
        assert (len(tokens), tokens[0].id) == (40, first.id)
        texts = short.generate_batch([prompt, [5, 6]], max_tokens=3, temperature=0, context_shift=True)
        assert texts[0] == "".join(one.text for one in tokens[:3])
        with pytest.raises(hocket.ModelError, match=r"the context holds 32; .*context_shift=True"):
            list(short.generate(prompt))


def test_chat_passes_tools_documents_and_variables_to_its_template(model, monkeypatch):
    seen = []
    encode = type(model.tokenizer).encode_chat
    monkeypatch.setattr(
        type(model.tokenizer), "encode_chat", lambda self, text: seen.append(text) or encode(self, text)
    )
    template = "{{ tools }} {{ documents }} {{ thinking }}"
    variables = {"tools": [{"name": "f"}], "documents": [{"text": "t"}], "chat_template_kwargs": {"thinking": False}}
    list(model.chat("hi", chat_template=template, max_tokens=1))
    list(model.chat("hi", chat_template=template, max_tokens=1, **variables))
    assert seen == ["None None ", "[{'name': 'f'}] [{'text': 't'}] False"]
    with pytest.raises(hocket.ModelError, match="'messages' is set by hocket"):
        model.chat("hi", chat_template=template, chat_template_kwargs={"messages": []})
    with pytest.raises(hocket.ModelError, match="tools is 'f'"):
        model.chat("hi", chat_template=template, tools="f")


def test_a_model_without_a_vocabulary_continues_token_ids():
    with hocket.Model(path_of("llama"), context=64) as model:
        tokens = list(model.tokens([1, 2, 3], max_tokens=4, temperature=0))
        assert [token.text for token in tokens] == [""] * 4
        assert tokens[0].id == int(model.logits([1, 2, 3])[-1].argmax())
        with pytest.raises(hocket.ModelError, match="no vocabulary"):
            next(model.tokens("It is", max_tokens=1))
        with pytest.raises(hocket.ModelError, match="no vocabulary, so stop has no meaning; leave it out"):
            next(model.tokens([1], stop="a"))
        with pytest.raises(hocket.ModelError, match="no vocabulary, so grammar has no meaning"):
            next(model.tokens([1], grammar='root ::= "a"'))
