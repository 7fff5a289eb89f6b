"""Models of the hub, from a small one on loopback: by name and revision, once on a machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from outrider_controller.cli.models import OUR_ENGINE

COMMIT = "c" * 40
REPOSITORY = "owner/tiny"


class Hub(BaseHTTPRequestHandler):
    """The part of the model hub's HTTP interface that its client asks for."""

    def __init__(self, directory: Path, asked: Counter[str], *arguments: object) -> None:
        self.directory = directory
        self.asked = asked
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        files = [file for file in sorted(self.directory.iterdir()) if file.is_file()]
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            siblings = [{"rfilename": file.name} for file in files]
            found = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(200 if name in ("main", COMMIT) else 404, json.dumps(found).encode(), with_body)
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40} for f in files]
            self._send(200, json.dumps(tree).encode(), with_body)
        elif f"/{REPOSITORY}/resolve/" in path and (self.directory / name).is_file():
            if with_body:
                self.asked[name] += 1
            self._send(200, (self.directory / name).read_bytes(), with_body)
        else:
            self._send(404, b"{}", with_body)

    def _send(self, status: int, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def asked() -> Counter[str]:
    """How often each file was sent."""
    return Counter()


@pytest.fixture
def endpoint(tiny: Path, asked: Counter[str]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, tiny, asked))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def fetch(model: str, endpoint: str, cache: Path) -> tuple[int, str, str]:
    """Exit code, directory, and what was said meanwhile."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_controller.cli.up.fetch", model, OUR_ENGINE),
        stdout=PIPE,
        stderr=PIPE,
        env={"OUTRIDER_CACHE": str(cache), "HF_HOME": str(cache / "hub"), "HF_ENDPOINT": endpoint, "PATH": ""},
    )
    out, said = await process.communicate()
    return process.returncode or 0, out.decode().strip(), said.decode()


@pytest.mark.slow
async def test_workers_that_start_together_fetch_a_model_once(
    endpoint: str, asked: Counter[str], tiny: Path, tmp_path: Path
) -> None:
    model = f"hf://{REPOSITORY}@{COMMIT}"
    found = await asyncio.gather(*(fetch(model, endpoint, tmp_path) for _ in range(3)))
    assert {code for code, _, _ in found} == {0}, found
    assert {path for _, path, _ in found} == {str(tmp_path / "models" / f"owner--tiny@{COMMIT}")}
    assert asked["model.safetensors"] == 1
    assert (Path(found[0][1]) / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert any(f"downloading {REPOSITORY}@{COMMIT}" in said for _, _, said in found)
    # What lies there is taken from there, hub or not.
    code, path, said = await fetch(model, "http://127.0.0.1:1", tmp_path)
    assert (code, path, said) == (0, found[0][1], "")


@pytest.mark.slow
async def test_a_revision_that_is_not_there_is_named_and_leaves_nothing(endpoint: str, tmp_path: Path) -> None:
    code, _, said = await fetch(f"hf://{REPOSITORY}@absent", endpoint, tmp_path)
    assert code == 1 and f"model: hf://{REPOSITORY}@absent: the hub did not deliver it" in said
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock-owner--tiny@absent"]
