"""The readers of hostile input, their sound inputs, and the check of each reading."""

from __future__ import annotations

import io
import json
import random
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import hocket
from hocket import ops
from hocket.backends.base import find_device
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import LazyMetadataArray, open_gguf
from hocket.frontends.gguf.chat import render_chat, select_chat_template
from hocket.frontends.gguf.reader import Gguf
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step, load_model
from hocket.frontends.open_model import open_model
from hocket.graph import Graph, format_graph, from_json, input, parse, state, to_json, weight
from hocket.graph.errors import GraphError, HocketError
from hocket.scheduler import plan_for_group
from hocket.scheduler.serialisation.plan_json import plan_from_json, plan_to_json

from .damage import bytes_damaged, json_damaged, words_damaged, words_of
from .engine import Target
from .gguf_fields import entries_of, gguf_damaged, header_of, with_pairs

TESTS = Path(__file__).parents[1]
MODELS = ("llama", "gemma3", "qwen35", "qwen3moe", "qwen3-q4_k_m")
MIB = 1 << 20


@cache
def folder() -> Path:
    """Where inputs lie that are files."""
    return Path(_folder.name)


_folder = tempfile.TemporaryDirectory(prefix="hocket-fuzz-")

# --------------------------------------------------------------------------------------------------------- GGUF files


def model_files() -> list[bytes]:
    """Models with a tokenizer, of one kind or the other."""
    vocabularies = cycle(map(_vocabulary_file, ("gpt2", "llama")))
    files = [(TESTS / "fixtures" / name / "model.gguf").read_bytes() for name in MODELS]
    return [_with_vocabulary(data, vocabulary) for data, vocabulary in zip(files, vocabularies, strict=False)]


def _with_vocabulary(data: bytes, vocabulary: bytes) -> bytes:
    """Return a model with the tokenizer of another file."""
    lent = [pair for pair in entries_of(vocabulary) if pair[8:].startswith((b"tokenizer.", b"odd."))]
    own = [pair for pair in entries_of(data) if not pair[8:].startswith(b"tokenizer.")]
    return with_pairs(data, [*own, *lent])


