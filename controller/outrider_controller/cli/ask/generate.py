"""outrider generate"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
from outrider.limits import MAX_UINT32
from outrider.rpc.v1 import generation_pb2 as generation

from outrider_controller.cli.ask.figures import answer_figures
from outrider_controller.cli.asking import NumberRange
from outrider_controller.cli.client import SPECULATION_MODES, Gateway, GatewayAnswer, OnChunk, apply_prompt
from outrider_controller.cli.clusters.control import context_option, endpoint_option
from outrider_controller.cli.output import colours, emit, note, output_option
from outrider_controller.cli.show.trace.command import show
from outrider_controller.cli.show.trace.rows import trace_row


@click.command("generate")
@click.argument("prompt", nargs=-1)
@context_option
@endpoint_option("--model", "model", "OUTRIDER_MODEL", "Model to ask")
@endpoint_option("--gateway", "grpc", "OUTRIDER_GATEWAY", "gRPC address to ask")
@click.option("--raw", is_flag=True, help="Continue the prompt as text, without the chat template.")
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--top-k",
    type=click.IntRange(0, MAX_UINT32),
    default=None,
    metavar="N",
    help="Only the N likeliest tokens; 0: all.",
)
@click.option("--top-p", type=float, default=None, metavar="P", help="Only the likeliest tokens that make up P.")
@click.option("--min-p", type=float, default=None, metavar="P", help="Only tokens at least P times the likeliest.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=None, help="Same seed, same text.")
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_UINT32), default=256, show_default=True, metavar="N", help="At most."
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Continue to --max-tokens, past the end-of-text token.")
@click.option("--speculation", type=click.Choice(list(SPECULATION_MODES)), default="auto", show_default=True)
@click.option("--max-draft-tokens", type=click.IntRange(0, 64), default=None, metavar="N", help="At most, per round.")
@click.option("--receipt", is_flag=True, help="Ask for a receipt: on stderr, or with -o json in the field receipt.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Print the text as it comes.")
@click.option("--stats", is_flag=True, help="Tokens/s and acceptance, on stderr.")
@click.option("--trace", is_flag=True, help="Then print its rounds, as `outrider trace` does.")
@endpoint_option("--control", "control", "OUTRIDER_CONTROL", "Control plane that knows the routers, for --trace")
@click.option("--timeout", type=NumberRange(0, min_open=True), default=600.0, show_default=True, metavar="S")
@output_option("text", "json")
def generate(
    prompt: tuple[str, ...],
    model: str,
    grpc: str,
    raw: bool,
    system: str,
    output: str,
    stream: bool,
    stats: bool,
    trace: bool,
    control: str,
    timeout: float,
    **options: Any,
) -> None:
    """Ask a running stack for an answer; the prompt comes from the arguments, or from stdin.

    Options that are not given are left to the server. Exit code 2 when the server refuses a field, 3 for an unknown
    model, 5 when nobody answers, 6 after the timeout.
    """
    text = " ".join(prompt) if prompt and prompt != ("-",) else _stdin()
    if not (text if raw else text.strip()):
        raise click.UsageError("the prompt is empty")
    request = generation.GenerateRequest(model=model, options=_options(**options))
    apply_prompt(request, text, raw=raw, system=system)
    live = stream and output == "text"
    answer = asyncio.run(_ask(grpc, request, timeout, _show if live else lambda chunk: None))
    if output == "text":
        click.echo("" if live else answer.text)
    if answer.receipt and output == "text":
        note(answer.receipt)
    if stats:
        note(_stats(answer))
    traces = asyncio.run(_trace(answer, control, grpc, quiet=output == "json")) if trace else {}
    if output == "json":
        emit("generation", {"model": model, "text": answer.text, **answer_figures(answer), **traces}, output)


async def _ask(address: str, request: generation.GenerateRequest, timeout_s: float, show: OnChunk) -> GatewayAnswer:
    async with Gateway(address) as gateway:
        return await gateway.answer(request, timeout_s, show)


async def _trace(answer: GatewayAnswer, control: str, gateway: str, *, quiet: bool) -> dict[str, Any]:
    if not quiet:
        click.echo()
    parts = await show(answer.id, control, gateway, colour=colours(), quiet=quiet)
    return {"traces": [trace_row(part) for part in parts]}


def _show(chunk: generation.StreamGenerateResponse) -> None:
    click.echo(chunk.text, nl=False)
    sys.stdout.flush()


def _stdin() -> str:
    if sys.stdin.isatty():
        raise click.UsageError("no prompt: give it as arguments, or on stdin")
    return sys.stdin.read()


def _options(*, speculation: str, **given: Any) -> generation.GenerationOptions:
    """From the options as given; None leaves a field to the server."""
    return generation.GenerationOptions(
        speculation=SPECULATION_MODES[speculation],
        include_metrics=True,
        **{name: value for name, value in given.items() if value is not None},
    )


def _stats(answer: GatewayAnswer) -> str:
    sums = answer.sums
    line = f"{len(answer.token_ids)} tokens in {answer.seconds:.2f} s ({answer.tokens_per_second:.1f} tokens/s)"
    if sums.num_verified_tokens:
        share = sums.num_accepted_draft_tokens / sums.num_verified_tokens
        line += (
            f"; {sums.num_accepted_draft_tokens} of {sums.num_verified_tokens} verified drafts ({share:.0%}) accepted"
        )
    return f"{line}; ended by {answer.finish_reason}"
