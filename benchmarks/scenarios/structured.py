"""python -m benchmarks structured"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import jsonschema
from outrider.errors import InvalidRequest
from outrider.gateway.tools.structured import Structured
from outrider_controller.cli.ask.client import Gateway, GatewayAnswer
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import finish, show
from benchmarks.support.asking import make_request, max_tokens_option
from benchmarks.support.progress import Progress

_FREE = "no schema"
_AT_ONCE = 8
"""Schemas in concurrent requests."""


@dataclass(slots=True)
class Found:
    """The results of the answers."""

    ends: Counter[str] = field(default_factory=Counter)
    """valid, invalid, cut off; and different, if the text without speculation differs."""
    structured: list[GatewayAnswer] = field(default_factory=list)
    free: list[GatewayAnswer] = field(default_factory=list)


@click.command("structured")
@click.option(
    "--schemas",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Of JSON files: schemas, or cases of JSON-Schema-Test-Suite.",
)
@click.option("-n", "--num-schemas", type=click.IntRange(1), default=500, show_default=True)
@max_tokens_option(96)
@json_file_option
def structured(directory: Path, num_schemas: int, max_tokens: int, json_file: Path | None) -> int:
    """Are answers valid under the schemas of a public suite, with speculation as without?

    Greedy. Schemas that the library does not support are refused by the gateway, and counted. An answer that reaches
    --max-tokens is cut off, and only counted.
    """
    schemas, refused = supported(directory, num_schemas)
    return run_async(_structured(schemas, refused, max_tokens, json_file))


def supported(directory: Path, count: int) -> tuple[list[Any], int]:
    """The first `count` supported schemas, and the number of unsupported ones before the last of them."""
    found: list[Any] = []
    refused = 0
    for schema in _schemas(directory):
        if len(found) == count:
            break
        try:
            Structured("json_schema", schema, "schema").to_grammar()
            found.append(schema)
        except InvalidRequest:
            refused += 1
    return found, refused


def _schemas(directory: Path) -> Iterator[Any]:
    for file in sorted(directory.rglob("*.json")):
        content = json.loads(file.read_text())
        cases = content if isinstance(content, list) else [{"schema": content}]
        yield from (case["schema"] for case in cases if isinstance(case, dict) and "schema" in case)


async def _structured(schemas: list[Any], refused: int, max_tokens: int, json_file: Path | None) -> int:
    found, report = Found(), Progress("schemas", len(schemas))
    async with Stack(StackConfig(pin=True), note) as stack, Gateway(stack.gateway_grpc) as gateway:
        places, model = asyncio.Semaphore(_AT_ONCE), stack.config.model

        async def ask(schema: Any) -> None:
            async with places:
                await _ask(gateway, model, schema, max_tokens, found)
            report(len(found.structured), "")

        await asyncio.gather(*map(ask, schemas))
    acceptance = {name: AnswerFigures.of(answers).acceptance for name, answers in _by_kind(found).items()}
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(found.ends.items()))
    shares = "; ".join(f"{name} {share:.3f}" for name, share in acceptance.items())
    show(f"{len(schemas)} schemas ({refused} more are not supported): {counts}", f"acceptance: {shares}")
    holds = not found.ends["invalid"] and not found.ends["different"]
    body = {"holds": holds, "ends": dict(found.ends), "refused": refused, "acceptance": acceptance}
    return finish("structured", body, json_file)


def _by_kind(found: Found) -> dict[str, list[GatewayAnswer]]:
    return {"schema": found.structured, _FREE: found.free}


async def _ask(gateway: Gateway, model: str, schema: Any, max_tokens: int, found: Found) -> None:
    prompt = f"Give an example of JSON that is valid under this schema: {json.dumps(schema)[:1500]}"
    answers = []
    for mode in ("auto", "off"):
        request = make_request(model, prompt, mode, max_tokens=max_tokens, temperature=0)
        request.options.structured.json_schema = json.dumps(schema)
        answers.append(await gateway.answer(request))
    drafted, plain = answers
    free = make_request(model, prompt, "auto", max_tokens=max_tokens, temperature=0)
    found.free.append(await gateway.answer(free))
    found.structured.append(drafted)
    found.ends[end_of(drafted.text, drafted.finish_reason, schema)] += 1
    found.ends["different"] += list(drafted.token_ids) != list(plain.token_ids)


def end_of(text: str, finish_reason: str, schema: Any) -> str:
    """The kind of an answer's end, a key of `Found.ends`."""
    if finish_reason == "length":
        return "cut off"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"
