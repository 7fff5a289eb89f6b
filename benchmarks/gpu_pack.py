"""What a GPU's machine lacks that has torch, Triton and transformers, and no network: python -m benchmarks.gpu_pack

Packs, where there is a network, the packages that this project imports besides, its generated code, SmolLM2, prompts,
and with --vllm that engine, into pieces NAME.I-of-N of a size that can be sent. `unpack` puts there what is complete;
`make gpu-day` does it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "services/outrider/rpc/v1"
_PIECE = 60 << 20
_THERE = ("torch", "triton", "transformers")
"""On the machine, with what they require."""
_TESTING = ("pytest<10", "pytest-asyncio<2", "pytest-timeout<3", "pytest-xdist<4")
_PLATFORMS = ("2_5", "2_12", "2_17", "2_24", "2_27", "2_28", "2_31", "2_34", "2_35", "2_39")
_VLLM = "vllm==0.32.0"
# Of its wheel: what a dense model in bfloat16 on Hopper does without, most of its size.
_LEFT_OUT = (
    "_vllm_fa2_C|_moe_C|/vllm-rs|deep_gemm/(_C|include)|_deepselect_C|_flashmla|_flashkda|_qutlass_C|fmha_sm100/cutlass"
)

# Of what it requires: other builds of torch, and kernels and decoders of which such a model needs none.
_NOT_NEEDED = (
    "torch|nvidia-|flashinfer-|opencv-|tilelang|quack-|tokenspeed-|humming-"
    "|fastsafetensors|instanttensor|pynvvideocodec"
)

Pip = Callable[..., None]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def pack(folder: Path, python: str, *, vllm: bool, prompts: Path | None, learn: Path | None, pip: Pip = _pip) -> None:
    """Fills `folder` anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place, have = Path(made), set(required(_THERE))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        small = [
            *project["dependencies"],
            *_TESTING,
            *(r for e in ("engine", "gateway", "structured") for r in extras[e]),
        ]
        stack = [r for e in ("controller", "embedded", "gpu", "loadtest") for r in extras[e]]
        groups = {"site": small, "stack": stack} | ({"vllm": [_VLLM, *extras["vllm"]]} if vllm else {})
        for name, roots in groups.items():
            pinned = None if name == "vllm" else _pins(place / "pins.txt", have)
            have |= site(place / name, roots, have, python, pinned, pip)
        for file in [f for f in (place / "vllm").rglob("*") if re.search(_LEFT_OUT, str(f)) and f.is_file()]:
            file.unlink()
        _describe_itself(place / "site", project)
        shutil.copytree(GENERATED, place / "site/generated", ignore=shutil.ignore_patterns("__*", "*.pyi"))
        files = place / "files"
        _model(files)
        for name, given in (("prompts.jsonl", prompts), ("learn.jsonl", learn)):
            if given is not None:
                shutil.copy(given, files / name)
        for name in (*groups, "files"):
            split(place / name, folder)


def required(names: Sequence[str]) -> set[str]:
    """They and what they require themselves, by what is installed here. What that requires depends on its version."""
    lines = [line for name in names for line in distribution(name).requires or ()]
    direct = (r for r in map(Requirement, lines) if _applies(r, {}))
    return {canonicalize_name(name) for name in (*names, *(r.name for r in direct))}


def _applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **environment})


def _pins(file: Path, have: set[str]) -> Path:
    """What this project is tested with here."""
    there = {canonicalize_name(each.name): each.version for each in distributions()}
    file.write_text("".join(f"{name}=={version}\n" for name, version in there.items() if name not in have))
    return file


