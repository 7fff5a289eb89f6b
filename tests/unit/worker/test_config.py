"""What every worker is told on its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from outrider.draft.config import parse_arguments as parse_draft
from outrider.target.config import parse_arguments as parse_target
from outrider.worker.config import WorkerConfig, parse_cores

Parse = Callable[[Sequence[str]], WorkerConfig]
REQUIRED = ["--model", "/models/small.gguf/", "--listen", "127.0.0.1:0"]
both = pytest.mark.parametrize("parse", [parse_draft, parse_target], ids=["draft", "target"])


def test_cores_are_written_as_for_taskset() -> None:
    assert parse_cores("0,2-4,3") == (0, 2, 3, 4)
    assert parse_cores("") == ()


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-x", "3-2"])
def test_what_is_no_list_of_cores_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="' is not a list"):
        parse_cores(text)


@both
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-sequences", "0"], "max_sequences"),
        (["--max-draft-tokens", "-1"], "max_draft_tokens"),
        (["--threads", "-1"], "threads"),
        (["--drain-timeout", "-1"], "drain_timeout_s"),
        (["--drain-timeout", "nan"], "drain_timeout_s"),
        (["--step-timeout", "0"], "step_timeout_s"),
        (["--step-timeout", "nan"], "step_timeout_s"),
        (["--cpu-cores", "a"], "cpu_cores: 'a'"),
        (["--dtype", "int3"], "dtype"),
        (["--block-size", "0"], "block_size"),
        (["--native-variant", "sse9"], "native_variant"),
        (["--log-format", "xml"], "--log-format"),
        (["--sped", "1"], "--sped"),
        (["--drain", "1"], "--drain"),
    ],
)
def test_an_impossible_option_is_refused_by_name(
    parse: Parse, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*REQUIRED, *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@both
def test_every_option_reaches_its_field(parse: Parse) -> None:
    config = parse(
        [
            *("--model", "m", "--listen", "h:1", "--model-name", "named", "--advertise", "10.0.0.1:2", "--insecure"),
            *("--metadata", "redis://h:3", "--max-sequences", "7", "--threads", "2", "--cpu-cores", "0,1"),
            *("--ops-listen", "h:4", "--drain-timeout", "5", "--log-format", "json", "--dtype", "float32"),
            *("--device", "cuda", "--quantization", "int8", "--block-size", "8", "--kv-cache-bytes", "9"),
            *("--max-batch-tokens", "100", "--max-context-len", "11", "--no-prefix-cache", "--attention", "sdpa"),
            *("--no-cuda-graphs", "--native-variant", "avx2", "--execution", "native"),
        ]
    )
    assert (config.model, config.listen, config.served_name, config.advertise) == ("m", "h:1", "named", "10.0.0.1:2")
    assert config.insecure
    assert (config.metadata_url, config.max_sequences, config.threads) == ("redis://h:3", 7, 2)
    assert (config.cpu_cores, config.ops_listen) == ((0, 1), "h:4")
    assert (config.drain_timeout_s, config.log_format) == (5.0, "json")
    engine = config.engine
    assert (engine.dtype, engine.device, engine.quantization, engine.block_size) == ("float32", "cuda", "int8", 8)
    assert (engine.kv_cache_bytes, engine.max_batch_tokens, engine.max_context_len) == (9, 100, 11)
    assert (engine.prefix_cache, engine.attention, engine.cuda_graphs) == (False, "sdpa", False)
    assert (engine.native_variant, engine.execution) == ("avx2", "native")


@both
def test_a_worker_is_named_after_its_model(parse: Parse) -> None:
    assert parse(REQUIRED).served_name == "small"


@both
def test_a_worker_on_all_interfaces_says_where_to_reach_it(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    everywhere = ["--model", "/models/small.gguf", "--listen", "0.0.0.0:7000"]
    leased = [*everywhere, "--metadata", "redis://127.0.0.1:1"]
    with pytest.raises(SystemExit):
        parse(leased)
    assert "advertise: needed where '0.0.0.0:7000' listens on all interfaces" in capsys.readouterr().err
    reachable = [*leased, "--advertise", "10.0.0.7:7000"]
    with pytest.raises(SystemExit):
        parse(reachable)
    assert "give tls_dir, or insecure for plain text" in capsys.readouterr().err
    assert parse([*reachable, "--insecure"]).advertise == "10.0.0.7:7000"
    # Without a lease nobody is told anything.
    assert parse([*everywhere, "--insecure"]).advertise == ""
