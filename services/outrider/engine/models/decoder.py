"""Runs any transformers decoder over the paged cache, through transformers' own attention interface.

Only the attention is replaced; all other code of the model is transformers'. So every decoder that uses the interface
works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.attention import Batch
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.models.adapters import AdaptedModules, Adapter
from outrider.engine.models.taps import HEAD_INPUT, Taps

_ATTENTION_NAME = "outrider"


class Decoder(Protocol):
    """A model in the form that the engine runs."""

    execution: str
    """Name of the implementation. Two decoders of one model, dtype and execution give the same bits."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """token_ids, positions [tokens]; rows: indices of the tokens whose logits are wanted; taps: states to take.

        Returns float32 logits [len(rows), vocab] and the head's inputs, [len(rows), width] in the model's dtype.
        """
        ...


# The current step, for the attention of every layer.
_batch: ContextVar[Batch] = ContextVar("outrider_batch")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, tokens, head_dim] → [1, tokens, heads, head_dim]."""
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise CheckpointError("config.json", f"attention with {unsupported} is not supported")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = _batch.get().attend(rows[0], rows[1], rows[2], layer, scale)
    return out.view(1, query.shape[2], query.shape[1], -1), None


def register_attention() -> str:
    """Makes the paged cache's attention known to transformers. Returns the name under which a model is to use it."""
    # No mask function is registered under the name, so transformers builds no mask. The paged cache has its own, and
    # building one would wait for the device in every step.
    AttentionInterface.register(_ATTENTION_NAME, _attend)
    return _ATTENTION_NAME


class HeadDecoder(Decoder, Protocol):
    """A head in the form that an engine runs. Instead of the head's inputs it gives the features of the next step."""

    features: Tensor
    """Of the next forward's tokens, [tokens, width]."""


class TransformersDecoder:
    """Any AutoModelForCausalLM, unfused."""

    execution = "transformers"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adapted = AdaptedModules(model)
        self.of_tokens: Tensor | None = None
        self._head_input = torch.empty(0)
        # A hook keeps the head's input: requesting all hidden states would keep those of every layer alive.
        model.get_output_embeddings().register_forward_pre_hook(self._see_head_input)  # type: ignore[operator]

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        self._adapted.adapt(adapters, self)

    def _see_head_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._head_input = inputs[0][0]

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        token = _batch.set(batch)
        try:
            with self._tapped(taps):
                out = self._model(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=rows,
                )
            hidden = self._head_input
        finally:
            _batch.reset(token)
        return out.logits[0].float(), hidden

    @contextmanager
    def _tapped(self, taps: Taps | None) -> Iterator[None]:
        """Takes the states while the model runs. Hooks that stayed would cost every step."""
        if taps is None:
            yield
            return
        decoder: Any = self._model.base_model
        layers = next(
            found
            for found in decoder.modules()
            if isinstance(found, nn.ModuleList) and len(found) == decoder.config.num_hidden_layers
        )

        def before(number: int, args: tuple[Tensor, ...], given: dict[str, Tensor]) -> None:
            taps.take(number, (args[0] if args else given["hidden_states"])[0])

        def after(number: int, out: Any) -> None:
            taps.take(number, (out if isinstance(out, Tensor) else out[0])[0])

        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                take = partial(before, number)
                hook = layer.register_forward_pre_hook(lambda _, *given, take=take: take(*given), with_kwargs=True)
                hooks.callback(hook.remove)
            for module, number in ((layers[-1], len(layers)), (decoder, HEAD_INPUT)):
                hook = module.register_forward_hook(lambda _, __, out, number=number: after(number, out))
                hooks.callback(hook.remove)
            yield
