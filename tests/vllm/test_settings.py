"""Settings of vLLM as it reads its arguments: what the worker takes, and what it refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outrider.vllm.front import WORKER
from outrider.vllm.settings import check
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PLUGIN = "outrider.vllm.plugin.Scheduler"
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 4}
TENANTS: dict[str, Any] = {"tenants": {"gold": {"max_draft_tokens": 0}}}
_RUST = "VLLM_USE_RUST_FRONTEND"


def config(model: Path, changes: dict[str, Any]) -> Any:
    plugin = changes.pop("plugin", {})
    given = {"scheduler_cls": PLUGIN, "worker_cls": WORKER, "speculative_config": NGRAM, "enforce_eager": True}
    given |= {"additional_config": {"outrider": plugin}, "dtype": "float32", "max_model_len": 128} | changes
    return EngineArgs(model=str(model), **given).create_engine_config()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"async_scheduling": False, "scheduler_cls": "outrider.vllm.scheduler.Scheduler"}, ""),
        ({"tensor_parallel_size": 2}, ""),
        ({"scheduler_cls": None}, "scheduler_cls: "),
        ({"speculative_config": None}, "speculative_config.method: "),
        ({"speculative_config": NGRAM | {"method": "ngram"}}, ""),
        (
            {"speculative_config": NGRAM | {"method": "ngram", "draft_sample_method": "probabilistic"}},
            "speculative_config.draft_sample_method: ",
        ),
        (
            {"speculative_config": NGRAM | {"method": "ngram", "rejection_sample_method": "block"}},
            "speculative_config.rejection_sample_method: ",
        ),
        (
            {"speculative_config": NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}},
            "speculative_config.num_speculative_tokens_per_batch_size: ",
        ),
        ({"speculative_config": NGRAM | {"prompt_lookup_max": 3}}, "speculative_config.prompt_lookup_max: "),
        (
            {
                "speculative_config": NGRAM
                | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
            },
            "speculative_config.",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: "),
        (
            {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
            "kv_transfer_config: ",
        ),
        ({"plugin": {"draft": []}}, "additional_config.outrider.draft: "),
    ],
)
def test_a_setting_works_or_is_refused_by_name(tiny_vllm: Path, changes: dict[str, Any], named: str) -> None:
    made = config(tiny_vllm, dict(changes))
    if not named:
        check(made)
        return
    with pytest.raises(ValueError, match=named):
        check(made)


def test_ranks_of_a_mixture_of_experts_are_refused_and_those_of_another_model_are_servers_of_their_own(
    tiny_vllm: Path,
) -> None:
    made = config(tiny_vllm, {"data_parallel_size": 2})
    with pytest.raises(ValueError, match="data_parallel_size: "):
        check(made)
    # As vLLM does in each rank of a model without experts.
    made.parallel_config.reconfigure_for_independent_dp_rank()
    check(made)


@pytest.mark.parametrize(
    ("plugin", "refused"),
    [({}, False), (TENANTS, True), ({"tenant_header": "x-tenant"}, True), ({"routers": ["127.0.0.1:9"]}, True)],
)
def test_a_front_end_without_middleware_is_refused_where_there_are_tenants(
    tiny_vllm: Path, monkeypatch: pytest.MonkeyPatch, plugin: dict[str, Any], refused: bool
) -> None:
    made = config(tiny_vllm, {"plugin": plugin})
    check(made)
    monkeypatch.setenv(_RUST, "1")
    if refused:
        with pytest.raises(ValueError, match=_RUST):
            check(made)
    else:
        check(made)
