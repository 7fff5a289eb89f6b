"""python -m tests.vllm.second_runner PLAN [TEXTS]: how many texts with drafts from outside are those of vLLM alone.

PLAN is JSON with the fields of `Plan`; its model is `tiny`, a directory, or one that Outrider knows by name. With TEXTS
it is run again and again, synchronously and asynchronously, with many KV blocks and with few, until so many texts have
been compared. Printed are how many differ, and how many there are of each kind of drafts and of requests.

Groups of requests with options drawn at random are answered by vLLM as it is, in a process of its own without anything
of this package, and then in another with drafts that are right, right with a chance of 0.7, wrong, late, or none, and
with those of a drafter of vLLM's own, of which each request has a cap. Equal are token ids, finish reasons and log
probabilities. vLLM draws the seeds of requests without one: it draws the same for each group.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Case = dict[str, Any]
"""One request: its prompt, and vLLM's sampling parameters."""

NUM_DRAFTED = 4
KINDS = ("right", "some", "wrong", "late", "none")
_RIGHT = {"right": 1.0, "some": 0.7, "wrong": 0.0, "late": 1.0}
OWN_CAPS = (0, 2, NUM_DRAFTED)
"""Of the drafts of vLLM's drafter: the first request's, the second's, the third's, the first's again."""
IMPOSSIBLE: Case = {
    "prompt": [9, 8, 7],
    "options": {"temperature": 1, "seed": 5, "max_tokens": 6, "min_tokens": 4}
    | {"allowed_token_ids": [9], "stop_token_ids": [9]},
}
"""Its first tokens have no finite logit: what is allowed is forbidden. Others of its step are as without it."""
RECORDED: Sequence[Case] = [
    {"prompt": [5, 6, 7, 8], "options": {"temperature": 0, "max_tokens": 6, "ignore_eos": True}},
    {
        "prompt": [6, 6, 7, 8],
        "options": {"temperature": 0.8, "top_p": 0.9, "seed": 1, "max_tokens": 6, "ignore_eos": True},
    },
    {
        "prompt": [7, 6, 7, 8],
        "options": {"temperature": 1, "seed": 2, "max_tokens": 6, "ignore_eos": True, "logprobs": 1},
    },
]
"""Of which all that is run is recorded."""
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999, "minimum": 0}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `small`: so few KV blocks that requests are preempted."""

    model: str
    groups: int = 4
    seed: int = 0
    dtype: str = "float32"
    asynchronous: bool = False
    small: bool = False
    grammars: bool = True
    most_requests: int = 16
    most_tokens: int = 30
    """Of one text. A large vocabulary takes seconds a token in Triton's interpreter."""
    kinds: Sequence[str] = KINDS
    speculative: Case = field(default_factory=lambda: {"method": "ngram_gpu"})
    """What vLLM is told of its drafter. With another method than this, the kind `own` has its drafts."""
    more: Case = field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    adapter: str = ""
    """Directory of a LoRA adapter, which every other request of a group uses."""


def cases(plan: Plan, vocab_size: int) -> list[list[Case]]:
    """Groups of requests that run at once; each group by its own numbers."""
    groups = [_group(plan, random.Random(f"{plan.seed} {number}"), vocab_size) for number in range(plan.groups)]
    return [[*group, IMPOSSIBLE] if number == 0 else group for number, group in enumerate(groups)]


def _group(plan: Plan, rng: random.Random, vocab_size: int) -> list[Case]:
    count = 6 if plan.small else rng.choice((1, 2, 4, 6, plan.most_requests))
    shared = [rng.randrange(3, 259) for _ in range(64)]
    group = [_request(plan, rng, vocab_size, shared) for _ in range(min(count, plan.most_requests))]
    # One that is preempted gets a new seed, and one that waits for a grammar gets its seed when it may.
    if not plan.small and not any("json" in one["options"] for one in group):
        for one in group:
            if rng.random() < 0.3:
                one["options"]["seed"] = None
    return group


