"""Penalties, biases and masks: as transformers computes them, and the same whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.errors import InvalidRequest
from outrider.speculation import (
    Candidate,
    DraftDistribution,
    Grammar,
    LogitsOptions,
    LogitsProcessor,
    SamplingParams,
    VerificationMode,
)
from outrider.speculation.changes import process
from outrider.tree import DraftTree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.judged import verify, verify_batched

VOCAB = 30
PROMPT = [3, 4, 5]
STOP = 2
ASKED = [
    LogitsOptions(presence_penalty=1.1, frequency_penalty=0.7, repetition_penalty=1.4),
    LogitsOptions(frequency_penalty=-1.5),
    LogitsOptions(logit_bias=((7, 3.0), (8, -4.0)), min_tokens=6),
    LogitsOptions(allowed_token_ids=tuple(range(1, 20)), bad_words=((6, 7), (9,), (7, 8, 10)), repetition_penalty=0.8),
]
MODES = [
    (VerificationMode.GREEDY, SamplingParams(temperature=0)),
    (VerificationMode.COUPLED, SamplingParams(temperature=0.9, top_p=0.95, seed=3)),
]


def model(text: Sequence[int]) -> Tensor:
    """Logits after a text: short-sighted, so that texts repeat themselves."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(text[-1:])) & 0xFFFF)) * 2


def applied(processor: LogitsProcessor, row: Tensor, prefix: Sequence[int] = ()) -> Tensor:
    """The row after `prefix`, with those before it in the same step."""
    rows = row.repeat(len(prefix) + 1, 1)
    params = SamplingParams(temperature=0)
    process(rows, [Candidate(params, VerificationMode.GREEDY, DraftTree(3, tuple(prefix)), processor)])
    return rows[-1]


def processed(options: LogitsOptions, output: Sequence[int], row: Tensor, prefix: Sequence[int] = ()) -> Tensor:
    return applied(LogitsProcessor(options, PROMPT, output, (STOP,)), row, prefix)


def decode(options: LogitsOptions, mode: VerificationMode, params: SamplingParams, drafts: object = None) -> list[int]:
    """24 tokens. `drafts(output)` is asked before each step."""
    processor, output = LogitsProcessor(options, PROMPT, (), (STOP,)), list[int]()
    while len(output) < 24:
        draft = list(drafts(output)) if callable(drafts) else []
        text = [*PROMPT, *output]
        rows = torch.stack([model([*text, *draft[:i]]) for i in range(len(draft) + 1)])
        [verdict] = verify(rows, [Candidate(params, mode, DraftTree(len(text), tuple(draft)), processor)])
        processor.advance(verdict.token_ids)
        output += verdict.token_ids
    return output[:24]


@pytest.mark.parametrize("options", ASKED)
@pytest.mark.parametrize(("mode", "params"), [pytest.param(*MODES[0], marks=pytest.mark.slow), MODES[1]])
@settings(max_examples=12)
@given(data=st.data())
def test_no_draft_changes_the_text(
    options: LogitsOptions, mode: VerificationMode, params: SamplingParams, data: st.DataObject
) -> None:
    plain = decode(options, mode, params)

    def drafts(output: list[int]) -> list[int]:
        kept = data.draw(st.integers(0, 4))
        noise = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
        return plain[len(output) :][:kept] + noise

    assert decode(options, mode, params, drafts) == plain


@pytest.mark.parametrize("options", ASKED)
@settings(max_examples=20)
@given(output=st.lists(st.integers(0, VOCAB - 1), max_size=12), cut=st.integers(0, 12))
def test_a_drafted_prefix_counts_as_if_it_were_committed(options: LogitsOptions, output: list[int], cut: int) -> None:
    row = model(output)
    assert torch.equal(processed(options, output, row), processed(options, output[:cut], row, output[cut:]))
    advanced = LogitsProcessor(options, PROMPT, output[:cut], (STOP,))
    advanced.advance(output[cut:])
    assert torch.equal(applied(advanced, row), processed(options, output, row))


