"""How a trace reads: the same figures for people and programs, and nothing a terminal would obey."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.cli.show.trace.command import Drawing
from outrider_controller.cli.show.trace.rows import round_row, trace_row
from outrider_controller.cli.show.trace.table import Table, event_line, interleaved
from outrider_controller.cli.show.trace.tokens import TokenPainter, printable, token_ids

WORDS = {1: b"The", 2: b" sky", 3: b" is", 4: b" was", 5: b"\n", 6: b" blue", 7: "é".encode()[:1], 8: "é".encode()[1:]}


def one_round(at_us: int, base_len: int, token_ids: list[int], **fields: Any) -> trace.RoundTrace:
    timing = router.RoundTiming(**fields.pop("timing", {}))
    return trace.RoundTrace(
        at_us=at_us, base_len=base_len, token_ids=token_ids, num_tokens=len(token_ids), timing=timing, **fields
    )


def example(**fields: Any) -> trace.RequestTrace:
    def worker_event(at_us: int, kind: trace.TraceEventKind.ValueType, role: str, **more: Any) -> trace.TraceEvent:
        return trace.TraceEvent(at_us=at_us, kind=kind, role=worker.WorkerRole.Value(f"WORKER_ROLE_{role}"), **more)

    opened, lost = trace.TRACE_EVENT_KIND_OPENED, trace.TRACE_EVENT_KIND_LOST
    defaults: dict[str, Any] = {
        "request_id": "c2d415dd",
        "model": "m",
        "router_id": "router-1",
        "speculation": router.SPECULATION_MODE_AUTO,
        "mode": sequence.VERIFICATION_MODE_GREEDY,
        "prompt_tokens": 10,
        "cached_tokens": 8,
        "output_tokens": 6,
        "placing_us": 100,
        "duration_us": 100_000,
        "finish_reason": sequence.FINISH_REASON_STOP,
        "metrics": router.RequestMetrics(
            num_steps=3, num_draft_tokens=5, num_verified_tokens=3, num_accepted_draft_tokens=2,
            num_dropped_draft_tokens=4,
        ),
        "events": [
            worker_event(110, opened, "DRAFT", worker_id="d1", model="small"),
            worker_event(120, opened, "TARGET", worker_id="t1", model="m"),
            worker_event(70_000, lost, "DRAFT", worker_id="d1", position=13, reason="draft_lost"),
        ],
        "rounds": [
            one_round(
                50_000, 10, [1],
                timing={"round_us": 49_900, "queue_us": 400, "verify_us": 49_000, "wire_us": 500},
            ),
            one_round(
                65_000, 11, [2, 3, 5], num_drafted=5, num_verified=3, num_accepted=2, num_dropped=4,
                rejected_token_ids=[4, 6, 6],
                timing={"round_us": 15_000, "queue_us": 5_000, "wait_us": 4_000, "verify_us": 9_900,
                        "draft_us": 3_100, "compute_us": 3_000, "wire_us": 1_200},
            ),
            one_round(90_000, 14, [6, 99], timing={"round_us": 25_000, "queue_us": 1_000, "verify_us": 24_000}),
        ],
    }  # fmt: skip
    return trace.RequestTrace(**{**defaults, **fields})


def text(part: trace.RequestTrace, *, colour: bool = False) -> str:
    drawing = Drawing(Table(TokenPainter(WORDS, colour), part.rounds))
    return "\n".join([*drawing.head(part), *drawing.more(part, ended=True)])


GOLDEN = """\
request c2d415dd   m   greedy   speculation auto
target t1   draft d1 (small)   router router-1
prompt 10 tokens, 8 of them cached

round   pos   K ver acc stale   wait  draft   wire  queue verify  total  tokens
    0    10   0   0   0     0    0.0      -    0.5    0.4   49.0   49.9  The
    1    11   5   3   2     4    4.0    3.0    1.2    1.0    9.9   15.0  [ sky][ is]\\n~ was~~~ blue~~~~ blue~~
   --    13 draft d1 lost (draft_lost) at 70.0 ms
    2    14   0   0   0     0    0.0      -    0.0    1.0   24.0   25.0   blue<99>
  sum         5   3   2     4    4.0    3.0    1.7    2.4   82.9   89.9  6 tokens

