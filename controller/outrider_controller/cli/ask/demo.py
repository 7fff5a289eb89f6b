"""outrider demo"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from outrider.hardware import hardware
from outrider.limits import MAX_UINT32
from outrider.rpc.v1 import generation_pb2 as generation
from tokenizers import Tokenizer

from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import SPECULATION_MODES, Gateway, GatewayAnswer, apply_prompt
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import colours, columns, json_file_option, note, write_json
from outrider_controller.cli.up.command import process_rows, process_table
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async, stack_options

_PROMPT = "Write a Python function that returns the n-th Fibonacci number, then explain how it works."


@click.command("demo")
@click.argument("prompt", nargs=-1)
@stack_options(pin=True, borrow_cores=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(2, MAX_UINT32),
    default=128,
    show_default=True,
    metavar="N",
    help="Of each answer.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=7,
    show_default=True,
    help="For sampling: same seed, same text.",
)
@json_file_option
def demo(
    config: StackConfig,
    prompt: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    seed: int,
    json_file: Path | None,
) -> int:
    """Answer a prompt twice, plain and with speculation, and compare.

    Starts every process for real, streams both answers (what a draft guessed and the target accepted is green), and
    prints where the time went. Exit code 0 only if both texts are equal.
    """
    request = generation.GenerateRequest(model=config.model)
    apply_prompt(request, " ".join(prompt) or _PROMPT)
    request.options.MergeFrom(
        generation.GenerationOptions(max_tokens=max_tokens, temperature=temperature, seed=seed, include_metrics=True)
    )
    return run_async(_demo(config, request, json_file))


async def _demo(config: StackConfig, request: generation.GenerateRequest, json_file: Path | None) -> int:
    async with Stack(config, note) as stack:
        click.echo(f"\n{request.chat.messages[-1].content}\n")
        async with Gateway(stack.gateway_grpc) as gateway:
            await _warm_up(gateway, request)
            plain = await _stream(gateway, request, "off", Painter(stack.target_path))
            speculative = await _stream(gateway, request, "on", Painter(stack.target_path))
        rows = await process_rows(stack)
    report = make_report(plain, speculative)
    click.echo(f"{process_table(rows)}\n\n{_table(report)}")
    write_json(json_file, "demo", {**report, "processes": rows, "hardware": hardware()})
    return ExitCode.OK if report["texts_equal"] else ExitCode.ERROR


async def _warm_up(gateway: Gateway, request: generation.GenerateRequest) -> None:
    """Both ways once, so that neither answer pays for what only a first one does; and both find the prompt cached."""
    for mode in ("off", "on"):
        short = _with_mode(request, mode)
        short.options.max_tokens = min(8, request.options.max_tokens)
        await gateway.answer(short)


async def _stream(gateway: Gateway, request: generation.GenerateRequest, mode: str, painter: Painter) -> GatewayAnswer:
    click.secho("Plain:" if mode == "off" else "With speculation:", bold=colours())

    def show(chunk: generation.StreamGenerateResponse) -> None:
        click.echo(painter.paint(chunk), nl=False, color=colours())
        sys.stdout.flush()

    answer = await gateway.answer(_with_mode(request, mode), on_chunk=show)
    click.echo("\n")
    return answer


def _with_mode(request: generation.GenerateRequest, mode: str) -> generation.GenerateRequest:
    changed = generation.GenerateRequest()
    changed.CopyFrom(request)
    changed.options.speculation = SPECULATION_MODES[mode]
    return changed


def make_report(plain: GatewayAnswer, speculative: GatewayAnswer) -> dict[str, Any]:
    sums = {"plain": AnswerFigures.of([plain]), "speculation": AnswerFigures.of([speculative])}
    rates = [figures.tokens_per_second for figures in sums.values()]
    return {
        "texts_equal": plain.text == speculative.text and plain.token_ids == speculative.token_ids,
        "speedup": round(rates[1] / rates[0], 4) if rates[0] else 0.0,
        "text": {"plain": plain.text, "speculation": speculative.text},
        **{name: figures.summary() for name, figures in sums.items()},
    }


def _table(report: dict[str, Any]) -> str:
    plain, speculation = report["plain"], report["speculation"]
    rows: list[list[object]] = [
        ["tokens", plain["tokens"], speculation["tokens"]],
        ["tokens/s", f"{plain['tokens_per_second']:.1f}", f"{speculation['tokens_per_second']:.1f}"],
        ["drafts accepted / verified", "-", f"{speculation['accepted']} / {speculation['verified']}"],
        ["acceptance", "-", f"{speculation['acceptance']:.2f}"],
    ]
    names = {
        "tokens_per_round": "tokens per round",
        "round_ms": "ms per round",
        "draft_ms": "  draft",
        "wire_ms": "  wire",
        "verify_ms": "  verify",
    }
    rows += [[label, f"{plain[name]:.2f}", f"{speculation[name]:.2f}"] for name, label in names.items()]
    equal = "equal" if report["texts_equal"] else "DIFFERENT"
    table = columns(["", "PLAIN", "SPECULATION"], rows)
    return f"{table}\n\n{report['speedup']:.2f} × plain decoding; the texts are {equal}."


_ACCEPTED = "green"


class Painter:
    """The text is the gateway's; the tokenizer only tells where in it the accepted tokens end."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._token_ids: list[int] = []
        self._accepted: list[tuple[int, int]] = []
        """Spans of characters."""
        self._length = 0

    def paint(self, chunk: generation.StreamGenerateResponse) -> str:
        """The chunk's text with escape codes around what was drafted."""
        before = self._chars(len(self._token_ids))
        self._token_ids.extend(chunk.token_ids)
        after = self._chars(len(self._token_ids) - len(chunk.token_ids) + chunk.num_accepted)
        if after > before:
            self._accepted.append((before, after))
        start, self._length = self._length, self._length + len(chunk.text)
        return self._styled(chunk.text, start)

    def _styled(self, text: str, start: int) -> str:
        """Runs of equal colour. A text held back by the gateway belongs to spans of earlier chunks, too."""
        self._accepted = [span for span in self._accepted if span[1] > start]
        runs: list[tuple[bool, str]] = []
        for position, character in enumerate(text, start):
            accepted = any(first <= position < last for first, last in self._accepted)
            if runs and runs[-1][0] == accepted:
                runs[-1] = (accepted, runs[-1][1] + character)
            else:
                runs.append((accepted, character))
        return "".join(click.style(run, fg=_ACCEPTED) if accepted else run for accepted, run in runs)

    def _chars(self, tokens: int) -> int:
        return len(self._tokenizer.decode(self._token_ids[:tokens]))
