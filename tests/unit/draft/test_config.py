"""The command line."""

from __future__ import annotations

import pytest
from outrider.draft.config import parse_arguments, parse_cores
from outrider.drafters import DrafterKind

REQUIRED = ["--model", "/models/small.gguf", "--listen", "127.0.0.1:0"]


def test_the_default_is_the_combined_drafter_named_after_its_model() -> None:
    config = parse_arguments(REQUIRED)
    assert config.kind is DrafterKind.COMBINED
    assert (config.served_name, config.ngrams.min_match) == ("small", 2)


def test_n_grams_alone_continue_shorter_matches() -> None:
    assert parse_arguments([*REQUIRED, "--kind", "ngram"]).ngrams.min_match == 2
    assert parse_arguments([*REQUIRED, "--kind", "ngram", "--min-match", "4"]).ngrams.min_match == 4


def test_cores_are_read_as_taskset_reads_them() -> None:
    assert parse_cores("0,2-4") == (0, 2, 3, 4)
    assert parse_cores("") == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-draft-tokens", "0"], "max_draft_tokens"),
        (["--max-sequences", "0"], "max_sequences"),
        (["--threads", "-1"], "threads"),
        (["--drain-timeout", "nan"], "drain_timeout_s"),
        (["--dtype", "int3"], "dtype"),
        (["--native-variant", "sse9"], "native_variant"),
        (["--min-confidence", "2"], "min_confidence"),
        (["--min-match", "20"], "min_match"),
        (["--cpu-cores", "a"], "cpu_cores"),
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


def test_kernels_are_chosen_and_required_by_option() -> None:
    engine = parse_arguments([*REQUIRED, "--native-variant", "avx2", "--require-native"]).engine
    assert (engine.native_variant, engine.execution) == ("avx2", "native")


def test_a_worker_on_all_interfaces_says_where_to_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    everywhere = ["--model", "/models/small.gguf", "--listen", "0.0.0.0:7000"]
    leased = [*everywhere, "--metadata", "redis://127.0.0.1:1"]
    with pytest.raises(SystemExit):
        parse_arguments(leased)
    assert "advertise: needed where '0.0.0.0:7000' listens on all interfaces" in capsys.readouterr().err
    assert parse_arguments([*leased, "--advertise", "10.0.0.7:7000"]).advertise == "10.0.0.7:7000"
    # Without a lease nobody is told anything.
    assert parse_arguments(everywhere).advertise == ""