def _vocabulary_file(kind: str) -> bytes:
    """A file without tensors: all kinds of metadata, a small tokenizer and a chat template."""
    path = folder() / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", kind)
    alphabet = [*"abcdefghijklmnopqrstuvwxyz"]
    joined = ["Ġ", "Ġa", "ab", "the"] if kind == "gpt2" else ["▁", "▁a", "ab", "the"]
    tokens = ["<unk>", "<s>", "</s>", *alphabet, *joined]
    bytes_of = [] if kind == "gpt2" else [f"<0x{i:02X}>" for i in range(256)]
    writer.add_array("tokenizer.ggml.tokens", tokens + bytes_of)
    writer.add_array("tokenizer.ggml.scores", [float(-i) for i in range(len(tokens + bytes_of))])
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3] + [1] * (len(tokens) - 3) + [6] * len(bytes_of))
    if kind == "gpt2":
        writer.add_string("tokenizer.ggml.pre", "default")
        writer.add_array("tokenizer.ggml.merges", ["a b", "Ġ a"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "{{ messages[0].content }}")
    for i, add in enumerate((writer.add_uint8, writer.add_int8, writer.add_uint16, writer.add_int16, writer.add_int32)):
        add(f"odd.{i}", i)
    writer.add_uint64("odd.u64", 1 << 40)
    writer.add_int64("odd.i64", -1)
    writer.add_float64("odd.f64", 0.5)
    writer.add_array("odd.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_model_file(data: bytes) -> None:
    """Open the whole file and its header alone, compare both with its content, and go on to a prompt."""
    path = folder() / "model.gguf"
    path.write_bytes(data)
    refusals: list[HocketError] = []
    for header_only in (False, True):
        try:
            model = open_gguf(path, header_only=header_only)
        except ModelError as why:
            refusals.append(why)
            continue
        _compare(model, data)
        for use in (_tokenize, _build):
            try:
                use(model)
            except HocketError as why:
                refusals.append(why)
    # One that is no printable line is told, whichever it is.
    longer = [why for why in refusals if not str(why).isprintable()]
    if refusals:
        raise (longer or refusals)[0]


def _tokenize(model: Gguf) -> None:
    tokenizer = tokenizer_from_metadata(model.metadata)
    ids = tokenizer.encode("the ab 12 é")
    tokenizer.decode(ids)
    text = render_chat(select_chat_template(model.metadata), [{"role": "user", "content": "a"}], bos="", eos="")
    tokenizer.encode_chat(text)


def _build(gguf: Gguf) -> None:
    model = load_model(gguf)
    ops.verify(model.graph(Step(1, 1, 1, 1, 1)))


def _compare(model: Gguf, data: bytes) -> None:
    """An independent reading of the file says the same."""
    header = header_of(data)
    assert header.is_whole, "a broken header was read"
    assert model.version == header.version
    assert list(model.metadata) == [key.decode() for key, _, _ in header.pairs], "other keys"
    for key, kind, value in header.pairs:
        _compare_value(model.metadata[key.decode()], kind, value)
    assert list(model.tensors) == [name.decode() for name, *_ in header.tensors], "other tensors"
    alignment = next((value for key, _, value in header.pairs if key == b"general.alignment"), 32)
    start = -(-header.end // alignment) * alignment
    for tensor, (_, shape, number, offset) in zip(model.tensors.values(), header.tensors, strict=True):
        assert (tensor.shape, tensor.dtype.ggml) == (shape[::-1] or (1,), number)
        assert tensor.offset == start + offset
        if tensor.offset + tensor.nbytes <= len(data):
            assert tensor.stored_elements.tobytes() == data[tensor.offset : tensor.offset + tensor.nbytes], (
                "other bytes"
            )


def _compare_value(value: object, kind: int, reported: Any) -> None:
    if isinstance(reported, bytes):
        reported = reported.decode("utf-8", "replace")
    elif isinstance(reported, tuple):
        assert isinstance(value, LazyMetadataArray)
        assert (value.item_type.number, len(value)) == (reported[0], len(reported[1]))
        for mine, theirs in zip(value, reported[1], strict=True):
            _compare_value(mine, reported[0], theirs)
        return
    elif kind == 7:
        reported = reported != 0
    assert repr(value) == repr(reported), f"{value!r:.80} was read where the file says {reported!r:.80}"


# ------------------------------------------------------------------------------------------------------------- graphs


def layer() -> Graph:
    """A layer with a cache: views, a state, optional operands, attributes of several kinds."""
    x, rows = input("x", (3, 8)), input("rows", (3,), "i32")
    cache = state("cache", (6, 8))
    h = ops.mul(ops.rms_norm(x, eps=1e-6), weight("norm", (8,)), name="normed")
    new = ops.set_rows(cache, ops.mul_mat(weight("wk", (8, 8)), h), rows)
    heads = ops.reshape(h, shape=(3, 2, 4))
    cells = ops.reshape(new, shape=(6, 2, 4))
    a = ops.attention(heads, cells, cells, ops.causal_mask(rows, cells=6), scale=0.5)
    y = ops.add(x, ops.mul_mat(weight("wo", (8, 8)), ops.reshape(a, shape=(3, 8))), name="mixed")
    z = ops.swiglu(ops.mul_mat(weight("gate", (12, 8)), y), ops.mul_mat(weight("up", (12, 8)), y))
    y = ops.add(y, ops.mul_mat(weight("down", (8, 12)), z), name="two words")
    return Graph({"y": y}, {cache: new})


def product() -> Graph:
    return Graph({"y": ops.mul_mat(weight("w", (4, 32), "q8_0"), input("x", (2, 32)), name="7")})


def constants() -> Graph:
    table = hocket.constant("table", np.arange(6, dtype=np.float32).reshape(3, 2))
    rows = ops.get_rows(table, input("ids", (4,), "i32"))
    return Graph({"two rows": rows, "sum": ops.sum_rows(rows)})


GRAPHS = (layer, product, constants)


def dumps() -> list[bytes]:
    recorded = [path.read_bytes() for path in sorted((TESTS / "goldens" / "passes").glob("*/1-built.txt"))]
    return [*(format_graph(graph()).encode() for graph in GRAPHS), *(text for text in recorded if _is_dump(text))]


def _is_dump(text: bytes) -> bool:
    try:
        parse(text.decode())
    except GraphError:
        return False
    return True


GRAPH_WORDS = words_of(r"""
%x   %1   #1   %"a b"   _   (   )   ,   =   :   return   update   none   true   inf   nan   x"00"   "a"   f32[]
f32[0]   q8_0[32]   i32   1e400   mul_mat   state()   input   shape=(   //
""")


def read_text_graph(data: bytes) -> None:
    _check_graph(parse(data.decode("utf-8", "replace")))


def read_json_graph(data: bytes) -> None:
    _check_graph(from_json(data.decode("utf-8", "replace")))


def _check_graph(graph: Graph) -> None:
    """It is written and read back alike; a legal one can be planned."""
    ops.verify(graph)
    assert parse(format_graph(graph)).digest() == graph.digest(), "the dump reads back as another graph"
    assert from_json(to_json(graph)).digest() == graph.digest(), "the JSON reads back as another graph"
    if len(graph.nodes) < 64:
        plan_for_group(graph, [find_device("numpy:0")])


# -------------------------------------------------------------------------------------------------------------- plans


def plans() -> list[bytes]:
    one, two = [find_device("numpy:0")], [find_device("numpy:0"), find_device("numpy:1")]
    built_plans = [plan_for_group(graph(), one) for graph in GRAPHS]
    built_plans += [plan_for_group(layer(), two, split_mode=mode) for mode in ("tensor", "layer")]
    return [plan_to_json(plan).encode() for plan in built_plans]


def read_plan(data: bytes) -> None:
    """Check that an accepted plan is written and read back unchanged, has an explanation, and computes its graph."""
    plan = plan_from_json(data.decode("utf-8", "replace"))
    assert plan_from_json(plan_to_json(plan)).digest() == plan.digest(), "it reads back as another plan"
    assert plan.explain()
    assert plan.cost.total >= 0
    if any(device_plan.backend.name != "numpy" for device_plan in plan.device_plans):
        return
    if sum(sum(device_plan.count_memory_bytes_by_kind().values()) for device_plan in plan.device_plans) > MIB:
        return
    weights, inputs = _arrays_of_leaves(plan.graph.weights), _arrays_of_leaves(plan.graph.inputs)
    expected = hocket.load(plan_for_group(plan.graph, [find_device("reference:0")]), weights).run(inputs)
    got = hocket.load(plan, weights).run(inputs)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)


def _arrays_of_leaves(leaves: Sequence[Any]) -> dict[str, Any]:
    """An array for each leaf; integers are row numbers."""
    rng, arrays = np.random.default_rng(0), {}
    for leaf in leaves:
        spec = leaf.spec
        if spec.dtype.is_integer:
            arrays[leaf.node.name] = (np.arange(spec.size) % 3).astype(spec.dtype.storage).reshape(spec.shape)
        elif spec.dtype.is_quantised:
            rows = spec.nbytes // max(1, spec.shape[-1] // spec.dtype.block * spec.dtype.block_bytes)
            arrays[leaf.node.name] = np.zeros((*spec.shape[:-1], spec.nbytes // max(rows, 1)), np.uint8)
        else:
            arrays[leaf.node.name] = rng.standard_normal(spec.shape).astype(spec.dtype.storage)
    return arrays


# ------------------------------------------------------------------------------------------------------- saved states


@cache
def session() -> Session:
    model = open_model(TESTS / "fixtures" / "qwen35" / "model.gguf")
    return Session(model, on=DeviceGroup(devices=("numpy:0",)), context=16, batch=4)


def saved_states() -> list[bytes]:
    states = []
    for tokens in ([1, 2, 3], [4]):
        session().reset(0)
        session().evaluate([tokens])
        path = folder() / "saved.npz"
        save_state(session(), [tokens], path)
        states.append(path.read_bytes())
    return states


def states_damaged(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Bytes of the archive, or one of its members: its header in JSON, the head of an array, its name."""
    members = _members(data)
    if not members or rng.random() < 0.3:
        return bytes_damaged(data, other, rng)
    name = rng.choice(("header.npy", *members)) if rng.random() < 0.5 else "header.npy"
    content = members.pop(name, b"")
    theirs = _members(other).get(name, b"")
    match rng.randrange(4):
        case 0 if name == "header.npy":
            header = json_damaged(content[128:], theirs[128:], rng)
            members[name] = _npy(np.frombuffer(header, np.uint8))
        case 1:
            members[name] = (
                content[:10] + words_damaged(NPY_WORDS)(content[10:128], theirs[10:128], rng) + content[128:]
            )
        case 2:
            members[name] = bytes_damaged(content, theirs, rng)
        case _:
            members[rng.choice(("", "header.npy", "x", name + "x", "state/x.npy", "../x.npy"))] = content
    return _archive(members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


NPY_WORDS = words_of(r"""
'descr'   '<f4'   '|O'   '<U9'   '<f8'   '|V1000000000'   (   )   {   }   111111111111   -1   0   True   None
'shape'   [   'fortran_order'   '>f4'   '<c16'   '<M8[s]'
""")


def _members(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if entry.file_size <= 1 << 20]
            return {entry.filename: archive.read(entry) for entry in entries}
    except Exception:  # a damaged archive may fail in any way here
        return {}


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _archive(members: dict[str, bytes], compression: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return file.getvalue()


def read_saved_state(data: bytes) -> None:
    """Check that a refused state changes nothing, and that an accepted state is saved again unchanged."""
    own, path = session(), folder() / "state.npz"
    path.write_bytes(data)
    before = _copy_session(own)
    try:
        tokens = load_state(own, path)
    except HocketError:
        after = _copy_session(own)
        assert before[0] == after[0], "a refused state changed the lengths"
        same = (np.array_equal(before[1][name], after[1][name], equal_nan=True) for name in before[1])
        assert all(same), "a refused state changed another"
        raise
    again = folder() / "again.npz"
    save_state(own, tokens, again)
    with np.load(path) as saved, np.load(again) as got:
        header, second = (json.loads(bytes(file["header"])) for file in (saved, got))
        assert [header[key] for key in ("lengths", "tokens")] == [second[key] for key in ("lengths", "tokens")]
        for name in got.files:
            if name != "header":
                assert np.array_equal(saved[name], got[name], equal_nan=True), f"{name} was read wrong"


def _copy_session(own: Session) -> tuple[list[int], dict[str, Any]]:
    return list(own.lengths), {name: np.array(own.store.state(name)) for name in own.store.states}


# ----------------------------------------------------------------------------------------------------- chat templates

TEMPLATE_WORDS = words_of(r"""
{{   }}   {%   %}   {% for m in messages %}   {% endfor %}   {% if true %}   {% endif %}   {%- else -%}
{% set x = 'a' %}   {% set x = x ~ x %}   {% set x = [x, x] %}   {% macro f(n) %}   {% endmacro %}   {{ f(f) }}
{% for i in range(99999) %}   {% set n = namespace(x='aa') %}   {% set n.x = n.x + n.x %}   {% break %}
messages   messages[0]   .content   ['role']   loop.index   loop   namespace   range   dict   cycler   joiner
|tojson   |length   |join   |replace('a', x)   |indent   |center(10**6)   |batch(9)   |slice(9)   |sort   |list
|map('upper')   |groupby('role')   |dictsort   |format(x, x)   |safe   |wordwrap(1)   |truncate(9)   |round(9)
|random   |string   |title   |filesizeformat   |selectattr('role')   |unique   |sum   |max   |attr('x')   |int
~   +   *   **   %   //   in   is   not   and   (   )   [   ]   :   ,   =   '   "   x   f   n.x   'a'   '%s'
'%9999999d'   '{:>9999}'.format   .items()   .split   .join   .zfill   __class__   strftime_now('%Y')
strftime_now   raise_exception('no')   none   true   10**9   9999999999   0   1e308   -1   {% generation %}
{% endgeneration %}   {% block b %}   {% endblock %}   {{ super() }}   {{ self.b() }}   {% include x %}
{% import x as y %}   {% extends x %}   {% raw %}   {% endraw %}   {#   #}   {% filter upper %}
{% endfilter %}   {% call f() %}   {% endcall %}   {{ caller() }}   {% with %}   {% endwith %}   é   recursive
""")
TEMPLATES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{%- if messages[0]['role'] == 'system' %}\n{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}\n"
    "{%- else %}{%- set rest = messages %}{%- endif %}{{ bos_token }}{%- for m in rest %}\n"
    "{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles') }}{%- endif %}\n"
    "[{{ m.role|upper }}] {{ m.content|trim }}{{ loop.index0 }}{{ '' if loop.last else ', ' }}{%- endfor %}"
    "{{ eos_token }}",
    "{% set ns = namespace(found=false, text='') %}{% for m in messages|reverse %}{% if not ns.found %}"
    "{% set ns.found = true %}{% set ns.text = ns.text ~ (m|tojson(indent=2)) %}{% endif %}{% endfor %}{{ ns.text }}",
    "{% macro turn(role, text) %}<{{ role }}>{{ text|replace('\n', ' ')|indent(2) }}</{{ role }}>{% endmacro %}"
    "{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}{{ '%s|%d' % ('a', 4) }}{{ '{:>3}'.format(1) }}"
    "{{ strftime_now('%d') | length }}{{ messages|map(attribute='role')|join(', ') }}"
    "{% generation %}x{% endgeneration %}",
)


def templates() -> list[bytes]:
    return [text.encode() for text in TEMPLATES]


def read_template(data: bytes) -> None:
    """Rendering twice gives the same text."""
    template = data.decode("utf-8", "replace")
    chat = [{"role": "user", "content": "Hi <b>\n'you'"}, {"role": "assistant", "content": "é"}]
    text = render_chat(template, chat, bos="<s>", eos="</s>")
    assert isinstance(text, str)
    assert chat[0]["role"] == "user", "a template changed the messages"


# Apart from its input, a running plan has a pool of 32 MiB for weights on each of its devices and on the reference.
TARGETS = {
    target.name: target
    for target in (
        Target("gguf", model_files, gguf_damaged, read_model_file, 2, 4 * MIB),
        Target("text", dumps, words_damaged(GRAPH_WORDS), read_text_graph, 32, MIB),
        Target("json", lambda: [to_json(graph()).encode() for graph in GRAPHS], json_damaged, read_json_graph, 32, MIB),
        Target("plan", plans, json_damaged, read_plan, 32, 104 * MIB),
        Target("state", saved_states, states_damaged, read_saved_state, 2, MIB),
        Target("template", templates, words_damaged(TEMPLATE_WORDS), read_template, 32, 64 * MIB),
    )
}
