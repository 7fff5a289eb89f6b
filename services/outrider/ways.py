"""Which way of drafting is fastest for a target on this machine: what was measured, kept in the cache directory.

Reads no model and needs no torch; `outrider.comparison.best_way` measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from outrider.engine_config import EngineConfig
from outrider.hardware import compute
from outrider.user_cache import cache_directory, write_whole

MORE = 1.15
"""A draft worker has to bring this much more than what the target does alone: it is another process, which takes cores
and memory, and its messages take time that a replay does not count."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """The drafts that ship for a target."""

    draft: str
    """For a draft worker."""
    head: str
    """For the target itself."""


SHIPPED = {"smollm2-135m-instruct": Shipped("smollm2-135m-draft", "smollm2-135m-mtp")}
"""By the target's name."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way; without head and draft the target only looks drafts up. It does so in all others, too."""

    head: str
    draft: str
    times_plain: float

    @property
    def name(self) -> str:
        if not (self.head or self.draft):
            return "lookups alone"
        named = [f"the head {self.head} in the target" * bool(self.head), f"the draft {self.draft}" * bool(self.draft)]
        return " and ".join(filter(None, named))


@dataclass(frozen=True, slots=True)
class Way:
    """What is fastest, and what else was measured."""

    head: str
    draft: str
    measured: tuple[Measured, ...]

    @property
    def line(self) -> str:
        """What was chosen and why."""
        chosen = next(one for one in self.measured if (one.head, one.draft) == (self.head, self.draft))
        others = ", ".join(f"{one.name} {one.times_plain:.2f} x" for one in self.measured if one is not chosen)
        faster = any(one.times_plain > chosen.times_plain for one in self.measured)
        why = f", where a worker more has to bring {MORE:g} times as much" * faster
        return f"drafts: {chosen.name}, {chosen.times_plain:.2f} x plain decoding as measured here; {others}{why}"


def file_of(target: Path, options: Sequence[str]) -> Path:
    """Where the way of this model is kept for this machine, this version of Outrider and these options of an engine."""
    weights = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(target.glob("*.*"))]
    variables = [f"OUTRIDER_{member.name.upper()}" for member in fields(EngineConfig)]
    engine = {name: os.environ[name] for name in variables if name in os.environ}
    known = [version("outrider"), compute(), target.name, weights, list(options), engine]
    return cache_directory() / "ways" / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"


def kept(file: Path) -> Way | None:
    try:
        found = json.loads(file.read_text())
        return Way(found["head"], found["draft"], tuple(Measured(**one) for one in found["measured"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(file: Path, way: Way) -> None:
    """Where it cannot be written, it is measured again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(way), indent=2) + "\n")
