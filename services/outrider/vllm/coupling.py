"""Coupled sampling in vLLM: a seeded text is the same with drafts, without, and on another target.

The token at a position is argmax(log p + G(seed, position, token)), where p is what vLLM's own processors, penalties
and masks leave, after temperature, top-k, top-p and min-p: `outrider.speculation` chooses it, as on our own engine. A
drafted token is accepted if it is that token. Such a row is handed to vLLM as a greedy row whose only possible token is
the chosen one, so that vLLM's own sampler and rejection sampler do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingType
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from outrider.drafting.tree import DraftTree
from outrider.speculation import Candidate, NotFinite, SamplingParams, VerificationMode, verify

EXTRA = "outrider"
"""Key in a request's extra_args: what vLLM has no place for."""
COMMITTED, BIAS = "committed", "bias"
"""Under it: how many tokens at the end of the prompt are output of another target; token ids and biases."""
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class CoupledRow:
    """A request of the batch whose choice is coupled."""

    index: int
    position: int
    """Of its next token. Positions count from the first prompt token."""
    params: SamplingParams


class Coupling:
    """What a runner's batch asks for. As of now, so only to be used while it samples."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_drafted: Sequence[int] | None = None
        """How many tokens of each request are drafted, while the rejection sampler runs."""

    def rows(self) -> list[CoupledRow]:
        batch = self._runner.input_batch
        if not batch.random_reqs:
            return []
        found = []
        for index, request_id in enumerate(batch.req_ids):
            params = self._runner.requests[request_id].sampling_params
            if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
                # On a CPU vLLM cannot rewind the generator of a row that it discards. It is not needed.
                batch.generators.pop(index, None)
                found.append(CoupledRow(index, int(batch.num_tokens_no_spec[index]), coupled_params(params)))
        return found

    def extras(self) -> dict[int, Mapping[str, Any]]:
        """What vLLM has no place for, by index in the batch. Under another scheduler a client can write there too:
        what is no mapping is ignored."""
        found = {}
        for index, request_id in enumerate(self._runner.input_batch.req_ids):
            params = self._runner.requests[request_id].sampling_params
            if (extra := extra_args(params).get(EXTRA)) and isinstance(extra, Mapping):
                found[index] = extra
        return found

    def as_greedy(self, metadata: Any, rows: Sequence[CoupledRow]) -> Any:
        """The metadata in which `rows` are greedy, and nothing is cut off by top-k and top-p in them."""
        indices = [row.index for row in rows]
        temperature = metadata.temperature.clone()
        temperature[indices] = 0.0
        if not bool((temperature > 0).any()):
            return replace(
                metadata, temperature=None, all_greedy=True, all_random=False, top_k=None, top_p=None, generators={}
            )
        top_k, top_p = metadata.top_k, metadata.top_p
        if top_k is not None:
            top_k = top_k.clone()
            top_k[indices] = self._runner.input_batch.vocab_size
        if top_p is not None:
            top_p = top_p.clone()
            top_p[indices] = 1.0
        others = {index: one for index, one in metadata.generators.items() if index not in set(indices)}
        return replace(
            metadata,
            temperature=temperature,
            all_greedy=False,
            all_random=False,
            top_k=top_k,
            top_p=top_p,
            generators=others,
        )

    def with_committed(self, metadata: Any) -> Any:
        """The metadata in which output that another target committed counts as output: penalties need it."""
        if not metadata.output_token_ids:
            return metadata
        counts = {index: extra.get(COMMITTED, 0) for index, extra in self.extras().items()}
        if not any(counts.values()):
            return metadata
        outputs = list(metadata.output_token_ids)
        for index, count in counts.items():
            prompt = self._runner.requests[self._runner.input_batch.req_ids[index]].prompt_token_ids
            if count:
                outputs[index] = [*prompt[-count:], *outputs[index]]
        return replace(metadata, output_token_ids=outputs)

    def add_biases(self, logits: Tensor, counts: Sequence[int]) -> None:
        """Adds logit biases. `counts`: rows of logits of each request."""
        starts = [0, *accumulate(counts)]
        for index, extra in self.extras().items():
            if biases := extra.get(BIAS):
                ids = torch.tensor(list(biases), device=logits.device)
                values = torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
                logits[starts[index] : starts[index + 1], ids] += values


def extra_args(params: Any) -> Mapping[str, Any]:
    """A request's own arguments, of a client or of a target."""
    found = None if params is None else params.extra_args
    return found if isinstance(found, Mapping) else {}


