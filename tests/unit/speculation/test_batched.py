"""Judging all rows at once says what judging them one after another says: the same rule, the same noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outrider.speculation import (
    Candidate,
    DraftDistribution,
    LogitsOptions,
    LogitsProcessor,
    NotFinite,
    SamplingParams,
    VerificationMode,
    batched,
    choice_kernels,
    choosing,
    propose,
)
from outrider.speculation.changes import Changes
from outrider.speculation.columns import Columns
from outrider.speculation.noise import Purpose, gumbel_keys, gumbel_of
from outrider.speculation.proposals import propose_batched, quantize
from outrider.speculation.sampling import support
from outrider.tree import DraftTree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.judged import verify, verify_batched

pytestmark = pytest.mark.usefixtures("interpreted", "narrow_blocks")

VOCAB = 90


@pytest.fixture(scope="module")
def narrow_blocks() -> Iterator[None]:
    """Several to a wide vocabulary."""
    with patch.object(choosing, "_BLOCK", 1024):
        yield


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 200]),
    top_p=st.sampled_from([0.1, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, (1 << 64) - 1),
)

GREEDY = SamplingParams(temperature=0)
SAMPLING = [VerificationMode.COUPLED, VerificationMode.RATIO]


def logits_of(rows: int, seed: int, *, ties: bool = True) -> Tensor:
    """Some tokens masked, some equally likely, as grammars and low precision make them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=generator) * 2
    if ties:
        logits = logits.bfloat16().float()
    logits[:, ::7] = -torch.inf
    return logits


@st.composite
def candidates(draw: st.DrawFn, seed: int) -> Candidate:
    mode = draw(st.sampled_from(VerificationMode))
    params = GREEDY if mode is VerificationMode.GREEDY else draw(sampling)
    base_len, count = draw(st.integers(1, 5000)), draw(st.integers(0, 5))
    if mode is VerificationMode.RATIO:
        q = [quantize(support(row, params)) for row in logits_of(count, seed + 1)]
        drafted = [draw(st.sampled_from(distribution.token_ids)) for distribution in q]
        return Candidate(params, mode, DraftTree(base_len, tuple(drafted), q=tuple(q)))
    # Few tokens, so that some are what the target says.
    drafted = [int(row.argmax()) if draw(st.booleans()) else draw(st.integers(0, 9)) for row in logits_of(count, seed)]
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count)) if draw(st.booleans()) else ()
    return Candidate(params, mode, DraftTree(base_len, tuple(drafted), parents))


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_any_batch_is_judged_as_its_rows_are(data: st.DataObject, seed: int) -> None:
    batch = data.draw(st.lists(candidates(seed), min_size=1, max_size=4))
    logits = torch.cat([logits_of(candidate.num_rows, seed) for candidate in batch])
    assert verify_batched(logits, batch) == verify(logits, batch)


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 10_000), mapped=st.booleans())
def test_any_rows_are_proposed_for_as_one_by_one(data: st.DataObject, seed: int, mapped: bool) -> None:
    rows = data.draw(st.integers(1, 5))
    # Among equally likely tokens, which q names first, and so which is drawn, is the sort's to say.
    logits = logits_of(rows, seed, ties=False)
    modes = data.draw(st.lists(st.sampled_from(VerificationMode), min_size=rows, max_size=rows))
    params = [GREEDY if mode is VerificationMode.GREEDY else data.draw(sampling) for mode in modes]
    positions = data.draw(st.lists(st.integers(1, 5000), min_size=rows, max_size=rows))
    token_map = torch.arange(VOCAB) * 3 + 1 if mapped else None
    num_others = data.draw(st.integers(0, 3))
    got = propose_batched(logits, params, modes, positions, token_map, num_others)
    for now, want in zip(got, propose(logits, params, modes, positions, token_map, num_others), strict=True):
        assert now.token_id == want.token_id
        # Where little is left to choose from, a chance may be 0 one way and next to nothing the other.
        ranked = [[token for token, chance in one.others if chance > 1e-9] for one in (now, want)]
        assert ranked[0] == ranked[1]
        assert len(ranked[0]) <= num_others
        assert math.isclose(now.confidence, want.confidence, rel_tol=1e-4)
        assert now.q == want.q


