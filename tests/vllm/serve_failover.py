"""python -m tests.vllm.serve_failover: seeded texts of `vllm serve` without the plugin, with it, and after a failover.

A server with the plugin and a draft worker is killed in mid-answer; another one gets each prompt with the tokens that
had arrived, and the same seed. Prints how many texts are those of vLLM alone; without accepted drafts it fails.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import httpx
from outrider.testing.tiny import tiny_checkpoint

from tests.vllm.processes import ending, free_address
from tests.vllm.test_serve import await_drafts
from tests.vllm.test_texts import PROMPTS
from tests.vllm.vllm_alone import FIRST_SEED, TEMPERATURE, TOP_P
from tests.vllm.vllm_serve import Server, drafting, plugin, serving

LENGTH = 48
Texts = list[list[int]]


def answers(
    server: Server, held: Sequence[Sequence[int]], arrived: Callable[[Texts], None] = lambda texts: None
) -> Texts:
    """All texts, each after the tokens that are held; broken off where the server goes."""
    texts = [list(one) for one in held]

    def answer(number: int) -> None:
        body = {
            "model": "m",
            "prompt": [*PROMPTS[number], *held[number]],
            "max_tokens": LENGTH - len(held[number]),
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "seed": FIRST_SEED + number,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=1800) as reply,
        ):
            for line in reply.iter_lines():
                # A server that dies may say an error.
                for choice in json.loads(line[6:]).get("choices", ()) if line.startswith("data: {") else ():
                    texts[number] += choice["token_ids"]
                    arrived(texts)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(answer, [number for number, one in enumerate(held) if len(one) < LENGTH]))
    return texts


@contextlib.contextmanager
def drafted(model: Path) -> Iterator[Server]:
    """A server with the plugin and a draft worker with the same model."""
    address = free_address()
    with ending(drafting(model, address)), serving(model, *plugin(drafts=[address], row_price=0)) as server:
        await_drafts(server)
        yield server


@click.command()
def main() -> None:
    nothing: Texts = [[] for _ in PROMPTS]
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_checkpoint(Path(directory) / "tiny", head_dim=32, max_context_len=1024)
        with serving(model) as server:
            alone = answers(server, nothing)

        def ask(name: str, server: Server, held: Texts) -> None:
            before = server.counted("num_accepted_tokens")
            texts = answers(server, held)
            equal, accepted = sum(map(list.__eq__, texts, alone)), server.counted("num_accepted_tokens") - before
            click.echo(f"{name}: {equal} of {len(alone)} texts equal; {accepted:g} drafted tokens accepted")
            assert accepted > 0

        with drafted(model) as server:
            ask("with the plugin", server, nothing)
            half = answers(server, nothing, lambda texts: server.kill() if sum(map(len, texts)) > 600 else None)
            click.echo(f"killed after {sum(map(len, half))} of {len(alone) * LENGTH} tokens")
        with drafted(model) as server:
            ask("continued on another server", server, half)


if __name__ == "__main__":
    main()