def settle(logits: Tensor, at: Sequence[int], params: Sequence[SamplingParams], positions: Sequence[int]) -> None:
    """Makes the rows `at` of `logits` one-hot at their chosen tokens."""
    rows = torch.tensor(at, device=logits.device)
    candidates = [
        Candidate(one, VerificationMode.COUPLED, DraftTree(position))
        for one, position in zip(params, positions, strict=True)
    ]
    try:
        chosen = [verdict.token_ids[0] for verdict in verify(logits[rows], candidates)]
    except NotFinite:
        # A fault of the model: vLLM does with such rows what it does without us.
        return
    logits[rows] = -torch.inf
    logits[rows, torch.tensor(chosen, device=logits.device)] = 0.0


class CoupledSampler(Sampler):
    """For steps without drafts, and for the last row of each request in steps with drafts."""

    coupling: Coupling

    def forward(self, logits: Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
        if self.coupling.num_drafted is None:
            sampling_metadata = self.coupling.with_committed(sampling_metadata)
        return super().forward(logits, sampling_metadata, *rest, **more)

    def apply_logits_processors(self, logits: Tensor, *rest: Any, **more: Any) -> Tensor:
        self.coupling.add_biases(logits, [1] * len(logits))
        processed: Tensor = super().apply_logits_processors(logits, *rest, **more)
        return processed

    def sample(self, logits: Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
        rows = self.coupling.rows() if len(logits) else []
        if not rows:
            return super().sample(logits, sampling_metadata, *rest, **more)
        drafted = self.coupling.num_drafted
        positions = [row.position + (drafted[row.index] if drafted is not None else 0) for row in rows]
        settle(logits, [row.index for row in rows], [row.params for row in rows], positions)
        # Under the rejection sampler the metadata is greedy already.
        metadata = sampling_metadata if drafted is not None else self.coupling.as_greedy(sampling_metadata, rows)
        return super().sample(logits, metadata, *rest, **more)


class CoupledRejectionSampler(RejectionSampler):
    """For steps with drafts."""

    coupling: Coupling
    _rows: Sequence[CoupledRow] = ()

    def forward(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        rows = self.coupling.rows()
        sampling_metadata = self.coupling.with_committed(sampling_metadata)
        if rows:
            sampling_metadata = self.coupling.as_greedy(sampling_metadata, rows)
        self.coupling.num_drafted, self._rows = list(metadata.num_draft_tokens), rows
        try:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        finally:
            self.coupling.num_drafted, self._rows = None, ()

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        counts = list(metadata.num_draft_tokens)
        self.coupling.add_biases(logits, counts)
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        starts = [0, *accumulate(counts)]
        each = [(row, number) for row in self._rows for number in range(counts[row.index])]
        if each:
            at = [starts[row.index] + number for row, number in each]
            settle(logits, at, [row.params for row, _ in each], [row.position + number for row, number in each])
        return logits


def mend_kernels() -> None:
    """Replaces a kernel for CPUs that vLLM 0.32 has wrong: it writes to a copy. In steps with drafts and sampled
    requests each row then had as its temperature, top_k and top_p what lay in memory.
    """
    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, most: int | None = None
) -> None:
    """`values` [batch] → `output` [tokens], as often as each request has tokens; `ends` [batch] are their sums."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


def couple(runner: Any, speculative_config: Any, device: Any) -> None:
    """Replaces the samplers of a runner by coupled ones."""
    coupling, config = Coupling(runner), runner.model_config
    sampler = CoupledSampler(logprobs_mode=config.logprobs_mode, use_fp64_gumbel=config.use_fp64_gumbel)
    sampler.coupling = coupling
    runner.sampler = sampler
    if hasattr(runner, "rejection_sampler"):  # where tokens are sampled, in an engine that verifies
        runner.rejection_sampler = CoupledRejectionSampler(sampler, speculative_config, device)
        runner.rejection_sampler.coupling = coupling


def coupled_params(params: Any) -> SamplingParams:
    """How the next token of a seeded request of vLLM is chosen."""
    return _made(params.temperature, max(params.top_k, 0), params.top_p, params.min_p, params.seed % _SEEDS)


@lru_cache(maxsize=4096)
def _made(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature, top_k, top_p, min_p, seed)
