"""Drafted tokens are counted by the source that proposed them: in the target, in its metrics, and on the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import KINDS, make_sources
from outrider.protocol.rounds import Round, SourceTokens
from outrider.rpc.v1 import sequence_pb2, worker_pb2
from outrider.sequence.speculation import Speculation
from outrider.target.metrics import TargetMetrics
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.requests.wire import response_of
from outrider.tree import DraftTree
from prometheus_client import CollectorRegistry

from tests.unit.target.harness import Bench, Liar, key, opening, prompts

POOL = DraftTree(10, (5, 6, 7), chances=(0.9, 0.9, 0.1), source="model", serial=1)
LOOKUP = DraftTree(10, (5, 8), chances=(0.5, 0.5), source="ngram")


def counted(draft: DraftTree, accepted: list[int], num_verified: int = 0) -> StepRow[None]:
    made = StepRow(sequence=None, key=key(5), base_len=10, draft=draft, accepted=accepted, num_verified=num_verified)
    made.count_sources(made.verified)
    return made


def test_each_drafted_token_counts_for_one_source() -> None:
    merged = POOL.merge(LOOKUP)
    row = counted(merged, [0, 3], num_verified=2)
    # Both propose 5, and the model gives it the greater chance.
    assert row.sources == [SourceTokens("model", False, 3, 2, 1), SourceTokens("ngram", True, 1, 1, 1)]
    shown = "5 of the model, 8 that was looked up, and the 7 that nobody got to"
    assert row.token_sources == [0, 1, 0], shown
    # A draft worker says itself what its drafts took.
    timed = replace(POOL, seconds=0.9).merge(replace(LOOKUP, seconds=0.004))
    assert [one.draft_us for one in counted(timed, []).sources] == [0, 2000]
    assert list(row.chances) == [round(255 * merged.claims()[node]) for node in (0, 3, 2)]
    none = counted(DraftTree(10), [])
    assert (list(none.sources), none.token_sources, none.chances) == ([], [], b"")


@pytest.mark.parametrize("how", ["right", "random", "beside"])
def test_the_sums_over_all_sources_are_those_of_the_steps(tiny: Path, how: str) -> None:
    both = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)
    what = [opening([*one, *one], max_new_tokens=30, speculation=both) for one in prompts(4, longest=20)]
    plain = Bench(tiny).answer(what)
    bench = Bench(tiny, sources=make_sources(NAMES), row_price=lambda cost: 0.0)
    bench.answer(what, Liar(plain, how))
    stats = bench.worker.stats
    sources = stats.sources.values()
    assert sum(one.num_drafted for one in sources) == stats.num_draft_tokens + stats.num_branch_tokens
    assert sum(one.num_accepted for one in sources) == stats.num_accepted_tokens
    assert stats.sources["ngram"].num_drafted > 0
    assert all(one.num_accepted <= one.num_verified <= one.num_drafted for one in sources)
    assert all(stats.sources[name].draft_s > 0 for name in NAMES), "also where it proposed nothing"


def test_the_metrics_have_one_label_more_and_a_bounded_number_of_sources() -> None:
    stats, registry = TargetStats(), CollectorRegistry()
    TargetMetrics(registry, worker_pb2.WorkerInfo(model="m"), stats)
    stats.of_source("model").add(SourceTokens("model", False, 4, 3, 2))
    for number in range(1000):
        stats.of_source(f"made up {number}").num_drafted += 1
    labels = {"model_name": "m", "source": "model"}
    assert registry.get_sample_value("outrider_source_accepted_tokens_total", labels) == 2
    [family] = [each for each in registry.collect() if each.name == "outrider_source_drafted_tokens"]
    values = {sample.labels["source"]: sample.value for sample in family.samples}
    assert set(KINDS) <= set(values) and len(values) <= 17
    assert sum(values.values()) == 1004 and values["other"] > 900


def commit(
    draft: DraftTree, accepted: list[int], sources: list[SourceTokens], stats: sequence_pb2.DraftStats | None
) -> sequence_pb2.Commit:
    made = StepRow(
        sequence=None,
        key=key(5),
        base_len=10,
        draft=draft,
        token_ids=[5, 8, 3],
        accepted=accepted,
        num_verified=2,
        sources=sources,
        draft_stats=stats,
    )
    [message] = response_of(TargetReport(commits=[made]))[1].commits
    return message


MODEL = sequence_pb2.DraftStats(source="model", draft_us=5)


def test_a_commit_tells_of_its_sources_and_a_round_has_them() -> None:
    counts = [SourceTokens("model", False, 3, 2, 1), SourceTokens("ngram", True, 1, 1, 1)]
    done = Round.from_commit(commit(POOL.merge(LOOKUP), [0, 3], counts, MODEL), 1000)
    assert (list(done.sources), list(done.token_sources)) == (counts, [0, 1, 0])
    told = done.to_trace()
    assert [(one.source, one.own, one.num_accepted) for one in told.sources] == [
        ("model", False, 1),
        ("ngram", True, 1),
    ]
    assert list(told.token_sources) == [0, 1, 0]


def test_a_commit_with_a_chain_of_the_pool_alone_has_no_byte_for_it_and_so_reads_as_one_of_the_version_before() -> None:
    counts = [SourceTokens("model", False, 3, 2, 2)]
    message = commit(POOL, [0, 1], counts, MODEL)
    assert not message.sources and not message.token_sources
    assert Round.from_commit(message, 1000).sources == tuple(counts)


def test_a_commit_of_a_lookup_alone_names_it() -> None:
    counts = [SourceTokens("ngram", True, 3, 2, 2)]
    message = commit(replace(POOL, source="ngram", serial=0), [0, 1], counts, None)
    assert not message.token_sources
    assert Round.from_commit(message, 1000).sources == tuple(counts)
