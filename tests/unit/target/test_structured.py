"""Structured output on a real model: every answer follows its grammar, with drafts, without, and when taken over."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from outrider.errors import InternalError, InvalidRequest
from outrider.gateway.tools.structured import Structured
from outrider.options.sampling import DraftDistribution
from outrider.runtime.bounded import BoundedProcess, OutOfBounds
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import Grammar, LogitsOptions, MaskLate, VerificationMode
from outrider.target.config import TargetConfig
from outrider.target.grammars.grammar import GrammarCompiler
from outrider.target.grammars.matcher import GrammarMatcher, ThreadedMatcher, WaitAllowance
from outrider.target.process import load
from outrider.target.requests.events import Compiled, GrammarWork, Offered
from outrider.testing.tiny import tiny_tokenizer
from outrider.tree import DraftTree

from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Liar, key, opening, prompts

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

EOS = 2
VOCAB = 384
TOKENIZER = tiny_tokenizer(VOCAB)
PROMPTS = prompts(8, longest=20)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'root ::= item (", " item){1,3}\nitem ::= [a-z]{2} [0-9]'


@pytest.fixture(scope="module")
def compiler(tiny: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny, VOCAB, [EOS])


def asking(
    compiler: GrammarCompiler,
    structured: Structured,
    sampled: bool,
    committed: Sequence[Sequence[int]] = (),
    **more: Any,
) -> list[tuple[SequenceSpec, Grammar]]:
    grammar = structured.to_grammar()
    found = []
    for number, prompt in enumerate(PROMPTS):
        params = replace(SAMPLED, seed=number) if sampled else GREEDY
        plain = opening(prompt, params=params, stops=[EOS], max_new_tokens=480, **more)
        said = tuple(committed[number]) if committed else ()
        compiled = compiler.compile(grammar, said)
        found.append((replace(plain, committed=said, logits=LogitsOptions(grammar=grammar)), compiled))
    return found


def run(tiny: Path, openings: list[tuple[SequenceSpec, Grammar]], drafter: object = None) -> Bench:
    bench = Bench(tiny, num_blocks=1024)
    for number, (each, grammar) in enumerate(openings):
        bench.open(number, each, grammar)
    bench.run(drafter) if drafter else bench.run()  # type: ignore[arg-type]
    assert not any(answer.errors for answer in bench.answers.values())
    return bench


def text_of(bench: Bench, number: int) -> str:
    answer = bench.answers[key(number)]
    assert answer.finish is Finish.STOP
    return str(TOKENIZER.decode(bench.tokens[key(number)][len(PROMPTS[number]) : -1]))


def check(kind: str, text: str) -> None:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "choice":
        assert text in ("yes", "no", "perhaps")
    elif kind == "regex":
        assert re.fullmatch(r"[a-f]{3}-[0-9]{2,4}", text)
    else:
        assert re.fullmatch(r"[a-z]{2}\d(, [a-z]{2}\d){1,3}", text)


ASKED = [
    Structured("json_schema", SCHEMA, "x"),
    Structured("choice", ["yes", "no", "perhaps"], "x"),
    Structured("regex", r"[a-f]{3}-[0-9]{2,4}", "x"),
    Structured("grammar", LIST, "x"),
]


@pytest.mark.parametrize("sampled", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.kind)
def test_texts_follow_and_are_equal_with_drafts_and_when_taken_over(
    tiny: Path, compiler: GrammarCompiler, asked: Structured, sampled: bool
) -> None:
    plain = run(tiny, asking(compiler, asked, sampled, speculation=Speculation()))
    texts = {number: plain.tokens[key(number)] for number in range(len(PROMPTS))}
    for number in texts:
        check(asked.kind, text_of(plain, number))
    for how in ("right", "random", "beside"):
        drafted = run(tiny, asking(compiler, asked, sampled), Liar(texts, how))
        assert {number: drafted.tokens[key(number)] for number in texts} == texts
    begun = [texts[number][len(prompt) :][:2] for number, prompt in enumerate(PROMPTS)]
    taken_over = run(tiny, asking(compiler, asked, sampled, begun), Liar(texts, "right"))
    assert {number: taken_over.tokens[key(number)] for number in texts} == texts


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.kind)
def test_in_ratio_mode_too_every_answer_follows(tiny: Path, compiler: GrammarCompiler, asked: Structured) -> None:
    bench = run(tiny, asking(compiler, asked, True, mode=VerificationMode.RATIO, speculation=Speculation()))
    for number in range(len(PROMPTS)):
        check(asked.kind, text_of(bench, number))


def test_drafts_that_break_the_grammar_cost_no_row(tiny: Path, compiler: GrammarCompiler) -> None:
    [(asked, grammar)] = asking(compiler, ASKED[1], False)[:1]
    bench = Bench(tiny)
    bench.open(0, asked, grammar)
    ids = TOKENIZER.encode("noise")
    bench.offer(0, len(asked.prompt), ids)
    sequence = bench.worker._sequences.get(key(0))
    assert sequence.drafts.buffer.merged().guess() == TOKENIZER.encode("no"), "the rest can never be accepted"
    assert sequence.drafts.buffer.num_dropped == len("ise")


def test_a_draft_that_breaks_the_grammar_at_once_has_answered(tiny: Path, compiler: GrammarCompiler) -> None:
    """Or each step would wait as long as a step may wait."""
    [(asked, grammar)] = asking(compiler, ASKED[1], False, speculation=Speculation(4, max_wait_us=10_000_000))[:1]
    bench = Bench(tiny)
    bench.open(0, asked, grammar)
    bench.offer(0, len(asked.prompt), [])
    bench.step()
    said_len = len(bench.tokens[key(0)])
    assert said_len > len(asked.prompt)
    assert bench.step() == pytest.approx(bench.now_s + 10), "it waits for the next draft"
    bench.offer(0, said_len, TOKENIZER.encode("~"))
    bench.step()
    assert len(bench.tokens[key(0)]) > said_len


def test_in_ratio_mode_the_first_impossible_draft_is_judged(tiny: Path, compiler: GrammarCompiler) -> None:
    """Whether it is judged must not depend on what was drawn: what is said in its place would follow another law."""
    [(asked, grammar)] = asking(compiler, ASKED[1], True, mode=VerificationMode.RATIO)[:1]
    sequence_of = Bench(tiny)
    sequence_of.open(0, asked, grammar)
    sequence = sequence_of.worker._sequences.get(key(0))
    ids = TOKENIZER.encode("noise")
    q = tuple(DraftDistribution((token,), (65536,)) for token in ids)
    sequence.drafts.offer(DraftTree(len(asked.prompt), tuple(ids), q=q))
    [kept] = sequence.drafts.buffer.trees
    assert kept.guess() == TOKENIZER.encode("noi")


def test_each_branch_is_kept_as_far_as_the_grammar_lets_it_through(tiny: Path, compiler: GrammarCompiler) -> None:
    [(asked, grammar)] = asking(compiler, ASKED[1], False)[:1]
    bench = Bench(tiny)
    bench.open(0, asked, grammar)
    n, o, i, y, e, s = TOKENIZER.encode("noiyes")
    tree = DraftTree(len(asked.prompt), (n, o, i, y, i, e, s), (-1, 0, 1, -1, 3, 3, 5))
    bench.apply(Offered(key(0), tree))
    sequence = bench.worker._sequences.get(key(0))
    assert sequence.drafts.buffer.merged().token_ids == (n, o, y, e, s)


class Exhausted(Grammar):
    """Allows everything, and has no mask once so many tokens follow the prompt."""

    def __init__(self, at: int) -> None:
        self._left = at

    def advance(self, token_ids: Sequence[int]) -> None:
        self._left -= len(token_ids)

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        if len(prefix) >= self._left:
            raise InvalidRequest("logits.grammar", "is too complex")
        return None

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)


@pytest.mark.parametrize("mode", [VerificationMode.GREEDY, VerificationMode.COUPLED])
@pytest.mark.parametrize("how", ["none", "right", "random", "beside"])
def test_a_grammar_that_is_exhausted_ends_its_sequence_at_the_same_token_and_no_row_is_run_again(
    tiny: Path, mode: VerificationMode, how: str
) -> None:
    params = GREEDY if mode is VerificationMode.GREEDY else SAMPLED
    asked = [opening(prompt, params=params, max_new_tokens=20) for prompt in PROMPTS[:3]]
    texts = Bench(tiny).answer(asked)
    bench = Bench(tiny)
    bench.open(1, replace(asked[1], logits=LogitsOptions(grammar="x")), Exhausted(7))
    for number in (0, 2):
        bench.open(number, asked[number])
    retracted: list[object] = []
    bench.engine.kv.retract = lambda *args: retracted.append(args)  # type: ignore[method-assign]
    bench.run(Liar(texts, how)) if how != "none" else bench.run()
    assert [type(error) for error in bench.answers[key(1)].errors] == [InvalidRequest]
    assert bench.answers[key(1)].text == texts[1][len(PROMPTS[1]) :][:7]
    assert all(bench.tokens[key(number)] == texts[number] for number in (0, 2))
    assert not retracted, "the step was run once"


class Nothing(Grammar):
    """Allows no token."""

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        return bytes(VOCAB // 8)


def test_a_place_without_any_token_ends_its_answer_alone_by_name(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], max_new_tokens=5))
    logits = LogitsOptions(grammar="x")
    bench.open(1, replace(opening(PROMPTS[1], max_new_tokens=5), logits=logits), Nothing())
    bench.run()
    [error] = bench.answers[key(1)].errors
    assert isinstance(error, InvalidRequest) and error.field == "logits.grammar"
    assert not bench.answers[key(0)].errors


def test_a_grammar_whose_first_mask_costs_too_much_is_refused_as_it_is_compiled(tiny: Path) -> None:
    grammar = "\n".join(["start: A | B", "A: /(.*a){2}b/", "B: /(.*a){3}b/"])
    GrammarCompiler(tiny, VOCAB, [EOS]).compile(grammar, ())
    with pytest.raises(InvalidRequest, match="too complex"):
        GrammarCompiler(tiny, VOCAB, [EOS], step_fuel=100).compile(grammar, ())


def test_what_was_said_elsewhere_has_to_follow_the_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile(ASKED[1].to_grammar(), TOKENIZER.encode("x"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"type": 5}),
        ("json_schema", {"$ref": "http://elsewhere/schema"}),
        ("json_schema", "text"),
        ("regex", "a(b"),
        ("grammar", "root ::= ("),
        ("choice", []),
        ("choice", ["a", 1]),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Structured(kind, value, "its.name").to_grammar()
    assert refused.value.field == "its.name"


def test_a_sequence_whose_grammar_is_compiled_holds_up_nobody_and_then_says_the_same(
    tiny: Path, compiler: GrammarCompiler
) -> None:
    at_once, later = asking(compiler, ASKED[0], False)[:2]
    expected = run(tiny, [at_once]).tokens[key(0)]
    bench = Bench(tiny, num_blocks=1024)
    bench.open(0, at_once[0])
    bench.open(1, opening(later[0].prompt, max_new_tokens=5))
    while not bench.answers.get(key(1)) or bench.answers[key(1)].finish is Finish.NONE:
        bench.step()
    assert key(0) not in bench.answers
    assert bench.step() is None, "nothing is run before it is there"
    bench.apply(Compiled(key(0), compiler.compile(ASKED[0].to_grammar(), ())))
    bench.run()
    assert bench.tokens[key(0)] == expected


def test_a_grammar_is_compiled_once_however_often_it_is_asked_for(tiny: Path) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, [EOS])
    grammars = [Structured("choice", [f"number {i}"], "x").to_grammar() for i in range(66)]
    first = compiler.compile(grammars[0], TOKENIZER.encode("num"))
    assert compiler.compile(grammars[0], ()).num_allowed(TOKENIZER.encode("number 0")) == 8
    assert first.num_allowed(TOKENIZER.encode("number 0")) == 0, "it goes on after its own text"
    assert len(compiler._cached) == 1
    for grammar in grammars:
        compiler.compile(grammar, ())
    assert len(compiler._cached) == 64


def intersection(count: int) -> str:
    """The library checks it at exponential cost: neither fuel nor a time-out ends its thread."""
    return "start: T\nT: " + " & ".join(f"/(.|\\n)*a.{{{i}}}/" for i in range(count))


def hidden(schema: object) -> str:
    """A grammar of the schema, in which no keyword is spelled as it is read."""
    spelled = re.sub(
        r'"(pattern|format|allOf)"', lambda name: f'"\\u{ord(name[1][0]):04x}{name[1][1:]}"', json.dumps(schema)
    )
    return f'{{"grammars": [{{"json_schema": {spelled}}}]}}'


TOO_LARGE = {
    "an intersection": intersection(40),
    "patterns of one text": hidden({"allOf": [{"type": "string", "pattern": f"(.|\n)*a.{{{i}}}"} for i in range(40)]}),
    "multiples": hidden({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}),
    "repetitions": r"start: /((a{1,100}){1,100}){1,100}/",
    "rules that repeat": 'start: x{0,50}\nx: y{0,50}\ny: "a"{0,50}',
}


def test_grammars_of_an_erased_tenant_are_forgotten_and_those_of_others_are_not(tiny: Path) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, (2,))
    for tenant in "ab":
        compiler.compile(Structured("regex", "a+b", "x").to_grammar(), (), tenant)
    compiler.forget("a")
    assert [tenant for tenant, _ in compiler._cached] == ["b"] and not compiler._tried


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "multiples" else pytest.mark.slow) for kind in TOO_LARGE]
)
async def test_what_would_be_compiled_for_hours_leaves_its_thread_and_is_on_the_bill(tiny: Path, kind: str) -> None:
    compiler, worked = GrammarCompiler(tiny, VOCAB, [EOS], max_s=0.5), list[float]()
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequest, match="is too complex"):
        await compiler.compile_on_thread(TOO_LARGE[kind], (), "hostile", worked.append)
    assert sum(worked) > 0
    assert psutil.Process().memory_info().rss - before < 32 << 20, "this process never compiled it"
    # The tenant has one thread, which is free again; an intersection that is small is compiled.
    async with asyncio.timeout(60):
        found = await compiler.compile_on_thread("start: T\nT: /[a-z]*/ & /.*b/", (), "hostile")
    assert found.num_allowed(TOKENIZER.encode("ab")) == 2


class Failing(Grammar):
    """Has no mask."""

    def __init__(self, inner: Grammar) -> None:
        self._inner = inner

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        raise InvalidRequest("logits.grammar", "is too complex")


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.01)


async def eventually_nothing_is_held(compiler: GrammarCompiler) -> None:
    """Threads drop their last references a little later."""
    await eventually(lambda: not any(each.users for each in compiler._cached.values()))
    compiler._cached.clear()
    await eventually(lambda: not compiler.memory.num_bytes)


async def _followed_to_a_fault(compiler: GrammarCompiler, grammar: str, text: str) -> None:
    matcher = await compiler.compile_on_thread(grammar, (), "a")
    with pytest.raises(InvalidRequest):
        for token in TOKENIZER.encode(text):
            while True:
                try:
                    matcher.allowed(())
                    break
                except MaskLate:
                    await asyncio.sleep(0.001)
            matcher.advance([token])
        await asyncio.sleep(0.05)
        matcher.allowed(())


@pytest.mark.parametrize("how", ["refused", "broken at its opening", "broken", "at a limit", "abandoned", "run"])
async def test_memory_is_free_when_the_last_holder_ends_without_the_collector(tiny: Path, how: str) -> None:
    """One that ends by an error holds nothing either: a tenant's share would be full with nothing running."""
    compiler, choice = GrammarCompiler(tiny, VOCAB, [EOS]), ASKED[1].to_grammar()
    with collector_off():
        match how:
            case "refused":
                with pytest.raises(InvalidRequest):
                    await compiler.compile_on_thread(TOO_LARGE["repetitions"], (), "a")
            case "broken at its opening":
                with pytest.raises(InvalidRequest):
                    await compiler.compile_on_thread(choice, TOKENIZER.encode("x"), "a")
            case "broken":
                await _followed_to_a_fault(compiler, choice, "zz")
            case "at a limit":
                await _followed_to_a_fault(compiler, DEEP[0], "b" * 80 + "a" * 100)
            case "abandoned":
                compiling = asyncio.ensure_future(compiler.compile_on_thread(choice, (), "a"))
                await asyncio.sleep(0.001)
                compiling.cancel()
                await asyncio.wait([compiling])
                del compiling
            case _:
                opened, (failing, grammar) = asking(compiler, ASKED[1], False)[:2]
                bench = Bench(tiny)
                bench.open(0, *opened)
                bench.open(1, failing, Failing(grammar))
                bench.run()
                assert bench.answers[key(1)].errors
                del opened, failing, grammar, bench
        await eventually_nothing_is_held(compiler)


