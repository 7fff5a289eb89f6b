"""What was answered before is drafted again, under its own cache salt only, and within bounds."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

import pytest
from outrider.drafting.lookup.suffix import History, SuffixConfig, SuffixDrafts, SuffixLookup
from outrider.drafting.source import CloseReason
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree

from tests.told import Told

GREEDY = SamplingParams(temperature=0)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def opening(prompt: Sequence[int], salt: bytes, count: int = 8, tenant: str = "") -> SequenceSpec:
    return SequenceSpec(
        prompt, GREEDY, VerificationMode.GREEDY, speculation=Speculation(count), salt=salt, tenant=tenant
    )


def answered(source: Told, prompt: list[int], answer: list[int], salt: bytes, serial: int) -> int:
    """A target that says `answer`: returns its steps, one for each round of drafts and the token after them."""
    key, steps, at = SequenceKey(1, serial), 0, 0
    source.open(key, opening(prompt, salt))
    while at < len(answer):
        [drafted] = [tree.guess() for _, tree in source.poll() if isinstance(tree, DraftTree)] or [[]]
        right = 0
        while right < len(drafted) and at + right < len(answer) - 1 and drafted[right] == answer[at + right]:
            right += 1
        source.commit(key, len(prompt) + at, answer[at : at + right + 1])
        at, steps = at + right + 1, steps + 1
    source.close(key, CloseReason.FINISHED)
    return steps


def test_an_answer_given_again_takes_a_fraction_of_the_steps() -> None:
    source = Told(SuffixDrafts(History()))
    prompt, answer = tokens(40, 1), tokens(120, 2)
    assert answered(source, prompt, answer, b"a", 1) == 120
    # Eight drafted tokens and one of the target's own in each step.
    assert answered(source, prompt, answer, b"a", 2) == pytest.approx(120 / 9, abs=1)
    edited = [*answer[:60], 5000, 5001, *answer[60:]]
    assert answered(source, prompt, edited, b"a", 3) < 30


def test_the_commonest_way_on_is_proposed_and_the_newest_of_equals() -> None:
    history = History(SuffixConfig(min_match=2, context=4))
    for following in ([3, 4], [3, 4], [8, 9]):
        history.add(b"", [1, 2, *following])
    assert history.find(b"", [1, 2], 8) == ([3, 4], 2)
    history.add(b"", [1, 2, 8, 9])
    assert history.find(b"", [1, 2], 8) == ([8, 9], 2)
    # The longer match counts, however rare it is.
    history.add(b"", [7, 1, 2, 5, 6])
    assert history.find(b"", [7, 1, 2], 8) == ([5, 6], 3)


def test_no_probe_finds_a_text_of_another_salt_and_an_erased_one_is_gone() -> None:
    history = History()
    texts = {bytes([salt]): tokens(400, salt) for salt in range(10)}
    for salt, text in texts.items():
        history.add(salt, text, tenant=f"tenant-{salt[0]}")
    rng = random.Random(0)
    for _ in range(1000):
        owner, other = rng.sample(sorted(texts), 2)
        at = rng.randrange(10, 390)
        assert history.find(owner, texts[owner][:at], 4)[0] == texts[owner][at : at + 4]
        assert history.find(other, texts[owner][:at], 4) == ([], 0)
    assert history.erase("tenant-3") == 1 and history.erase("tenant-3") == 0
    for _ in range(1000):
        owner, at = rng.choice(sorted(texts)), rng.randrange(10, 390)
        found, _ = history.find(owner, texts[owner][:at], 4)
        assert found == ([] if owner == bytes([3]) else texts[owner][at : at + 4])
    assert history.num_bytes == pytest.approx(9 / 10 * 4000 * 320)


def test_memory_is_bounded_for_a_salt_and_in_all_and_what_is_used_stays() -> None:
    config = SuffixConfig(total_bytes=3000 * 320, salt_bytes=1000 * 320)
    history = History(config)
    used = tokens(200, 0)
    history.add(b"a", used)
    for seed in range(1, 60):
        history.add(b"a", tokens(200, seed))
        assert history.find(b"a", used[:50], 4)[0] == used[50:54]
    assert history.num_bytes == 1000 * 320
    assert history.find(b"a", tokens(200, 1)[:50], 4) == ([], 0)
    for salt in range(50):
        history.add(b"salt %d" % salt, tokens(150, salt))
        assert history.num_bytes <= 3000 * 320
    # The salts used longest ago are forgotten, and nothing of them is left.
    assert history.find(b"a", used[:50], 4) == ([], 0)
    assert len(history._pasts) == 20


def test_a_text_that_moved_elsewhere_is_not_learnt_here() -> None:
    source = Told(SuffixDrafts(History()))
    text = tokens(60, 5)
    source.open(SequenceKey(1, 1), opening(text[:40], b""))
    source.commit(SequenceKey(1, 1), 40, text[40:])
    source.close(SequenceKey(1, 1), CloseReason.MOVED)
    assert source.history.num_bytes == 0


def test_a_text_that_ends_while_another_thread_erases_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    source, text, key = Told(SuffixDrafts(History())), tokens(60, 5), SequenceKey(1, 1)
    source.open(key, opening(text[:40], b"", tenant="t"))
    source.commit(key, 40, text[40:])
    remember, erasing = SuffixLookup.remember, threading.Thread(target=source.erase, args=("t",))

    def after_an_erasure_began(lookup: SuffixLookup) -> None:
        """The text no longer runs, and is not yet known."""
        erasing.start()
        erasing.join(0.2)
        remember(lookup)

    monkeypatch.setattr(SuffixLookup, "remember", after_an_erasure_began)
    source.close(key, CloseReason.FINISHED)
    erasing.join()
    assert source.history.find(b"", text[:50], 4) == ([], 0)


def test_texts_are_opened_found_and_closed_while_another_thread_erases() -> None:
    source, ended = Told(SuffixDrafts(History())), threading.Event()
    erasures: list[int] = []

    def erase() -> None:
        while not ended.is_set():
            erasures.append(source.erase("t"))

    erasing, before = threading.Thread(target=erase), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        erasing.start()
        for number in range(300):
            assert answered(source, tokens(20, number % 7), tokens(20, 100), b"%d" % (number % 50), number)
    finally:
        ended.set()
        erasing.join()
        sys.setswitchinterval(before)
    assert len(erasures) > 1


def test_what_runs_while_a_tenants_texts_are_erased_is_not_remembered_either() -> None:
    source = Told(SuffixDrafts(History()))
    text = tokens(60, 5)
    for number, tenant in enumerate(("erased", "kept")):
        key = SequenceKey(1, number)
        source.open(key, opening(text[:40], tenant.encode(), tenant=tenant))
        source.commit(key, 40, text[40:])
    assert source.erase("erased") == 0
    for number in range(2):
        source.close(SequenceKey(1, number), CloseReason.FINISHED)
    assert source.history.find(b"erased", text[:50], 4) == ([], 0)
    assert source.history.find(b"kept", text[:50], 4)[0] == text[50:54]
