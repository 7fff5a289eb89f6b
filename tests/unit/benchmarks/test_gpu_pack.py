"""What is packed for a machine without a network is what it lacks, and is unpacked there whole or not at all."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_pack
from benchmarks.gpu_pack import pack, required, site, split, unpack


def wheel(folder: Path, name: str, file: str, *requires: str) -> None:
    about = f"{name}-1.0.dist-info"
    metadata = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        made.writestr(file, "")
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}")
        made.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_a_site_has_what_is_required_and_lacking_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    wheel(
        wheels, "first", "shared/first.py", "second[more]>=1", "torch", "torchvision", 'newer; python_version >= "3.12"'
    )
    wheel(wheels, "second", "shared/second.py", "third", 'optional; extra == "more"', 'old; python_version < "3.12"')
    wheel(wheels, "third", "third.py", "first")
    wheel(wheels, "newer", "newer.py")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (pins := tmp_path / "pins.txt").write_text("third==1.0\n")
    found = site(tmp_path / "site", ["first"], {"torch"}, "3.12", pins, gpu_pack._pip)
    assert found == {"first", "second", "third", "newer"}
    there = {str(file.relative_to(tmp_path / "site")) for file in (tmp_path / "site").rglob("*.py")}
    assert there == {"shared/first.py", "shared/second.py", "third.py", "newer.py"}


def test_what_torch_and_transformers_need_is_there() -> None:
    there = required(("torch", "transformers"))
    assert {"torch", "transformers", "numpy", "huggingface-hub", "tokenizers", "safetensors", "jinja2"} <= there
    assert not {"grpcio", "redis", "pydantic", "sphinx"} & there


def test_pieces_are_unpacked_when_all_are_there_and_once(tmp_path: Path) -> None:
    (made := tmp_path / "site").mkdir()
    (made / "program").write_bytes(bytes(range(256)) * 40)
    (made / "program").chmod(0o755)
    (folder := tmp_path / "pieces").mkdir()
    split(made, folder, piece=200)
    pieces = sorted(folder.iterdir())
    assert len(pieces) > 1 and all(piece.stat().st_size <= 200 for piece in pieces)
    last = pieces[-1].rename(tmp_path / pieces[-1].name)
    assert unpack(folder, tmp_path / "to") == {}
    last.rename(pieces[-1])
    found = unpack(folder, tmp_path / "to")["site"]
    assert (found / "program").read_bytes() == (made / "program").read_bytes()
    assert (found / "program").stat().st_mode & 0o100
    (found / "mark").touch()
    assert unpack(folder, tmp_path / "to")["site"] == found and (found / "mark").exists()
    assert unpack(tmp_path / "no such folder", tmp_path / "to") == {}


def test_a_pack_has_packages_generated_code_a_model_and_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def pip(command: str, *arguments: str) -> None:
        asked.extend(arguments if command == "download" else ())
        if command == "install":
            to = Path(arguments[arguments.index("--target") + 1])
            (to / "vllm").mkdir(parents=True)
            for name in ("_C_stable_libtorch.abi3.so", "_moe_C.abi3.so"):
                (to / "vllm" / name).touch()

    def model(to: Path) -> None:
        (to / "cache").mkdir(parents=True)

    monkeypatch.setattr(gpu_pack, "_model", model)
    (prompts := tmp_path / "some.jsonl").write_text("{}")
    pack(tmp_path / "pieces", "3.12", vllm=True, prompts=prompts, learn=prompts, pip=pip)
    assert {name.partition(".1-of-")[0] for name in (file.name for file in (tmp_path / "pieces").iterdir())} == {
        "site", "stack", "vllm", "files",
    }  # fmt: skip
    found = unpack(tmp_path / "pieces", tmp_path / "to")
    assert {file.name for file in found["files"].iterdir()} == {"cache", "prompts.jsonl", "learn.jsonl"}
    assert (found["site"] / "generated/attach_pb2.py").exists()
    assert "vllm.general_plugins" in next(found["site"].glob("outrider-*.dist-info/entry_points.txt")).read_text()
    assert [file.name for file in (found["vllm"] / "vllm").iterdir()] == ["_C_stable_libtorch.abi3.so"]
    names = {re.split("[<>=!~]", line)[0] for line in asked}
    assert {"grpcio", "redis", "pydantic", "ray", "locust", "vllm"} <= names
    assert not {"torch", "transformers", "numpy"} & names