@pytest.mark.parametrize("options", ASKED)
def test_in_a_tree_each_row_follows_its_own_path(options: LogitsOptions) -> None:
    draft = DraftTree(3, (6, 7, 9, 6), parents=(-1, 0, -1, 2))
    paths = [[], [6], [6, 7], [9], [9, 6]]
    processor = LogitsProcessor(options, PROMPT, [6])
    params, row = SamplingParams(temperature=0), model([1])
    candidate = Candidate(params, VerificationMode.GREEDY, draft, processor)
    assert candidate.prefixes() == paths
    rows = row.repeat(5, 1)
    process(rows, [candidate])
    for found, path in zip(rows, paths, strict=True):
        assert torch.equal(found, applied(LogitsProcessor(options, PROMPT, [6, *path]), row))


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    row, output = model([9]), [6, 6, 11]
    text = torch.tensor([[*PROMPT, *output]])
    wanted = RepetitionPenaltyLogitsProcessor(1.4)(text, row.clone()[None])[0]
    assert torch.equal(processed(LogitsOptions(repetition_penalty=1.4), output, row), wanted)


@settings(max_examples=60)
@given(
    words=st.lists(st.lists(st.integers(5, 8), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12),
    output=st.lists(st.integers(5, 8), min_size=1, max_size=6),
    cut=st.integers(0, 6),
)
def test_runs_are_found_where_output_and_draft_meet(words: list[tuple[int, ...]], output: list[int], cut: int) -> None:
    wanted = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=STOP)(
        torch.tensor([output]), model(output)[None]
    )[0]
    found = processed(LogitsOptions(bad_words=tuple(words)), output[:cut], model(output), output[cut:])
    assert torch.equal(found, wanted)


def test_where_a_grammar_refuses_a_row_the_candidate_ends_before_it_and_the_others_do_not() -> None:
    class Refusing(Grammar):
        def advance(self, token_ids: Sequence[int]) -> None: ...

        def allowed(self, prefix: Sequence[int]) -> bytes | None:
            if len(prefix) >= at:
                raise InvalidRequest("logits.grammar", "is too complex")
            return None

        def num_allowed(self, token_ids: Sequence[int]) -> int:
            return len(token_ids)

    rows = torch.stack([model([token_id]) for token_id in (1, 2, 3)])
    draft = DraftTree(3, tuple(rows.argmax(-1).tolist()[:2]))
    params = SamplingParams(temperature=0)
    for at in range(3):
        processor = LogitsProcessor(LogitsOptions(), PROMPT, grammar=Refusing())
        refused = Candidate(params, VerificationMode.GREEDY, draft, processor)
        beside = Candidate(params, VerificationMode.GREEDY, draft)
        ended, whole = verify(torch.cat([rows, rows]), [refused, beside])
        assert (whole.num_accepted, len(whole.token_ids), whole.error) == (2, 3, None)
        assert ended.token_ids == whole.token_ids[:at]
        assert (ended.error is not None) is (at == 0)
        assert ended.num_accepted == ended.num_verified == at


def test_frequency_and_presence_are_subtracted_as_openai_documents() -> None:
    row, output = model([1]), [6, 6, 11]
    found = processed(LogitsOptions(frequency_penalty=0.5, presence_penalty=0.25), output, row)
    wanted = row.clone()
    wanted[6] -= 2 * 0.5 + 0.25
    wanted[11] -= 0.5 + 0.25
    assert torch.allclose(found, wanted)
    assert torch.equal(found[PROMPT], row[PROMPT]), "the prompt is not penalised"


def test_no_stop_token_is_chosen_before_min_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[STOP] = 9.0
    options = LogitsOptions(min_tokens=2)
    assert processed(options, [5], row)[STOP] == -torch.inf
    assert processed(options, [], row, [5])[STOP] == -torch.inf
    assert processed(options, [5, 5], row)[STOP] == 9.0
    assert processed(options, [5], row, [5])[STOP] == 9.0


