"""Names of models: a path, a known name, or hf://OWNER/NAME@REVISION; and the directories of fetched ones.

Reads no files. Also for supervisors, which have no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from outrider.user_cache import cache_directory

HUB_SCHEME = "hf://"
CONVERSION = "v4"
"""The form in which GGUF files are converted. Copies of another form are made anew, and removed: `v3` lacked settings
that the file has, such as its rotary factors."""
_HUB_NAME = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w.-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the model hub at one revision: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, so that the files never change."""
        return _COMMIT.fullmatch(self.revision) is not None


def hub_model(model: str) -> HubModel | None:
    """None for other names than hf://. Raises ValueError for an invalid hf:// name."""
    if not model.startswith(HUB_SCHEME):
        return None
    found = _HUB_NAME.fullmatch(model)
    if found is None or ".." in model:
        raise ValueError(f"model: {model!r} is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return HubModel(found[1], found[2] or "main")


def looks_like_hub(model: str) -> bool:
    """Whether it is a repository's name without hf:// before it."""
    return _HUB_NAME.fullmatch(HUB_SCHEME + model) is not None and ".." not in model


def served_name(model: str) -> str:
    """The default name under which clients request it."""
    hub = hub_model(model)
    path = hub.repository if hub is not None else model.rstrip("/")
    return os.path.basename(path).removesuffix(".gguf")


def fetched_directory(model: str) -> Path:
    """The directory of a known model, or one of the hub, after it was fetched."""
    hub = hub_model(model)
    if hub is None:
        # It may have come as a GGUF file.
        return cache_directory() / "models" / CONVERSION / model
    return cache_directory() / "models" / f"{hub.repository.replace('/', '--')}@{hub.revision}"
