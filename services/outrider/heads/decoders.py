"""The forms in which an engine runs a head: torch's, and on a CPU our kernels'."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.attention import Batch
from outrider.engine.attention.paged import TritonBatch
from outrider.engine.attention.sdpa import SdpaBatch
from outrider.engine.backends import cpu
from outrider.engine.backends.cpu.build import Kernels
from outrider.engine.checkpoints.quantization import Int8Linear, quantize
from outrider.engine.models.taps import HEAD_INPUT, Taps
from outrider.heads.interface import DraftHead, HeadSettings
from outrider.heads.layer import LayeredHead
from outrider.heads.mtp import MtpHead


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """The keys and values of a step's sequences."""

    batch: Batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The tokens of all sequences, one after another: [1, heads, tokens, head_dim]."""
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        out = self.batch.attend(queries, keys, values, layer, float(query.shape[-1]) ** -0.5)
        return out.view(1, query.shape[2], query.shape[1], -1).transpose(1, 2)


class TorchHead:
    """The reference."""

    execution = "torch"

    def __init__(self, head: LayeredHead) -> None:
        self.features = torch.empty(0)
        self._head = head

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        out, hidden = self._head(token_ids[None], self.features[None], positions[None], PagedMemory(batch))
        following = out[0, rows]
        if taps is not None:
            taps.found[HEAD_INPUT] = following
        return self._head.logits(hidden[0, rows]).float(), following


class BlockHead:
    """In torch a head that fills in blocks: tokens with features are read, and others are blocks."""

    execution = "torch"

    def __init__(self, head: Any) -> None:
        """head: has a `block`."""
        self.features = torch.empty(0)
        self._head = head

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of what is read no logits."""
        assert isinstance(batch, SdpaBatch | TritonBatch)
        if not len(self.features):
            hidden = self._head.fill_in(token_ids[None], positions[None], PagedMemory(batch))[0, rows]
            return self._head.logits(hidden).float(), hidden
        for layer, (key, value) in enumerate(self._head.context(self.features[None], positions[None])):
            batch.store(key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
        return self.features.new_empty(len(rows), 0), self.features[rows]


class NativeHead:
    """All of a head is our kernels', but for the join of an EAGLE-3 head, which is torch's."""

    def __init__(self, head: LayeredHead, shape: Any, kernels: Kernels, context: int) -> None:
        """shape: as `llama_config` has it."""
        self.features = torch.empty(0)
        rows = head.embed_tokens.weight.bfloat16()
        head.embed_tokens = nn.Embedding.from_pretrained(rows)  # type: ignore[no-untyped-call]
        model = AsLlama(head, shape)
        quantize(model, "int8")
        for name, module in model.named_modules():
            if isinstance(module, Int8Linear):
                # Without a norm a state has a few large numbers, beside which rounding would leave nothing of the rest.
                module.rounds_inputs = not name.startswith("join.")
        self._kernels = cpu.NativeLlama(kernels, model, context)
        self.execution = self._kernels.execution
        self._head = head
        read_natively(head, kernels)
        # They are packed: in this form they would only take memory.
        for layer in head.layers:
            del layer.self_attn, layer.mlp
        del head.lm_head

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        head, last = self._head, len(self._head.layers)
        before_norm = None if head.passes_normed else Taps((last,), rows)
        step = (positions, rows, batch, before_norm)
        if isinstance(head, MtpHead):
            logits, normed = self._kernels.forward_from(token_ids, *step, features=self.features)
        else:
            x, attended = head.join(head.embed(token_ids), self.features.to(head.norm.weight.dtype))
            logits, normed = self._kernels.forward_from(x.float(), *step, attended)
        return logits, normed if before_norm is None else before_norm.found[last]


def llama_config(settings: HeadSettings) -> Any:
    """The config of a Llama with such layers."""
    config = copy.deepcopy(settings.rotary)
    config.update(
        {
            "hidden_size": settings.width,
            "intermediate_size": settings.inner,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.kv_heads,
            "head_dim": settings.head_dim,
            "rms_norm_eps": settings.eps,
        }
    )
    return config


class AsLlama(nn.Module):
    """A head in the form of a Llama of transformers, whose layers have the same parts under the same names."""

    def __init__(self, head: LayeredHead, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.layers, self.model.norm, self.model.rotary_emb = head.layers, head.norm, head.rotary.table
        self.embedding, self.lm_head = head.embed_tokens, head.lm_head
        if isinstance(head, MtpHead):
            state_norm = getattr(head.enorm, "weight", None)
            self.join = cpu.Join(head.eh_proj, state_norm, head.hnorm.weight, head.early)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def read_natively(head: DraftHead, kernels: Kernels) -> None:
    """The kernels make its features from now on."""
    if isinstance(head, LayeredHead) and head.taps and not head.settings.gated:
        norms = [norm.get_parameter("weight") for norm in head.fc_norm]
        head.projection = cpu.Projection(kernels, head.fc, norms, head.settings.eps, len(head.taps))
        del head.fc, head.fc_norm