WIDE = 3000
"""More than are ranked."""

wide_sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 20, 512, 513, 2000]),
    top_p=st.sampled_from([0.5, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.3]),
    seed=st.integers(0, (1 << 64) - 1),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(wide_sampling, min_size=1, max_size=4), st.integers(0, 999), st.booleans(), st.sampled_from(SAMPLING))
def test_a_wide_vocabulary_is_judged_as_row_by_row(
    params: list[SamplingParams], seed: int, ties: bool, mode: VerificationMode
) -> None:
    logits = torch.randn(len(params), WIDE, generator=torch.Generator().manual_seed(seed)) * (seed % 4)
    if ties:
        logits = logits.bfloat16().float()
    batch = [Candidate(each, mode, DraftTree(7 + seed)) for each in params]
    assert verify_batched(logits, batch) == verify(logits, batch)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(wide_sampling, min_size=1, max_size=4), st.integers(0, 999), st.booleans())
def test_drafts_in_a_wide_vocabulary_are_judged_as_row_by_row(
    params: list[SamplingParams], seed: int, ties: bool
) -> None:
    """Drafts of another model, of a near one, and of the target itself."""
    generator = torch.Generator().manual_seed(seed)
    batch, logits = [], []
    for each, apart in zip(params, (1.0, 0.1, 0.0, 0.3), strict=False):
        rows = torch.randn(4, WIDE, generator=generator) * (seed % 4)
        near = rows[:3] + apart * torch.randn(3, WIDE, generator=generator)
        proposals = propose(near, [each] * 3, [VerificationMode.RATIO] * 3, range(seed, seed + 3))
        q = tuple(proposal.q for proposal in proposals if proposal.q is not None)
        drafted = tuple(proposal.token_id for proposal in proposals)
        batch.append(Candidate(each, VerificationMode.RATIO, DraftTree(seed, drafted, q=q)))
        logits.append(rows.bfloat16().float() if ties else rows)
    joined = torch.cat(logits)
    assert verify_batched(joined, batch) == verify(joined, batch)


# Of which the likeliest hold all that is kept: a draft is content with those. A top-p of 0.999 keeps more than 512.
narrow_sampling = wide_sampling.filter(
    lambda params: params.temperature < 3 and params.top_k < 512 and (params.top_k > 0 or params.top_p != 0.999)
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(narrow_sampling, min_size=1, max_size=4), st.integers(0, 999), st.booleans(), st.sampled_from(SAMPLING))
def test_a_wide_vocabulary_is_proposed_from_as_row_by_row(
    params: list[SamplingParams], seed: int, mapped: bool, mode: VerificationMode
) -> None:
    rows = len(params)
    # Of a model whose logits are padded; as peaked as a model's, or the likeliest would not reach a draft's top-p.
    logits = (torch.randn(rows, WIDE + 8, generator=torch.Generator().manual_seed(seed)) * 4)[:, :WIDE]
    assume(not any(_at_an_edge(row, each) for row, each in zip(logits, params, strict=True)))
    token_map = torch.arange(WIDE) * 3 + 1 if mapped else None
    arguments: Any = logits, params, [mode] * rows, range(seed, seed + rows), token_map, 3
    for now, want in zip(propose_batched(*arguments), propose(*arguments), strict=True):
        assert (now.token_id, now.q) == (want.token_id, want.q)
        assert math.isclose(now.confidence, want.confidence, rel_tol=1e-4)
        others, wanted = (
            [(token, round(chance, 3)) for token, chance in each.others if chance > 1e-3] for each in (now, want)
        )
        assert [token for token, _ in others] == [token for token, _ in wanted]
        assert [chance for _, chance in others] == pytest.approx([chance for _, chance in wanted], abs=2e-3)


