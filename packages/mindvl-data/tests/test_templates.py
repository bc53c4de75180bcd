# SPDX-License-Identifier: Apache-2.0
"""Templates: the same text as transformers gives; programs that never end or grow without end are refused."""

from typing import Any

import jinja2
import pytest

from mindvl_data import DataError
from mindvl_data.templates import compile_template
from mindvl_data.tokenization import wrap_tokenizer

pytestmark = pytest.mark.slow

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n  "},
    {"role": "user", "content": "<b>2+2?</b> caf\u00e9"},
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    {"role": "user", "content": "once more"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1.5, None]}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sum> \u00e9", "parameters": {}}}]
# Loops in loops, a macro, a namespace, slices, tests, methods, filters, and the tags that transformers adds.
RICH = """{%- macro show(message, last=false) -%}
{{ message.role | capitalize }}: {{ message['content'] | trim }}{{ '!' if last }}
{%- endmacro -%}
{{- bos_token }}{% if tools %}
{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{% endfor %}
{% endif %}
{% set ns = namespace(found=false, text='') %}
{% for message in messages[::-1] %}
    {% if message.role == 'user' and not ns.found %}
        {% set ns.found = true %}{% set ns.text = ns.text ~ message.content.split('?')[-1] + '%s' % loop.index0 %}
    {% endif %}
{% endfor %}
{% for message in messages if message.role != 'tool' %}
    {% if loop.first and message.content is string %}<{{ loop.length }}>{% endif %}
    {% if loop.last %}{% break %}{% endif %}
    {{ show(message, loop.last) }}{{ loop.previtem.role if loop.previtem is defined }}
    {% for key, value in message.items() %}{{ key }}={{ value | string | length }};{% else %}none{% endfor %}
    {% generation %}{{ message.reasoning_content | default('-') }}{% endgeneration %}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}
{{ 'x' * 3 }} {{ 7 ** 2 }} {{ ns.text }} {{ range(3) | list }} {{ dict(a=1)['a'] }}
{{ 'a%05d' | format(7) }} {{ '{:>4}'.format('b') }} {{ 'u' in 'user' }}
{% if add_generation_prompt %}Assistant:{% endif %}"""


@pytest.mark.parametrize("source", [CHATML, RICH])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("asks", [False, True])
def test_a_rendering_is_that_of_transformers(source: str, tools: Any, asks: bool, hf: Any) -> None:
    hf.chat_template = source
    ours = wrap_tokenizer(hf).template.render(TALK, asks, tools)
    assert ours == hf.apply_chat_template(TALK, tools=list(tools) or None, tokenize=False, add_generation_prompt=asks)
    assert len(ours) > 100


LONG = "{% set long = ('a' * 60000) %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [[1, 2]] recursive %}{{ loop([[1, 2], [1, 2]]) }}{% endfor %}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "block": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "times": "{{ 'a' * 10000000000 }}",
    "times, reversed": "{{ 10000000000 * [1] }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "filter": "{{ 'a' | center(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "width of format": "{{ '{:10000000000}'.format(1) }}",
    "width of the filter": "{{ '%10000000000d' | format(1) }}",
    "replace": LONG + "{{ long | replace('a', long) }}",
    "replace, method": LONG + "{{ long.replace('a', long) }}",
    "join": LONG + "{{ long | join(long) }}",
    "join, method": LONG + "{{ long.join(long) }}",
    "map": "{{ range(99999) | map('center', 99999) | join }}",
    "slices": LONG + "{% for a in range(99999) %}{% set b = long[::-1] %}{% endfor %}",
    "search": LONG + "{% for a in range(99999) %}{{ 'b' in long }}{% endfor %}",
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_or_grows_is_refused(name: str) -> None:
    render = compile_template(ENDLESS[name])
    with pytest.raises((jinja2.TemplateError, RecursionError)):
        render(messages=TALK)
    assert compile_template("{{ 'fine' }}")() == "fine"


def test_nested_lists_that_are_the_same_list_are_counted_as_often_as_they_are_shown() -> None:
    grown = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    with pytest.raises(jinja2.TemplateError, match="too much work"):
        compile_template(grown + "{{ n.x | tojson }}")()


def test_a_long_conversation_is_far_from_the_bound() -> None:
    talk = [{"role": role, "content": "word " * 200} for _ in range(2000) for role in ("user", "assistant")]
    assert len(compile_template(CHATML)(messages=talk, add_generation_prompt=False)) > 4_000_000


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "{% for x in y %}", "{{" + "(" * 5000])
def test_a_source_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="chat template cannot be compiled"):
        compile_template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(_a=1) }}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ dict.mro() }}",
    ],
)
def test_ways_out_of_the_sandbox_are_closed(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        compile_template(source + "{{ raise_exception('not closed') if false }}")()
