"""What only a draft is told on its command line. The rest is tested with the worker's."""

from __future__ import annotations

import pytest
from outrider.draft.config import DraftConfig, parse_arguments

REQUIRED = ["--model", "/models/small.gguf", "--listen", "127.0.0.1:0"]


def test_a_model_and_an_address_are_enough() -> None:
    assert parse_arguments(REQUIRED) == DraftConfig(model="/models/small.gguf", listen="127.0.0.1:0")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-draft-tokens", "0"], "max_draft_tokens"),
        (["--min-confidence", "2"], "min_confidence"),
        (["--num-alternatives", "9"], "num_alternatives"),
        (["--kind", "ngram"], "--kind"),
        (["--max-draft", "4"], "--max-draft"),
    ],
)
def test_an_impossible_option_is_refused_by_name(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments([*REQUIRED, *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
