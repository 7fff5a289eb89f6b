"""vLLM's worker with coupled sampling: `--worker-cls outrider.vllm.worker.Worker`."""

from __future__ import annotations

from vllm.platforms import current_platform

from outrider.vllm.coupling import couple

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

_RAW = ("raw_logprobs", "raw_logits")


class Worker(BaseWorker):
    """One process of the model."""

    def init_device(self) -> None:
        """Raises ValueError for settings under which seeded texts would depend on drafts."""
        super().init_device()
        if self.use_v2_model_runner:
            raise ValueError("outrider: coupled sampling needs vLLM's first model runner")
        if self.model_config.logprobs_mode not in _RAW:
            raise ValueError(f"logprobs_mode: outrider's worker needs one of {', '.join(_RAW)}")
        couple(self.model_runner, self.vllm_config.speculative_config, self.device)
