"""Our grammars under vLLM's structured output: vLLM asks for masks and tells which tokens it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from outrider.errors import without_frames
from outrider.speculation import Grammar

_WORD = 32


class MaskedGrammar(StructuredOutputGrammar):
    """One request's grammar, after its committed tokens.

    vLLM accepts drafted tokens one by one to get the masks after them, and takes them back; committed ones it does not
    take back. `settle` is called between two steps, so that what is then accepted is committed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.error: Exception | None = None
        """Why a mask could not be made; the request must end then."""
        self._grammar = grammar
        self._ahead: list[int] = []

    def settle(self) -> None:
        ahead, self._ahead = self._ahead, []
        try:
            if ahead:
                self._grammar.advance(ahead)
        except Exception as error:
            self.error = without_frames(error)

    def num_possible(self, token_ids: list[int]) -> int:
        """How many of these drafted tokens the grammar lets through. Between two steps only."""
        self.settle()
        return self._grammar.num_allowed(token_ids)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._ahead += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self.num_possible(tokens)]

    def rollback(self, num_tokens: int) -> None:
        del self._ahead[len(self._ahead) - num_tokens :]

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        try:
            allowed = self._grammar.allowed(self._ahead)
        except Exception as error:
            # It may not escape: that would end every request.
            self.error, allowed = without_frames(error), None
        if allowed is None:
            bitmask[batch_index].fill_(-1)
            return
        row = np.zeros(bitmask.shape[1] * 4, dtype=np.uint8)
        row[: len(allowed)] = np.frombuffer(allowed, dtype=np.uint8)[: len(row)]
        bitmask[batch_index] = torch.from_numpy(row.view(np.int32))

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self._ahead = []


class Bitmasks:
    """What vLLM's manager of structured output calls a backend, as far as it is used: it only makes room for masks."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // _WORD)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        return torch.full((max_num_seqs, self._words), -1, dtype=torch.int32)

    def compile_grammar(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("grammars come compiled")

    def destroy(self) -> None: ...
