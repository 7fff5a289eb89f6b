"""python -m tests.soak.image_stages ROOT ROLE...: runs what the Dockerfile says for a role in a copy of a Debian root.

    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm ROOT

No Docker: each RUN is a shell in a chroot, in the order of the stages that the role builds on. Then the role's process
starts as the image's user on a root that it cannot write to, and says what it was told. With all four roles they then
serve a text together: as `nobody`, without a home, a capability or a compiler. Needs to be root, on Linux, and the
project's environment. Build arguments come from the environment, as pip's own variables do. Knows only what our
Dockerfile uses.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from outrider.metadata.connection.embedded import find_server
from outrider.testing.tiny import tiny_checkpoint

CONTEXT = Path(__file__).parents[2]
FILE = CONTEXT / "deploy" / "images" / "Dockerfile"
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
# As the chart mounts them, and /dev/shm.
_WRITABLE = ("/tmp", "/var/cache/outrider")
_NOBODY = "65534:65534"
_TIMEOUT_S = 300.0
_CHECK = {
    "target": ["--model", "smollm2-135m-instruct", "--listen", "127.0.0.1:9001"],
    "draft": ["--model", "smollm2-135m-draft", "--listen", "127.0.0.1:9001"],
    "gateway": [],
    "controller": [],
}

Step = tuple[str, str]


def stages() -> dict[str, tuple[str, list[Step]]]:
    """By name: what it builds on, and its instructions."""
    found: dict[str, tuple[str, list[Step]]] = {}
    text = re.sub(r"\\\n\s*", "", FILE.read_text())
    steps: list[Step] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.split()
            steps = []
            found[name] = base, steps
        elif word.isupper():
            steps.append((word, rest))
    return found


class Image:
    """A root on disk, with the state that instructions change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.args: dict[str, str] = {}
        self.directory, self.user, self.entry = "/", "", list[str]()

    def extended(self, steps: list[Step], root: Path, wheels: Path | None) -> Image:
        """By these steps: in a copy of the root, if they write to it."""
        image = copy.deepcopy(self)
        if any(word in ("COPY", "RUN", "WORKDIR") for word, _ in steps):
            subprocess.run(["cp", "-a", str(self.root), str(root)], check=True)
            image.root = root
        image._follow(steps, wheels)
        return image

    def _follow(self, steps: list[Step], wheels: Path | None) -> None:
        for word, rest in steps:
            match word:
                case "ARG":
                    name, _, default = rest.partition("=")
                    self.args[name] = os.environ.get(name, default)
                case "ENV":
                    for pair in shlex.split(rest):
                        name, _, value = pair.partition("=")
                        self.env[name] = value.replace("$PATH", self.env["PATH"])
                case "WORKDIR":
                    self.directory = rest
                    self.at(rest).mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(rest.split(), wheels)
                case "USER":
                    self.user = rest
                case "ENTRYPOINT":
                    self.entry = json.loads(rest)
                case "RUN":
                    self.run(["sh", "-ec", rest])

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _copy(self, words: list[str], wheels: Path | None) -> None:
        *sources, target = [word for word in words if not word.startswith("--from")]
        for source in sources:
            found = wheels if source == "/wheels" and wheels else CONTEXT / source
            place = self.at(target) if target.startswith("/") else self.at(self.directory) / target
            if found.is_dir():
                shutil.copytree(found, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(found, place)

    def run(self, command: list[str]) -> None:
        """As root, in the working directory."""
        print("+", shlex.join(command), flush=True)
        subprocess.run(
            ["unshare", "--mount", "sh", "-ec", self._entering(shlex.join(command))],
            check=True,
            env={**self.env, **self.args},
        )

    def _entering(self, command: str, user: str = "", models: Path | None = None) -> str:
        """As a user, who may write nowhere but to what is mounted for it; or as root."""
        root = shlex.quote(str(self.root))
        lines = [f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        given = [word for name in ("PIP_FIND_LINKS",) if (word := os.environ.get(name))]
        for path in filter(os.path.exists, (*given, *_NETWORK)):
            place = self.at(path)
            place.mkdir(parents=True, exist_ok=True) if os.path.isdir(path) else place.touch()
            lines.append(f"mount --bind {path} {root}{path}")
        become = ""
        if user:
            uid, gid = user.split(":")
            self.at("/models").mkdir(exist_ok=True)
            lines += [f"mount --bind {models} {root}/models"] if models else []
            lines += [f"mount -o remount,ro,bind {root}{path}" for path in ("", *(["/models"] if models else []))]
            lines += [f"mount -t tmpfs -o uid={uid},gid={gid} tmpfs {root}{path}" for path in _WRITABLE]
            become = f"setpriv --reuid={uid} --regid={gid} --clear-groups --no-new-privs --bounding-set=-all"
        inside = shlex.quote(f"cd {self.directory}; exec {command}")
        return "\n".join([*lines, f"exec chroot {root} {become} sh -c {inside}"])

    def starts(self, arguments: list[str]) -> None:
        """The entry point as the image's user, on a root that it cannot write to. Raises where either fails."""
        command = shlex.join([*self.entry, *arguments])
        probe = (
            f"! touch /etc/x 2>/dev/null && ! touch /opt/outrider/x 2>/dev/null && test $(id -u):$(id -g) = {self.user}"
        )
        script = self._entering(f"sh -c {shlex.quote(f'{probe} && exec {command}')}", self.user)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script], env=self.env, capture_output=True, text=True, check=False
        )
        print(done.stdout[-300:], done.stderr[-2000:])
        done.check_returncode()

    @contextmanager
    def running(self, arguments: list[str], models: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The entry point as `nobody`, without a home or a compiler. It has to end well."""
        command = shlex.join([*self.entry, *arguments])
        probe = "! command -v gcc cc clang >/dev/null && ! touch /models/x 2>/dev/null"
        script = self._entering(f"sh -c {shlex.quote(f'{probe} && exec {command}')}", _NOBODY, models)
        env = {name: value for name, value in self.env.items() if name != "HOME"}
        with log.open("wb") as file:
            process = subprocess.Popen(["unshare", "--mount", "sh", "-ec", script], env=env, stdout=file, stderr=file)
        try:
            yield process
            process.terminate()
            if process.wait(60) != 0:
                raise RuntimeError(f"{command}: exit code {process.returncode}")
        finally:
            process.kill()
            process.wait()


class Builder:
    """Each stage once."""

    def __init__(self, base: Path, work: Path) -> None:
        self._work = work
        self._wheels: Path | None = None
        self._base = Image(base).extended([("WORKDIR", "/")], work / "base-image", None)
        self._base.at("/usr/bin/python").unlink(missing_ok=True)
        self._base.at("/usr/bin/python").symlink_to("python3")
        self._wheels = self.image("wheel").at("/wheels")

    @cache  # noqa: B019  # One builder a process.
    def image(self, name: str) -> Image:
        below, steps = stages()[name]
        base = self.image(below) if below in stages() else self._base
        return base.extended(steps, self._work / name, self._wheels)


def serve(images: dict[str, Image], work: Path) -> None:
    """A process of each image: they find one another, and say the same with drafts and without. Raises where not."""
    models, free = work / "models", iter(_free_ports())
    tiny_checkpoint(models / "tiny")
    for path in (models, *models.rglob("*")):
        path.chmod(0o755)
    ports = {
        name: f"127.0.0.1:{next(free)}" for name in ("target", "draft", "router", "control", "http", "grpc", "redis")
    }
    ops = {name: f"127.0.0.1:{next(free)}" for name in ("target", "draft", "router", "control", "gateway")}
    metadata = ["--metadata", f"redis://{ports['redis']}"]
    worker = ["--model", "/models/tiny", "--execution", "native", "--threads", "1"]
    flags = {
        "target": [*worker, "--listen", ports["target"], "--ops-listen", ops["target"]],
        "draft": [*worker, "--listen", ports["draft"], "--ops-listen", ops["draft"]],
        "controller": [
            *("--router-listen", ports["router"], "--router-ops-listen", ops["router"]),
            *("--control-listen", ports["control"], "--control-ops-listen", ops["control"]),
        ],
        "gateway": ["--listen-http", ports["http"], "--listen-grpc", ports["grpc"], "--ops-listen", ops["gateway"]],
    }
    with ExitStack() as stack:
        stack.enter_context(_redis(ports["redis"]))
        try:
            started = [
                stack.enter_context(image.running([*flags[role], *metadata], models, work / f"{role}.log"))
                for role, image in images.items()
            ]
            until = partial(_until, started)
            for name, address in ops.items():
                until(partial(_ready, address), f"{name} is ready")
            plain = _text(ports["http"], "off")
            if not plain:
                raise RuntimeError("no text came")
            accepted = "outrider_spec_decode_num_accepted_tokens_total"
            until(
                lambda: _text(ports["http"], "on") == plain and _metric(ops["target"], accepted) > 0,
                "the text is the same with drafts, and some are accepted",
            )
        except Exception:
            for role in images:
                print(f"-- {role}\n{(work / f'{role}.log').read_text()[-3000:]}")
            raise
    print(f"{', '.join(images)}: serve {plain!r} as nobody")


def _free_ports() -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def _redis(address: str) -> Iterator[None]:
    """Not of an image of ours."""
    command = [find_server(), "--bind", "127.0.0.1", "--port", address.rpartition(":")[2], "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _until(running: list[subprocess.Popen[bytes]], holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while not holds():
        if any(process.poll() is not None for process in running):
            raise RuntimeError("a process has ended")
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {_TIMEOUT_S:g} s: {what}")
        time.sleep(0.5)
    print("+", what, flush=True)


def _ready(address: str) -> bool:
    return _asked(f"http://{address}/readyz") is not None


def _asked(url: str, body: object = None) -> str | None:
    """None where there is no answer, or an error."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return None


def _text(gateway: str, speculation: str) -> str:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    answer = _asked(f"http://{gateway}/v1/completions", {**body, "speculation": speculation})
    return str(json.loads(answer)["choices"][0]["text"]) if answer else ""


def _metric(ops: str, name: str) -> float:
    page = _asked(f"http://{ops}/metrics") or ""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


def main(root: Path, roles: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-images-") as directory:
        work = Path(directory)
        # All may pass to what lies in it.
        work.chmod(0o755)
        builder = Builder(root, work)
        images = {role: builder.image(role) for role in roles}
        for role, image in images.items():
            image.starts([*_CHECK[role], "--metadata", "redis://redis:6379", "--check-config"])
            size = subprocess.run(["du", "-sm", str(image.root)], capture_output=True, text=True, check=True).stdout
            print(f"{role}: starts as {image.user}, writes to {', '.join(_WRITABLE)} only; {size.split()[0]} MB")
        if images.keys() == _CHECK.keys():
            serve(images, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
