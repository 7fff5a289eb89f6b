"""vLLM's worker that verifies drafts from outside: `--worker-cls outrider.vllm.worker.Worker`.

It is for vLLM's second model runner. Drafted ids come in the scheduler's output, so every process of the model has the
same. A drafted token is accepted if it is the token that vLLM draws at its position. vLLM's noise is a function of seed
and position, so a text is vLLM's own, with drafts and without. In a step in which no request has a draft, nothing of
ours runs.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from outrider.vllm import versions

# Before what another release may not have is imported.
versions.check()

from vllm.utils.torch_utils import async_tensor_h2d  # noqa: E402
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler  # noqa: E402

from outrider.vllm.features import send_features  # noqa: E402
from outrider.vllm.front import HEAD  # noqa: E402
from outrider.vllm.graphs import DraftGraphs  # noqa: E402
from outrider.vllm.kernels import accept_kernel, follow_kernel  # noqa: E402
from outrider.vllm.scheduler import CHAINS, METHOD  # noqa: E402
from outrider.vllm.settings import check  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_NO_DRAFTER = SimpleNamespace(draft_logits=None)


class Worker(BaseWorker):
    """One process of the model."""

    def init_device(self) -> None:
        """Raises ValueError for settings under which there can be no drafts."""
        check(self.vllm_config)
        super().init_device()
        if not self.use_v2_model_runner:
            raise ValueError(
                "outrider: needs vLLM's second model runner, which another setting excludes: vLLM's log names it. On a "
                "CPU it needs Triton"
            )
        if self.parallel_config.distributed_executor_backend == "mp":
            # vLLM's workers notice that the engine has ended only where they do not hang.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        use_drafts(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM says afterwards what is compiled in a step, or ends by it."""
        runner = self.model_runner
        longest, steps, update = runner.decode_query_len, runner.num_speculative_steps, runner.update_requests
        _follow(runner.req_states, [(0, 0, ())])
        # Its warm-up verifies drafts if the runner has a drafter. A divided one would send what nobody receives.
        if runner.pp_handler is None:
            runner.num_speculative_steps = runner.req_states.draft_tokens.shape[1]

        def update_requests(scheduler_output: Any) -> None:
            update(scheduler_output)
            # It makes its steps by it.
            runner.decode_query_len = longest

        runner.update_requests = update_requests
        try:
            return super().compile_or_warm_up_model()
        finally:
            runner.num_speculative_steps, runner.update_requests = steps, update

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        verify_by_draw(self.model_runner)
        if head := (self.vllm_config.additional_config or {}).get(HEAD):
            model = Path(self.vllm_config.model_config.model)
            send_features(self.model_runner, model, Path(head), sends=self.is_driver_worker)


def use_drafts(runner: Any) -> None:
    """Has a new runner take its drafts from the scheduler's output."""
    states = runner.req_states
    if not drafts_itself(runner):
        # For its n-grams vLLM keeps all token ids on the GPU: here they lie where they do without speculation.
        shape = states.max_num_reqs, states.max_model_len
        states.all_token_ids = StagedWriteTensor(shape, torch.int32, states.device, uva_instead_of_gpu=True)
        # Else it empties the drafts of each new request.
        states.num_speculative_steps = 0
    longest = 1 + states.draft_tokens.shape[1]
    update, initialize, adapters = (
        runner.update_requests,
        runner.initialize_kv_cache,
        runner.lora_state.make_lora_inputs,
    )
    drafted: Mapping[str, Sequence[int]] = {}

    def make_lora_inputs(names: list[str], *rest: Any) -> tuple[Any, ...]:
        """vLLM says the adapter of each request once, and a request with drafts has more rows of logits."""
        of_requests, *others = adapters(names, *rest)
        rows = [1 + len(drafted.get(name, ())) for name in names]
        return tuple(one for one, count in zip(of_requests, rows, strict=True) for _ in range(count)), *others

    def update_requests(scheduler_output: Any) -> None:
        """In each step, after new requests have their places and before inputs are prepared."""
        nonlocal drafted
        update(scheduler_output)
        drafted = scheduler_output.scheduled_spec_decode_tokens
        # vLLM orders a batch by it, and expands batches with drafts.
        runner.decode_query_len = longest if drafted else 1
        if chains := getattr(scheduler_output, CHAINS, None):
            try:
                follow_chains(runner.req_states, chains)
            except Exception:
                # Any tokens will do: they are compared with what is drawn.
                log.exception("a step's drafts are lost")

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> None:
        runner.decode_query_len = longest
        initialize(*args, **kwargs)
        runner.cudagraph_manager = DraftGraphs.of(runner)

    runner.update_requests, runner.initialize_kv_cache = update_requests, initialize_kv_cache
    runner.lora_state.make_lora_inputs = make_lora_inputs