def _request(plan: Plan, rng: random.Random, vocab_size: int, shared: list[int]) -> Case:
    some = lambda count: rng.sample(range(3, vocab_size), count)  # noqa: E731
    length = 44 - plan.most_tokens if plan.small else rng.choice((1, 3, 14, 33, 70))
    own = [rng.randrange(3, 259) for _ in range(length)]
    prompt = shared[: rng.choice((32, 33, 64))] if rng.random() < 0.25 and not plan.small else own
    options: dict[str, Any] = {
        "temperature": rng.choice((0, 0, 0.3, 0.8, 1, 1.5)),
        "seed": rng.choice((rng.randrange(1 << 31), -rng.randrange(1 << 62), 0)),
        "max_tokens": plan.most_tokens if plan.small else min(rng.choice((1, 2, 8, 20, 30)), plan.most_tokens),
        "ignore_eos": plan.small or rng.random() < 0.5,
    }
    searched: dict[str, Callable[[], Any]] = {
        "top_p": lambda: rng.choice((0.1, 0.5, 0.9, 0.99)),
        "top_k": lambda: rng.choice((1, 2, 5, 50)),
        "min_p": lambda: rng.choice((0.01, 0.1, 0.5)),
        "repetition_penalty": lambda: rng.choice((0.8, 1.2, 1.7)),
        "frequency_penalty": lambda: rng.choice((-0.5, 0.4, 1.5)),
        "presence_penalty": lambda: rng.choice((-0.5, 0.4, 1.5)),
        "logit_bias": lambda: {each: rng.choice((-100.0, -2.0, 3.0, 8.0)) for each in some(5)},
        "allowed_token_ids": lambda: some(rng.choice((1, 3, 40))),
        "bad_words_ids": lambda: [some(1), some(2), some(1)],
        "stop_token_ids": lambda: some(rng.choice((1, 20, 100))),
        "logprobs": lambda: rng.choice((0, 1, 3)),
        "prompt_logprobs": lambda: rng.choice((0, 2)),
    }
    for name, draw in searched.items():
        if rng.random() < 0.2:
            options[name] = draw()
    if plan.adapter:
        # Of a prompt under an adapter vLLM's kernels for CPUs cannot tell them.
        options.pop("prompt_logprobs", None)
    if options["temperature"] and rng.random() < 0.2:
        options["n"] = rng.choice((2, 3))
    if "stop_token_ids" in options and rng.random() < 0.5:
        options["min_tokens"] = min(7, options["max_tokens"])
    if plan.grammars and rng.random() < 0.15 and "allowed_token_ids" not in options:
        options["json"] = True
    return {"prompt": prompt, "options": options}


def forms(group: Sequence[Case]) -> Counter[str]:
    """Its texts by what is asked for."""
    found = Counter[str]()
    for options in (one["options"] for one in group):
        drawn = "unseeded" if options["seed"] is None else "seeded"
        names = ["greedy" if not options["temperature"] else drawn, f"{len(group)} at once"]
        count = options.get("n", 1)
        found.update(dict.fromkeys([*names, *(["under a grammar"] if "json" in options else [])], count))
    return found


