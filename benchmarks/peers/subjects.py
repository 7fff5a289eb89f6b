"""A peer as its own process, which answers one request at a time and is idle otherwise.

Handles processes and their lines of JSON, independent of the contents.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.peers import install
from benchmarks.peers.plan import Request

_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_EVERYONE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Far above the slowest start, which compiles a model.
_MAX_S = 900.0


class PeerFailed(Exception):
    """A peer ended, or answered with an error."""


class Subject:
    """One peer's process. It inherits our CPU affinity and has a thread on each of these cores."""

    def __init__(self, name: str, peer: install.Peer, model: Path, cores: Sequence[int]) -> None:
        start = install.command(peer, model)
        install.ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log = install.ENVIRONMENTS / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                start, env=_variables(peer, cores), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self.about = {**self._reply(), "preloaded": [path.name for path in install.libraries(peer)]}
        except PeerFailed:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request) -> dict[str, Any]:
        """Raises PeerFailed."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_reply` then raises with the reason.
        return self._reply()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        # Kills a process that hangs, so that the read below ends.
        limit = Timer(_MAX_S, self._process.kill)
        limit.daemon = True
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            raise PeerFailed(f"{self.name} ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(f"{self.name}: {reply['error']}")
        ok: dict[str, Any] = reply["ok"]
        return ok


def _variables(peer: install.Peer, cores: Sequence[int]) -> dict[str, str]:
    variables = {**os.environ, **_EVERYONE, **dict.fromkeys(_LIBRARIES, str(len(cores)))}
    variables["PYTHONPATH"] = os.pathsep.join([str(install.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    listed = ",".join(map(str, cores))
    variables.update({name: value.format(cores=listed) for name, value in peer.variables.items()})
    if preload := install.libraries(peer):
        variables["LD_PRELOAD"] = ":".join(map(str, preload))
    return variables
