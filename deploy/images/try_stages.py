"""python deploy/images/try_stages.py ROOT ROLE...: runs what the Dockerfile says for a role in a copy of a Debian root.

    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm ROOT

No Docker: each RUN is a shell in a chroot, in the order of the stages that the role builds on. Then the role's process
starts as the image's user on a root that it cannot write to, and says what it was told. Needs to be root, on Linux.
Build arguments come from the environment, as pip's own variables do. Knows only what our Dockerfile uses.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("Dockerfile")
CONTEXT = FILE.parents[2]
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_WRITABLE = ("/tmp", "/var/cache/outrider")
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

    def follow(self, steps: list[Step], wheels: Path | None) -> None:
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

    def _entering(self, command: str, read_only: bool = False) -> str:
        root = shlex.quote(str(self.root))
        lines = [f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        given = [word for name in ("PIP_FIND_LINKS",) if (word := os.environ.get(name))]
        for path in filter(os.path.exists, (*given, *_NETWORK)):
            place = self.at(path)
            place.mkdir(parents=True, exist_ok=True) if os.path.isdir(path) else place.touch()
            lines.append(f"mount --bind {path} {root}{path}")
        if read_only:
            lines += [f"mount -o remount,ro,bind {root}"]
            lines += [f"mount -t tmpfs -o uid=10001,gid=10001 tmpfs {root}{path}" for path in _WRITABLE]
        user = f"--userspec={self.user}" if read_only else ""
        lines.append(f"exec chroot {user} {root} sh -c {shlex.quote(f'cd {self.directory}; exec {command}')}")
        return "\n".join(lines)

    def starts(self, arguments: list[str]) -> None:
        """The entry point as the image's user, on a root that it cannot write to. Raises where either fails."""
        command = shlex.join([*self.entry, *arguments])
        probe = "! touch /etc/x 2>/dev/null && ! touch /opt/outrider/x 2>/dev/null && test $(id -u) = 10001"
        script = self._entering(f"sh -c {shlex.quote(f'{probe} && exec {command}')}", read_only=True)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script], env=self.env, capture_output=True, text=True, check=False
        )
        print(done.stdout[-300:], done.stderr[-2000:])
        done.check_returncode()


def build(name: str, root: Path, work: Path, wheels: Path | None) -> Image:
    """The image of a stage, with those that it builds on, in a copy of the root."""
    place = work / name
    subprocess.run(["cp", "-a", str(root), str(place)], check=True)
    image = Image(place)
    image.at("/usr/bin/python").unlink(missing_ok=True)
    image.at("/usr/bin/python").symlink_to("python3")
    chain: list[list[Step]] = []
    while name in stages():
        name, steps = stages()[name]
        chain.insert(0, steps)
    for steps in chain:
        image.follow(steps, wheels)
    return image


def main(root: Path, roles: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-images-") as directory:
        work = Path(directory)
        wheels = build("wheel", root, work, None).at("/wheels")
        for role in roles:
            image = build(role, root, work, wheels)
            image.starts([*_CHECK[role], "--metadata", "redis://redis:6379", "--check-config"])
            told = subprocess.run(["du", "-sm", str(image.root)], capture_output=True, text=True, check=True).stdout
            print(f"{role}: starts as {image.user}, writes to {', '.join(_WRITABLE)} only; {told.split()[0]} MB")
            shutil.rmtree(image.root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
