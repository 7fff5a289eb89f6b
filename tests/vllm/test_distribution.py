"""What our samplers draw in vLLM follows the model's own distribution: for 200,000 seeds at fixed prompts, and as often
without a seed, which vLLM's own rule is for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from outrider.speculation import SamplingParams
from outrider.speculation.sampling import support
from scipy.stats import chisquare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRAWS = 200_000
BATCH = 500
VOCABULARY = 384
PARAMS = {"temperature": 0.9, "top_k": 40, "top_p": 0.97}
PROMPTS = 4
SEEDED = pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "without a seed"])


class Batch:
    """As much of a runner as the samplers ask for: a batch of requests at one position each."""

    def __init__(self, seeds: Sequence[int | None], position: int) -> None:
        from vllm.sampling_params import SamplingParams as Vllm

        names = [str(number) for number in range(len(seeds))]
        self.requests = {
            name: type("Request", (), {"sampling_params": Vllm(seed=seed, **PARAMS), "prompt_token_ids": []})()
            for name, seed in zip(names, seeds, strict=True)
        }
        self.input_batch = type(
            "InputBatch",
            (),
            {
                "random_reqs": set(names),
                "req_ids": names,
                "generators": {},
                "num_tokens_no_spec": np.full(len(seeds), position),
                "vocab_size": VOCABULARY,
            },
        )()
        self.model_config = type("Config", (), {"logprobs_mode": "raw_logprobs", "use_fp64_gumbel": False})()


def metadata(count: int) -> Any:
    from vllm.v1.sample.logits_processor.state import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    full = torch.full((count,), PARAMS["temperature"])
    return SamplingMetadata(
        temperature=full,
        all_greedy=False,
        all_random=True,
        top_p=torch.full((count,), PARAMS["top_p"]),
        top_k=torch.full((count,), PARAMS["top_k"], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(count),
        presence_penalties=torch.zeros(count),
        repetition_penalties=torch.ones(count),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@functools.cache
def load_kernels() -> None:
    """As the worker does when it starts. It looks at every object of the process, so once."""
    from outrider.vllm import coupling
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    coupling.mend_kernels()


def couple(runner: Any) -> None:
    from outrider.vllm import coupling

    load_kernels()
    runner.rejection_sampler = None
    coupling.couple(runner, None, torch.device("cpu"))


def one_drafted(token_id: int) -> Any:
    """Each request of the batch has this drafted token: a row of logits before it, and one after it."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    rows = torch.arange(2 * BATCH, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.full((BATCH,), token_id, dtype=torch.int32),
        num_draft_tokens=[1] * BATCH,
        cu_num_draft_tokens=torch.arange(1, BATCH + 1, dtype=torch.int32),
        cu_num_sampled_tokens=torch.arange(2, 2 * BATCH + 1, 2, dtype=torch.int32),
        target_logits_indices=rows[::2].contiguous(),
        bonus_logits_indices=rows[1::2].contiguous(),
        logits_indices=rows,
    )


def draws(
    logits: torch.Tensor,
    drafted: int | None,
    count: int = DRAWS // PROMPTS,
    bias: float = 0.0,
    *,
    seeded: bool = True,
) -> tuple[Counter[int], Counter[int]]:
    """First tokens, and second ones where the drafted token was accepted; from both samplers of vLLM, made ours.

    logits [2, vocab]: of the first position, and of the one after it. `bias` is added to the last token's, unseen by
    the test's expectation.
    """
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for start in range(0, count, BATCH):
        runner = Batch([start + number if seeded else None for number in range(BATCH)], position=start % 7)
        couple(runner)
        rows = logits.clone()
        rows[:, int(logits[0].argmax())] += bias
        if drafted is None:
            found = runner.sampler(rows[:1].repeat(BATCH, 1), metadata(BATCH)).sampled_token_ids.tolist()
        else:
            spec = one_drafted(drafted)
            found = runner.rejection_sampler(
                spec, None, rows.repeat(BATCH, 1), metadata(BATCH)
            ).sampled_token_ids.tolist()
        first.update(tokens[0] for tokens in found)
        second.update(tokens[1] for tokens in found if len(tokens) > 1 and tokens[1] >= 0)
    return first, second


def p_value(counts: Counter[int], logits: torch.Tensor) -> float:
    wanted = support(logits, SamplingParams(**PARAMS))
    expected = {int(token): float(p) * counts.total() for token, p in zip(wanted.token_ids, wanted.probs, strict=True)}
    assert set(counts) <= set(expected)
    likely = [token for token, count in expected.items() if count >= 5]
    seen, due = [counts[token] for token in likely], [expected[token] for token in likely]
    rest = counts.total() - sum(seen)
    if (rare := counts.total() - sum(due)) > 1:
        seen, due = [*seen, rest], [*due, rare]
    return float(chisquare(seen, np.array(due) * sum(seen) / sum(due)).pvalue)


@pytest.fixture(scope="module")
def logits() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [2.5 * torch.randn(2, VOCABULARY) for _ in range(PROMPTS)]


def test_the_same_seeds_at_the_same_positions_draw_the_same_whatever_was_drafted(logits: list[torch.Tensor]) -> None:
    for each in logits:
        assert draws(each, None, 5000)[0] == draws(each, int(each[0].topk(3).indices[2]), 5000)[0]


@SEEDED
def test_draws_follow_the_model(logits: list[torch.Tensor], seeded: bool) -> None:
    values = []
    for each in logits:
        first, second = draws(each, int(each[0].topk(3).indices[2]), seeded=seeded)
        values += [p_value(first, each[0]), p_value(second, each[1])]
        assert second.total() > 1000
    assert min(values) > 1e-4, values


@SEEDED
def test_a_planted_bias_is_found(logits: list[torch.Tensor], seeded: bool) -> None:
    first, _ = draws(logits[0], int(logits[0][0].topk(3).indices[2]), bias=0.2, seeded=seeded)
    assert p_value(first, logits[0][0]) < 1e-4
