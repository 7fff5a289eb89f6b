"""vLLM's worker with coupled sampling: `--worker-cls outrider.vllm.worker.Worker`."""

from __future__ import annotations

import ctypes
import signal

import torch
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from outrider.vllm import versions

# Before what another release may not have is imported.
versions.check()

from outrider.vllm.coupling import couple, mend_kernels  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

_PR_SET_PDEATHSIG = 1
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
        if self.parallel_config.distributed_executor_backend == "mp":
            # vLLM's workers notice that the engine has ended only where they do not hang.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if current_platform.is_cpu() and self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            # Where the model is not compiled, vLLM still has small functions compiled in the step that first needs
            # them: of ranks, of log probabilities. That takes a CPU longer than any step.
            torch.compiler.set_stance("force_eager")
        mend_kernels()
        couple(self.model_runner, self.vllm_config.speculative_config, self.device)
