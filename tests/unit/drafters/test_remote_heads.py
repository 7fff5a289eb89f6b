"""Heads on draft workers, with the messages that targets and drafts exchange: texts are the target's, drafts are those
of a head beside the target, and a message that is lost or changed gives no draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from outrider.draft.worker import DraftWorker
from outrider.drafters.head import HeadDrafter
from outrider.drafting.lookup import NAMES
from outrider.drafting.pool.sequence import commit_message
from outrider.drafting.source import DraftSource, make_sources
from outrider.heads import HeadDrafts, HeadFeatures
from outrider.heads.interface import DraftHead
from outrider.heads.remote import read, written
from outrider.heads.text import HeadText, Place
from outrider.protocol.convert import sampling_to_proto
from outrider.rpc.v1 import draft_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.requests.events import Adjusted
from outrider.testing.tiny import tiny_checkpoint
from outrider.tree import DraftTree
from outrider.worker.events import PeerStreamEnded

from tests.unit.drafters.remote_pair import Change, Remote
from tests.unit.drafters.whole_text import TIE, WholeText
from tests.unit.target.harness import GREEDY, SAMPLED, Bench, key, one_sampling_each, opening, prompts
from tests.unit.target.test_head_drafts import LAYERS, knowing, random_head

ASKED = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)
OWN = Speculation(max_own_draft_tokens=4)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), layers=LAYERS, seed=4)


def remote(
    path: Path,
    head: DraftHead,
    sources: Sequence[DraftSource] = (),
    num_blocks: int = 256,
    bits: int = 16,
    **more: object,
) -> Remote:
    features = HeadFeatures(head.kind, head.taps, head.features, bits)
    bench = Bench(path, sources=[features, *sources], row_price=lambda cost: 0.0, num_blocks=num_blocks)
    return Remote(bench, DraftWorker(HeadDrafter(head, 384, 512, 64, "cpu"), 40), **more)  # type: ignore[arg-type]


def wanted(count: int, params: SamplingParams, speculation: Speculation) -> list[SequenceSpec]:
    return [opening(p, max_new_tokens=24, params=params, speculation=speculation) for p in prompts(count)]


def answered(one: Remote, what: Sequence[SequenceSpec], steps: int = 400, first: int = 0) -> Remote:
    for number, each in enumerate(what, first):
        one.open(number, each)
    one.run(steps)
    return one


def alone(path: Path, what: Sequence[SequenceSpec], sources: Sequence[DraftSource] = ()) -> Bench:
    bench = Bench(path, sources=sources, row_price=lambda cost: 0.0)
    bench.answer(what)
    return bench


class Recording(HeadDrafts):
    """A head beside the target, which reads features as exactly as messages have them, and keeps what it proposes, by
    sequence and length."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        exact = head.features
        head.features = lambda states: exact(states).bfloat16().float()  # type: ignore[method-assign]
        self.proposed: dict[tuple[int, int], DraftTree] = {}

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        for one, tree in super().poll():
            self.proposed[one.sequence_id, tree.base_len] = tree
            yield one, tree


