"""vLLM's second model runner on CPUs, by Triton's interpreter: imported as each interpreter of `make vllm` starts.

vLLM has that runner's kernels for GPUs only. Here they run as Python. Two of them the interpreter cannot run: PyTorch
stands in for these, with drafts and without. Nothing of Outrider is imported here, so that vLLM alone runs so too.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")


def _backends(module: Any) -> None:
    """vLLM asks for a backend that is active; PyTorch's compiler for its GPU, and takes such an error for none."""

    def no_target(self: Any) -> Any:
        raise RuntimeError("0 active drivers")

    driver = type("Driver", (), {"is_active": classmethod(lambda cls: True), "get_current_target": no_target})
    compiler = type("Compiler", (), {"supports_target": staticmethod(lambda target: False)})
    module.backends["cpu"] = SimpleNamespace(driver=driver, compiler=compiler)


def _top_k_top_p(module: Any) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply_top_k_top_p(logits: Any, k: Any, p: Any, **more: Any) -> Any:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

    module.apply_top_k_top_p = apply_top_k_top_p


def _grammars(module: Any) -> None:
    module.StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask


def apply_grammar_bitmask(self: Any, logits: Any, input_batch: Any, names: list[str], bitmask: Any) -> None:
    """Until 0.32 a request has as many rows of the mask as it has rows of logits; since then it has one for each row
    that it could have."""
    import torch

    starts, at = input_batch.cu_num_logits_np, 0
    fixed = len(bitmask) == len(names) * self.mask_stride
    for name in names:
        index = input_batch.req_ids.index(name)
        count = starts[index + 1] - starts[index]
        for row in range(count):
            allowed = (torch.from_numpy(bitmask[at + row])[:, None] >> torch.arange(32)) & 1
            logits[starts[index] + row].masked_fill_(allowed.flatten()[: logits.shape[1]] == 0, -torch.inf)
        at += self.mask_stride if fixed else count


def _settings(module: Any) -> None:
    """On CPUs vLLM turns asynchronous scheduling off, starts each process from nothing, and compiles small functions in
    the step that first needs them, for longer than a step may take."""
    module.CpuPlatform.simple_compile_backend = "eager"
    check = module.CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked
        # With what its parent has imported it starts in half the time.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    module.CpuPlatform.check_and_update_config = classmethod(check_and_keep)


_AFTER: dict[str, Callable[[Any], None]] = {
    "triton.backends": _backends,
    "vllm.v1.worker.gpu.sample.sampler": _top_k_top_p,
    "vllm.v1.worker.gpu.sample.states": _top_k_top_p,
    "vllm.v1.worker.gpu.structured_outputs": _grammars,
    "vllm.platforms.cpu": _settings,
}
"""What is done once a module is imported."""


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any, after: Callable[[Any], None]) -> None:
        self._real, self._after = real, after

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if (after := _AFTER.get(name)) is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                spec.loader = _Loader(spec.loader, after)  # type: ignore[assignment]
                return spec
        return None


sys.meta_path.insert(0, _Finder())