def site(to: Path, roots: Sequence[str], have: set[str], python: str, pins: Path | None, pip: Pip) -> set[str]:
    """Installs what `roots` require and the machine lacks into a directory. Returns the packages' names.

    Level by level, each package alone: pip itself would bring torch. Extras of requirements are left out.
    """
    wheels, found, wanted = to.with_suffix(".wheels"), set[str](), [Requirement(line) for line in roots]
    abi, environment = f"cp{python.replace('.', '')}", {"python_version": python, "python_full_version": f"{python}.0"}
    target = ["--only-binary=:all:", "--no-deps", "--quiet", "--python-version", python, "--implementation", "cp"]
    target += [f"--abi={name}" for name in (abi, "abi3", "none")]
    target += [f"--platform=manylinux_{name}_x86_64" for name in _PLATFORMS]
    target += [f"--platform=manylinux{name}_x86_64" for name in ("1", "2010", "2014")]
    while level := {
        name: f"{each.name}{each.specifier}"
        for each in reversed(wanted)
        if (name := canonicalize_name(each.name)) not in have | found
        and not re.match(_NOT_NEEDED, name)
        and _applies(each, environment)
    }:
        pip("download", *target, "--dest", str(wheels), *(["-c", str(pins)] if pins else []), *level.values())
        found |= level.keys()
        there = [each for wheel in wheels.glob("*.whl") for each in distributions(path=[str(wheel)])]
        wanted = [Requirement(line) for each in there for line in each.requires or ()]
    pip("install", *target, "--no-index", "--no-compile", "--target", str(to), *map(str, wheels.glob("*.whl")))
    return found


def _describe_itself(to: Path, project: dict[str, Any]) -> None:
    """Version and entry points, which vLLM and the processes read."""
    name, version = project["name"], project["version"]
    described = to / f"{name}-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{point} = {place}" for point, place in points.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _model(to: Path) -> None:
    from outrider.engine.checkpoints.fetching import resolve
    from outrider.user_cache import cache_directory

    model = resolve("smollm2-135m-instruct", print)
    shutil.copytree(model, to / "cache" / model.relative_to(cache_directory()))


def split(directory: Path, folder: Path, piece: int = _PIECE) -> None:
    """Into compressed pieces NAME.I-of-N."""
    whole = directory.with_suffix(".tgz")
    with tarfile.open(whole, "w:gz", compresslevel=6) as archive:
        archive.add(directory, arcname=".")
    count = -(-whole.stat().st_size // piece)
    with whole.open("rb") as stream:
        for number in range(1, count + 1):
            (folder / f"{directory.name}.{number}-of-{count}").write_bytes(stream.read(piece))


def unpack(folder: Path, to: Path) -> dict[str, Path]:
    """The directory of each name of which all pieces are there. What was unpacked before is used again."""
    found = {}
    for first in sorted(folder.glob("*.1-of-*")):
        name, _, count = first.name.partition(".1-of-")
        pieces = [folder / f"{name}.{number}-of-{count}" for number in range(1, int(count) + 1)]
        if not all(piece.exists() for piece in pieces):
            continue
        digest, place = hashlib.sha256(), to / "whole.tgz"
        to.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as whole:
            for piece in pieces:
                content = piece.read_bytes()
                digest.update(content)
                whole.write(content)
        found[name] = to / f"{name}-{digest.hexdigest()[:12]}"
        if not found[name].exists():
            with tempfile.TemporaryDirectory(dir=to) as made, tarfile.open(place) as archive:
                archive.extractall(Path(made) / "all", filter="data")
                (Path(made) / "all").rename(found[name])
        place.unlink()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--python", default="3.12", help="of the GPU's machine")
    parser.add_argument("--vllm", action="store_true", help=f"also {_VLLM}, as far as a dense model on Hopper needs it")
    parser.add_argument("--prompts", type=Path, help="JSON lines, for the stack's steps")
    parser.add_argument("--learn", type=Path, help="JSON lines, to distil from; else the target begins conversations")
    options = parser.parse_args(arguments)
    pack(options.folder, options.python, vllm=options.vllm, prompts=options.prompts, learn=options.learn)
    for piece in sorted(options.folder.iterdir()):
        print(f"{piece.stat().st_size / (1 << 20):6.1f} MiB  {piece}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
