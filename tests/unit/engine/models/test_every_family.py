"""No family of transformers answers wrongly in silence: its logits are those of transformers, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.engine.loading.comparison import PROVEN

from tests.unit.engine.models.every_family import FAMILIES, base, changed, verdict
from tests.unit.engine.test_supported_models import MODELS

OFFSET = (*("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm", "xmod"),)
"""Families that number their positions from the padding token on."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [OFFSET[0], *(pytest.param(each, marks=pytest.mark.slow) for each in OFFSET[1:])])
def test_a_decoder_with_offset_positions_is_refused_by_name(family: str, dtype: str) -> None:
    found = verdict(family, base(family), dtype)
    assert found.kind == "refused"
    assert f"model_type {family}: its logits here differ from those of transformers" in found.why


@pytest.mark.parametrize("family", ["bert", "gpt2", "olmo3", "gemma3", "gemma4", "granitemoe"])
def test_a_family_that_is_not_on_the_list_is_compared_and_served(family: str) -> None:
    assert family not in PROVEN
    assert verdict(family, base(family)).kind == "equal"


def test_a_decoder_that_alone_does_more_than_the_whole_model_is_refused() -> None:
    settings = base("gemma3")
    settings["text_config"]["final_logit_softcapping"] = 5.0
    found = verdict("gemma3", settings)
    assert found.kind == "refused" and "its logits here differ from those of transformers" in found.why


def test_a_family_that_is_never_compared_has_tests_that_compare_it() -> None:
    assert set(MODELS) == PROVEN


def _forms(family: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        return [("as it is", base(family)), *changed(family)]
    except Exception:  # transformers has no defaults for some
        return []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_wrong_as_it_is_or_with_some_of_its_fields_changed(family: str) -> None:
    for name, settings in _forms(family)[:: 1 if family in PROVEN else 12]:
        assert verdict(family, settings).kind != "wrong", name