def drafts_itself(runner: Any) -> bool:
    return bool(runner.speculative_config.method != METHOD)


def verify_by_draw(runner: Any) -> None:
    """Has a runner whose model is loaded verify by its own draw."""
    if runner.rejection_sampler is not None:
        runner.rejection_sampler = DrawSampler(runner.sampler, runner.speculative_config, runner.device)
    if not drafts_itself(runner):
        propose_nothing(runner)


def propose_nothing(runner: Any) -> None:
    runner.speculator = None
    runner.num_speculative_steps = 0
    if runner.pp_handler is not None:
        runner.pp_handler.num_speculative_steps = 0
    if runner.rejection_sampler is None:
        return
    sample: Callable[..., Any] = runner.sample

    def sample_with_drafts(hidden_states: Tensor, input_batch: Any, *rest: Any, **more: Any) -> Any:
        # vLLM's runner asks its drafter for probabilities when it verifies, and for drafts when it does not.
        runner.speculator = _NO_DRAFTER
        try:
            return sample(hidden_states, input_batch, *rest, **more)
        finally:
            runner.speculator = None

    runner.sample = sample_with_drafts


class DrawSampler(RejectionSampler):
    """For steps with drafts: one draw at each row, as without drafts, and a comparison."""

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos
        processes = self.sampler.get_logprobs_dims(idx_mapping_np, include_token_ids=False) is not None
        drawn, processed = self.sampler.sample(logits, *rows, seq_lens_upper_bound_np, return_logprobs=processes)
        num_reqs = idx_mapping.shape[0]
        sampled = drawn.new_zeros(num_reqs, self.num_speculative_steps + 1)
        num_sampled = drawn.new_empty(num_reqs, dtype=torch.int32)
        accept_kernel[(num_reqs,)](
            sampled, sampled.stride(0), num_sampled, drawn, verify_draft_sampled, cu_num_logits, num_warps=1
        )
        return processed, sampled, num_sampled


def follow_chains(states: Any, chains: Mapping[str, tuple[int, Sequence[int]]]) -> None:
    """The drafts of each request are what its chain says after the tokens that the device has committed: when steps
    overlap, the scheduler does not know these yet."""
    places = states.req_id_to_index
    _follow(states, [(places[name], base, token_ids) for name, (base, token_ids) in chains.items()])


def _follow(states: Any, chains: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    # A running step commits as many drafts as this one verifies, and its own token. Always as wide: the kernel is
    # compiled once.
    tokens, drafted = states.all_token_ids.gpu, states.draft_tokens
    count = drafted.shape[1]
    width = 2 * count + 1
    rows = []
    for place, base, token_ids in chains:
        found = token_ids[:width]
        rows.append([place, base, len(found), *found, *([0] * (width - len(found)))])
    table = async_tensor_h2d(rows, dtype=torch.int32, device=states.device)
    follow_kernel[(len(rows),)](
        *(drafted, drafted.stride(0), table, table.stride(0), tokens, tokens.stride(0), states.total_len.gpu),
        COUNT=count,
        num_warps=1,
    )
