"""python -m benchmarks placement --real: how two real targets share sequences with the same beginning."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from outrider.rpc.v1 import generation_pb2 as generation
from outrider_controller.cli.ask.client import SPECULATION_MODES, Gateway, apply_prompt
from outrider_controller.cli.output import note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report

_SYSTEM = "Be brief. " * 50
_OWN_CHARACTERS, _MAX_TOKENS, _CONTEXT_LEN = 32, 48, 1024
_ANSWERS = 4
"""Answers per stream, one after the other."""
_LEAST, _MOST = 0.35, 0.65
_TIMEOUT_S = 60.0


async def real_targets(streams: int, json_file: Path | None) -> int:
    """Raises ProcessFailed, and CommandError for a request that fails."""
    # Imported here because it imports torch.
    from outrider.testing.tiny import tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="placement-") as scratch:
        model = str(tiny_checkpoint(Path(scratch) / "tiny", max_context_len=_CONTEXT_LEN))
        config = StackConfig(model, targets=2, drafts=0, target_args=f"--dtype float32 --kv-cache-bytes {64 << 20}")
        async with Stack(config, note) as stack, Gateway(stack.gateway_grpc) as gateway:
            await gateway.answer(_request(config.model, 0), _TIMEOUT_S)
            before = await _prompt_tokens(stack)
            numbers = iter(range(1, 1 + _ANSWERS * streams))
            await asyncio.gather(*(_ask(gateway, config.model, numbers) for _ in range(streams)))
            shares = shares_of(before, await _prompt_tokens(stack))
    holds = all(_LEAST <= share <= _MOST for share in shares.values())
    report.show(
        report.table([{"target": name, "share": share} for name, share in shares.items()]),
        f"of {_ANSWERS * streams} sequences in {streams} streams; bar: {_LEAST:.0%} to {_MOST:.0%}",
    )
    body = {"holds": holds, "shares": shares, "streams": streams, "sequences": _ANSWERS * streams}
    return report.finish("placement-real", body, json_file)


async def _ask(gateway: Gateway, model: str, numbers: Iterator[int]) -> None:
    """One stream: sends a request for each next number until there is none."""
    for number in numbers:
        await gateway.answer(_request(model, number), _TIMEOUT_S)


def _request(model: str, number: int) -> generation.GenerateRequest:
    """A request with a unique prompt of the common length."""
    request = generation.GenerateRequest(model=model)
    request.options.MergeFrom(generation.GenerationOptions(max_tokens=_MAX_TOKENS, ignore_eos=True))
    request.options.speculation = SPECULATION_MODES["off"]
    apply_prompt(request, f"{number:0{_OWN_CHARACTERS}}", system=_SYSTEM)
    return request


async def _prompt_tokens(stack: Stack) -> dict[str, float]:
    """Prompt tokens of all sequences so far, by target."""
    targets = [name for name in stack.ops if name.startswith("target-")]
    async with httpx.AsyncClient() as http:
        pages = [(await http.get(f"http://{stack.ops[name]}/metrics")).text for name in targets]
    return {name: _value(page, "outrider_prompt_tokens_total") for name, page in zip(targets, pages, strict=True)}


def _value(page: str, metric: str) -> float:
    """Sum of the metric over all labels."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == metric)


def shares_of(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Share of the sequences, by target. All prompts are equally long, so prompt tokens count sequences."""
    read = {name: after[name] - before[name] for name in after}
    return {name: round(tokens / max(1, sum(read.values())), 3) for name, tokens in read.items()}