def moved(commit: sequence.Commit) -> list[sequence.Commit]:
    """The fault: each feature is that of the position before."""
    commit.features = commit.features[:128] + commit.features[:-128]
    return [commit]


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SAMPLED, id="coupled")]
)
@pytest.mark.parametrize(
    "how", ["alone", *(pytest.param(how, marks=pytest.mark.slow) for how in ("merged", "killed", "late", "wrong"))]
)
@pytest.mark.parametrize(
    "kind", ["mtp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("eagle3", "medusa", "dflash"))]
)
def test_texts_are_those_of_the_target_alone(
    deep: Path, kind: str, how: str, params: SamplingParams, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each planted fault is found: late and wrong features."""
    # So little does a random head know that its drafts would end at once.
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 0.0)
    plain, local = alone(deep, wanted(count, params, Speculation())), Recording(random_head(kind, deep))
    made = remote(
        deep,
        random_head(kind, deep),
        make_sources(NAMES) if how == "merged" else (),
        dies_at=6 if how == "killed" else 1 << 30,
        lag=2 if how == "late" else 0,
        change=moved if how == "wrong" else Remote.change,
    )
    bench = answered(made, wanted(count, params, ASKED)).bench
    assert bench.tokens == plain.tokens and len(bench.tokens) == count
    assert not made.errors and not bench.worker.stats.num_source_failures
    drafted = bench.worker.stats.of_source(kind).num_drafted
    # Of what comes late the end may still follow. A worker that is killed has drafted for few of many.
    assert drafted < 4 * count if how == "late" else drafted > (1 if how == "killed" else 4) * count
    if how == "alone" or how == "wrong":
        alone(deep, wanted(count, params, OWN), [local])
        assert same(made, local) is (how == "alone")


@one_sampling_each("kind", {"eagle3": GREEDY, "medusa": SAMPLED, "dflash": SAMPLED, "knowing": GREEDY})
def test_a_remote_head_proposes_and_is_accepted_as_one_beside_the_target(
    deep: Path, kind: str, params: SamplingParams
) -> None:
    head = knowing(deep, LAYERS) if kind == "knowing" else random_head(kind, deep)
    local = Recording(head)
    beside = alone(deep, wanted(8, params, OWN), [local])
    made = answered(remote(deep, head), wanted(8, params, ASKED))
    assert same(made, local)
    stats = [bench.worker.stats.of_source(head.kind) for bench in (beside, made.bench)]
    # The head beside the target also drafts a text's last token, which ends it anyway.
    assert abs(stats[0].num_accepted - stats[1].num_accepted) <= 8
    assert stats[1].num_verified > 100 and (stats[1].num_accepted > 40 or kind != "knowing")


def same(made: Remote, local: Recording) -> bool:
    """Whether both proposed the same trees. Near its end a text has no room for a whole one of a draft worker's."""
    ends = {one.sequence_id: len(tokens) - 5 for one, tokens in made.bench.tokens.items()}

    def trees(proposed: dict[tuple[int, int], DraftTree]) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
        used = {at: tree for at, tree in proposed.items() if tree.token_ids and at[1] < ends[at[0]]}
        return {at: (tree.token_ids, tree.parents) for at, tree in used.items()}

    return trees(made.proposed) == trees(local.proposed) != {}


DISTURBED = ["alone", "after prefix hits", "preempted", "draft restarted", "target restarted"]
_QUICK = ("target restarted",)
"""In which a fault is planted in quick tests."""
_AT = 6
"""The step after which one side is restarted."""


def disturbed(path: Path, head: DraftHead, how: str, **more: object) -> list[Remote]:
    """Eight texts, and what was proposed for them before the disturbance and after it."""
    what = wanted(8, GREEDY, ASKED)
    made = remote(path, head, num_blocks=24 if how == "preempted" else 256, **more)
    answered(made, what, steps=_AT if how.endswith("restarted") else 400)
    if how == "preempted":
        assert made.bench.worker.stats.num_preemptions > 2
    if how == "alone" or how == "preempted":
        return [made]
    second = remote(path, head, stream=2, **more)
    if how == "target restarted":
        second.worker = made.worker
        second.worker.apply(PeerStreamEnded(1))
        said = {number: made.bench.tokens[key(number)][len(each.prompt) :] for number, each in enumerate(what)}
        answered(second, [replace(each, committed=tuple(said[number])) for number, each in enumerate(what)])
        return [made, second]
    second.bench = made.bench
    if how == "after prefix hits":
        answered(made, what, first=8)
        answered(second, what, first=16)
    else:
        for number, each in enumerate(what):
            second.draft(number, each)
        second.run()
    return [made, second]


def widest_gap(path: Path, head: DraftHead, made: Sequence[Remote]) -> float:
    beside, gaps = WholeText(path, head), [0.0]
    for one in made:
        used = {at: tree for at, tree in one.proposed.items() if tree.token_ids}
        assert len(used) > 20
        for name, tokens in made[-1].bench.tokens.items():
            gaps.append(beside.gap(tokens, {at: tree for (number, at), tree in used.items() if key(number) == name}))
    return max(gaps)


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.slow if how in ("alone", "after prefix hits") else []) for how in DISTURBED],
)
@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mtp", "medusa", "dflash"))]
)
def test_proposals_are_those_of_the_head_beside_transformers_on_the_whole_text(
    deep: Path, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(kind, deep)
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 0.0)
    made = disturbed(deep, head, how)
    assert not any(one.errors for one in made)
    assert widest_gap(deep, head, made) < TIE


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=[] if how in _QUICK else pytest.mark.slow) for how in DISTURBED),
        "a draft that nobody says has read nothing",
    ],
)
def test_and_that_finds_a_planted_fault(deep: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the position before; or features that begin where the draft was restarted."""
    head, change = random_head("eagle3", deep), moved
    if how not in DISTURBED:
        monkeypatch.setattr(HeadFeatures, "paired", lambda *of: None)
        how, change = "draft restarted", Remote.change
    assert widest_gap(deep, head, disturbed(deep, head, how, change=change)) > TIE


def test_and_that_finds_a_token_map_that_is_off_by_one(deep: Path) -> None:
    def made(offset: int) -> Remote:
        head = knowing(deep, LAYERS, token_map=torch.arange(3, 300))
        assert head.token_map is not None
        head.token_map += offset
        return answered(remote(deep, head), wanted(8, GREEDY, ASKED))

    right, wrong = (made(offset).bench.worker.stats.of_source("mtp") for offset in (0, 1))
    assert right.num_accepted > 20
    assert wrong.num_accepted < 0.3 * right.num_accepted


def test_in_8_bits_half_as_much_is_sent_and_nearly_as_much_accepted(deep: Path) -> None:
    whole, half = (
        answered(remote(deep, knowing(deep, LAYERS), bits=bits), wanted(8, GREEDY, ASKED)) for bits in (16, 8)
    )
    assert half.bench.tokens == whole.bench.tokens and not half.errors
    accepted = [made.bench.worker.stats.of_source("mtp").num_accepted for made in (whole, half)]
    assert accepted[1] > 0.9 * accepted[0] > 40 and half.num_bytes < 0.55 * whole.num_bytes


def test_a_draft_worker_of_an_earlier_release_is_sent_16_bits_beside_one_that_reads_8(deep: Path) -> None:
    bits: dict[int, set[int]] = {0: set(), 1: set()}

    def unknown(commit: sequence.Commit) -> list[sequence.Commit]:
        if commit.features:
            bits[commit.sequence_id].add(commit.feature_bits)
        commit.ClearField("feature_bits")
        return [commit]

    head = knowing(deep, LAYERS)
    made = remote(deep, head, bits=8, reads_bits=16, change=unknown)
    newer = remote(deep, head)
    newer.bench = made.bench
    one, other = wanted(2, GREEDY, ASKED)
    made.open(0, one)
    newer.open(1, other)
    while made.bench.worker.load.num_sequences:
        made.bench.step()
        for each in (made, newer):
            each._follow()
        for each in (made, newer):
            each._work()
    assert not made.errors and not newer.errors
    assert bits == {0: {0}, 1: {8}} and made.bench.worker.stats.of_source("mtp").num_accepted > 5


def test_a_remote_head_drafts_as_far_as_its_target_verifies(deep: Path) -> None:
    """Above all one whose steps run ahead: they pass the first tokens of a draft before it comes."""

    def longest(price: float) -> int:
        made = answered(remote(deep, random_head("mtp", deep), price=price), wanted(2, GREEDY, ASKED))
        return max(tree.depth for tree in made.proposed.values())

    # So little does a random head know.
    assert longest(0.0) < longest(1e-12) == 4


@pytest.mark.parametrize("kind", ["mtp", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_token_costs_at_most_twice_the_width_in_bytes(deep: Path, kind: str) -> None:
    made = answered(remote(deep, random_head(kind, deep)), wanted(8, GREEDY, ASKED))
    positions = sum(len(tokens) - 1 for tokens in made.bench.tokens.values())
    assert made.num_bytes == positions * 2 * 64


def test_a_sequence_that_may_have_no_draft_costs_no_features(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head("eagle3", deep)
    projected: list[int] = []
    exact = head.features
    monkeypatch.setattr(head, "features", lambda states: (projected.append(states.shape[1]), exact(states))[1])
    made = remote(deep, head)
    projected.clear()
    answered(made, wanted(4, GREEDY, Speculation(max_own_draft_tokens=4)))
    assert made.num_bytes == 0 and not projected and len(made.bench.tokens) == 4


def test_a_draft_that_pauses_has_no_features_until_it_may_go_on_and_then_all(deep: Path) -> None:
    made = remote(deep, random_head("mtp", deep))
    made.open(0, wanted(1, GREEDY, ASKED)[0])

    def step() -> int:
        made.bench.step()
        made._follow()
        made._work()
        return made.num_bytes

    before = [step() for _ in range(3)][-1]
    assert before > 0
    made.bench.apply(Adjusted(key(0), OWN))
    assert [step() for _ in range(3)] == [before] * 3
    made.bench.apply(Adjusted(key(0), ASKED))
    step()
    committed = len(made.bench.tokens[key(0)])
    assert made.num_bytes == (committed - 1) * 2 * 64 and not made.errors


@pytest.mark.parametrize("most", [512, 16])
def test_after_a_cached_prefix_a_remote_head_has_its_last_features_wherever_it_drafts(
    deep: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the draft worker that has read the prefix before, and at another one."""
    monkeypatch.setattr("outrider.heads.remote._KNOWN", most)
    head, prompt = knowing(deep, LAYERS), prompts(1)[0] * 3
    made, accepted, sent = remote(deep, head), [0], [0]
    for number in range(3):
        if number == 2:
            made.worker = DraftWorker(HeadDrafter(head, 384, 512, 64, "cpu"), 40)
        made.open(number, opening(prompt, max_new_tokens=20, speculation=ASKED))
        made.run()
        accepted.append(made.bench.worker.stats.num_accepted_tokens)
        sent.append(made.num_bytes)
    assert len({tuple(tokens) for tokens in made.bench.tokens.values()}) == 1 and not made.errors
    first, again, elsewhere = (after - before for before, after in pairwise(accepted))
    assert first == again > 0 and (elsewhere == first or most < len(prompt))
    cached = 8 * ((len(prompt) - 1) // 8)
    saved = 2 * 64 * (cached - min(cached, most))
    assert [after - before for before, after in pairwise(sent)] == [sent[1], sent[1] - saved, sent[1] - saved]


def test_sequences_of_several_targets_are_read_and_drafted_together(deep: Path) -> None:
    head, what = knowing(deep, LAYERS), wanted(2, GREEDY, ASKED)
    drafter = HeadDrafter(head, 384, 512, 64, "cpu")
    targets = [remote(deep, head, stream=stream) for stream in (1, 2)]
    together, forward = [], drafter._runner._forward
    drafter._runner._forward = lambda texts, *of: together.append(len(texts)) or forward(texts, *of)  # type: ignore[method-assign,func-returns-value]
    worker = DraftWorker(drafter, 40)
    for target in targets:
        target.worker, target.peers = worker, dict(enumerate(targets, 1))
    for target, one in zip(targets, what, strict=True):
        target.open(0, one)
    while running := [target for target in targets if target.bench.worker.load.num_sequences]:
        for target in running:
            target.bench.step()
            target._follow()
        targets[0]._work()
    assert together.count(2) > 10
    for target, one in zip(targets, what, strict=True):
        [(_, tokens)] = target.bench.tokens.items()
        assert tokens == next(iter(alone(deep, [replace(one, speculation=Speculation())]).tokens.values()))
        assert target.bench.worker.stats.num_accepted_tokens > 5 and not target.errors


def counted(change: Callable[[int, sequence.Commit], list[sequence.Commit]]) -> Change:
    """`change` is told how many of its sequence's messages with tokens, or of those with features, came before."""
    seen = Counter[tuple[int, bool]]()

    def found(commit: sequence.Commit) -> list[sequence.Commit]:
        sort = commit.sequence_id, bool(commit.token_ids)
        seen[sort] += 1
        return change(seen[sort] - 1, commit)

    return found


def lost() -> Change:
    """The fault: the second commit of each sequence is never delivered."""
    return counted(lambda at, commit: [] if at == 1 and commit.token_ids else [commit])


def unseen() -> Change:
    """The fault: the second features of each sequence are never delivered."""
    return counted(lambda at, commit: [] if at == 1 and commit.features else [commit])


def swapped() -> Change:
    """The fault: the second commit of each sequence comes after the features of its tokens."""
    held: dict[int, sequence.Commit] = {}

    def change(at: int, commit: sequence.Commit) -> list[sequence.Commit]:
        if at == 1 and commit.token_ids:
            held[commit.sequence_id] = commit
            return []
        return [commit, held.pop(commit.sequence_id)] if commit.sequence_id in held else [commit]

    return counted(change)


@pytest.mark.parametrize("params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "coupled"])
@pytest.mark.parametrize("fault", [lost, unseen, swapped])
def test_a_commit_that_does_not_come_in_its_turn_ends_the_draft_and_no_text(
    deep: Path, fault: Callable[[], Change], params: SamplingParams
) -> None:
    plain = alone(deep, wanted(8, params, Speculation()))
    made = remote(deep, knowing(deep, LAYERS), change=fault())
    answered(made, wanted(8, params, ASKED))
    assert made.bench.tokens == plain.tokens
    assert {error.reason for error in made.errors} == {"COMMIT_MISMATCH"} and len(made.errors) == 8


def test_without_features_there_is_no_draft(deep: Path) -> None:
    def bare(commit: sequence.Commit) -> list[sequence.Commit]:
        commit.ClearField("features")
        return [commit]

    made = answered(remote(deep, knowing(deep, LAYERS), change=bare), wanted(4, GREEDY, ASKED))
    assert not any(tree.token_ids for tree in made.proposed.values()) and not made.errors


def test_features_that_leave_a_gap_or_go_beyond_the_text_end_the_draft(deep: Path) -> None:
    def late(commit: sequence.Commit) -> list[sequence.Commit]:
        if commit.features_start:
            commit.features_start += 1
        return [commit]

    made = answered(remote(deep, knowing(deep, LAYERS), change=late), wanted(4, GREEDY, ASKED))
    assert len(made.errors) == 4 and {error.reason for error in made.errors} == {"COMMIT_MISMATCH"}

    def torn(commit: sequence.Commit) -> list[sequence.Commit]:
        commit.features = commit.features[:-1]
        return [commit]

    made = answered(remote(deep, knowing(deep, LAYERS), change=torn), wanted(4, GREEDY, ASKED))
    assert len(made.errors) == 4 and {error.field for error in made.errors} == {"features"}


def test_ratio_mode_takes_a_remote_head_s_own_distribution(deep: Path) -> None:
    what = [replace(one, mode=VerificationMode.RATIO) for one in wanted(8, SAMPLED, ASKED)]
    made = answered(remote(deep, knowing(deep, LAYERS)), what)
    stats = made.bench.worker.stats.of_source("mtp")
    assert stats.num_accepted > 20 and not made.errors


def test_features_are_written_in_parts_that_cost_little_more_than_their_numbers_and_read_again() -> None:
    features = torch.randn(1000, 576)
    parts = list(written(7, features))
    assert len(parts) > 1 and all(len(part.rows) <= 256 << 10 for part in parts)
    assert [part.start for part in parts] == [7 + 227 * number for number in range(len(parts))]
    message = commit_message(1 << 20, 4000, (), replace(parts[0], rows=parts[0].rows[: 2 * 576]))
    assert message.ByteSize() < 1.03 * 2 * 576
    found = torch.cat([read(part, 576) for part in parts])
    assert torch.equal(found, features.to(torch.bfloat16))
    halved = list(written(7, features, 8))
    assert sum(len(part.rows) for part in halved) == 1000 * 580
    found = torch.cat([read(part, 576) for part in halved])
    torch.testing.assert_close(found, features, rtol=2**-4, atol=2**-7)


def _lie(commit: sequence.Commit, kind: str) -> None:
    width = 128
    match kind:
        case "a token at the end of the type":
            commit.token_ids[-1] = 2**32 - 1
        case "a token beyond the vocabulary":
            commit.token_ids[0] = 384
        case "a token that is not the sequence's":
            commit.base_len -= 1
            commit.token_ids[0] = (commit.token_ids[0] + 1) % 384
        case "tokens without end":
            commit.token_ids.extend([5] * 100_000)
        case "a place without end":
            commit.base_len = 2**32 - 1
        case "no number":
            commit.features = b"\xc0\x7f" * (len(commit.features) // 2)
        case "infinite":
            commit.features = b"\x80\x7f" * (len(commit.features) // 2)
        case "beyond all models":
            commit.features = b"\x7f\x7f" * (len(commit.features) // 2)
        case "a start at the end of the type":
            commit.features_start = 2**32 - 1
        case "features of half a number":
            commit.features += b"x"
        case "numbers of seven bits":
            commit.feature_bits = 7
        case "features of positions to come":
            commit.features += bytes(width) * 900


LIES = {
    "a token at the end of the type": "token_ids",
    "a token beyond the vocabulary": "token_ids",
    "a token that is not the sequence's": "base_len",
    "tokens without end": "token_ids",
    "a place without end": "base_len",
    "no number": "features",
    "infinite": "features",
    "beyond all models": "features",
    "a start at the end of the type": "base_len",
    "features of half a number": "features",
    "numbers of seven bits": "features",
    "features of positions to come": "base_len",
}


def of_others(made: Remote, first: int = 1) -> dict[tuple[int, int], tuple[object, object]]:
    """What was proposed for the sequences from `first` on."""
    return {at: (tree.token_ids, tree.parents) for at, tree in made.proposed.items() if at[0] >= first}


@pytest.mark.parametrize("kind", ["mtp", pytest.param("medusa", marks=pytest.mark.slow)])
def test_a_commit_that_lies_ends_the_draft_of_its_own_sequence_alone(deep: Path, kind: str) -> None:
    lies, what = list(LIES), wanted(len(LIES) + 4, GREEDY, ASKED)

    def change(at: int, commit: sequence.Commit) -> list[sequence.Commit]:
        lie = dict(enumerate(lies)).get(commit.sequence_id)
        if lie and at == 1 and bool(commit.token_ids) is ("token" in lie or "place" in lie):
            _lie(commit, lie)
        return [commit]

    honest = answered(remote(deep, random_head(kind, deep)), what)
    made = answered(remote(deep, random_head(kind, deep), change=counted(change)), what)
    assert {error.sequence_id: error.code for error in made.errors} == dict.fromkeys(range(len(lies)), 3)
    assert len(made.errors) == len(lies)
    assert all(error.field.startswith(LIES[lies[error.sequence_id]]) for error in made.errors)
    assert made.bench.tokens == honest.bench.tokens
    assert of_others(made, len(lies)) == of_others(honest, len(lies)) != {}


def test_what_breaks_a_round_ends_one_draft_and_the_others_propose_what_they_would_have(deep: Path) -> None:
    what = wanted(4, GREEDY, ASKED)
    head = random_head("mtp", deep)
    honest = answered(remote(deep, head), what)
    made = remote(deep, head)
    runner = made.worker._drafter._runner  # type: ignore[attr-defined]
    forward = runner._forward

    def breaks(texts: Sequence[HeadText], *more: object) -> list[Place]:
        if any(text.tokens[:3] == list(what[0].prompt[:3]) and len(text.tokens) > 12 for text in texts):
            raise RuntimeError("what no check foresaw")
        return forward(texts, *more)  # type: ignore[no-any-return]

    runner._forward = breaks
    answered(made, what)
    assert {error.sequence_id for error in made.errors} == {0}
    assert of_others(made) == of_others(honest) != {}


def test_an_opening_with_a_token_that_the_head_does_not_have_is_refused(deep: Path) -> None:
    made = remote(deep, random_head("mtp", deep))
    message = sequence.OpenSequence(
        sequence_id=7,
        prompt_token_ids=[5, 2**32 - 1],
        sampling=sampling_to_proto(GREEDY),
        mode=sequence.VERIFICATION_MODE_GREEDY,
        stopping=sequence.Stopping(max_new_tokens=4),
    )
    made._hear(draft_pb2.DraftRequest(opens=[message]))
    made._work()
    assert [(error.sequence_id, error.field) for error in made.errors] == [(7, "prompt_token_ids[1]")]
