"""The command line: what is unknown or impossible is named."""

from __future__ import annotations

import pytest
from outrider.target.config import TargetConfig, parse_arguments, parse_cores


def test_defaults_need_only_a_model_and_an_address() -> None:
    config = parse_arguments(["--model", "/models/tiny-chat/", "--listen", "127.0.0.1:0"])
    assert config == TargetConfig(model="/models/tiny-chat/", listen="127.0.0.1:0")
    assert config.served_name == "tiny-chat"


def test_cores_are_written_as_for_taskset() -> None:
    assert parse_cores("0,2-4,3") == (0, 2, 3, 4)
    assert parse_cores("") == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-sequences", "0"], "max_sequences"),
        (["--max-sequences", "600"], "max_sequences"),
        (["--max-draft-tokens", "-1"], "max_draft_tokens"),
        (["--dtype", "int3"], "dtype"),
        (["--native-variant", "sse9"], "native_variant"),
        (["--block-size", "0"], "block_size"),
        (["--threads", "-2"], "threads"),
        (["--tensor-parallel", "0"], "tensor_parallel"),
        (["--tensor-parallel", "2", "--device", "cuda:1"], "device"),
        (["--step-timeout", "0"], "step_timeout_s"),
        (["--cpu-cores", "a"], "'a'"),
        (["--sped", "1"], "--sped"),
    ],
)
def test_an_impossible_option_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--model", "m", "--listen", "h:1", *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_kernels_are_chosen_and_required_by_option() -> None:
    engine = parse_arguments(["--model", "m", "--listen", "h:1", "--native-variant", "avx2", "--require-native"]).engine
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
