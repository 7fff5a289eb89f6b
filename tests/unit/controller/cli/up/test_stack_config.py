"""What a stack's processes are told."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider.draft.config import parse_arguments as parse_draft_arguments
from outrider.target.config import parse_arguments
from outrider_controller.cli.up.command import _first_requests
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlanner


def target(config: StackConfig, cores: list[int]) -> ProcessSpec:
    return StackPlanner(config, Path("/m"), "redis://x", cores).plan(Ports()).targets[0]


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def test_each_worker_keeps_to_its_core() -> None:
    spec = target(StackConfig(pin=True), [0, 1])
    # Where grammars are tried no step waits.
    assert (spec.cores, flag(spec, "--cpu-cores")) == ((0, 1), "0")
    assert (flag(spec, "--threads"), flag(spec, "--prefill-threads")) == ("1", None)


@pytest.mark.parametrize(
    "drafts, cores, borrowed", [(1, [4, 5], (5,)), (2, [0, 1, 2, 3], (1, 2, 3)), (0, [0, 1], (1,))]
)
def test_a_target_may_borrow_the_others_cores_for_prompts(
    drafts: int, cores: list[int], borrowed: tuple[int, ...]
) -> None:
    spec = target(StackConfig(pin=True, borrow_cores=True, drafts=drafts), cores)
    assert spec.cores == (cores[0], *borrowed)
    # It decodes on its own, all the same.
    assert flag(spec, "--cpu-cores") == str(cores[0]) and flag(spec, "--threads") == "1"
    assert flag(spec, "--prefill-threads") == str(1 + len(borrowed))


def test_with_one_core_for_all_there_is_none_to_borrow() -> None:
    spec = target(StackConfig(pin=True, borrow_cores=True), [3])
    assert (spec.cores, flag(spec, "--prefill-threads")) == ((3,), "1")


def test_without_pinning_prompts_are_read_with_all_cores() -> None:
    spec = target(StackConfig(borrow_cores=True), [0, 1, 2, 3])
    assert (spec.cores, flag(spec, "--cpu-cores")) == ((), "")
    assert (flag(spec, "--threads"), flag(spec, "--prefill-threads")) == ("2", "4")


def test_a_target_on_vllm_runs_in_the_environment_that_has_it_and_divides_its_threads() -> None:
    args = "--vllm-args='--seed 1'"
    config = StackConfig(engine="vllm", vllm_python="/v/python", target_args=args, tensor_parallel=2, targets=2)
    plan = StackPlanner(replace(config, borrow_cores=True), Path("/m"), "redis://x", list(range(10))).plan(Ports())
    for spec in plan.targets:
        assert spec.argv[0] == "/v/python" and "--vllm-args=--seed 1" in spec.argv
        assert (flag(spec, "--engine"), flag(spec, "--tensor-parallel")) == ("vllm", "2")
        assert flag(spec, "--prefill-threads") is None
        assert flag(spec, "--threads") == str(
            max(1, int(flag(target(StackConfig(targets=2), [*range(10)]), "--threads") or 0) // 2)
        )
    assert {spec.argv[0] for spec in (*plan.drafts, plan.controller, plan.gateway)} == {sys.executable}
    # Its options are those of a target, and none of another engine is among them.
    chosen = parse_arguments(plan.targets[0].argv[3:])
    assert (chosen.runs_on, chosen.tensor_parallel, chosen.vllm_args) == ("vllm", 2, "--seed 1")


@pytest.mark.parametrize("given", [{"tensor_parallel": 2}, {"vllm_python": "p"}, {"engine": "x"}])
def test_options_of_vllm_need_it(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))}: "):
        StackConfig(**given)


@pytest.mark.parametrize("engine, borrow_cores", [("outrider", True), ("outrider", False), ("vllm", False)])
def test_workers_take_their_own_options_beside_those_of_the_stack(engine: str, borrow_cores: bool) -> None:
    config = StackConfig(
        engine=engine,
        borrow_cores=borrow_cores,
        target_args="--lookups 'ngram,suffix' --dtype=float32 --kv-cache-bytes 9",
        draft_args="--target-model '/models/a target' --num-alternatives 2 --native-variant avx2 --execution native",
    )
    plan = StackPlanner(config, Path("/m"), "redis://x", [0, 1]).plan(Ports())
    target = parse_arguments(plan.targets[0].argv[3:])
    assert (target.lookup_names, target.engine.dtype) == (["ngram", "suffix"], "float32")
    assert target.engine.kv_cache_bytes == 9
    draft = parse_draft_arguments(plan.drafts[0].argv[3:])
    assert (draft.target_model, draft.drafting.num_alternatives) == ("/models/a target", 2)
    assert (draft.engine.native_variant, draft.engine.execution) == ("avx2", "native")


@pytest.mark.parametrize(
    ("args", "words"),
    [("--lookups 'ngram", "No closing quotation"), ("--listen=0.0.0.0:1", "--listen is set by the stack")],
)
def test_options_for_a_worker_are_words_that_leave_the_stack_its_addresses(args: str, words: str) -> None:
    for name in ("target_args", "draft_args"):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            StackConfig(**{name: args})  # type: ignore[arg-type]


def test_no_command_line_shows_the_password_of_the_store() -> None:
    plan = StackPlanner(StackConfig(), Path("/m"), "redis://u:hunter2@h:1", [0, 1]).plan(Ports())
    for spec in (*plan.targets, *plan.drafts, plan.controller, plan.gateway):
        assert spec.env["OUTRIDER_METADATA"] == "redis://u:hunter2@h:1"
        assert not any("hunter2" in word for word in spec.argv)


def test_a_secret_goes_to_every_process_for_each_proves_its_role_by_it() -> None:
    config = StackConfig(secret_file=Path("/s/secret"))
    tiers = StackPlanner(config, Path("/m"), "redis://x", [0]).plan(Ports()).tiers
    told = {spec.name for tier in tiers for spec in tier if flag(spec, "--cluster-secret-file") == "/s/secret"}
    assert told == {spec.name for tier in tiers for spec in tier}


def test_what_up_prints_leads_to_the_console() -> None:
    stack = SimpleNamespace(
        config=StackConfig(), ops={"control": "127.0.0.1:9"}, run_dir=Path("/r"), scrape_file=Path("/r/s")
    )
    stack.gateway_http = stack.gateway_grpc = "127.0.0.1:8"
    assert "Console: http://127.0.0.1:9/console#token=t0\n" in _first_requests(cast(Stack, stack), "default", "t0")


def test_of_a_head_s_model_no_more_is_asked_than_that_the_target_s_engine_runs_it() -> None:
    found = {args: StackConfig(engine="vllm", draft_args=args).draft_engine for args in ("", "--head h", "--head=h")}
    assert found == {"": "outrider", "--head h": "vllm", "--head=h": "vllm"}
