"""Ours and peers that speculate too, answering the same prompts: `python -m benchmarks.peers.answers --prompts FILE`.

One stream of greedy answers, in bfloat16. Ours is the whole stack: gateway, router, target on one core, draft on the
other, which the target also uses for prefill. A peer is one process with a thread on each of the same cores. The
subjects take turns prompt by prompt; the others are idle. This module handles the processes, `answer_figures` the
answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from outrider.engine import resolve
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.hardware import hardware
from outrider.rpc.v1 import worker_pb2
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import columns, note, write_json
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.arms import turns
from benchmarks.peers import answer_figures as made
from benchmarks.peers import draft_export, install
from benchmarks.peers.answer_figures import Answered
from benchmarks.peers.subjects import PeerFailed, Subject
from benchmarks.support.asking import make_request
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import Prompt, read_prompts, spread
from benchmarks.support.stacks import outside_cores

_MODEL = "smollm2-135m-instruct"
# Pause between answers: OpenMP threads spin for a few milliseconds after their work and would slow the next subject.
_REST_S = 0.05
_IDLE_S = 3.0
_ANSWER_S = 600.0


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as text, for ours, and as the tokens of that text in the chat template, for a peer."""

    prompt: Prompt
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int
    ignore_eos: bool


class Asked(Protocol):
    """A subject. Its answer is {"token_ids", "s", "first_s", "steps"}."""

    name: str

    async def answer(self, question: Question, limits: Limits) -> dict[str, Any]:
        """Raises PeerFailed, or CommandError when ours fails."""


class Ours:
    """The stack through its gateway, timed by its client."""

    def __init__(self, name: str, gateway: Gateway, speculation: str) -> None:
        self.name = name
        self._gateway = gateway
        self._speculation = speculation

    async def answer(self, question: Question, limits: Limits) -> dict[str, Any]:
        request = make_request(
            _MODEL,
            question.prompt.text,
            self._speculation,
            max_tokens=limits.max_tokens,
            ignore_eos=limits.ignore_eos,
            temperature=0.0,
        )
        answer = await self._gateway.answer(request, _ANSWER_S)
        if (tokens := answer.usage.prompt_tokens) != len(question.token_ids):
            raise CommandError(
                f"prompt {question.prompt.id}: ours has {tokens} tokens, the peers' {len(question.token_ids)}"
            )
        return {
            "token_ids": answer.token_ids,
            "s": answer.seconds,
            "first_s": answer.first_token_s,
            "steps": answer.sums.num_steps,
        }


class Peer:
    """A process that measures its own time: communication with it is not counted."""

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self._subject = subject

    async def answer(self, question: Question, limits: Limits) -> dict[str, Any]:
        request = {
            "do": "answer",
            "prompt": question.token_ids,
            "max_tokens": limits.max_tokens,
            "ignore_eos": limits.ignore_eos,
        }
        return await asyncio.to_thread(self._subject.ask, request)