def made(options: dict[str, Any]) -> Any:
    """vLLM's sampling parameters."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(options)
    grammar = StructuredOutputsParams(json=_SCHEMA) if given.pop("json", False) else None
    words, biases = given.pop("bad_words_ids", None), given.pop("logit_bias", None)
    biases = biases and {int(name): value for name, value in biases.items()}
    params = SamplingParams(detokenize=False, structured_outputs=grammar, logit_bias=biases, **given)
    if words:
        params._bad_words_token_ids = words
    return params


@contextlib.contextmanager
def engine(plan: Plan, *, drafts: bool) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    more: dict[str, Any] = {"async_scheduling": plan.asynchronous}
    if plan.adapter:
        more |= {"enable_lora": True, "max_lora_rank": 8}
    if drafts:
        more |= {
            "scheduler_cls": "outrider.vllm.scheduler.Scheduler",
            "worker_cls": "outrider.vllm.worker.Worker",
            "speculative_config": plan.speculative | {"num_speculative_tokens": NUM_DRAFTED},
        }
    more |= {
        "dtype": plan.dtype,
        "max_model_len": 160,
        "max_num_seqs": 4 if plan.small else 8,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "num_gpu_blocks_override": 7 if plan.small else 80,
        "kv_cache_memory_bytes": 100_000_000,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    llm = LLM(plan.model, **(more | plan.more))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answers(llm: Any, group: Sequence[Case], adapter: str = "") -> list[dict[str, Any]]:
    import numpy
    from vllm.lora.request import LoRARequest

    numpy.random.seed(len(group))
    prompts = [{"prompt_token_ids": one["prompt"]} for one in group]
    adapters = [LoRARequest("a", 1, adapter) if adapter and number % 2 else None for number in range(len(group))]
    done = llm.generate(prompts, [made(one["options"]) for one in group], lora_request=adapters, use_tqdm=False)
    found = []
    for one in done:
        rows = [*(one.prompt_logprobs or [])[1:], *(row for text in one.outputs for row in text.logprobs or ())]
        scores = [{str(token): value.logprob for token, value in row.items()} for row in rows]
        ids, why = [list(text.token_ids) for text in one.outputs], [text.finish_reason for text in one.outputs]
        found.append({"ids": ids, "why": why, "scores": scores})
    return found


@contextlib.contextmanager
def recording(llm: Any) -> Iterator[list[list[str]]]:
    """What the model's process runs meanwhile, by half of a step: each kernel of Triton, each operation of PyTorch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime import interpreter

    found: list[list[str]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Where a tensor is already, nothing is moved.
            if func is not torch.ops.aten.to.device:
                found[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[-1].append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = recorded
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    real = {name: getattr(runner, name) for name in ("execute_model", "sample_tokens")}

    def within(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append([name])
            with Recorder():
                return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(runner, name, within(name))
    try:
        yield found
    finally:
        interpreter.GridExecutor.__call__ = launch
        for name, method in real.items():
            setattr(runner, name, method)


class Drafts:
    """Fills a scheduler's book from known texts."""

    def __init__(self, scheduler: Any, vocab_size: int) -> None:
        self._scheduler, self._vocab_size = scheduler, vocab_size
        self._texts: dict[str, list[int]] = {}
        self._known: list[list[int]] = []
        self._kind = "none"
        self._rng = random.Random(0)
        self.num_drafted = self.num_accepted = 0
        self.miscounted: list[str] = []
        self.most = dict[int, int]()
        """Most drafted tokens in a step, by the cap of a request."""
        caps: dict[str, int] = {}
        scheduler.book.price_of = lambda cost: 0.0
        scheduler.before_step = self._fill
        add, follow = scheduler.add_request, scheduler._follow

        def add_request(request: Any) -> None:
            from outrider.sequence.speculation import Speculation
            from outrider.target.drafts.sequence import SequenceDrafts
            from outrider.vllm.drafts import beyond_a_step

            add(request)
            self._texts[request.request_id] = self._known.pop(0)
            own = OWN_CAPS[(len(self._texts) - 1) % len(OWN_CAPS)] if self._kind == "own" else 0
            caps[request.request_id] = own
            allowed = Speculation(2 * NUM_DRAFTED + 2, max_own_draft_tokens=own)
            drafts = SequenceDrafts(request.all_token_ids, allowed, beyond_a_step(allowed))
            scheduler.book.open(request.request_id, drafts)

        def followed(step: Any, output: Any, outputs: Any, ran: Any) -> None:
            follow(step, output, outputs, ran)
            for name, one in scheduler.verified.items():
                num_sampled = len(ran.sampled_token_ids[ran.req_id_to_index[name]])
                # Of a chain that had died nothing is counted, and of a text's end vLLM keeps no more than is committed.
                if one.draft.token_ids and name in scheduler.requests and one.num_accepted != num_sampled - 1:
                    self.miscounted.append(f"{name}: {num_sampled - 1} accepted, not {one.num_accepted}: {one}")
                self.most[caps[name]] = max(len(one.draft), self.most.get(caps[name], 0))
                self.num_drafted += len(one.draft)
                self.num_accepted += one.num_accepted
            for name in [name for name in self._texts if name not in scheduler.requests]:
                scheduler.book.close(name)

        scheduler.add_request, scheduler._follow = add_request, followed

    def begin(self, expected: Sequence[dict[str, Any]], kind: str) -> None:
        """The texts of the requests that come next, in their order."""
        self._kind, self._rng = kind, random.Random(kind)
        self._known = [ids for one in expected for ids in one["ids"]]
        self._texts.clear()
        self.most.clear()

    def _fill(self, until_s: float) -> None:
        from outrider.tree import DraftTree

        if self._kind in ("none", "own"):
            return
        for request in self._scheduler.running:
            name, at, text = request.request_id, request.num_tokens, self._texts[request.request_id]
            done, count = request.num_output_tokens, self._rng.choice((0, 1, 2, 4, 7, 10, 10))
            if self._kind == "late":
                # What is committed already is cut off when it arrives.
                at, done = at - min(done, 2), done - min(done, 2)
            ids = [
                one if self._rng.random() < _RIGHT[self._kind] else (one + 1) % self._vocab_size
                for one in text[done : done + count]
            ]
            if ids:
                self._scheduler.book.find(name).offer(DraftTree(at, tuple(ids), source="test"))


def differences(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> str:
    """Empty when they are equal."""
    if (one["ids"], one["why"]) != (other["ids"], other["why"]):
        return f"{one['ids']} {one['why']} != {other['ids']} {other['why']}"
    for row, same in zip(one["scores"], other["scores"], strict=True):
        if set(row) != set(same) or any(abs(row[name] - same[name]) > tolerance for name in row):
            return f"log probabilities {row} != {same}"
    return ""


def _run(plan: Plan, path: Path, *, drafts: bool) -> None:
    """In a process of its own: writes what vLLM says alone, or compares."""
    with engine(plan, drafts=drafts) as llm:
        vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        groups = cases(plan, vocab_size)
        if not drafts:
            texts = [answers(llm, group, plan.adapter) for group in groups]
            with recording(llm) as ran:
                answers(llm, RECORDED)
            path.write_text(json.dumps([texts, ran]))
            assert not [name for name in sys.modules if name.partition(".")[0] == "outrider"]
            return
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        source, found = Drafts(scheduler, vocab_size), []
        texts_alone, ran_alone = json.loads(path.read_text())
        for group, expected in zip(groups, texts_alone, strict=True):
            for kind in plan.kinds:
                scheduler.reset_prefix_cache()
                source.begin(expected, kind)
                before = source.num_drafted, source.num_accepted
                texts = answers(llm, group, plan.adapter)
                pairs, count = zip(texts, expected, strict=True), sum(len(one["ids"]) for one in texts)
                wrong = [said for one, other in pairs if (said := differences(one, other, 1e-3))]
                drafted, accepted = source.num_drafted - before[0], source.num_accepted - before[1]
                found.append([kind, count, wrong, drafted, accepted, source.most])
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        source.begin([{"ids": [[]]}] * len(RECORDED), "none")
        with recording(llm) as ran:
            answers(llm, RECORDED)
        ours, alone = ({tuple(half) for half in halves} for halves in (ran, ran_alone))
        result = {"found": found, "faults": scheduler.num_faults, "preemptions": scheduler.num_preemptions}
        result |= {"ran": sum(map(len, alone)), "differs": [sorted(ours - alone), sorted(alone - ours)]}
        result["miscounted"] = source.miscounted
        result["forms"] = sum(map(forms, groups), Counter[str]())
        path.write_text(json.dumps(result))


def compare(plan: Plan) -> dict[str, Any]:
    """What the second process has found: by group and kind the texts that differ, tokens drafted and accepted."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "texts.json"
        for drafts in (False, True):
            given = json.dumps({name: getattr(plan, name) for name in Plan.__dataclass_fields__} | {"drafts": drafts})
            command = [sys.executable, "-m", "tests.vllm.second_runner", "--run", given, str(path)]
            plugins = {} if drafts else {"VLLM_PLUGINS": ""}
            subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | plugins)
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def main() -> None:
    if sys.argv[1] == "--run":
        given = json.loads(sys.argv[2])
        drafts = given.pop("drafts")
        _run(Plan(**given), Path(sys.argv[3]), drafts=drafts)
        return
    from tests.vllm.models import checkpoint

    plan, wanted = Plan(**json.loads(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        plan = replace(plan, model=str(checkpoint(plan.model, Path(directory))))
        for number in itertools.count():
            varied = {"seed": plan.seed + number, "asynchronous": number % 2 == 1, "small": number % 4 == 3}
            _count(replace(plan, **varied) if wanted else plan, total)
            if total["texts"] >= wanted:
                return


def _count(plan: Plan, total: Counter[str]) -> None:
    result = compare(plan)
    wrong = [one for _, _, said, *_ in result["found"] for one in said]
    total["differ"] += len(wrong)
    for kind, count, _, drafted, accepted, _ in result["found"]:
        total.update({"texts": count, kind: count, "drafted": drafted, "accepted": accepted})
    total.update({name: count * len(plan.kinds) for name, count in result["forms"].items()})
    total.update({name: result[name] for name in ("faults", "preemptions")})
    total["miscounted"] += len(result["miscounted"])
    total["half steps that differ without drafts"] += sum(map(len, result["differs"]))
    print(*wrong[:5], *result["miscounted"], dict(total), sep="\n", flush=True)


if __name__ == "__main__":
    main()
