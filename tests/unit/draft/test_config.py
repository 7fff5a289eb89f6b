"""What only a draft is told on its command line. The rest is tested with the worker's."""

from __future__ import annotations

import pytest
from outrider.draft.config import DraftConfig, parse_arguments
from outrider.drafters import DrafterKind

REQUIRED = ["--model", "/models/small.gguf", "--listen", "127.0.0.1:0"]


def test_the_default_is_the_combined_drafter() -> None:
    config = parse_arguments(REQUIRED)
    assert config == DraftConfig(model="/models/small.gguf", listen="127.0.0.1:0")
    assert config.kind is DrafterKind.MODEL


def test_the_shortest_match_is_an_option() -> None:
    assert parse_arguments([*REQUIRED, "--kind", "ngram", "--min-match", "4"]).ngrams.min_match == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-draft-tokens", "0"], "max_draft_tokens"),
        (["--min-confidence", "2"], "min_confidence"),
        (["--min-match", "20"], "min_match"),
        (["--num-alternatives", "9"], "num_alternatives"),
        (["--kind", "oracle"], "--kind"),
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
