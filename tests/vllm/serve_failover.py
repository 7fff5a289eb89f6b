"""python -m tests.vllm.serve_failover: seeded texts of `vllm serve` without the plugin, with it, and after a failover.

A server with the plugin, and drafts of which most are right, is killed in mid-answer; another one gets each prompt with
the tokens that had arrived, and the same seed. Prints how many texts are those of vLLM alone; fails where few drafts
were accepted.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import httpx
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import ScriptedDraft
from tests.vllm.models import checkpoint
from tests.vllm.test_texts import PROMPTS
from tests.vllm.vllm_alone import FIRST_SEED, TEMPERATURE, TOP_P
from tests.vllm.vllm_serve import Server, plugin, scripted, serving

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


class KnowingDraft(ScriptedDraft):
    """Knows the texts. Of every fifth guess the third token is wrong."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(self._say)
        self._texts, self._open = texts, dict[int, list[int]]()

    def _say(self, sequence_id: int, base_len: int) -> sp.Draft:
        for opened in self.requests[-1].opens:
            given = [*opened.prompt_token_ids]
            (number,) = (number for number, one in enumerate(PROMPTS) if given[: len(one)] == one)
            self._open[opened.sequence_id] = [*PROMPTS[number], *self._texts[number]]
        guess = self._open[sequence_id][base_len : base_len + 9]
        if not base_len % 5:
            guess[2:3] = [0] * len(guess[2:3])
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)


@click.command()
def main() -> None:
    nothing: Texts = [[] for _ in PROMPTS]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        model = checkpoint("tiny", Path(directory), max_context_len=1024)
        with serving(model) as server:
            alone = answers(server, nothing)
        draft = KnowingDraft(alone)
        stack.enter_context(scripted(draft))
        flags = plugin(drafts=[draft.address], row_price=0)

        def ask(name: str, server: Server, held: Texts) -> None:
            before = server.counted("num_accepted_tokens")
            texts = answers(server, held)
            equal, accepted = sum(map(list.__eq__, texts, alone)), server.counted("num_accepted_tokens") - before
            click.echo(f"{name}: {equal} of {len(alone)} texts equal; {accepted:g} drafted tokens accepted")
            assert accepted > 5 * len(alone)

        with serving(model, *flags) as server:
            ask("with the plugin", server, nothing)
            before = server.counted("num_accepted_tokens")

            def kill(texts: Texts) -> None:
                if sum(map(len, texts)) > 600:
                    accepted = server.counted("num_accepted_tokens") - before
                    server.kill()
                    click.echo(f"killed after {sum(map(len, texts))} tokens, {accepted:g} of them accepted drafts")

            half = answers(server, nothing, kill)
        with serving(model, *flags) as server:
            ask("continued on another server", server, half)


if __name__ == "__main__":
    main()
