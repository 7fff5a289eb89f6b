"""The plugin's scheduler, which writes what each step verified: `--scheduler-cls tests.vllm.step_log.Scheduler`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from outrider.vllm import plugin
from outrider.vllm.server.feed import tenant_of

PATH = "OUTRIDER_TESTS_STEP_LOG"
"""The variable that names the file."""


class Step(NamedTuple):
    """Of one tenant in a step."""

    began_s: float
    """When it was scheduled, by the clock that all processes of a machine share."""
    tenant: str
    num_drafted: int


def steps(path: Path) -> list[Step]:
    # The last line may be under way.
    return [Step(*json.loads(line)) for line in path.read_text().rpartition("\n")[0].splitlines()]


class Scheduler(plugin.Scheduler):
    """Of each tenant one request runs at once."""

    def _follow(self, step: Any, scheduler_output: Any, outputs: Any, ran: Any) -> None:
        super()._follow(step, scheduler_output, outputs, ran)
        drafted = scheduler_output.scheduled_spec_decode_tokens
        with Path(os.environ[PATH]).open("a") as file:
            for name in scheduler_output.num_scheduled_tokens:
                if (request := self.requests.get(name)) is not None:
                    line = Step(step.began_s, tenant_of(request), len(drafted.get(name, ())))
                    file.write(json.dumps(line) + "\n")