def _at_an_edge(row: Tensor, params: SamplingParams) -> bool:
    """Whether a draft, which sums in float32, may keep one token fewer than top-p does."""
    mass = (row.double() / params.temperature).softmax(-1).sort(descending=True).values.cumsum(-1)
    return bool(((mass - params.top_p).abs() < 2e-5).any()) and params.top_p < 1 and params.top_k == 0


@pytest.mark.slow
def test_a_chance_is_that_among_all_that_is_kept() -> None:
    logits = torch.randn(4, 32_000, generator=torch.Generator().manual_seed(2)) * 3
    params = [SamplingParams(top_p=top_p, seed=seed) for top_p in (0.9, 0.99) for seed in (1, 2)]
    arguments: Any = logits, params, [VerificationMode.COUPLED] * 4, range(4)
    for now, want in zip(propose_batched(*arguments), propose(*arguments), strict=True):
        assert now.token_id == want.token_id
        assert math.isclose(now.confidence, want.confidence, rel_tol=1e-3)


class NoneWide(TorchDispatchMode):
    """No sort, and no result in float64 as wide as the vocabulary."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        assert "sort" not in func.overloadpacket.__name__.split("_")
        for each in tree_leaves(found):
            assert not (isinstance(each, Tensor) and each.dtype == torch.float64 and WIDE in each.shape), func
        return found


def chosen_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that are chosen by the rule itself, because float32 does not tell enough."""
    found: list[int] = []
    rule = batched.choose_row

    def note(candidate: Candidate, row: int, logits: Tensor) -> int:
        found.append(row)
        return rule(candidate, row, logits)

    monkeypatch.setattr(batched, "choose_row", note)
    return found


def drafted(row: Tensor, params: SamplingParams, mode: VerificationMode, position: int) -> Candidate:
    """A candidate, in ratio mode with a drafted token."""
    if mode is VerificationMode.COUPLED:
        return Candidate(params, mode, DraftTree(position))
    q = (quantize(support(row.roll(position % 2), params)),)
    return Candidate(params, mode, DraftTree(position, (q[0].token_ids[0],), q=q))


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}])
def test_a_usual_row_is_certain_without_the_whole_vocabulary(
    mode: VerificationMode, changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = chosen_again(monkeypatch)
    # As peaked as a model's: half of the mass on some thirty tokens.
    logits = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(seed=5, **changes)  # type: ignore[arg-type]
    batch = [drafted(row, params, mode, position) for position, row in enumerate(logits)]
    twice = logits.repeat_interleave(len(batch[0].positions), 0)
    with NoneWide():
        found = verify_batched(twice, batch)
    assert found == verify(twice, batch)
    assert not again


def test_a_row_without_ranks_is_certain_beside_one_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    again = chosen_again(monkeypatch)
    logits = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(1)) * 3
    q = tuple(quantize(support(row, SamplingParams())) for row in logits[:1])
    draft = DraftTree(7, (q[0].token_ids[0],), q=q)
    batch = [Candidate(SamplingParams(seed=5, top_p=top_p), VerificationMode.RATIO, draft) for top_p in (1.0, 0.9)]
    assert verify_batched(logits, batch) == verify(logits, batch)
    assert not again