6 tokens in 3 rounds and 100.0 ms (60.0 tokens/s); ended by stop
first token after 50.0 ms: placing 0.1, queue 0.4, prefill 49.0, wire 0.5
rounds after it 40.0 ms: verify 33.9 (85%), waiting for drafts 4.0 (10%), queue 2.0 (5%), rest 0.1 (0%)
drafts: 5 drafted, 3 verified, 2 accepted (67% of verified), 4 dropped stale; 2.00 tokens a round
K drafted, ver verified, acc accepted, stale dropped; times in ms, total = wait + queue + prefill + verify + rest
tokens: [accepted] [looked up: accepted] own ~rejected~ ~~never verified~~"""


def test_a_trace_reads_like_this() -> None:
    assert text(example()) == GOLDEN


def test_a_trace_that_is_followed_bit_by_bit_says_the_same_once() -> None:
    whole = example()
    drawing = Drawing(Table(TokenPainter(WORDS, False), whole.rounds))
    lines = drawing.head(whole)
    for rounds, events in ((0, 2), (2, 2), (2, 3), (3, 3)):
        part = example(rounds=whole.rounds[:rounds], events=whole.events[:events])
        lines += drawing.more(part, ended=False)
    lines += drawing.more(whole, ended=True) + drawing.more(whole, ended=True)
    assert "\n".join(lines) == GOLDEN


def test_colours_say_the_same_without_brackets() -> None:
    line = next(line for line in text(example(), colour=True).splitlines() if " 11 " in line)
    assert line.endswith(
        "\x1b[32m sky is\x1b[0m\x1b[1m\\n\x1b[0m\x1b[31m\x1b[9m was\x1b[0m\x1b[2m\x1b[9m blue blue\x1b[0m"
    )


MIXED = one_round(
    0, 0, [2, 3, 4, 1],
    num_drafted=4, num_verified=4, num_accepted=3, rejected_token_ids=[6],
    sources=[
        {"source": "model", "num_drafted": 2, "num_verified": 2, "num_accepted": 1},
        {"source": "ngram", "own": True, "num_drafted": 2, "num_verified": 2, "num_accepted": 2},
    ],
    token_sources=[1, 1, 0, 0],
)  # fmt: skip


def test_each_token_says_which_source_drafted_it() -> None:
    assert TokenPainter(WORDS, False).paint(MIXED) == "[ngram: sky][ngram: is][ was]The~ blue~"
    painter = TokenPainter(WORDS, True)
    assert painter.paint(MIXED).startswith("\x1b[36m sky is\x1b[0m\x1b[32m was\x1b[0m")
    assert "\x1b[36mngram\x1b[0m" in painter.legend
    row = round_row(0, MIXED)
    assert row["token_sources"] == ["ngram", "ngram", "model", "model"]
    assert [(one["source"], one["made_by"], one["accepted"]) for one in row["sources"]] == [
        ("model", "draft", 1),
        ("ngram", "target", 2),
    ]
    assert "drafted, verified, accepted of model 2, 2, 1; ngram 2, 2, 2" in text(example(rounds=[MIXED]))


def test_a_source_that_a_worker_made_up_is_no_fault_of_the_trace() -> None:
    odd = one_round(0, 0, [2, 1], num_drafted=1, num_verified=1, num_accepted=1, token_sources=[7])
    odd.sources.add(source="\x1b[2J", num_drafted=1, num_verified=1, num_accepted=1, own=True)
    assert "\x1b[2J" not in text(example(rounds=[odd]), colour=True)
    odd.token_sources[:] = [0]
    assert "\x1b[2J" not in text(example(rounds=[odd, MIXED]))


def test_columns_without_a_figure_are_left_out_unless_they_may_still_come() -> None:
    slow = one_round(1, 1, [1], num_drafted=1, timing={"prefill_us": 60, "draft_us": 900, "compute_us": 100})
    painter = TokenPainter(WORDS, False)
    assert {"d-queue", "prefill"} <= set(Table(painter, [slow]).heading().split())
    assert {"d-queue", "prefill"} <= set(Table(painter).heading().split())
    assert not {"d-queue", "prefill"} & set(Table(painter, example().rounds).heading().split())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"finish_reason": 0, "running": True}, "still running"),
        ({"finish_reason": 0, "error": "CANCELLED"}, "ended by the gateway"),
        ({"finish_reason": 0, "error": "NO_TARGET", "rounds": []}, "ended by NO_TARGET"),
        ({"num_rounds_omitted": 7}, "7 later rounds were not recorded"),
        ({"resumed_tokens": 3}, "resumed after 3 tokens"),
        ({"trace_id": "ab" * 16}, f"trace {'ab' * 16}"),
    ],
)
def test_what_is_special_about_a_request_is_said(fields: dict[str, Any], said: str) -> None:
    assert said in text(example(**fields))


def test_rounds_and_events_come_in_order_of_time_and_can_be_taken_up_again() -> None:
    items = list(interleaved(example()))
    assert [item.at_us for item in items] == [50_000, 65_000, 70_000, 90_000]
    assert list(interleaved(example(), 2)) == items[2:]


def test_a_worker_that_was_replaced_before_the_first_round_is_not_lost_sight_of() -> None:
    part = example()
    part.events.add(at_us=300, kind=trace.TRACE_EVENT_KIND_OPENED, role=worker.WORKER_ROLE_TARGET, worker_id="t2")
    (line,) = [event_line(i) for i in interleaved(part) if isinstance(i, trace.TraceEvent) and i.worker_id == "t2"]
    assert line == "   --     0 target t2 opened at 0.3 ms"


def test_a_character_in_two_tokens_is_drawn_with_the_one_that_completes_it() -> None:
    painter = TokenPainter(WORDS, False)
    assert painter.paint(one_round(0, 0, [1, 7], num_accepted=2)) == "[The][]"
    assert painter.paint(one_round(0, 0, [8], rejected_token_ids=[2], num_verified=1)) == "é~ sky~"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[31m\r\n\u202e\x00é ") == "a\\x1b[31m\\r\\n\\u202e\\x00é "
    painter = TokenPainter({1: b"\x1b]0;title\x07"}, True)
    assert "\x1b]" not in painter.paint(one_round(0, 0, [1], num_accepted=1))


def test_every_token_is_looked_up_the_rejected_ones_too() -> None:
    assert token_ids(example().rounds) == {1, 2, 3, 4, 5, 6, 99}


def test_programs_get_the_same_figures() -> None:
    row = trace_row(example())
    assert (row["state"], row["verification"], row["speculation"]) == ("stop", "greedy", "auto")
    assert (row["drafted"], row["verified"], row["accepted"], row["dropped_stale"]) == (5, 3, 2, 4)
    assert row["time_to_first_token_ms"] == 50.0
    second = row["rounds"][1]
    assert second["queue_ms"] + second["wait_ms"] == 5.0
    assert (second["draft_ms"], second["draft_queue_ms"], second["wire_ms"]) == (3.0, 0.1, 1.2)
    assert second["rejected_token_ids"] == [4, 6, 6]
    assert row["events"][-1] == {
        "at_ms": 70.0, "position": 13, "event": "lost", "role": "draft", "worker": "d1", "model": "",
        "reason": "draft_lost",
    }  # fmt: skip