async def test_free_memory_goes_back_to_the_system(tiny: Path) -> None:
    """Each thread's would be kept for that thread."""
    compiler, process = GrammarCompiler(tiny, VOCAB, [EOS], most_bytes=64 << 20), psutil.Process()
    await compiler.compile_on_thread(ASKED[1].to_grammar(), (), "a")
    before = process.memory_info().rss
    for number in range(12):
        grammar = Structured("regex", rf"(.{{0,{120 + number}}}a){{2}}b", "x").to_grammar()
        matcher = await compiler.compile_on_thread(grammar, (), "a")
        matcher.advance(TOKENIZER.encode("ab" * 40))
    del matcher
    await eventually_nothing_is_held(compiler)
    await eventually(lambda: process.memory_info().rss - before < 8 << 20)


def test_what_is_refused_is_refused_again_without_another_trial(tiny: Path) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, [EOS])
    with pytest.raises(InvalidRequest) as first:
        compiler.compile(TOO_LARGE["repetitions"], ())
    compiler._trials.process.close()
    with pytest.raises(InvalidRequest) as second:
        compiler.compile(TOO_LARGE["repetitions"], ())
    assert str(first.value) == str(second.value)
    assert compiler._trials.process._child is None, "no other process was started"


def test_an_expression_that_takes_all_memory_takes_it_from_no_target(tiny: Path) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, [EOS], most_bytes=4 << 20)
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        compiler.compile(intersection(16), ())
    assert compiler.compile("start: T\nT: /[a-z]*/ & /.*b/", ()).num_allowed(TOKENIZER.encode("ab")) == 2


