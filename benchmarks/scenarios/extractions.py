"""python -m benchmarks extractions"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import finish, show, table

_TIMEOUT_S = 600.0
_NAMES = ("Anna Lind", "Marco Rossi", "Kofi Mensah", "Yuki Tanaka", "Elena Petrova", "James Carter", "Sofia Alvarez")
_CITIES = ("Oslo", "Milan", "Accra", "Kyoto", "Sofia")
_JOBS = ("nurse", "carpenter", "pilot", "teacher")
_SHOWN = (("Peter Novak", 52, "Prague", "baker"), ("Mia Chen", 29, "Lyon", "lawyer"))
_FIELDS = ("name", "age", "city", "job")
_SCHEMA = {
    "type": "object",
    "properties": {field: {"type": "integer" if field == "age" else "string"} for field in _FIELDS},
    "required": list(_FIELDS),
}
# How the form is asked for, and how JSON may be written.
_FORMS: dict[str, dict[str, Any]] = {"free": {}, "json_object": {"json_object": True}, "schema": {"json": _SCHEMA}}
_STYLES: dict[str, dict[str, Any]] = {
    "compact": {"disable_any_whitespace": True},
    "default": {},
    "any": {"disable_any_whitespace": False},
}


@click.command("extractions")
@click.option("--target", default=DEFAULT_TARGET, show_default=True, help="A name or a path.")
@click.option("-n", "--num-texts", type=click.IntRange(1), default=32, show_default=True)
@json_file_option
def extractions(target: str, num_texts: int, json_file: Path | None) -> int:
    """Are the values right that a model extracts as JSON, in each form and each style of writing it?

    Greedy, each text with and without speculation. Two examples precede each text, in the style of Python's `json`.
    What is counted is content: the values, however the JSON is written.
    """
    return run_async(_extractions(target, num_texts, json_file))


async def _extractions(target: str, num_texts: int, json_file: Path | None) -> int:
    rows, different = list[dict[str, Any]](), 0
    config = StackConfig(target_model=target, drafts=1 if target == DEFAULT_TARGET else 0, pin=True)
    async with Stack(config, note) as stack, httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        for form, asked in _FORMS.items():
            for style, written in _STYLES.items() if asked else [("", {})]:
                ends = Counter[str]()
                for values in _texts(num_texts):
                    body = {"prompt": _prompt(values), "structured_outputs": {**asked, **written} if asked else None}
                    drafted, plain = [await _answer(client, stack, body, mode) for mode in ("auto", "off")]
                    different += drafted != plain
                    ends[_end(plain, values)] += 1
                rows.append({"form": form, "white space": style, "right": ends["right"], "of": num_texts} | dict(ends))
                note(f"{form} {style}: {dict(ends)}")
    show(table(rows), f"different with speculation: {different}")
    return finish("extractions", {"holds": not different, "rows": rows, "different": different}, json_file)


def _texts(count: int) -> Iterator[tuple[str, int, str, str]]:
    for number in range(count):
        name, city, job = (each[number % len(each)] for each in (_NAMES, _CITIES, _JOBS))
        yield name, 21 + 7 * number % 60, city, job


def _sentence(name: str, age: int, city: str, job: str) -> str:
    return f"{name}, who is {age} years old, works as a {job} in {city}."


def _prompt(values: tuple[str, int, str, str]) -> str:
    shown = "".join(
        f"Text: {_sentence(*each)}\nJSON: {json.dumps(dict(zip(_FIELDS, each, strict=True)))}\n\n" for each in _SHOWN
    )
    return f"Extract {', '.join(_FIELDS)} from the text as JSON.\n\n{shown}Text: {_sentence(*values)}\nJSON:"


async def _answer(client: httpx.AsyncClient, stack: Stack, body: dict[str, Any], speculation: str) -> str:
    more = {"model": stack.config.model, "temperature": 0, "max_tokens": 80, "speculation": speculation}
    response = await client.post(f"http://{stack.gateway_http}/v1/completions", json={**body, **more})
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def _end(text: str, values: tuple[str, int, str, str]) -> str:
    try:
        found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    except ValueError:
        return "no JSON"
    given = {name: str(found.get(name)).strip().lower() for name in _FIELDS}
    return "right" if given == {n: str(v).lower() for n, v in zip(_FIELDS, values, strict=True)} else "wrong"