def questions(prompts: Sequence[Prompt], model: Path) -> list[Question]:
    """The prompts as chats of one turn."""
    tokenizer = load_tokenizer(model)

    def token_ids(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return found

    return [Question(prompt, token_ids(prompt.text)) for prompt in prompts]


async def take_turns(
    asked: Sequence[Asked], asking: Sequence[Question], limits: Limits, failures: dict[str, str]
) -> list[Answered]:
    """Answers of the subjects that gave all of them; `failures` gets the reasons of the others."""
    answers: list[Answered] = []
    report = Progress("prompts", len(asking))
    by_name = {subject.name: subject for subject in asked}
    for number, name in turns(len(asking), list(by_name)):
        report(number, "")
        if name in failures:
            continue
        await asyncio.sleep(_REST_S)
        try:
            reply = await by_name[name].answer(asking[number], limits)
        except PeerFailed as failure:
            _left_out(name, failure, failures)
            continue
        answers.append(_answered(name, asking[number].prompt, reply))
    report(len(asking), "")
    return [answer for answer in answers if answer.subject not in failures]


def _answered(name: str, prompt: Prompt, reply: Mapping[str, Any]) -> Answered:
    times = reply["s"], reply["first_s"], reply["steps"]
    return Answered(name, prompt.id, prompt.category, tuple(reply["token_ids"]), *times, reply.get("core_share"))


def _left_out(name: str, failure: Exception, failures: dict[str, str]) -> None:
    failures[name] = str(failure)
    note(f"{name} is left out: {failure}")


async def _start_peers(
    names: Sequence[str], peers: Mapping[str, install.Peer], model: Path, cores: Sequence[int], failures: dict[str, str]
) -> list[Subject]:
    started: list[Subject] = []
    try:
        for name in names:
            try:
                install.python_of(peers[name])
                started.append(await asyncio.to_thread(Subject, name, peers[name], model, cores))
            except (PeerFailed, OSError, subprocess.CalledProcessError) as failure:
                _left_out(name, failure, failures)
            else:
                note(f"{name} is ready ({started[-1].about['load_s']} s)")
    except BaseException:
        for subject in started:
            subject.close()
        raise
    return started


async def idle_shares(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Share of one core that each takes while idle."""
    before = {name: _cpu_s(own) for name, own in pids.items()}
    await asyncio.sleep(_IDLE_S)
    return {name: round((_cpu_s(own) - before[name]) / _IDLE_S, 3) for name, own in pids.items()}


def _cpu_s(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                times = one.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything → the content of --json."""
    started_s = time.monotonic()
    model = resolve(_MODEL)
    draft = draft_export.export(resolve(draft_export.DRAFT), install.ENVIRONMENTS / f"{draft_export.DRAFT}-llama")
    asking = questions(spread(read_prompts(options.prompts), options.num_prompts), model)
    limits = Limits(options.max_tokens, not options.stop_at_eos)
    failures: dict[str, str] = {}
    config = StackConfig(
        target_model=_MODEL,
        pin=True,
        borrow_cores=True,
        realtime=True,
        target_args="--no-prefix-cache",
        draft_args="--no-prefix-cache",
    )
    async with Stack(config, note) as stack, Gateway(stack.gateway_grpc) as gateway:
        with ExitStack() as exits:
            known = _peers(draft, await _draft_address(stack), options)
            peers = await _start_peers(options.peers, known, model, options.cores, failures)
            for peer in peers:
                exits.callback(peer.close)
            asked: list[Asked] = [Ours("ours", gateway, "auto"), Ours("ours-off", gateway, "off"), *map(Peer, peers)]
            with outside_cores(stack):
                await take_turns(asked, asking[:1], Limits(16, True), failures)  # Warms up.
            await asyncio.sleep(1.0)
            pids = {peer.name: [peer.pid] for peer in peers}
            idle = await idle_shares({"ours": [one.pid for one in stack.processes.values() if one.pid], **pids})
            with outside_cores(stack):
                answers = await take_turns(asked, asking, limits, failures)
            about = {peer.name: peer.about for peer in peers}
    return {
        **hardware(),
        "run_s": round(time.monotonic() - started_s),
        "max_tokens": limits.max_tokens,
        "ignore_eos": limits.ignore_eos,
        "num_prompts": len(asking),
        "subjects": about,
        "failures": failures,
        "idle": idle,
        "figures": made.summary(answers),
        "bars": made.verdict_rows(made.verdicts(answers)),
        "answers": made.answer_rows(answers),
    }


async def _draft_address(stack: Stack) -> str:
    """Our draft worker drafts for vLLM with our plugin too."""
    return next(one.address for one in await stack.workers() if one.info.role == worker_pb2.WORKER_ROLE_DRAFT)


def _peers(draft: Path, address: str, options: argparse.Namespace) -> dict[str, install.Peer]:
    return install.answering(
        draft,
        assistant_tokens=options.assistant_tokens,
        ngram_tokens=options.ngram_tokens,
        draft_tokens=options.draft_tokens,
        outrider_tokens=options.outrider_tokens,
        address=address,
    )


def report(outcome: Mapping[str, Any]) -> str:
    """The report as text."""
    summed = outcome["figures"]
    names = list(summed["ours"]["tokens_per_second"])
    ending = "end of text ignored" if outcome["ignore_eos"] else "stopped at the end of text"
    head = [
        f"{outcome['cpu']}, {outcome['cores']} cores, {outcome['at']}, {outcome['run_s']} s; "
        f"{outcome['num_prompts']} prompts, at most {outcome['max_tokens']} tokens, {ending}",
        *(f"{name}: {what['version']}" for name, what in outcome["subjects"].items()),
        *(f"{name} was left out: {why}" for name, why in outcome["failures"].items()),
        "share of a core when not asked: " + ", ".join(f"{n} {share:.1%}" for n, share in outcome["idle"].items()),
    ]
    tables = [
        columns(["tokens/s", *names], made.rate_rows(summed)),
        columns(["ours / subject", *names, "median of answers"], made.ratio_rows(summed)),
        columns(["subject", "tokens/step", "first token, ms", "cores", "equal to ours"], made.subject_rows(summed)),
        columns(["bar", "subject", "ratio", "median of answers", "bound", "met"], outcome["bars"]),
    ]
    return "\n\n".join(["\n".join(head), *tables])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    known = list(install.answering(Path(), assistant_tokens=0, ngram_tokens=1, draft_tokens=1, outrider_tokens=1))
    option = parser.add_argument
    option("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines: id, turns or prompt, category")
    option("-n", "--num-prompts", type=int, default=80, help="spread by category (default: %(default)s)")
    option("--max-tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    option("--peers", default="transformers,assisted,vllm-compiled,vllm-ngram-compiled,vllm-draft-compiled")
    option("--stop-at-eos", action="store_true", help="by default all answers are as long as they may be")
    option("--assistant-tokens", type=int, default=3, help="of transformers at once; 0: its own choice")
    option("--ngram-tokens", type=int, default=4, help="of vLLM's n-grams at once (default: %(default)s)")
    option("--draft-tokens", type=int, default=2, help="of vLLM's draft model at once (default: %(default)s)")
    option("--outrider-tokens", type=int, default=4, help="of vLLM with our plugin at once (default: %(default)s)")
    option("--cores", default="", metavar="A,B", help="that all share; default: the first two")
    option("--json", type=Path, metavar="FILE", help="also write every answer's figures and the verdicts here")
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(known):
        parser.error(f"--peers: {', '.join(sorted(unknown))}: not of {', '.join(known)}")
    if options.num_prompts < 1 or options.max_tokens < 2:
        parser.error("--num-prompts must be at least 1, --max-tokens at least 2")
    options.cores = [int(core) for core in options.cores.split(",") if core] or sorted(os.sched_getaffinity(0))[:2]
    return options


def main() -> int:
    options = _options()
    os.sched_setaffinity(0, options.cores)
    try:
        outcome = run_async(run(options))
    except CommandError as failure:
        print(f"answers: {failure}", file=sys.stderr)
        return 1
    write_json(options.json, "peer-answers", outcome)
    print(report(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
