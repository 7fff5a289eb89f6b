"""An opening is refused before anything runs when this worker could not serve it to the end."""

from __future__ import annotations

import pytest
from outrider.errors import InvalidRequest
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.requests.limits import Limits

from tests.unit.target.harness import opening

LIMITS = Limits(vocab_size=384, max_context_len=512, block_size=8, num_blocks=16, max_draft_tokens=8)


def test_a_sound_opening_passes() -> None:
    LIMITS.check(opening([1, 2, 3], committed=[4], stops=[2], salt=b"tenant"))


@pytest.mark.parametrize(
    ("what", "field"),
    [
        # Whatever no sequence may say: see tests/unit/sequence.
        (opening([1, 384]), "prompt_token_ids[1]"),
        (opening([1] * 512), "prompt_token_ids"),
        (opening([1], speculation=Speculation(max_draft_tokens=9)), "speculation.max_draft_tokens"),
        (opening([1], speculation=Speculation(max_wait_us=2**32 - 1)), "speculation.max_wait_us"),
    ],
)
def test_each_bad_field_is_named(what: SequenceSpec, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.check(what)
    assert caught.value.field == field


def test_what_could_never_fit_the_kv_cache_is_refused() -> None:
    LIMITS.check(opening([1] * 100, max_new_tokens=28))
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.check(opening([1] * 100, max_new_tokens=29))
    assert caught.value.field == "stopping.max_new_tokens"


@pytest.mark.parametrize(("price", "weight", "chance"), [(0.0, 1.0, 0.0), (0.3, 2.0, 0.15), (0.6, 0.5, 1.0)])
def test_drafts_hear_of_a_price_as_a_chance_of_their_tenants_tokens(price: float, weight: float, chance: float) -> None:
    assert Speculation(weight=weight).for_draft(price).min_chance == pytest.approx(chance)
