"""What a draft head on draft workers reads of the target's hidden states, taken out of vLLM's second runner.

A step's rows are computed on the device, because the next step's graph writes over its states, and copied to the host
on the stream of the drawn tokens, while the next step runs. They come with these in the runner's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, stream

from outrider.heads.interface import DraftHead
from outrider.heads.loading import load_head_of

_SENT = "outrider_features"
"""Attribute of the runner's output."""
_READ = ("fc", "fc_norm", "input_norm")
"""What a head needs to compute features; the rest of it runs on draft workers."""


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Of all requests of a step: one tensor, because it crosses to another process where the model has several."""

    spans: Mapping[str, tuple[int, int, int]]
    """By request the position of its first row, and its rows, without those of rejected drafts."""
    rows: Tensor
    """[tokens, width], bfloat16"""

    def of(self, request_id: str) -> tuple[int, Tensor]:
        first, begin, end = self.spans[request_id]
        return first, self.rows[begin:end]


def sent_features(made: Any) -> StepFeatures | None:
    """What came with a runner's output."""
    return getattr(made, _SENT, None)


def send_features(runner: Any, model: Path, directory: Path, *, sends: bool) -> None:
    """Has a runner whose model is loaded, and not yet compiled, send what the head in `directory` reads. `sends`: of
    the processes that a model is divided among the first, whose output is taken; all run the same steps. Raises
    HeadError, or ValueError for a model that does not give the states."""
    head: Any = load_head_of(model, directory, "cpu")[0]
    for name, _ in [*head.named_children()]:
        if name not in _READ:
            delattr(head, name)
    head.to(runner.device, runner.vllm_config.model_config.dtype)
    order = _tap(runner, head.taps)
    if not sends:
        return
    sample_tokens = runner.sample_tokens

    def sample_and_read(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        output = sample_tokens(grammar_output)
        # Another process than the last of the model draws nothing.
        return _Output(output, runner, head, order, state) if isinstance(output, AsyncOutput) else output

    runner.sample_tokens = sample_and_read


def _tap(runner: Any, taps: Sequence[int]) -> Sequence[int]:
    """Has the model give the inputs of these layers. Returns which of them each tap is."""
    if not taps:
        return ()
    if not hasattr(runner.model, "set_aux_hidden_state_layers"):
        raise ValueError(f"remote_head: vLLM's {type(runner.model).__name__} does not give the states that it reads")
    layers = sorted(set(taps))
    runner.use_aux_hidden_state_outputs = True
    runner.model.set_aux_hidden_state_layers(tuple(layers))
    return [layers.index(tap) for tap in taps]


class _Output(AsyncModelRunnerOutput):
    """vLLM's output of a step, with features."""

    @torch.inference_mode()
    def __init__(self, output: AsyncOutput, runner: Any, head: DraftHead, order: Sequence[int], state: Any) -> None:
        batch, aux = state.input_batch, state.aux_hidden_states
        count, starts = batch.num_tokens, batch.query_start_loc_np[: batch.num_reqs + 1]
        states = torch.cat([aux[place][:count] for place in order], -1) if order else state.hidden_states[:count]
        begins = torch.from_numpy(starts[:-1].copy()).to(batch.positions.device, torch.int64, non_blocking=True)
        here = [
            head.features(states[None])[0].to(torch.bfloat16, copy=True),
            batch.positions[begins],
            output.sampler_output.num_rejected,
        ]
        self._output, self._here, self._starts = output, here, starts.tolist()
        with stream(runner.output_copy_stream, runner.main_stream):
            runner.output_copy_stream.wait_stream(runner.main_stream)
            self._there = [one.to("cpu", non_blocking=True, copy=True) for one in here]
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(runner.output_copy_stream)

    def get_output(self) -> Any:
        made = self._output.get_output()
        self._copied.synchronize()
        rows, firsts, rejected = self._there
        begins, ends = self._starts, self._starts[1:]
        each = zip(made.req_ids, firsts.tolist(), begins, ends, rejected.tolist(), strict=False)
        spans = {name: (first, begin, end - dropped) for name, first, begin, end, dropped in each}
        setattr(made, _SENT, StepFeatures(spans, rows))
        return made

    def get_kv_connector_output(self) -> Any:
        """Asked for by vLLM 0.33 where `get_output` has failed."""
        return self._output.get_kv_connector_output()