# Cheap at first, and beyond every limit after more tokens than a trial looks at.
DEEP = [
    r"start: /b{80}((a{0,50}){0,50}){0,50}/",
    r"start: /b{80}(((a?){30}){30}){30}/",
    'start: "b"{80} x{0,50}\nx: y{0,50}\ny: "a"{0,50}',
]


def text_of_its_own(compiler: GrammarCompiler, grammar: str, length: int) -> list[int]:
    """Drawn from the grammar by chance."""
    matcher, chance, text = compiler.compile(grammar, (), "another"), random.Random(0), list[int]()
    for _ in range(length):
        mask = matcher.allowed(())
        assert mask is not None
        ids = [token for token in range(3, VOCAB) if mask[token // 8] >> token % 8 & 1]
        if not ids:
            break
        text.append(chance.choice(ids))
        matcher.advance(text[-1:])
    return text


def verdict_on(
    compiler: GrammarCompiler, grammar: str, text: list[int], tenant: str, num_drafted: int = 0, begun: int = 0
) -> tuple[int, str]:
    """How many tokens are committed, and what the error says. Of each draft one branch is right and one goes wrong in
    the middle."""
    done, chance = begun, random.Random(num_drafted)
    try:
        matcher = compiler.compile(grammar, text[:begun], tenant)
        while done < len(text):
            assert matcher.allowed(()) is not None
            draft = text[done : done + num_drafted]
            other = [*draft[: len(draft) // 2], *(chance.randrange(3, VOCAB) for _ in draft)]
            for branch in (other, draft):
                num_rows = matcher.num_allowed(branch)
                for length in range(num_rows):
                    assert matcher.allowed(branch[:length]) is not None
            matcher.advance(text[done : done + max(1, num_rows)])
            done += max(1, num_rows)
    except InvalidRequest as error:
        return done, str(error)
    return done, ""


TAGS = """start: TEXT | call
call: "<f>" args "</f>"
args: %json {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(.{0,9}a){2}$"}}}
TEXT: /(.|\\n)*/ & ~/(.|\\n)*<f>(.|\\n)*/"""
LIKE = {
    "json_object": Structured("json_schema", {"type": "object"}, "x").to_grammar(),
    "schema": Structured("json_schema", SCHEMA, "x").to_grammar(),
    "regex": Structured("regex", r"((.{0,60}a){2}b|[^a]{3}){1,30}", "x").to_grammar(),
    "lark": 'start: e\ne: e e | "a" e | "(" e ")" | "b"',
    "tags": TAGS,
}


@pytest.mark.parametrize("kind", [*LIKE, 0, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 2))])
def test_the_verdict_is_one_with_drafts_and_without_for_other_tenants_and_when_taken_over(
    tiny: Path, kind: str | int
) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, [EOS])
    if isinstance(kind, str):
        grammar = LIKE[kind]
        text = text_of_its_own(compiler, grammar, 60)
    else:
        grammar, text = DEEP[kind], TOKENIZER.encode("b" * 80 + "a" * 100)
    expected = verdict_on(compiler, grammar, text, "a")
    assert bool(expected[1]) == isinstance(kind, int)
    for num_drafted in (3, 8):
        assert verdict_on(compiler, grammar, text, "a", num_drafted) == expected
    for tenant in ("a", "b"):
        assert verdict_on(compiler, grammar, text, tenant) == expected
    for begun in (len(text) // 4, expected[0]):
        assert verdict_on(compiler, grammar, text, "b", 3, begun) == expected


async def test_a_verdict_on_time_is_its_tenants_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work may take less time for another."""
    compiler, asked = GrammarCompiler(tiny, VOCAB, [EOS]), list[bytes]()

    def slow(process: BoundedProcess, question: bytes) -> bytes:
        asked.append(question)
        raise OutOfBounds("it takes more than 4 s of processor time")

    with monkeypatch.context() as patch:
        patch.setattr(BoundedProcess, "ask", slow)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="too much time"):
                compiler.compile("start: /a/", (), "a")
    assert len(asked) == 1
    assert compiler.compile("start: /a/", (), "b").num_allowed(TOKENIZER.encode("a")) == 1


def test_a_text_that_reaches_a_limit_takes_no_mask_from_others_of_the_same_grammar(tiny: Path) -> None:
    """The library's copies share a lexer, which fails as a whole."""
    compiler = GrammarCompiler(tiny, VOCAB, [EOS])
    other, spent = (compiler.compile(DEEP[0], (), tenant) for tenant in ("other", "hostile"))
    expected = other.allowed(TOKENIZER.encode("bbb"))
    with pytest.raises(InvalidRequest, match="too complex"):
        for token in TOKENIZER.encode("b" * 80 + "a" * 300):
            spent.allowed(())
            spent.advance([token])
    other.advance(TOKENIZER.encode("bbb"))
    assert other.allowed(()) == expected
    assert compiler.compile(DEEP[0], TOKENIZER.encode("bbb")).allowed(()) == expected


def test_the_plan_of_the_memory_has_room_for_the_processes_that_try_grammars(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, most_bytes = GrammarCompiler(tiny, VOCAB, [EOS]), 64 << 20
    compiler.compile("start: /a/", ())
    child = compiler._trials.process._child
    peak_bytes = psutil.Process(child.pid).memory_full_info().uss
    planned: list[int] = []

    class Planned(Exception): ...

    def load_engine(path: Path, config: object, host_bytes: int) -> None:
        planned.append(host_bytes)
        raise Planned

    monkeypatch.setattr("outrider.target.process.load_engine", load_engine)
    with pytest.raises(Planned):
        load(TargetConfig(model=str(tiny), listen="127.0.0.1:0", grammar_bytes=most_bytes))
    # Two threads compile, each with one; and either grammar may be as large as a tenant's may.
    assert planned[0] >= 2 * most_bytes + 2 * peak_bytes


async def test_grammars_are_tried_and_compiled_on_the_cores_for_them(tiny: Path) -> None:
    core, found = max(os.sched_getaffinity(0)), list[set[int]]()

    class Told(GrammarCompiler):
        def compile(self, grammar: str, committed: Sequence[int]) -> Any:
            made = super().compile(grammar, committed)
            found.extend(map(os.sched_getaffinity, (0, self._trials.process._child.pid)))
            return made

    await Told(tiny, VOCAB, [EOS], compile_cores=[core]).compile_on_thread("start: /a/", ())
    assert found == [{core}, {core}]


async def test_waiting_for_a_thread_does_not_count_against_the_limit(tiny: Path) -> None:
    class Slow(GrammarCompiler):
        def compile(self, grammar: str, committed: Sequence[int]) -> Any:
            begun.append(grammar)
            time.sleep(0.25)
            return super().compile(grammar, committed)

    begun: list[str] = []
    compiler = Slow(tiny, VOCAB, [EOS], max_s=1.0)
    grammars = [Structured("choice", [f"number {i}"], "x").to_grammar() for i in range(6)]
    assert len(await asyncio.gather(*(compiler.compile_on_thread(each, ()) for each in grammars))) == 6


async def test_tenants_take_turns_with_the_compilers(tiny: Path) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, [EOS])
    released, order = threading.Event(), list[str]()
    turns = compiler._compile_turns
    held = [turns.submit("many", lambda: released.wait(60)) for _ in range(5)]
    choice = ASKED[1].to_grammar()
    async with asyncio.timeout(60):
        await compiler.compile_on_thread(choice, (), "other", lambda seconds: order.append("other"))
    assert order == ["other"] and not any(each.done() for each in held), "one tenant cannot take every thread"
    released.set()


def test_masks_that_come_late_end_no_answer(tiny: Path) -> None:
    """However slow the machine is: what bounds them is work."""

    class Slow:
        """A matcher of the library, each mask of which takes a minute of processor time."""

        def compute_bitmask(self) -> bytes:
            nonlocal now_s
            now_s += 60.0
            return b"\xff" * 48

        def is_error(self) -> bool:
            return False

        def consume_token(self, token_id: int) -> bool:
            return True

    class Free:
        lock = threading.Lock()

        def measured(self, matcher: object, mask_bytes: int) -> None: ...

    now_s, slow = 0.0, Slow()
    matcher = GrammarMatcher(slow, [EOS], Free())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "thread_time", lambda: now_s)
        for _ in range(1000):
            assert matcher.allowed(()) is not None
            matcher.advance([5])


async def test_one_tenants_masks_leave_a_thread_to_the_others(compiler: GrammarCompiler) -> None:
    released, turns = threading.Event(), compiler._mask_turns
    try:
        hostile = [turns.submit("hostile", released.wait) for _ in range(8)]
        assert await asyncio.wait_for(asyncio.wrap_future(turns.submit("other", lambda: "a mask")), 60) == "a mask"
        assert not any(one.done() for one in hostile)
    finally:
        released.set()


class Threaded:
    """Masks on threads, which work as the test says."""

    def __init__(self, compiler: GrammarCompiler, grammar: str) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.seconds: list[float] = []
        inner = compiler.compile(grammar, ())
        self.matcher = ThreadedMatcher(inner, self.jobs.append, WaitAllowance(), self.seconds.append)

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
def test_masks_of_other_threads_are_the_same_and_hold_up_nobody_while_they_are_not_there(
    tiny: Path, compiler: GrammarCompiler, sampled: bool
) -> None:
    plain = run(tiny, asking(compiler, ASKED[0], sampled))
    (asked, _), beside = asking(compiler, ASKED[0], sampled)[:2]
    threaded = Threaded(compiler, ASKED[0].to_grammar())
    bench = Bench(tiny, num_blocks=1024)
    bench.open(0, asked, threaded.matcher)
    bench.open(1, *beside)
    # No thread works: the other one's text is complete all the same.
    while key(1) not in bench.answers or bench.answers[key(1)].finish is Finish.NONE:
        bench.step()
    assert bench.tokens[key(1)] == plain.tokens[key(1)]
    assert bench.tokens[key(0)] == list(asked.prompt) and not bench.answers.get(key(0))
    drafter = Liar({0: plain.tokens[key(0)]}, "right")
    while key(0) not in bench.answers or bench.answers[key(0)].finish is Finish.NONE:
        for draft in drafter(0, bench.tokens[key(0)]):
            bench.apply(Offered(key(0), draft))
        threaded.work()
        while threaded.seconds:
            bench.apply(GrammarWork(key(0), threaded.seconds.pop()))
        bench.step()
    assert bench.tokens[key(0)] == plain.tokens[key(0)]
    [times] = [times for report in bench.reports for removed, times in report.removed if removed == key(0)]
    assert times.share_s > 0, "the threads' time is on the bill"


def test_an_answer_that_is_out_of_date_is_no_mask(compiler: GrammarCompiler) -> None:
    threaded = Threaded(compiler, ASKED[1].to_grammar())
    threaded.matcher.advance(TOKENIZER.encode("y"))
    # It was asked for before the commit.
    threaded.jobs.pop(0)()
    with pytest.raises(MaskLate):
        threaded.matcher.allowed(())
    assert threaded.matcher.awaited
    threaded.work()
    assert not threaded.matcher.awaited
    mask = threaded.matcher.allowed(())
    assert mask is not None and [t for t in range(VOCAB) if mask[t // 8] >> t % 8 & 1] == TOKENIZER.encode("e")


class Panic(BaseException):
    """As what panics in Rust is raised."""


@pytest.mark.parametrize("raised", [ValueError("no number"), Panic("no number")], ids=["exception", "panic"])
def test_what_goes_wrong_on_a_thread_ends_the_answer_and_lets_no_step_wait_for_ever(
    compiler: GrammarCompiler, raised: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise raised

    threaded = Threaded(compiler, ASKED[1].to_grammar())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMatcher, "num_allowed", fail)
        threaded.work()
    with pytest.raises(InternalError, match="masks of its grammar failed"):
        threaded.matcher.allowed(())


def test_steps_wait_for_masks_no_longer_than_their_allowance() -> None:
    now_s, changed = [0.0], threading.Condition()
    allowance = WaitAllowance(share=0.1, most_s=0.001, clock=lambda: now_s[0])
    with changed:
        now_s[0] += 1
        assert allowance.wait(changed, lambda: True)
        before = time.monotonic()
        for _ in range(100):
            now_s[0] += 0.0001
            assert not allowance.wait(changed, lambda: False)
        assert time.monotonic() - before < 30


def test_thousands_of_texts_are_followed(compiler: GrammarCompiler) -> None:
    value = [f"choice number {i}" for i in range(2001)]
    matcher = compiler.compile(Structured("choice", value, "x").to_grammar(), TOKENIZER.encode("choice number 20"))
    assert matcher.num_allowed(TOKENIZER.encode("00")) == 2


def test_thousands_of_optional_properties_are_too_complex_and_are_told_so(compiler: GrammarCompiler) -> None:
    fields = {f"p{i}": {"type": "string"} for i in range(2000)}
    grammar = Structured("json_schema", {"type": "object", "properties": fields}, "x").to_grammar()
    with pytest.raises(InvalidRequest, match="too complex"):
        compiler.compile(grammar, TOKENIZER.encode('{"'))


@pytest.mark.slow
def test_a_chain_of_rules_ends_no_process(tiny: Path) -> None:
    """The library follows it by recursion, so threads that compile have room for it."""

    def chain(count: int) -> str:
        return "\n".join(["start: a0", *(f'a{i}: a{i + 1} | "x"' for i in range(count)), f'a{count}: "y"'])

    compiler = GrammarCompiler(tiny, VOCAB, [EOS], max_s=60.0)
    assert asyncio.run(compiler.compile_on_thread(chain(900), ()))
    # After its first token there are too many places. The process that said so had followed it.
    with pytest.raises(InvalidRequest, match="a limit of the library"):
        asyncio.run(compiler.compile_on_thread(chain(3000), ()))


@pytest.mark.slow
def test_hostile_grammars_stay_within_their_memory_and_leave_the_others_theirs(tiny: Path) -> None:
    bound = 64 << 20
    command = [sys.executable, "-m", "tests.unit.target.hostile_grammars", str(tiny), str(VOCAB), str(bound)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["running"] == 200
    assert found["took"] <= bound and found["estimated"] <= bound
    assert not found["small_refused"]
