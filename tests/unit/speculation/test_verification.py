"""What is emitted is what the target would have said itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from outrider.errors import InvalidRequest
from outrider.speculation import Candidate, DraftDistribution, SamplingParams, VerificationMode, propose
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.proposals import quantize
from outrider.speculation.sampling import support
from outrider.speculation.warm_up import warm_up_proposals, warm_up_verdicts
from outrider.tree import DraftTree
from torch import Tensor

from tests.judged import verify

VOCAB = 40
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
FREE_MODES = [(VerificationMode.GREEDY, GREEDY), (VerificationMode.COUPLED, SAMPLED)]


def model(prefix: list[int], vocab: int = VOCAB) -> Tensor:
    """Logits [vocab] as a function of the whole prefix."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix)) & 0xFFFFFFFF)
    return torch.randn(vocab, generator=generator) * 2


def decode(
    prompt: list[int], count: int, mode: VerificationMode, params: SamplingParams, drafts: object = None
) -> list[int]:
    """Text of at least `count` tokens; `drafts(prefix)` proposes before every step."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        draft = list(drafts(text)) if callable(drafts) else []
        rows = torch.stack([model(text + draft[:i]) for i in range(len(draft) + 1)])
        [verdict] = verify(rows, [Candidate(params, mode, DraftTree(len(text), tuple(draft)))])
        text += verdict.token_ids
    return text[len(prompt) :][:count]


@pytest.mark.parametrize(("mode", "params"), FREE_MODES)
@settings(max_examples=40)
@given(data=st.data())
def test_no_draft_changes_the_text(mode: VerificationMode, params: SamplingParams, data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
    plain = decode(prompt, 12, mode, params)

    def drafts(text: list[int]) -> list[int]:
        true = plain[len(text) - len(prompt) :]
        kept = data.draw(st.integers(0, 4))
        noise = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
        return true[:kept] + noise

    assert decode(prompt, 12, mode, params, drafts) == plain


def test_a_right_draft_is_accepted_whole_and_followed_by_a_bonus() -> None:
    plain = decode([1], 5, VerificationMode.GREEDY, GREEDY)
    rows = torch.stack([model([1, *plain[:i]]) for i in range(5)])
    [verdict] = verify(rows, [Candidate(GREEDY, VerificationMode.GREEDY, DraftTree(1, tuple(plain[:4])))])
    assert (verdict.token_ids, verdict.num_verified, verdict.accepted) == (plain, 4, [0, 1, 2, 3])


def test_positions_after_a_rejection_are_not_verified() -> None:
    plain = decode([1], 5, VerificationMode.GREEDY, GREEDY)
    draft = [plain[0], (plain[1] + 1) % VOCAB, plain[2], plain[3]]
    rows = torch.stack([model([1, *draft[:i]]) for i in range(5)])
    [verdict] = verify(rows, [Candidate(GREEDY, VerificationMode.GREEDY, DraftTree(1, tuple(draft)))])
    assert (verdict.token_ids, verdict.num_accepted, verdict.num_verified) == (plain[:2], 1, 2)


@pytest.mark.parametrize(("mode", "params"), FREE_MODES)
def test_a_tree_is_walked_along_the_target_s_own_choices(mode: VerificationMode, params: SamplingParams) -> None:
    plain = decode([1], 4, mode, params)
    wrong = [(t + 1) % VOCAB for t in plain]
    #  root ─ wrong0, plain0 ─ wrong1, plain1 ─ plain2
    draft = (wrong[0], plain[0], wrong[1], plain[1], plain[2])
    parents = (-1, -1, 1, 1, 3)
    paths = {-1: [], **{i: [] for i in range(5)}}
    for node, parent in enumerate(parents):
        paths[node] = [*paths[parent], draft[node]]
    rows = torch.stack([model([1, *paths[node]]) for node in range(-1, 5)])
    [verdict] = verify(rows, [Candidate(params, mode, DraftTree(1, draft, parents))])
    assert (verdict.token_ids, verdict.num_accepted, verdict.accepted) == (plain, 3, [1, 3, 4])


def test_the_draft_meets_the_target_s_noise_even_with_a_reduced_vocabulary() -> None:
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0))
    token_map = torch.arange(0, VOCAB, 2)
    agreed = 0
    for position, row in enumerate(logits):
        [guess] = propose(row[token_map][None], [SAMPLED], [VerificationMode.COUPLED], [position], token_map)
        [verdict] = verify(row[None], [Candidate(SAMPLED, VerificationMode.COUPLED, DraftTree(position))])
        assert guess.token_id % 2 == 0
        agreed += guess.token_id == verdict.token_ids[0]
    # Half the tokens are out of the draft's reach; shared noise makes it right on most of the others.
    assert agreed > 70


def test_ratio_mode_accepts_everything_when_the_draft_is_the_target() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_k=20, seed=9)
    verdicts = []
    for position in range(200):
        [guess] = propose(logits, [params], [VerificationMode.RATIO], [position])
        assert guess.q is not None
        draft = DraftTree(position, (guess.token_id,), q=(guess.q,))
        verdicts += verify(logits.repeat(2, 1), [Candidate(params, VerificationMode.RATIO, draft)])
    assert sum(v.num_accepted for v in verdicts) >= 199  # but for q's sixteen bits


def test_a_token_the_target_cannot_say_is_never_accepted() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 3] = 0.0
    q = DraftDistribution((7,), (65536,))
    for seed in range(50):
        candidate = Candidate(SamplingParams(seed=seed), VerificationMode.RATIO, DraftTree(0, (7,), q=(q,)))
        assert verify(logits, [candidate])[0].token_ids == [3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_a_bad_sampling_value_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("ids", "counts"),
    [((), ()), ((1, 1), (1, 65535)), ((1,), (65535,)), ((1, 2), (65536, 0)), ((1,), (1, 65535)), ((-1,), (65536,))],
)
def test_a_malformed_draft_distribution_is_refused(ids: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        DraftDistribution(ids, counts)


@pytest.mark.parametrize(
    "changes",
    [
        {"q": ()},
        {"q": (DraftDistribution((4,), (65536,)),)},
        {"q": (DraftDistribution((3,), (65536,)),), "parents": (-1,)},
    ],
)
def test_a_ratio_candidate_without_its_own_q_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Candidate(SAMPLED, VerificationMode.RATIO, DraftTree(0, (3,), **changes)).check()  # type: ignore[arg-type]


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.2, 3), st.integers(0, VOCAB + 5), st.floats(0.05, 1), st.floats(0, 0.5))
@example(0, 0.5, 0, 0.9999999999999999, 0.0)
def test_the_support_is_the_textbook_s(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature, top_k, top_p, min_p)
    probs = torch.softmax(logits.double() / temperature, 0).tolist()
    order = sorted(range(VOCAB), key=lambda i: -probs[i])
    if top_k:
        order = order[:top_k]
    least = min_p * probs[order[0]] * (1 - 1e-9)
    mass, needed, allowed, total = 0.0, set(), set(), sum(probs[i] for i in order)
    for i in order:
        if probs[i] >= least:
            # Where less than this is missing, rounding decides.
            if top_p == 1 or mass < top_p * total - 1e-9:
                needed.add(i)
            if mass < top_p * total + 1e-9:
                allowed.add(i)
        mass += probs[i]
    found = support(logits, params)
    got = dict(zip(found.token_ids.tolist(), found.probs.tolist(), strict=True))
    kept = set(got)
    assert needed <= kept <= allowed
    want = sum(probs[i] for i in kept)
    for i in kept:
        assert got[i] == pytest.approx(probs[i] / want, abs=1e-9)


@given(st.integers(0, 10_000), st.integers(1, 200))
@settings(max_examples=40)
def test_quantized_counts_always_form_a_distribution(seed: int, width: int) -> None:
    logits = torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 8
    q = quantize(support(logits, SamplingParams()))  # DraftDistribution checks itself at birth
    assert q.token_ids[0] == int(logits.argmax())
    assert q.counts[0] == max(q.counts)


def test_noise_depends_on_seed_position_purpose_and_token_and_nothing_else() -> None:
    ids = torch.arange(1000)
    base = gumbel(1, 2, ids)
    assert torch.equal(gumbel(1, 2, ids.flip(0)).flip(0), base)
    assert torch.equal(gumbel(1, 2, ids[500:501]), base[500:501])
    for other in (gumbel(2, 2, ids), gumbel(1, 3, ids)):
        assert not torch.isclose(other, base).any()
    assert len({uniform(1, 2, purpose) for purpose in Purpose}) == len(Purpose)


def test_gumbel_noise_is_gumbel_and_uncorrelated_along_positions_and_seeds() -> None:
    from scipy import stats

    ids = torch.arange(50_000)
    sample = gumbel(7, 11, ids).numpy()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    along = torch.stack([gumbel(7, position, ids[:64]) for position in range(2000)])
    assert stats.kstest(along.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    correlation = torch.corrcoef(torch.stack([along[:-1].flatten(), along[1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(1999 * 64)


def test_without_our_kernels_a_gpu_is_warmed_up_and_its_rows_are_chosen_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise ImportError("triton")

    logits = torch.stack([model([number]) for number in range(2)])
    params, modes = [GREEDY, SAMPLED], [VerificationMode.GREEDY, VerificationMode.COUPLED]
    wanted = propose(logits, params, modes, [3, 3])
    monkeypatch.setattr("outrider.speculation.choosing._kernels", missing)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    warm_up_verdicts(logits)
    warm_up_proposals(logits, propose, 2)
    assert propose(logits, params, modes, [3, 3]) == wanted
