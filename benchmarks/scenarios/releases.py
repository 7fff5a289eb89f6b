"""python -m benchmarks releases"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
from outrider.rpc.v1 import control_pb2
from outrider.runtime.spawn import bound_to_us
from outrider.samples import SampleStore
from outrider_controller.cli.ask.client import GatewayAnswer
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.clusters.control import call_control
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.report import finish, show, table
from benchmarks.support.asking import answers, count_option, max_tokens_option
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.tenants import create_key

T = TypeVar("T")
TENANT, DRAFT, SHIPPED = "acme", "acme-1", "smollm2-135m-draft"
_MIN_GAIN, _MAX_CHANGE, _MAX_MINUTES = 0.08, 0.01, 60.0
_BATCH, _PAUSE_S, _HELD_OUT = 64, 5.0, 48
_NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Felix", "Grace", "Henry", "Ines", "Jack", "Kara", "Liam", "Mia")
_CITIES = ("Paris", "Berlin", "Madrid", "Rome", "Oslo", "Vienna", "Lisbon", "Dublin", "Prague", "Athens", "Milan")
_ITEMS = ("chairs", "lamps", "tables", "mugs", "boots", "bikes", "tents", "cables", "phones", "books", "pens", "desks")
_OPERATIONS = ("sum", "product", "maximum", "minimum", "mean", "length", "median", "variance", "range")
_FORMS = (
    "Write a Haskell function that computes the {operation} of a list of {item} with their prices in {city}.",
    "Write an XML document for an invoice: customer {name}, city {city}, {count} {item}, price {price}, tax and total.",
    "Write an SQL query that lists the {item} sold in {city} by {name} with a quantity above {count}, by month.",
)


def prompts_of_the_tenant(seed: int) -> Iterator[Prompt]:
    """Code and records, of which the shipped draft guesses less than of other text; endless."""
    rng = random.Random(seed)
    while True:
        given = {"name": rng.choice(_NAMES), "city": rng.choice(_CITIES), "item": rng.choice(_ITEMS)}
        given["operation"] = rng.choice(_OPERATIONS)
        numbers = {"count": rng.randint(2, 99), "price": rng.randint(5, 999)}
        yield Prompt(str(seed), TENANT, rng.choice(_FORMS).format(**given, **numbers))


@click.command("releases")
@prompts_option
@count_option(48)
@max_tokens_option(96)
@click.option("--requests", type=click.IntRange(64), default=400, show_default=True, help="That are recorded.")
@click.option("--train-tokens", type=click.IntRange(1), default=800_000, show_default=True)
@click.option("--most", type=click.IntRange(1), default=4000, show_default=True, help="Requests until the verdict.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="To distil with.")
@click.option("--directory", type=click.Path(file_okay=False, path_type=Path), required=True, help="A new one.")
@json_file_option
def releases(
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    requests: int,
    train_tokens: int,
    most: int,
    threads: int,
    directory: Path,
    json_file: Path | None,
) -> int:
    """A tenant's text that the draft does not know: how soon is it learnt, and what do other tenants notice?

    With the manual's commands: the tenant's requests are recorded, a draft is distilled from them and released to it.
    The tenant asks for Haskell, XML and SQL, with other names and numbers in each request. --prompts are those of other
    tenants, asked before and after, with the draft that each has then. Of the tenant, acceptance is the share of first
    drafted tokens that the target accepts at temperature 0, on prompts that nothing learnt from.
    """
    others = spread(read_prompts(prompts_file), num_prompts)
    loop = Loop(directory, others, max_tokens, requests, train_tokens, most, threads)
    rollout = run_async(loop.run())
    minutes = sum(loop.minutes.values())
    accepted = Accepted(directory / DRAFT, max_tokens, threads)
    tenant = accepted.row(TENANT, held_out(max(requests, most)))
    # Nobody has it so: what the tenant's draft would do for the others.
    unlike = accepted.row(f"others, with {DRAFT}", others)
    rows = [tenant, {"prompts of": "others", "before": loop.others[0], "after": loop.others[1]}, unlike]
    gained, kept = (row["after"] - row["before"] for row in rows[:2])
    took = {name.upper(): f"{each:.1f}" for name, each in loop.minutes.items()}
    equal = "equal" if loop.texts_equal else "NOT EQUAL"
    verdict = f"{DRAFT}: {rollout['state']}: {rollout['reason']}; texts of the others: {equal}"
    show(f"Minutes:\n{table([took])}", table(rows), verdict)
    promoted = rollout["state"] == "promoted" and loop.texts_equal
    holds = promoted and gained >= _MIN_GAIN and abs(kept) <= _MAX_CHANGE and minutes <= _MAX_MINUTES
    body = {"holds": holds, "rollout": rollout, "minutes": loop.minutes, "acceptance": rows}
    return finish("releases", {**body, "train_tokens": train_tokens}, json_file)


def take(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    return list(islice(prompts, count))


def held_out(asked: int) -> list[Prompt]:
    """Prompts of the tenant, of which none is among the first that it asks."""
    known = {prompt.text for prompt in take(prompts_of_the_tenant(1), asked)}
    return take((prompt for prompt in prompts_of_the_tenant(3) if prompt.text not in known), _HELD_OUT)


@dataclass(slots=True)
class Loop:
    """From the tenant's first request to the verdict on its draft."""

    directory: Path
    prompts: Sequence[Prompt]
    """Of other tenants."""
    max_tokens: int
    requests: int
    train_tokens: int
    most: int
    threads: int
    minutes: dict[str, float] = field(default_factory=dict)
    """That each step took."""
    others: tuple[float, float] = (0.0, 0.0)
    """Acceptance of other tenants, before and after."""
    texts_equal: bool = False
    """Theirs, before and after."""

    @property
    def samples(self) -> Path:
        return self.directory / "samples"

    async def run(self) -> dict[str, Any]:
        """The rollout, as `outrider rollout status` shows it."""
        self.samples.mkdir(parents=True)
        # The teacher needs memory beside the target.
        options = f"--samples {self.samples} --kv-cache-bytes 500000000"
        async with Stack(StackConfig(target_args=options), note) as stack:
            key, other = await self._keys(stack)
            before = await self._ask(stack, other, self.prompts)
            async with self._released(stack, key) as rollout:
                after = await self._ask(stack, other, self.prompts)
        self.others = round(AnswerFigures.of(before).acceptance, 4), round(AnswerFigures.of(after).acceptance, 4)
        self.texts_equal = [one.token_ids for one in before] == [one.token_ids for one in after]
        return rollout

    @asynccontextmanager
    async def _released(self, stack: Stack, key: str) -> AsyncIterator[dict[str, Any]]:
        """Yields the rollout, while the worker runs."""
        await self._consent(stack)
        await self._timed("record", self._ask(stack, key, take(prompts_of_the_tenant(1), self.requests)))
        note(f"{SampleStore(self.samples).count(TENANT)} samples")
        await self._timed("distil", self._distil())
        note(await self._timed("compare", self._compared()))
        model = ("--model", str(self.directory / DRAFT), "--candidate", "--listen", "127.0.0.1:0", "--threads", "1")
        async with running("draft", *model, "--metadata", stack.metadata_url):
            yield await self._timed("rollout", self._rolled_out(stack, key))

    async def _rollout(self, at: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await outrider("rollout", "status", DRAFT, *at))["rollout"]
        note(f"{found}")
        return found

    async def _timed(self, name: str, step: Awaitable[T]) -> T:
        began_s = time.monotonic()
        found = await step
        self.minutes[name] = (time.monotonic() - began_s) / 60
        note(f"{name}: {self.minutes[name]:.1f} minutes")
        return found

    async def _keys(self, stack: Stack) -> tuple[str, str]:
        """API keys of the tenant and of another one."""
        await self._apply(stack, {"name": TENANT}, {"name": "others"})
        names = (TENANT, "others")
        requests = [control_pb2.CreateKeyRequest(tenant=name) for name in names]
        key, other = [(await call_control(stack.control, partial(create_key, one))).key for one in requests]
        return key, other

    async def _consent(self, stack: Stack) -> None:
        await self._apply(stack, {"name": TENANT, "samples": "text"})

    async def _apply(self, stack: Stack, *tenants: Mapping[str, str]) -> None:
        record = self.directory / "tenants.json"
        record.write_text(json.dumps({"tenants": tenants}))
        await outrider("apply", "-f", str(record), "--control", stack.control)

    async def _ask(self, stack: Stack, key: str, prompts: Sequence[Prompt]) -> list[GatewayAnswer]:
        found = await answers(
            *(stack.gateway_grpc, stack.config.model, prompts, prompts[0].category),
            speculation="on",
            concurrency=8,
            keys=[key] * len(prompts),
            temperature=0.0,
            max_tokens=self.max_tokens,
        )
        note(f"{prompts[0].category}: {AnswerFigures.of(found).acceptance:.3f} of the verified tokens were accepted")
        return found

    async def _distil(self) -> None:
        await outrider(
            *("distill", str(self.directory / DRAFT), "--start", SHIPPED, "--threads", str(self.threads)),
            *("--from-samples", TENANT, "--samples-dir", str(self.samples)),
            *("--train-tokens", str(self.train_tokens), "--json", str(self.directory / "distilled.json")),
        )

    async def _compared(self) -> str:
        corpus = str(SampleStore(self.samples).of(TENANT) / "distill-model")
        drafts = (SHIPPED, str(self.directory / DRAFT))
        return await outrider("compare", "drafts", *drafts, "--held-out", corpus, "--threads", str(self.threads))

    async def _rolled_out(self, stack: Stack, key: str) -> dict[str, Any]:
        at = ("--control", stack.control)
        while DRAFT not in await outrider("get", "drafts", "-o", "name", *at):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        # Large shares of one tenant's requests: few are asked here.
        await outrider("rollout", "start", DRAFT, "--tenant", TENANT, "--share", "0.5", *at)
        prompts = prompts_of_the_tenant(2)
        for _ in range(0, self.most, _BATCH):
            await self._ask(stack, key, take(prompts, _BATCH))
            found = await self._rollout(("-o", "json", *at))
            if found["state"] != "running":
                break
        return found


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[None]:
    """A command that runs until it is terminated."""
    note(" ".join(["outrider", *arguments]))
    child = await asyncio.create_subprocess_exec(*_command(*arguments))
    try:
        yield
    finally:
        child.terminate()
        await child.wait()


