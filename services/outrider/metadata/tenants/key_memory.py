"""Whether API keys were ever made, remembered apart from the metadata store, which may lose its data: in this process,
and in a file if one is given. A process that forgot both has to be told (`--require-api-keys`).
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class KeyMemory:
    def __init__(self, file: str = "") -> None:
        """`file`: exists once a key was made; empty for none."""
        self._file = Path(file) if file else None
        self.required = self._file is not None and self._file.exists()

    def remember(self) -> None:
        if self.required:
            return
        self.required = True
        if self._file is not None:
            try:
                self._file.touch(mode=0o600)
            except OSError as error:
                log.error("keys_required_file: %s: after a restart it may not be known that keys are required", error)
