"""Chat templates as transformers renders them, and as the gateway does without it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from outrider.engine import resolve
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.template import ChatTemplate, TemplateError
from outrider.target.grammars.tokenizer import describe, read_tokenizer
from outrider.testing.tiny import tiny_tokenizer
from transformers import AutoTokenizer

WORDS = [
    "Why",
    "is",
    "the",
    "sky",
    "blue?",
    "Grüße,",
    "世界",
    "🌍🏽",
    "  two  spaces ",
    "\n\n",
    "<b>&amp;",
    "{{ x }}",
    "\t",
    "<|im_end|>",
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<does> 'it'", "parameters": {"type": "object"}}}

# The shapes of templates that are common: what they use of Jinja and of the environment differs.
LLAMA = """{{- bos_token }}{%- set date = date or "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}
{%- set system = "" %}{%- endif %}<|start_header_id|>system {{ date }}: {{ system }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
QWEN = """{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}{%- if message.role == "user" and not ns.seen %}
{%- set ns.seen = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if loop.index0 > 40 %}{%- break %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{%- endif %}
{%- generation %}{{ message.content }}{%- endgeneration %}
{%- if message.name is defined %} ({{ message.name }}){%- endif %}{{ '<|im_end|>' }}
{%- endfor %}{{ ns.last }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' and loop.index0 > 0 %}{{ raise_exception('system comes first') }}{% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role }}: {{ message | tojson }}
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model{% endif %}"""


def random_chat(draw: random.Random) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        chat.append({"role": "system", "content": " ".join(draw.choices(WORDS, k=draw.randint(0, 8)))})
    for i in range(draw.randint(1, 9)):
        message: dict[str, Any] = {"role": ("user", "assistant")[i % 2]}
        message["content"] = " ".join(draw.choices(WORDS, k=draw.randint(0, 12)))
        if draw.random() < 0.2:
            message["name"] = draw.choice([None, "Ada"])
        if i % 2 and draw.random() < 0.4:
            message[draw.choice(["reasoning_content", "thinking", "reasoning"])] = draw.choice(WORDS)
        chat.append(message)
    if draw.random() < 0.1:
        chat.append({"role": "system", "content": "late"})
    return chat


def outcome(render: Any, *arguments: Any, **more: Any) -> str:
    """What is rendered; of a refusal, that it is one."""
    try:
        return str(render(*arguments, **more))
    except Exception as error:
        return f"refused: {str(error).rpartition(': ')[2]}"


def bounded(ours: ModelTokenizer, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    return ours.template.submit("", lambda render: render(chat, tools)).result()


@cache
def shipped() -> Path:
    return resolve("smollm2-135m-instruct")


def both(source: str) -> tuple[Any, ModelTokenizer]:
    """A tokenizer of transformers, and the gateway's, of one that was described."""
    if source == "smollm2-135m-instruct":
        checkpoint = shipped()
        return AutoTokenizer.from_pretrained(checkpoint), ModelTokenizer.parse(read_tokenizer(checkpoint))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    return tokenizer, ModelTokenizer.parse(describe(tokenizer).SerializeToString())


@pytest.mark.parametrize(
    "source", ["smollm2-135m-instruct", LLAMA, QWEN, GEMMA], ids=["smollm2", "llama", "qwen", "gemma"]
)
def test_200_random_chats_are_the_same_text_and_tokens_as_with_transformers(source: str) -> None:
    theirs, ours = both(source)
    refused = 0
    for seed in range(200):
        draw = random.Random(seed)
        chat, tools = random_chat(draw), draw.choice([None, [TOOL]])
        want = outcome(theirs.apply_chat_template, chat, tools=tools, tokenize=False, add_generation_prompt=True)
        assert outcome(bounded, ours, chat, tools) == want
        refused += want.startswith("refused")
        if tools is None and not want.startswith("refused"):
            assert ours.encode_plain(bounded(ours, chat, None)) == theirs(want, add_special_tokens=False).input_ids
    assert refused < 100


def test_end_tokens_are_the_models_and_the_tokenizers(tiny: Path) -> None:
    ours = ModelTokenizer.parse(describe(tiny_tokenizer(), (7, 2)).SerializeToString())
    assert ours.eos_token_ids == (2, 7)
    assert ModelTokenizer.parse(read_tokenizer(tiny)).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ dict.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{% for",
    ],
)
def test_a_template_that_leaves_its_sandbox_or_makes_no_sense_is_refused(source: str) -> None:
    template = ChatTemplate({"default": "a" + source}, {})
    try:
        text = template.render([{"role": "user", "content": "hello"}])
    except TemplateError as error:
        assert str(error).startswith("refused by the model's chat template")
    else:
        # Jinja makes nothing of an attribute that a sandbox hides.
        assert text == "a"


def test_dict_makes_dictionaries_and_changes_no_message() -> None:
    chat = [{"role": "user", "content": "a"}]
    makes = ChatTemplate({"default": "{{ dict(b=1) }}{{ dict.fromkeys(['c'], 2) }}"}, {})
    assert makes.render(chat) == "{'b': 1}{'c': 2}"
    # Jinja's own `dict` would let it.
    changes = ChatTemplate({"default": "{{ dict.update(messages[0], content='b') }}"}, {})
    with pytest.raises(TemplateError, match="update"):
        changes.render(chat)


def test_templates_by_name_are_chosen_as_transformers_does() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    chat = [{"role": "user", "content": "a"}]
    assert (template.render(chat), template.render(chat, [TOOL])) == ("plain", "tools")
    for sources, messages in (({}, chat), ({"default": "plain"}, [])):
        with pytest.raises(TemplateError):
            ChatTemplate(sources, {}).render(messages)


def test_variables_of_a_client_reach_the_template_and_hide_none_of_its_own() -> None:
    source = "{{ bos }}{{ think }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    template = ChatTemplate({"default": source}, {"bos": "^"})
    chat = [{"role": "user", "content": "a"}]
    assert template.render(chat, None, {"think": False, "messages": [], "add_generation_prompt": False}) == "^Falsea>"


@pytest.mark.parametrize("source", ["{{ 1 / x }}", "{{ namespace(a=1) }}", "{{ x.a.b }}", "{{ [][x] + 1 }}"])
def test_a_variable_that_the_template_cannot_take_is_refused(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(TemplateError, match="refused"):
        template.render([{"role": "user", "content": "a"}], None, {"x": 0, "namespace": 5})


@pytest.mark.parametrize("data", [b"\xff", b"", b"\x0a\x02{}"])
def test_what_is_no_tokenizer_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        ModelTokenizer.parse(data)
