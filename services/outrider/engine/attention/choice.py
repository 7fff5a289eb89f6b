"""Chooses an engine's attention."""

from __future__ import annotations

import logging

import torch

from outrider.engine.attention.interface import Attention, Windows
from outrider.engine.attention.paged import Shape, TritonAttention, TritonMissing
from outrider.engine.attention.sdpa import SdpaAttention

log = logging.getLogger(__name__)


def make_attention(name: str, shape: Shape, device: torch.device, windows: Windows = ()) -> Attention:
    """The attention that EngineConfig.attention names. Raises TritonMissing when triton is required but cannot run."""
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        try:
            return TritonAttention(shape, device, windows)
        except TritonMissing as error:
            if name == "triton":
                raise
            log.warning("%s; without it a GPU runs several times slower", error)
    return SdpaAttention(windows)