def _command(*arguments: str) -> list[str]:
    return bound_to_us([sys.executable, "-m", "outrider_controller.cli", *arguments])


async def outrider(*arguments: str) -> str:
    """What the command prints. Raises CommandError."""
    note(" ".join(["outrider", *arguments]))
    child = await asyncio.create_subprocess_exec(*_command(*arguments), stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    if child.returncode:
        raise CommandError(f"outrider {arguments[0]} ended with exit code {child.returncode}")
    return out.decode()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The share of first drafted tokens that the target accepts at temperature 0."""

    draft: Path
    max_tokens: int
    threads: int

    def row(self, who: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Before and after: of the shipped draft, and of this one."""
        import torch
        from outrider.engine import EngineConfig, resolve
        from outrider.engine.checkpoints.tokenizer import load_tokenizer
        from outrider.engine.models.loader import load_engine
        from outrider.training.acceptance import share
        from outrider.training.texts import prompt_ids

        torch.set_num_threads(self.threads)
        target = resolve(DEFAULT_TARGET)
        tokenizer = load_tokenizer(target)
        engine = load_engine(target, EngineConfig(num_blocks=2048, prefix_cache=False))
        asked = [prompt_ids(tokenizer, [{"role": "user", "content": prompt.text}]) for prompt in prompts]
        before, after = (share(engine, resolve(str(one)), asked, self.max_tokens) for one in (SHIPPED, self.draft))
        return {"prompts of": who, "before": before, "after": after}
