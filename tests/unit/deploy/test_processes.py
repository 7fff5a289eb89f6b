"""What the chart's containers start accepts the arguments and the environment that it gets there."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from outrider.configuration import settings

from tests.unit.deploy.chart import CASES, containers, profile, rendered
from tests.unit.deploy.processes import PARSERS, POD_IP, Process, image_environment, parsed, processes


@pytest.mark.parametrize("name", CASES)
def test_each_process_accepts_what_the_chart_gives_it(name: str, tmp_path: Path) -> None:
    """Its own parser does, quickly; the program itself, in the slow tier."""
    objects = rendered(profile(name))
    started = list(processes(objects, tmp_path))
    assert {process.environment["OUTRIDER_METADATA"].partition("://")[0] for process in started} <= {"redis", "rediss"}
    for process in started:
        parsed(process)
    roles = {process.module.removeprefix("outrider.").partition(".")[0] for process in started}
    served = {"target", "gateway"} if name != "drafts-alone" else set[str]()
    assert roles == {"draft", "outrider_controller", *served}
    others = {one["name"] for one in containers(objects)} - {process.container for process in started}
    assert others <= {"redis", "ray", "test"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", PARSERS)
def test_every_program_itself_accepts_what_the_chart_gives_it(module: str, tmp_path: Path) -> None:
    """Of every case, in nothing but its container's environment; what starts the same is started once."""
    every = [process for name in CASES for process in processes(rendered(profile(name)), tmp_path)]
    different = list({process.key: process for process in every if process.module == module}.values())
    assert different
    with ThreadPoolExecutor(2) as pool:
        for process, done in zip(different, pool.map(Process.check, different), strict=True):
            assert done.returncode == 0, f"{process}: {done.stderr}"
            assert json.loads(done.stdout)["metadata"].startswith("redis")


@pytest.mark.slow
def test_what_one_program_would_refuse_is_found_in_its_arguments_and_in_its_environment(tmp_path: Path) -> None:
    def router(**values: Any) -> Process:
        objects = rendered({"controller": {"mode": "plain"} | values})
        return next(one for one in processes(objects, tmp_path) if one.module == "outrider_controller.router")

    good = router()
    done = good.check()
    assert done.returncode == 0 and json.loads(done.stdout)["advertise"] == f"{POD_IP}:9100", done.stderr
    assert json.loads(done.stdout)["metadata"] == "redis://demo-redis:6379"
    wrong = {
        "OUTRIDER_MAX_DRAFT_TOKENS": router(env=[{"name": "OUTRIDER_MAX_DRAFT_TOKENS", "value": "banana"}]),
        "--speed": router(args=["--speed", "11"]),
        "metadata": good.without("OUTRIDER_METADATA"),
        "drain_timeout": good.without("--drain-timeout").having(OUTRIDER_DRAIN_TIMEOUT="banana"),
    }
    for named, process in wrong.items():
        done = process.check()
        assert done.returncode == 2 and named in done.stderr, done
        with pytest.raises(SystemExit):
            parsed(process)


@pytest.mark.parametrize("name", ["everything", "everything-kuberay"])
def test_every_variable_of_the_charts_own_is_one_that_its_process_reads(name: str, tmp_path: Path) -> None:
    """A process looks for those that it knows, and would not miss one that the chart misspells."""
    for process in processes(rendered(profile(name) | {"env": []}), tmp_path):
        read = {setting.variable for setting in settings(type(parsed(process)))}
        known = read | {"OUTRIDER_CACHE", "OUTRIDER_KERNELS"}
        told = process.environment.keys() - image_environment(process.image).keys()
        assert {name for name in told if name.startswith("OUTRIDER_")} <= known, process.container
