"""Chat templates that do not end, or take all memory: they are ended, and say so; other templates go on meanwhile."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from outrider.gateway.tokenizer import rendering
from outrider.gateway.tokenizer.rendering import BoundedTemplate
from outrider.gateway.tokenizer.template import TemplateError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its bounds are Linux's")
CHAT = [{"role": "user", "content": "hello"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def grown(first: str, step: str, after: str = "") -> str:
    return (
        f"{{% set n = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}{after}"
    )


def busy(step: str) -> str:
    return "{% for i in range(99999) %}" + step + "{% endfor %}"


QUICK = {
    "loops in loops": busy(busy("a")),
    "a text that doubles": grown("'aaaaaaaa'", "n.x + n.x"),
    "a constant that is multiplied": "{{ 'a' * 99999999999 }}",
}
HOSTILE = QUICK | {
    "a text that is multiplied": "{{ messages[0].content * 99999999999 }}",
    "a list that is multiplied": "{{ ([0] * 9999999999) | length }}",
    "a list of lists": grown("[0]", "[n.x, n.x]", "{{ n.x }}"),
    "a list that doubles": grown("[0]", "n.x + n.x"),
    "a power": "{{ 9 ** 99999999 }}",
    "powers of powers": "{{ (9 ** 9 ** 9 ** 9) > 1 }}",
    "a constant power": "{{ 3 ** (7 ** 11) }}",
    "numbers that are multiplied": grown("9", "n.x * n.x", "{{ n.x }}"),
    "a shift of text by format": "{{ '%999999999999d' % 1 }}",
    "a width of format": "{{ '{:>99999999999}'.format(1) }}",
    "a precision": "{{ '%.999999999f' % 1.5 }}",
    "a format filter": "{{ '%99999999999s' | format('a') }}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "a loop that calls itself": "{% for x in [messages] recursive %}{{ loop([x]) }}{% endfor %}",
    "a caller": "{% macro f() %}{{ caller() ~ caller() }}{% endmacro %}" + "{% call f() %}" * 40 + "{% endcall %}" * 40,
    "a date": "{{ strftime_now('%c' * 99999999) }}",
    "a wide date": "{{ strftime_now('%9999999999Y') }}",
    "many dates": busy("{{ strftime_now('%c' * 9999) }}"),
    "indented JSON": "{{ messages | tojson(indent=999999999999) }}",
    "JSON indented by text": "{{ messages | tojson(indent='a' * 999999999) }}",
    "JSON of a deep list": "{% set n = namespace(l=[]) %}" + busy("{% set n.l = [n.l] %}") + "{{ n.l | tojson }}",
    "JSON of shared lists": grown("[0]", "[n.x, n.x]", "{{ n.x | tojson }}"),
    "separators of JSON": "{{ range(9999) | list | tojson(separators=(',' * 99999999, ':')) }}",
    "JSON in JSON": grown("'\"'", "n.x | tojson", "{{ n.x }}"),
    "centred text": "{{ 'a' | center(99999999999) }}",
    "indented text": "{{ 'a' | indent(99999999999, true) }}",
    "text in places": "{{ 'a'.ljust(99999999999) }}",
    "noughts": "{{ 'a'.zfill(99999999999) }}",
    "replaced text": grown("'a'", "n.x | replace('a', 'aaaa')"),
    "joined text": "{{ ('a' * 9999) | join('b' * 99999999) }}",
    "wrapped text": busy("{{ ('a ' * 99999) | wordwrap(3) }}"),
    "links in text": busy("{{ ('www.a.com ' * 99999) | urlize }}"),
    "tags in text": busy("{{ ('<' * 99999) | striptags }}"),
    "sorted lists": busy("{% set x = range(99999) | sort %}"),
    "batches": "{{ [1] | batch(99999999999, 0) | list | length }}",
    "slices": "{{ [1] | slice(99999999999, 0) | list | length }}",
    "products of lists": "{% set x = range(99999) %}{{ x | map('string') | map('center', 999999) | list | length }}",
    "random texts": busy("{{ lipsum(n=9999) }}"),
    "cycles": "{% set c = cycler(*range(99999)) %}" + busy(busy("{{ c.next() }}")),
    "blocks without number": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "brackets without number": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "lists without number": "{{ " + "[" * 9999 + "]" * 9999 + " }}",
    "an endless condition": busy("{% if messages | map('string') | join | length %}" + busy("") + "{% endif %}"),
    "digits": "{{ (10 ** 4000000) | string | length }}",
    "bytes": "{{ ('a' * 99999999).encode() * 9999 }}",
    "tables": "{{ 'a'.translate(dict.fromkeys(range(99999), 'a' * 99999999)) }}",
    "split text": "{{ ('a ' * 99999999).split() | length }}{{ ('a ' * 99999999).split() | length }}",
    "groups": busy("{% set g = range(9999) | groupby(0) %}{% set u = range(9999) | unique | list %}"),
}


def rendered(template: BoundedTemplate, chat: list[dict[str, Any]] = CHAT) -> str:
    return template.submit("a", lambda render: render(chat)).result(60)


def check_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is said, or its text is short; in both cases the next conversation is rendered."""
    monkeypatch.setattr(rendering, "_CPU_S", 0.2)
    monkeypatch.setattr(rendering, "_EXTRA_BYTES", 128 << 20)
    when = "{% if messages[0].content == 'hello' %}" + source + "{% else %}" + PLAIN + "{% endif %}"
    for written in (source, when):
        template = BoundedTemplate({"default": written}, {})
        try:
            assert len(rendered(template)) <= rendering._MAX_CHARS
        except TemplateError as error:
            assert re.search(r"^(ended in|refused by) the model's chat template: .|makes \d+ characters", str(error))
            assert len(str(error)) < 2000
        if written == when and error_of(template) is None:
            assert rendered(template, [{"role": "user", "content": "other"}]) == "user: other"


def error_of(template: BoundedTemplate) -> TemplateError | None:
    """That of a template which no conversation gets through, because it cannot be compiled."""
    try:
        rendered(template, [{"role": "user", "content": "other"}])
    except TemplateError as error:
        return error
    return None


@pytest.mark.parametrize("kind", QUICK)
def test_a_template_that_takes_too_much_is_ended_and_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ends(QUICK[kind], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind not in QUICK])
def test_any_kind_of_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ends(HOSTILE[kind], monkeypatch)


def test_a_template_that_does_not_end_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_CPU_S", 1.0)
    hostile, other = BoundedTemplate({"default": QUICK["loops in loops"]}, {}), BoundedTemplate({"default": PLAIN}, {})
    running = hostile.submit("a", lambda render: render(CHAT))
    assert [rendered(other) for _ in range(20)] == ["user: hello"] * 20
    assert not running.done(), "it still runs"
    with pytest.raises(TemplateError, match="1 s of processor time"):
        running.result(60)


def test_half_of_a_surrogate_pair_and_what_json_lacks_are_refused_or_rendered() -> None:
    template = BoundedTemplate({"default": "{{ messages[0].content }}{{ x }}"}, {})
    with pytest.raises(TemplateError, match="surrogate"):
        rendered(template, [{"role": "user", "content": "\ud800"}])
    more = {"x": float("inf")}
    assert template.submit("a", lambda render: render(CHAT, None, more)).result(60) == "helloinf"
