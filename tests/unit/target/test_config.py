"""What only a target is told on its command line. The rest is tested with the worker's."""

from __future__ import annotations

import pytest
from outrider.target.config import TargetConfig, parse_arguments


def test_defaults_need_only_a_model_and_an_address() -> None:
    config = parse_arguments(["--model", "/models/tiny-chat/", "--listen", "127.0.0.1:0"])
    assert config == TargetConfig(model="/models/tiny-chat/", listen="127.0.0.1:0")
    assert config.served_name == "tiny-chat"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-sequences", "600"], "max_sequences"),
        (["--max-draft-tokens", "512"], "max_draft_tokens"),
        (["--prefill-threads", "-1"], "prefill_threads"),
        (["--tensor-parallel", "0"], "tensor_parallel"),
        (["--tensor-parallel", "2"], "tensor_parallel: needs engine vllm"),
        (["--engine", "vllm", "--tensor-parallel", "2", "--device", "cuda:1"], "device"),
    ],
)
def test_an_impossible_option_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--model", "m", "--listen", "127.0.0.1:1", *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
