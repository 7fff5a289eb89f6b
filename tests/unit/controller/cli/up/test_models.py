"""The models of a stack are looked at before anything starts, and a process that ends says first why."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from outrider_controller.cli.app import cli
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import fetched
from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed, ProcessSpec


async def test_a_fault_of_a_checkpoint_is_told_without_a_process(tiny: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    assert await fetched(str(copy), print) == copy
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CommandError, match=r"tokenizer\.json: missing"):
        await fetched(str(copy), print)


def _of_family(tiny: Path, path: Path, **differs: object) -> str:
    shutil.copytree(tiny, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | differs))
    return str(path)


_RECURRENT = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
_CAPPED = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
_LATENT = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 4}
_FOREIGN = {"quantization_config": {"quant_method": "nobodys"}}


@pytest.mark.parametrize(
    ("differs", "option", "reasons"),
    [
        pytest.param(
            *(_RECURRENT, "--target-model", ["model_type mamba: recurrent", "use --engine vllm"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(*(_CAPPED, "--draft-model", ["attn_logit_softcapping"]), marks=pytest.mark.slow),
        pytest.param(*({}, "--head", ["config.json: not a known draft head"]), marks=pytest.mark.slow),
        (_LATENT, "--target-model", ["kv_lora_rank", "use --engine vllm"]),
        (_FOREIGN, "--target-model", ["quantization_config: quant_method 'nobodys'"]),
    ],
)
def test_a_model_that_the_engine_does_not_run_is_refused_once_before_anything_starts(
    tiny: Path, tmp_path: Path, differs: dict[str, object], option: str, reasons: list[str]
) -> None:
    model, run_dir = _of_family(tiny, tmp_path / "model", **differs), tmp_path / "run"
    named = {"--target-args": f"--head {model}"} if option == "--head" else {option: model}
    models = {"--target-model": str(tiny), "--draft-model": str(tiny), **named}
    arguments = [word for pair in models.items() for word in pair]
    ports = [word for name in ("http", "grpc", "control") for word in (f"--{name}-port", "0")]
    ran = CliRunner().invoke(cli, ["up", *arguments, *ports, "--run-dir", str(run_dir)])
    # The command prints what it raises, and nothing before it.
    assert (type(ran.exception), ran.output) == (CommandError, "")
    [line] = str(ran.exception).splitlines()
    assert all(line.count(reason) == 1 for reason in reasons), line
    assert not run_dir.exists()


async def test_vllm_may_run_what_our_engine_does_not(tiny: Path, tmp_path: Path) -> None:
    path = _of_family(tiny, tmp_path / "model", **_CAPPED)
    assert await fetched(path, print, "vllm") == Path(path)


@pytest.mark.parametrize(
    ("script", "first"),
    [
        ("print('a record'); print('outrider.target: config.json: missing'); print('b')", "1: config.json: missing"),
        ("raise ImportError('no optimum')", "1: ImportError: no optimum"),
    ],
)
async def test_the_reason_comes_first_and_the_log_after(tmp_path: Path, script: str, first: str) -> None:
    argv = [sys.executable, "-c", f"{script}; raise SystemExit(1)"]
    process = ManagedProcess(ProcessSpec("target-0", argv, "127.0.0.1:1"), tmp_path / "target-0.log")
    await process.start()
    with pytest.raises(ProcessFailed) as raised:
        await process.ready(60)
    line, *rest = str(raised.value).splitlines()
    assert line.endswith(first)
    assert rest[0].endswith("target-0.log ends with:")
