"""Chat templates: their output, and the limits of the sandbox."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from jinja2 import Template

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.chat import choose_chat_template_and_variables, render_chat, select_chat_template
from hocket.frontends.gguf.chat_sandbox import LimitedChatSandbox
from hocket.frontends.gguf.reader import open_gguf
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata

MESSAGES = [{"role": "user", "content": "Hi <b>&</b> 'you'"}]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(template: str, **extra: object) -> str:
    return render_chat(template, MESSAGES, bos="<s>", eos="</s>", **extra)  # type: ignore[arg-type]


def test_a_rendered_chat_ends_with_the_start_of_the_turn_of_the_model() -> None:
    turn = "<|im_start|>user\nHi <b>&</b> 'you'<|im_end|>\n"
    assert render(CHATML) == turn + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == turn


def test_templates_know_bos_eos_and_further_variables() -> None:
    assert render("{{ bos_token }}{{ tools|length }}{{ eos_token }}", tools=[1, 2]) == "<s>2</s>"


def test_blocks_on_their_own_line_leave_no_trace() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_loops_can_be_left_early() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_tojson_escapes_nothing_for_html() -> None:
    assert render("{{ messages[0]|tojson }}") == '{"role": "user", "content": "Hi <b>&</b> \'you\'"}'
    assert render("{{ {'b': 'é', 'a': 1}|tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "é"\n}'


def test_the_generation_tag_prints_its_body() -> None:
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_macros_joins_and_concatenation_still_work() -> None:
    assert render("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) ~ m('a') ~ none }}") == "[1][a]None"
    assert render("{{ messages|map(attribute='role')|join(', ') }}{{ '-'.join(['a', 'b']) }}") == "usera-b"
    assert render("{{ 'x' * 3 + '%s|%d' % ('a', 4) + '{:>3}'.format(1) }}") == "xxxa|4  1"


def test_the_time_is_known_to_templates() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(ModelError, match=r"^the chat template refuses these messages: no system$"):
        render("{{ raise_exception('no\nsystem') }}")


BROKEN = [
    ("", "has 0 characters"),
    ("x" * (1 << 21), "has 2097152 characters"),
    ("{% for %}", "fails at line 1: TemplateSyntaxError"),
    ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{% include 'x' %}", "TypeError: no loader"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
]


@pytest.mark.parametrize(("template", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_template_is_one_line(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        render(template)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__.json }}"],
)
def test_a_template_reaches_neither_python_nor_the_messages(template: str) -> None:
    with pytest.raises(ModelError, match="SecurityError"):
        render(template)


ENDLESS = [
    "{% set l = [1] * 9999 %}{% for i in range(9999) %}{% set y = l[1:] %}{% endfor %}",
    "{% set l = 'a' * 999999 %}{% for i in range(9999) %}{% if 'b' in l %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% set y = range(99999)|sum %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ eos_token }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.frontends.gguf.chat_sandbox.INITIAL_FUEL", 1 << 14)
    with pytest.raises(ModelError, match="does not come to an end"):
        render(template)


DOUBLED = "{% set n = namespace(x='aa', l=['a']) %}{% for i in range(60) %}STEP{% endfor %}"
HUGE = [
    "{{ 'a' * 10**9 }}",
    "{{ 9**(9**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>{}}'.format(1, 10**9) }}",
    DOUBLED.replace("STEP", "{% set n.x = n.x ~ n.x %}"),
    DOUBLED.replace("STEP", "{% set n.x = n.x + n.x %}"),
    DOUBLED.replace("STEP", "{% set n.x = n.x|replace('a', n.x) %}"),
    DOUBLED.replace("STEP", "{% set n.x = n.x.replace('a', n.x) %}"),
    DOUBLED.replace("STEP", "{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}"),
    DOUBLED.replace("STEP", "{% set n.l = [n.l, n.l] %}") + "{{ n.l }}",
    DOUBLED.replace("STEP", "{% set n.l = [n.l, n.l] %}") + "{{ n.l|tojson|length }}",
    "{% set x = 'a' * 1000000 %}{{ ''.join([x] * 100) }}",
    "{% set x = 'a' * 1000000 %}{{ [x] * 100 }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
]


PAIRED = DOUBLED.replace("STEP", "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}").replace("x=", "m=['a'], x=")
HUGE += [
    PAIRED + "{{ n.l == n.m }}",  # two to the power of sixty comparisons
    PAIRED + "{{ n.l in [n.m] }}",
    PAIRED + "{{ n.l is eq(n.m) }}",
    PAIRED + "{{ [n.l].index(n.m) }}",
    DOUBLED.replace("STEP", "{% set n.x = (n.x, n.x) %}") + "{{ {n.x: 1} }}",  # as many hashes
    "{{ ([1] * 99999999)|length }}",
    "{% set n = namespace() %}{% set n.n = [n, n] %}{{ n }}",
]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("template", HUGE)
def test_a_template_cannot_fill_memory(template: str) -> None:
    with pytest.raises(
        ModelError, match=r"makes a text of more than|number too large|a width it does not need|not come to an end"
    ):
        render(template)


def test_the_template_is_found_by_name() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert select_chat_template(metadata) == "a"
    assert select_chat_template(metadata, "tool_use") == "b"
    with pytest.raises(ModelError, match=r"no chat template 'rag'; this model has those named tool_use"):
        select_chat_template(metadata, "rag")


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(ModelError, match="the model has no chat template; give plain text, or chat_template=TEMPLATE"):
        select_chat_template({})
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is a int; need a string"):
        select_chat_template({"tokenizer.chat_template": 3})


def test_smollm2_renders_and_tokenises_its_own_chat() -> None:
    if "HOCKET_SMOLLM2" not in os.environ:
        pytest.skip("HOCKET_SMOLLM2 is not set")
    metadata = open_gguf(Path(os.environ["HOCKET_SMOLLM2"]), header_only=True).metadata
    tokenizer = tokenizer_from_metadata(metadata)
    text = render_chat(select_chat_template(metadata), MESSAGES, bos=tokenizer.bos_text, eos=tokenizer.eos_text)
    assert text.endswith("<|im_start|>user\nHi <b>&</b> 'you'<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(text)
    assert ids[:3] == [1, 9690, 198]
    assert tokenizer.decode(ids, special=True) == text


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% if tools is not none %}T{% else %}-{% endif %}", "-"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{% if tools is iterable and tools | length > 0 %}T{% else %}-{% endif %}", "-"),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools is none }}", "True"),
    ],
)
def test_tools_and_documents_are_none_by_default(template: str, want: str) -> None:
    assert render(template) == want


def test_tools_choose_the_template_for_them() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools | length }}"}

    def render_with(**variables: object) -> str:
        return choose_chat_template_and_variables(metadata, **variables).render(MESSAGES, bos="", eos="")  # type: ignore[arg-type]

    assert render_with() == "plain"
    assert render_with(tools=[{}, {}]) == "2"
    assert render_with(tools=[{}], template="own") == "own"
    assert render_with(variables={"tools": [{}]}) == "1"


COSTLY_TEMPLATE = """{%- set ns = namespace(n=0) -%}
{%- for i in range(5) -%}{%- set text = 'a' * 4000000 -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}
{{- messages[0].content }} {{ ns.n -}}"""
"""A template that consumes more than half of the fuel of a rendering."""


def render_content(template: str, content: str) -> str:
    return render_chat(template, [{"role": "user", "content": content}], bos="", eos="")


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_text = LimitedChatSandbox.compile_template_charging_constants

    def compile_and_count(environment: LimitedChatSandbox, source: str) -> Template:
        compiled.append(source)
        return compile_text(environment, source)

    monkeypatch.setattr(LimitedChatSandbox, "compile_template_charging_constants", compile_and_count)
    template = "{{ messages[0].content }} of a template that is compiled once"
    assert [render_content(template, name)[0] for name in "abc"] == ["a", "b", "c"]
    assert compiled == [template]


@pytest.mark.long
def test_each_rendering_has_its_own_fuel() -> None:
    assert [render_content(COSTLY_TEMPLATE, str(i)) for i in range(3)] == [f"{i} 5" for i in range(3)]
    with pytest.raises(ModelError, match="does not come to an end"):
        render_content(2 * COSTLY_TEMPLATE, "a")
    loops = "{% for i in range(n) %}{% for j in range(n) %}{{ j }}{% endfor %}{% endfor %}"
    square = f"{{% set n = messages[0].content | int %}}{loops}"
    for _ in range(2):  # the second rendering has the compiled template and the same limit
        with pytest.raises(ModelError, match="does not come to an end"):
            render_content(square, "2000")
        assert render_content(square, "2") == "0101"


def test_renderings_in_several_threads_share_no_state() -> None:
    with ThreadPoolExecutor(4) as workers:
        texts = list(workers.map(partial(render_content, COSTLY_TEMPLATE), map(str, range(24))))
    assert texts == [f"{i} 5" for i in range(24)]


def test_a_rendering_leaves_no_values_for_the_next_one() -> None:
    template = "{{ x is defined }}{% set x = messages[0].content %}{% set ns = namespace(l=[x]) %}{{ ns.l }}"
    assert [render_content(template, name) for name in "ab"] == ["False['a']", "False['b']"]
