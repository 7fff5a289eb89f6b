"""The proposer that vLLM wants before it verifies anything. It proposes nothing: drafts come through the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoProposer:
    """For `method: custom_class`. vLLM makes one in each process of the model."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's runner for CPUs calls it without asking whether it is there."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
