"""How a model is named: a path, a name that we know, or hf://OWNER/NAME@REVISION; and where what is fetched lies.

Reads nothing; for supervisors too, which have no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from outrider.user_cache import cache_directory

HUB_SCHEME = "hf://"
_HUB_NAME = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w.-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the model hub at one revision: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether it can only ever be the same files."""
        return _COMMIT.fullmatch(self.revision) is not None


def hub_model(model: str) -> HubModel | None:
    """None for what is no hf:// name. Raises ValueError for one that cannot be."""
    if not model.startswith(HUB_SCHEME):
        return None
    found = _HUB_NAME.fullmatch(model)
    if found is None or ".." in model:
        raise ValueError(f"model: {model!r} is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return HubModel(found[1], found[2] or "main")


def served_name(model: str) -> str:
    """Under which clients ask for it, unless somebody says otherwise."""
    hub = hub_model(model)
    path = hub.repository if hub is not None else model.rstrip("/")
    return os.path.basename(path).removesuffix(".gguf")


def fetched_directory(model: str) -> Path:
    """Where a known model, or one of the hub, lies once it has been fetched."""
    hub = hub_model(model)
    if hub is None:
        return cache_directory() / "models" / model
    return cache_directory() / "models" / f"{hub.repository.replace('/', '--')}@{hub.revision}"
