"""The plugin's scheduler with a fault: `--scheduler-cls tests.vllm.faulty.Scheduler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.vllm import plugin

PLACES = {201: "choose", 202: "committed", 203: "stepped"}
"""By the `max_tokens` of a request: what raises from its twentieth token to its end."""
BEGINS = 20


class Scheduler(plugin.Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for place in PLACES.values():
            setattr(self.book, place, self._raising(place, getattr(self.book, place)))

    def _raising(self, place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if any(PLACES.get(one.max_tokens) == place and one.num_output_tokens >= BEGINS for one in self.running):
                raise RuntimeError(f"planted in {place}")
            return real(*args, **kwargs)

        return called
