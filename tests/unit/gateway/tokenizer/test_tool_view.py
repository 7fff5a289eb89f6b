"""What templates show of tools and calls is found by trying them, whatever letters they have."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest
from outrider.gateway.tokenizer.template import ChatTemplate, TemplateError
from outrider.gateway.tokenizer.tool_view import ToolView, find_view
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.tool_calls import Delta, Tools
from transformers.utils.chat_template_utils import render_jinja_template

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOL = {"type": "function", "function": {"name": "sun", "description": "Shines.", "parameters": PARAMETERS}}
TOOLS: Tools = {"sun": PARAMETERS, "rain": {}}
ARGUMENTS = {"city": 'Bern, "the" town', "days": [1, {"a": None}]}
WRITTEN = json.dumps(ARGUMENTS)
CALL = {"id": "call12345", "type": "function", "function": {"name": "sun", "arguments": WRITTEN}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Will it shine?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "content": "It will."},
]
OPENS = "{% if add_generation_prompt %}<assistant>{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}CALLS</s>{% endfor %}" + OPENS
AS_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


def turns(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """A template whose turns write calls so."""
    each = f"{{% for c in m.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    return TURNS.replace("CALLS", f"{{% if m.tool_calls %}}{before}{each}{after}{{% endif %}}")


def shown(call: str, before: str = "", after: str = "", between: str = "", prompt: str = "{{ tools | tojson }}") -> str:
    return f"{{% if tools %}}{prompt}{{% endif %}}" + turns(call, before, after, between)


def pairs(before: str, middle: str, after: str) -> str:
    value = "{{ v if v is string else v | tojson }}"
    return f"{{% for k, v in c.function.arguments.items() %}}{before}{{{{ k }}}}{middle}{value}{after}{{% endfor %}}"


PYTHON = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
NAME = "{{ c.function.name }}"
# How templates of each family write calls; to each the format, and an answer of it with its calls.
FAMILIES = {
    "qwen 2.5": ("hermes", shown(f"\n<tool_call>\n{AS_JSON}\n</tool_call>")),
    "granite 4": ("hermes", shown(f"<tool_call>\n{AS_JSON}\n</tool_call>", between="\n")),
    "granite 3": ("granite", shown(AS_JSON, "<|tool_call|>[", "]", ", ")),
    "mistral 7b": ("mistral", shown(AS_JSON, "[TOOL_CALLS] [", "]", ", ")),
    "mistral small": ("mistral", shown(f"[TOOL_CALLS]{NAME}[ARGS]{{{{ c.function.arguments | tojson }}}}")),
    "llama 3.1": ("llama3_json", shown(AS_JSON.replace('arguments":', 'parameters":'), between="; ")),
    "llama 4": ("pythonic", shown(PYTHON, "[", "]", ", ")),
    "olmo 3": ("olmo3", shown(PYTHON, "<function_calls>", "</function_calls>", "\n")),
    "lfm 2": ("lfm2", shown(PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")),
    "phi 4 mini": ("phi4_mini_json", shown(f"<|tool_call|>{AS_JSON}<|/tool_call|>")),
    "qwen 3 coder": (
        "qwen3_coder",
        shown(
            f"\n<tool_call>\n<function={NAME}>\n" + pairs("<parameter=", ">\n", "\n</parameter>\n"),
            between="</function>\n</tool_call>",
            after="</function>\n</tool_call>",
        ),
    ),
    "glm 4.5": (
        "glm45",
        shown(
            f"\n<tool_call>{NAME}\n" + pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            between="</tool_call>",
            after="</tool_call>",
        ),
    ),
    "minimax m2": (
        "minimax_m2",
        shown(
            f'<invoke name="{NAME}">\n' + pairs('<parameter name="', '">', "</parameter>\n") + "</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
    ),
    "nemotron": ("nemotron_json", shown(AS_JSON, "<TOOLCALL>[", "]</TOOLCALL>", ", ")),
    "deepseek v3.1": (
        "deepseek_v31",
        shown(
            f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{{{{ c.function.arguments | tojson }}}}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek v3, arguments joined as text": (
        "deepseek_v3",
        shown(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + c.function.arguments }}"
            "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
    ),
    "kimi k2": (
        "kimi_k2",
        shown(
            f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>"
            "{{ c.function.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "kimi k2 thinking, functions named by the ids of calls": (
        "kimi_k2",
        shown(
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "command r7b": (
        "cohere_command",
        shown(
            f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {{{{ c.function.arguments | tojson }}}}}}',
            "<|START_ACTION|>[",
            "]<|END_ACTION|>",
            ", ",
        ),
    ),
    "told of functools, calls without it": ("phi4_mini_json", shown(AS_JSON, prompt="Write functools[ {{ tools }}")),
    "unknown": ("", shown(f"!!{NAME}!!{{{{ c.function.arguments | tojson }}}}!!")),
}


def found(source: str) -> tuple[ChatTemplate, ToolView]:
    template = ChatTemplate({"default": source}, {"eos_token": "</s>"})
    return template, find_view(template.render, source)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_that_a_template_writes_are_read_in_every_cut(family: str) -> None:
    expected, source = FAMILIES[family]
    template, view = found(source)
    assert view.written_in == expected
    if not expected:
        assert any("not known" in remark for remark in view.remarks)
        return
    text = view.render(template.render, CHAT, [TOOL], opens=False)
    assert "It will." in text and "sun" in text and "Bern" in text
    if family.startswith("told"):
        return
    answer = "Let me see." + text.partition("<assistant>")[2].partition("</s>")[0]
    for size, cut in product((1, 2, 3, 5, len(answer)), (False, True)):
        parser = FORMATS[expected].parser(TOOLS)
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        whole = Delta.join([*map(parser.push, pieces), parser.finish(cut=cut)])
        if FORMATS[expected].bare:
            assert whole == Delta(answer), "calls without marks are the whole answer"
            continue
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("sun", ARGUMENTS)]
        assert whole.content == "Let me see."


ONE_A_TURN = {
    "refuses more": "{% if m.tool_calls | length > 1 %}{{ raise_exception('One call!') }}{% endif %}",
    "shows the first": "{% set calls = m.tool_calls[:1] %}",
    "takes any number": "",
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("template_of", ONE_A_TURN)
def test_a_turn_of_two_calls_is_shown_whole_where_a_template_has_one_a_turn(
    template_of: str, order: tuple[int, int]
) -> None:
    first = "{% set calls = m.tool_calls %}" + ONE_A_TURN[template_of]
    call = "{% for c in calls %}[{{ c.function.name }}:{{ c.function.arguments | tojson }}]{% endfor %}"
    template, view = found(
        "{{ tools | tojson }}" + TURNS.replace("CALLS", f"{{% if m.tool_calls %}}{first}{call}{{% endif %}}")
    )
    names = ["sun", "rain"]
    calls = [
        {"id": f"call1234{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"n": i})}}
        for i, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": f"call1234{i}", "content": f"Result {i}."} for i in order]
    turn = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    # Some clients use the same ids again.
    chat = [{"role": "user", "content": "?"}, turn, *results, {"role": "user", "content": "!"}, turn, *results]
    text = view.render(template.render, chat, [TOOL])
    shown_calls = ['[sun:{"n": 0}]', '[rain:{"n": 1}]'] * 2
    assert re.findall(r"\[\w+:.+?\]", text) == (
        shown_calls if template_of.startswith("takes") else [shown_calls[i] for i in order] * 2
    )
    assert re.findall(r"Result \d", text) == [f"Result {i}" for i in order] * 2
    assert text.count("I look.") == 2
    if not template_of.startswith("takes"):
        assert all(f"{shown_calls[i]}</s><tool>Result {i}." in text for i in order)


SEES = {
    "its variable": "{{ tools | tojson }}",
    "a variable of another name": "{% if xml_tools %}{{ xml_tools | tojson }}{% endif %}",
    "functions without their type": "{% for f in functions %}{{ f.name }} {{ f.parameters | tojson }}{% endfor %}",
    "a member of the system message": "{% for m in messages if m.tools %}{{ '<|tool|>' + m.tools }}{% endfor %}",
    "a list in the system message": "{% for m in messages if m.tools %}{{ m.tools | tojson }}{% endfor %}",
    "functions of the system message": "{{ messages[0].get('functions', '') }}",
    "only the letters": "{# tools #}{% set ns = namespace(tools='') %}",
    "only the letters in text": "I have no tools, functions or tool_calls.",
}


@pytest.mark.parametrize("where", SEES)
def test_the_model_sees_tools_wherever_its_template_looks_for_them(where: str) -> None:
    template, view = found(SEES[where] + turns(f"<tool_call>{AS_JSON}</tool_call>"))
    for more in ([], [{"role": "system", "content": "Be brief."}]):
        text = view.render(template.render, [*more, *CHAT], [TOOL])
        assert '"city"' in text and "sun" in text and "It will." in text
        assert ("Be brief." in text) is bool(more)
    assert (view.handing is None) is where.startswith("only")
    assert bool(view.remarks) is where.startswith("only"), "what the template lacks is said"


ARGUMENTS_AS = {
    "an object": "{{ c.function.arguments | tojson }}",
    "members": "{% for k, v in c.function.arguments | items %}{{ k }}: {{ v | tojson }}{% endfor %}",
    "a text that is joined": "{{ 'f: ' + c.function.arguments + '.' }}",
    "either": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "not at all": "",
}


@pytest.mark.parametrize("way", ARGUMENTS_AS)
def test_the_second_turn_of_an_agent_shows_the_call_and_its_result(way: str) -> None:
    template, view = found(shown(f"<call>{NAME}{ARGUMENTS_AS[way]}</call>"))
    for arguments in (WRITTEN, ARGUMENTS, "not JSON {", "[1]"):
        call = {**CALL, "function": {"name": "sun", "arguments": arguments}}
        text = view.render(template.render, [CHAT[0], {**CHAT[1], "tool_calls": [call]}, CHAT[2]], [TOOL])
        assert "It will." in text and ("Bern" in text or "JSON {" in text or "[1]" in text)
    assert view.calling.plain is (way == "not at all")


def test_results_have_the_name_of_their_function_where_a_template_needs_it() -> None:
    template, view = found(
        shown(AS_JSON).replace("{{ m.content }}", "{{ m.name + m.content if m.role == 'tool' else m.content }}")
    )
    assert "sunIt will." in view.render(template.render, CHAT, [TOOL])


def test_a_template_that_would_show_tools_nowhere_has_them_refused() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + turns("")
    _, view = found(strict)
    assert not view.shows_tools and any("refused" in remark for remark in view.remarks)


def test_what_a_template_refuses_stays_refused() -> None:
    template, view = found("{{ raise_exception('never') }}")
    with pytest.raises(TemplateError, match="never"):
        view.render(template.render, CHAT)


SPOKEN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Will it shine?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And then?"},
]
PARTS = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
SPEAKS = "{% for m in messages %}<{{ m.role }}>TEXT</s>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (PARTS, {"system", "user", "assistant"}),
        ("{{ m.content[0].text }}", {"system", "user", "assistant"}),
        ("{{ m.content[0]['text'] }}", {"system", "user", "assistant"}),
        (f"{{% if m.role == 'user' %}}{PARTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}", {"user"}),
        (f"{{% if m.role == 'system' %}}{PARTS}{{% else %}}{{{{ m.content }}}}{{% endif %}}", {"system"}),
        (f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PARTS}{{% endif %}}", set()),
        ("{{ m.content }}", set()),
    ],
)
def test_a_text_is_given_as_the_template_reads_it(text: str, roles: set[str]) -> None:
    source = SPEAKS.replace("TEXT", text)
    template = ChatTemplate({"default": source}, {})
    given = [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each["role"] in roles else each
        for each in SPOKEN
    ]
    [[wanted], _] = render_jinja_template(conversations=[given], chat_template=source)
    assert all(each["content"] in wanted for each in SPOKEN)
    assert find_view(template.render, source).render(template.render, SPOKEN) == wanted


def test_a_template_that_hides_what_users_say_is_refused_and_one_that_hides_others_says_so() -> None:
    hidden = ChatTemplate({"default": SPEAKS.replace("TEXT", "{{ m.text }}")}, {})
    view = find_view(hidden.render, hidden.text)
    with pytest.raises(TemplateError, match="what a user says"):
        view.render(hidden.render, SPOKEN)
    no_system = ChatTemplate({"default": SPEAKS.replace("TEXT", "{{ m.content if m.role != 'system' }}")}, {})
    view = find_view(no_system.render, no_system.text)
    assert "it shows nothing of what system messages say" in view.remarks
    assert "Will it shine?" in view.render(no_system.render, SPOKEN)
