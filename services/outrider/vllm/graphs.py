"""Recorded steps of vLLM's second runner for drafts from outside.

With speculation vLLM records whole steps in which each request has all its drafts; steps with fewer, and those without,
it runs in pieces. Here steps without drafts have the graphs that they have without speculation, and steps with drafts
have graphs for any number of them, where the attention can.
"""

from __future__ import annotations

from typing import Any, Self

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager


class DraftGraphs(ModelCudaGraphManager):
    decode_query_len: int
    varlen_decode: bool
    _candidates: dict[Any, list[Any]]
    _capture_descs: dict[Any, list[Any]]

    @classmethod
    def of(cls, runner: Any) -> Self:
        """For a runner that has made its own manager, which records nothing before it is asked to."""
        mode, length = runner.cudagraph_manager.cudagraph_mode, runner.decode_query_len
        blocked = get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, length)
        return cls(
            runner.vllm_config,
            runner.device,
            mode,
            decode_query_len=length,
            lora_capture_cases=runner.lora_capture_cases,
            varlen_decode=blocked is None and mode.separate_routine(),
            ubatch_runner=runner.ubatch_runner,
        )

    def _init_candidates(self) -> None:
        drafts = self._recorded(self.decode_query_len, self.varlen_decode)
        plain = self._recorded(1, False)
        for key, found in drafts[0].items():
            own = plain[0].get(key, [])
            both = [*own, *(one for one in found if one not in own)]
            # The first that fits is taken: a whole step, if there is one.
            self._candidates[key] = sorted(both, key=lambda one: one.cg_mode != CUDAGraphMode.FULL)
        for mode, found in drafts[1].items():
            every = {*plain[1].get(mode, ()), *found}
            # The largest is recorded first: the others use its memory.
            self._capture_descs[mode] = sorted(every, key=lambda one: one.num_tokens, reverse=True)

    def _recorded(self, length: int, varlen: bool) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
        """The graphs that vLLM has for steps of `length` tokens a request: by key of a step, and by mode."""
        given = self.decode_query_len, self.varlen_decode
        self._candidates, self._capture_descs = {}, {}
        self.decode_query_len, self.varlen_decode = length, varlen
        super()._init_candidates()
        self.decode_query_len, self.varlen_decode = given
        return self._candidates, self._capture_descs