@pytest.mark.slow
def test_where_float32_does_not_tell_the_rule_itself_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equally likely tokens, a top-p that is met within a rounding error."""
    again = chosen_again(monkeypatch)
    logits = torch.zeros(40, WIDE)
    logits[:, : WIDE // 2] = 1e-6
    half = float((logits[0].double().softmax(-1)[: WIDE // 2]).sum())
    batch = [
        Candidate(SamplingParams(seed=seed, top_p=half), VerificationMode.COUPLED, DraftTree(9)) for seed in range(40)
    ]
    assert verify_batched(logits, batch) == verify(logits, batch)
    assert again


@triton.jit
def noise_kernel(keys, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, choice_kernels._noise(choice_kernels._mixed(at, tl.load(keys))))


def test_noise_in_float32_is_close_enough_to_tell_which_tokens_may_win() -> None:
    keys, out = (
        torch.tensor(gumbel_keys(*np.array([[1], [4], [Purpose.GUMBEL]], dtype=np.uint64))),
        torch.empty(1 << 18),
    )
    noise_kernel[(64,)](keys, out, SIZE=4096)
    assert float((out - gumbel_of(keys, torch.arange(1 << 18))).abs().max()) < 1e-4


@pytest.mark.parametrize("banned", [(5,), tuple(range(3)), tuple(range(3, 2500, 50))])
def test_kernels_change_logits_to_the_bit_as_the_cpu_does_in_every_block(banned: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(WIDE, (2400,), generator=generator).tolist()
    bias = tuple((token, token / 100 - 9) for token in range(0, WIDE, 3))
    every = LogitsOptions(1.1, -0.7, 1.3, bias[:1000], bad_words=tuple((token,) for token in banned))
    asked = [every, replace(every, allowed_token_ids=(0, 1, 2, 2700)), LogitsOptions(allowed_token_ids=(0, 1, 2))]
    asked[2] = replace(asked[2], bad_words=every.bad_words)
    drafts = [(text[0], 7, 7), (7, 8, 9), ()]
    batch = [
        Candidate(
            GREEDY, VerificationMode.GREEDY, DraftTree(9, draft), LogitsProcessor(options, text[:1500], text[900:])
        )
        for options, draft in zip(asked, drafts, strict=True)
    ]
    logits = torch.randn(10, WIDE, generator=generator) * 5
    wanted, columns = logits.clone(), Columns()
    changes = Changes([*batch, Candidate(draft=DraftTree(3))])
    changes.apply(wanted)
    changes.lay_out(columns)
    choosing.choose(logits, columns.send(logits.device))
    assert torch.equal(logits, wanted)


def test_log_probabilities_are_those_of_a_token_that_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    batch = [Candidate(params, VerificationMode.COUPLED, DraftTree(9, (1, 2)), num_top=2)]
    logits = logits_of(3, 5)
    want = verify(logits.clone(), batch)
    unsure = torch.tensor([[0, choosing.UNSURE]] * 3)
    monkeypatch.setattr(batched, "choose", lambda logits, sent: unsure)
    found = verify_batched(logits.clone(), batch)
    assert found == want and found[0].token_ids[0] != 0


def test_a_point_mass_is_judged_by_ratio_too() -> None:
    logits = logits_of(2, 3)
    best = int(logits[0].argmax())
    for drafted in (best, best + 1):
        q = DraftDistribution((drafted,), (1 << 16,))
        candidate = Candidate(GREEDY, VerificationMode.RATIO, DraftTree(9, (drafted,), q=(q,)))
        assert verify_batched(logits, [candidate]) == verify(logits, [candidate])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("verifying", [verify, verify_batched])
def test_logits_that_are_no_numbers_are_refused(verifying: object, poison: float) -> None:
    logits = logits_of(2, 1)
    logits[1, 5] = poison
    with pytest.raises(NotFinite):
        verifying(logits, [Candidate(GREEDY, VerificationMode.GREEDY, DraftTree(4, (7,)))])  # type: ignore[operator]


@given(st.integers(0, 1000), sampling | st.just(GREEDY), st.sampled_from(VerificationMode), st.integers(1, 8))
def test_what_is_named_beside_a_token_is_ranked_and_changes_nothing_of_the_token(
    seed: int, params: SamplingParams, mode: VerificationMode, count: int
) -> None:
    logits, positions = logits_of(4, seed, ties=False), [3, 4, 5, 9]
    named = propose(logits, [params] * 4, [mode] * 4, positions, num_others=count)
    for proposal, alone in zip(named, propose(logits, [params] * 4, [mode] * 4, positions), strict=True):
        assert replace(proposal, others=()) == alone
        tokens, chances = [token for token, _ in proposal.others], [chance for _, chance in proposal.others]
        assert chances == sorted(chances, reverse=True) and sum(chances) < 1.0001
        assert len({*tokens, proposal.token_id}) == 1 + len(tokens) <= 1 + count
        assert not (tokens and mode is VerificationMode.RATIO)
