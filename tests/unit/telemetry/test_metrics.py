from __future__ import annotations

import pytest
from outrider.telemetry.metrics import (
    PHASES,
    Durations,
    LabelCap,
    MetadataCollector,
    SpeculationMetrics,
    TokenMetrics,
    WorkerMetrics,
)
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    return samples_of(generate_latest(registry).decode())


def samples_of(text: str) -> dict[str, float]:
    """As `name`, or `name{values of its other labels}`."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_speculation_counters_are_the_sums_of_the_rounds() -> None:
    registry = CollectorRegistry()
    metrics = SpeculationMetrics(registry, "m")
    metrics.round(num_drafted=5, num_verified=3, num_accepted=2)
    metrics.round(num_drafted=3, num_verified=3, num_accepted=3, num_dropped=4)
    metrics.round(num_drafted=0, num_verified=0, num_accepted=0)
    samples = scrape(registry)
    assert samples["outrider_spec_decode_num_drafts_total"] == 2
    assert samples["outrider_spec_decode_num_draft_tokens_total"] == 8
    assert samples["outrider_spec_decode_num_verified_tokens_total"] == 6
    assert samples["outrider_spec_decode_num_accepted_tokens_total"] == 5
    per_position = [samples[f"outrider_spec_decode_num_accepted_tokens_per_pos_total{{{i}}}"] for i in range(4)]
    assert per_position == [2, 2, 1, 0]
    assert samples["outrider_wasted_draft_tokens_total"] == 3 + 4


def test_a_chain_longer_than_the_positions_counted_apart_loses_no_token() -> None:
    registry = CollectorRegistry()
    SpeculationMetrics(registry, "m").round(num_drafted=40, num_verified=40, num_accepted=40)
    name = "outrider_spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(value for key, value in scrape(registry).items() if key.startswith(name)) == 40


def test_a_worker_tells_its_load_cache_and_steps() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "m", block_size=16, num_blocks=100)
    metrics.load(num_running=3, num_waiting=2, num_free_blocks=25)
    metrics.step(0.02)
    tokens = TokenMetrics(registry, "m")
    tokens.opened(num_prompt_tokens=64, num_cached_tokens=48)
    tokens.step(20, 4)
    samples = scrape(registry)
    assert samples["outrider_num_requests_running"] == 3
    assert samples["outrider_num_requests_waiting"] == 2
    assert samples["outrider_kv_cache_usage_perc"] == 0.75
    assert samples["outrider_prefix_cache_queries_total"] == 64
    assert samples["outrider_prefix_cache_hits_total"] == 48
    assert samples["outrider_generation_tokens_total"] == 4
    assert samples["outrider_iteration_tokens_sum"] == 20
    assert samples["outrider_step_duration_seconds_count"] == 1
    assert samples["outrider_cache_config_info{16,100}"] == 1


def test_a_worker_without_a_cache_uses_none_of_it() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, "ngram").load(num_running=1, num_waiting=0, num_free_blocks=0)
    assert scrape(registry)["outrider_kv_cache_usage_perc"] == 0


def test_durations_are_counted_by_a_label_whose_values_are_given_before() -> None:
    registry = CollectorRegistry()
    durations = Durations(registry, "outrider_round_duration_seconds", "Parts.", "phase", PHASES)
    durations.observe("verify", [0.03])
    samples = scrape(registry)
    assert samples["outrider_round_duration_seconds_count{verify}"] == 1
    assert samples["outrider_round_duration_seconds_count{other}"] == 0
    with pytest.raises(KeyError):
        durations.observe("lunch", [1.0])


def test_the_metadata_store_is_read_when_scraped() -> None:
    registry = CollectorRegistry()
    state = {"num_outages": 0}
    MetadataCollector(registry, lambda: state["num_outages"] == 0, lambda: state)
    assert scrape(registry)["outrider_metadata_available"] == 1
    state["num_outages"] = 2
    samples = scrape(registry)
    assert (samples["outrider_metadata_available"], samples["outrider_metadata_num_outages_total"]) == (0, 2)


def test_a_label_has_at_most_so_many_values() -> None:
    cap = LabelCap(2)
    assert [cap(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_a_sequence_on_a_target_and_its_draft_is_one_running_request() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, "m").load(num_running=1, num_waiting=0, num_free_blocks=0)
    WorkerMetrics(registry, "d", prefix="outrider_draft_").load(num_running=1, num_waiting=0, num_free_blocks=0)
    samples = scrape(registry)
    assert samples["outrider_num_requests_running"] == samples["outrider_draft_num_requests_running"] == 1