def test_where_every_allowed_token_is_banned_what_is_allowed_counts() -> None:
    options = LogitsOptions(allowed_token_ids=(STOP, 6), bad_words=((6,),), min_tokens=4)
    found = processed(options, [], model([1]))
    assert torch.isfinite(found).nonzero()[:, 0].tolist() == [STOP, 6]


class Odd(Grammar):
    """Allows odd tokens only; none after its limit."""

    def advance(self, token_ids: Sequence[int]) -> None: ...

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        if len(prefix) > 2:
            raise InvalidRequest("logits.grammar", "is too complex")
        return bytes([0xAA] * 4)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_many_sequences_in_a_step_are_each_verified_as_alone_and_as_on_a_gpu(examples: int) -> None:
    settings(max_examples=examples)(given(data=st.data(), seed=st.integers(0, 1000))(check_verdicts))()


def check_verdicts(data: st.DataObject, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    candidates, logits = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        mode, params = data.draw(st.sampled_from(MODES))
        output, draft = (data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=n)) for n in (9, 4))
        options, grammar = data.draw(st.sampled_from([None, *ASKED])), data.draw(st.sampled_from([None, Odd()]))
        processor = None if options is None else LogitsProcessor(options, PROMPT, output, (STOP,), grammar)
        num_top = data.draw(st.sampled_from([None, 0, 3]))
        candidates.append(Candidate(params, mode, DraftTree(9, tuple(draft)), processor, num_top))
        logits.append(torch.randn(len(draft) + 1, VOCAB, generator=rng) * 3)
    alone = [verify(rows.clone(), [each])[0] for rows, each in zip(logits, candidates, strict=True)]
    for verifying in (verify, verify_batched):
        assert [str(verdict) for verdict in verifying(torch.cat(logits), candidates)] == [str(each) for each in alone]


class NoWaiting(TorchDispatchMode):
    """Fails at operations that wait for a GPU: they read a value on the host, or copy a number from it."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, func
        # A number that is written by index is a tensor on the host.
        assert not name.startswith("index_put") or args[2].dim(), func
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("mode", "params"), [*MODES, (VerificationMode.RATIO, MODES[1][1])])
def test_nothing_waits_for_a_gpu_between_what_goes_in_and_what_comes_out(
    mode: VerificationMode, params: SamplingParams
) -> None:
    q = (DraftDistribution((6,), (1 << 16,)),) if mode is VerificationMode.RATIO else ()
    draft = DraftTree(9, (6,), q=q)
    batch = [
        Candidate(params, mode, draft, LogitsProcessor(options, PROMPT, [6], (STOP,), Odd()), num_top=2)
        for options in ASKED
    ]
    logits = torch.stack([model([token_id]) for token_id in range(2 * len(batch))])
    with NoWaiting():
        verdicts = verify_batched(logits, batch)
    assert all(len(verdict.top) == len(verdict.token_ids) for verdict in verdicts)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("logit_bias[4]", {"logit_bias": ((4, 101.0),)}),
        ("logit_bias", {"logit_bias": ((4, 1.0), (4, 2.0))}),
        ("bad_words[1]", {"bad_words": ((1,), ())}),
        ("min_tokens", {"min_tokens": -1}),
        ("allowed_token_ids", {"allowed_token_ids": (1,), "grammar": 'start: "a"'}),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, asked: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        LogitsOptions(**asked)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        LogitsOptions(logit_bias=((VOCAB, 1.0),)),
        LogitsOptions(allowed_token_ids=(VOCAB,)),
        LogitsOptions(bad_words=((1, VOCAB),)),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused(options: LogitsOptions) -> None:
    options.check_vocabulary(VOCAB + 1)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        options.check_vocabulary(VOCAB)
