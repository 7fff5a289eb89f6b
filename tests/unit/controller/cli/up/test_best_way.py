"""A stack whose operator named no draft starts what was measured to be fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from outrider import ways
from outrider.ways import SHIPPED, Measured, Way, file_of, keep, kept
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.up.best_way import with_best_way
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import stack_options

HEAD, DRAFT = SHIPPED[DEFAULT_TARGET].head, SHIPPED[DEFAULT_TARGET].draft
LOOKUPS_ARE, HEAD_IS, DRAFT_IS = Measured("", "", 1.1), Measured(HEAD, "", 1.69), Measured("", DRAFT, 1.37)
WAY = Way(HEAD, "", (LOOKUPS_ARE, HEAD_IS, DRAFT_IS))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def config_of(*options: str) -> StackConfig:
    import click

    found: list[StackConfig] = []

    @click.command()
    @stack_options(pin=False)
    def command(config: StackConfig) -> None:
        found.append(config)

    ran = CliRunner().invoke(command, options, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return found[0]


@pytest.mark.parametrize(
    ("way", "drafts", "target_args"),
    [
        (WAY, 0, f"--max-sequences 4 --head {HEAD}"),
        (Way("", DRAFT, WAY.measured), 1, "--max-sequences 4"),
        (Way("", "", WAY.measured), 0, "--max-sequences 4"),
    ],
    ids=["head", "draft worker", "lookups"],
)
async def test_what_was_measured_is_started_and_said_in_one_line(
    way: Way, drafts: int, target_args: str, tmp_path: Path
) -> None:
    keep(file_of(tmp_path, ["--max-sequences", "4"]), way)
    said: list[str] = []
    config = await with_best_way(config_of("--target-args", "--max-sequences 4"), tmp_path, said.append)
    assert (config.drafts, config.target_args) == (drafts, target_args)
    [line] = said
    assert "1.69 x" in line and "1.37 x" in line and "1.10 x" in line and "\n" not in line


@pytest.mark.parametrize(
    "options",
    [
        ["--drafts", "1"],
        ["--drafts", "0"],
        ["--draft-model", DRAFT],
        ["--draft-args", "--max-sequences 4"],
        ["--target-args", f"--head {HEAD}"],
        ["--target-args", f"--head={HEAD}"],
        ["--target-args", "--lookups ''"],
        ["--target-args", "--remote-head head"],
        ["--engine", "vllm"],
        ["--target-model", "/models/other"],
    ],
    ids=" ".join,
)
def test_what_the_operator_says_of_drafts_is_done(options: list[str]) -> None:
    assert config_of().measured
    assert not config_of(*options).measured


def test_so_is_what_the_environment_says_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HEAD", "head")
    assert not config_of().measured


@pytest.mark.slow
async def test_a_stack_starts_with_its_draft_where_nothing_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = await with_best_way(config_of("--target-args", "--no-such-option"), tmp_path, said.append)
    assert config.drafts == 1 and "could not be measured" in said[-1] and "--no-such-option" in said[-1]


def test_a_measurement_counts_for_its_machine_model_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    file = file_of(tmp_path, [])
    keep(file, WAY)
    assert kept(file_of(tmp_path, [])) == WAY
    others = {file_of(tmp_path, ["--quantization", "int8"])}
    monkeypatch.setenv("OUTRIDER_DEVICE", "cuda")
    others.add(file_of(tmp_path, []))
    monkeypatch.delenv("OUTRIDER_DEVICE")
    monkeypatch.setattr(ways, "compute", lambda: {"cpu": "another"})
    others.add(file_of(tmp_path, []))
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"another")
    others.add(file_of(tmp_path, []))
    assert len(others | {file}) == 5
    file.write_text('{"head": 1}')
    assert kept(file) is None
