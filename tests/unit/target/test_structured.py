"""Structured output on a real model: every answer follows its grammar, with drafts, without, and when taken over."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outrider.drafting.tree import DraftTree
from outrider.errors import InvalidRequest
from outrider.gateway.structured import Structured
from outrider.options.sampling import DraftDistribution
from outrider.protocol.finish import Finish
from outrider.speculation import Grammar, LogitsOptions, VerificationMode
from outrider.target.events import Compiled, Offered
from outrider.target.grammar import GrammarCompiler
from outrider.target.opening import Opening, Speculation
from outrider.testing.tiny import tiny_tokenizer
from torch import Tensor

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
) -> list[Opening]:
    grammar = structured.to_grammar()
    found = []
    for number, prompt in enumerate(PROMPTS):
        params = replace(SAMPLED, seed=number) if sampled else GREEDY
        plain = opening(prompt, params=params, stops=[EOS], max_new_tokens=480, **more)
        said = tuple(committed[number]) if committed else ()
        compiled = compiler.compile(grammar, said)
        found.append(replace(plain, committed=said, logits=LogitsOptions(grammar=grammar), grammar=compiled))
    return found


def run(tiny: Path, openings: list[Opening], drafter: object = None) -> Bench:
    bench = Bench(tiny, num_blocks=1024)
    for number, each in enumerate(openings):
        bench.open(number, each)
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
    [asked] = asking(compiler, ASKED[1], False)[:1]
    bench = Bench(tiny)
    bench.open(0, asked)
    ids = TOKENIZER.encode("noise")
    bench.offer(0, len(asked.prompt), ids)
    sequence = bench.worker._sequences.find(key(0))
    assert sequence.drafts.merged().guess() == TOKENIZER.encode("no"), "the rest can never be accepted"
    assert sequence.drafts.num_dropped == len("ise")


def test_a_draft_that_breaks_the_grammar_at_once_has_answered(tiny: Path, compiler: GrammarCompiler) -> None:
    """Or each step would wait as long as a step may wait."""
    [asked] = asking(compiler, ASKED[1], False, speculation=Speculation(4, max_wait_us=10_000_000))[:1]
    bench = Bench(tiny)
    bench.open(0, asked)
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
    [asked] = asking(compiler, ASKED[1], True, mode=VerificationMode.RATIO)[:1]
    sequence_of = Bench(tiny)
    sequence_of.open(0, asked)
    sequence = sequence_of.worker._sequences.find(key(0))
    ids = TOKENIZER.encode("noise")
    q = tuple(DraftDistribution((token,), (65536,)) for token in ids)
    sequence.offer(DraftTree(len(asked.prompt), tuple(ids), q=q), 0.0)
    [kept] = sequence.drafts.trees
    assert kept.guess() == TOKENIZER.encode("noi")


def test_each_branch_is_kept_as_far_as_the_grammar_lets_it_through(tiny: Path, compiler: GrammarCompiler) -> None:
    [asked] = asking(compiler, ASKED[1], False)[:1]
    bench = Bench(tiny)
    bench.open(0, asked)
    n, o, i, y, e, s = TOKENIZER.encode("noiyes")
    tree = DraftTree(len(asked.prompt), (n, o, i, y, i, e, s), (-1, 0, 1, -1, 3, 3, 5))
    bench.apply(Offered(key(0), tree))
    sequence = bench.worker._sequences.find(key(0))
    assert sequence.drafts.merged().token_ids == (n, o, y, e, s)


class Exhausted(Grammar):
    """Allows everything, and has no mask once so many tokens follow the prompt."""

    def __init__(self, at: int) -> None:
        self._left = at

    def advance(self, token_ids: Sequence[int]) -> None:
        self._left -= len(token_ids)

    def allowed(self, prefix: Sequence[int]) -> Tensor | None:
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
    plain = Bench(tiny)
    for number, each in enumerate(asked):
        plain.open(number, each)
    plain.run()
    texts = {number: plain.tokens[key(number)] for number in range(3)}
    bench = Bench(tiny)
    for number, each in enumerate(asked):
        grammar = {"logits": LogitsOptions(grammar="x"), "grammar": Exhausted(7)} if number == 1 else {}
        bench.open(number, replace(each, **grammar))  # type: ignore[arg-type]
    retracted: list[object] = []
    bench.engine.kv.retract = lambda *args: retracted.append(args)  # type: ignore[method-assign]
    bench.run(Liar(texts, how)) if how != "none" else bench.run()
    assert [type(error) for error in bench.answers[key(1)].errors] == [InvalidRequest]
    assert bench.answers[key(1)].text == texts[1][len(PROMPTS[1]) :][:7]
    assert all(bench.tokens[key(number)] == texts[number] for number in (0, 2))
    assert not retracted, "the step was run once"


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
    bench.open(0, replace(at_once, grammar=None))
    bench.open(1, opening(later.prompt, max_new_tokens=5))
    while not bench.answers.get(key(1)) or bench.answers[key(1)].finish is Finish.NONE:
        bench.step()
    assert key(0) not in bench.answers
    assert bench.step() is None, "nothing is run before it is there"
    assert at_once.grammar is not None
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


async def test_a_grammar_that_takes_too_long_is_refused_by_name(tiny: Path) -> None:
    class Stuck(GrammarCompiler):
        def compile(self, grammar: str, committed: Sequence[int]) -> Grammar:
            released.wait(60)
            return super().compile(grammar, committed)

    released = threading.Event()
    with pytest.raises(InvalidRequest, match="could not be compiled") as refused:
        await Stuck(tiny, VOCAB, [EOS], max_s=0.01).compile_aside("x", ())
    released.set()
    assert refused.value.field == "logits.grammar"
