"""Does a head know its target? A wrong order of taps or a norm left out gives drafts that are never accepted, and no
error. So a head is tried on a text of the target before it serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.heads.interface import ChainMemory, DraftHead

log = logging.getLogger(__name__)

# Chance is one in tens of thousands; the worst heads that are of use guess one token in five.
LEAST = 0.1


@torch.inference_mode()
def guess_logits(head: DraftHead, token_ids: Tensor, states: Tensor) -> Tensor:
    """token_ids [n], states [n, …] of the same positions → float32 [n - 1, logits width]: row t is the head's guess of
    token t + 2."""
    count = len(token_ids) - 1
    positions = torch.arange(count, device=states.device)[None]
    features = head.features(states[None, :count])
    _, hidden = head.forward(token_ids[None, 1:], features, positions, ChainMemory())
    # Of a head that fills in blocks the first masks alone.
    logits = head.logits(hidden[:1])
    return (logits if head.recurrent else logits[0])[0].float()


def agreement(head: DraftHead, token_ids: Tensor, states: Tensor) -> float:
    """Share of the text's tokens that the head guesses from those before: first-token acceptance of greedy text."""
    best = guess_logits(head, token_ids, states)[:-1].argmax(-1)
    guesses = best if head.token_map is None else head.token_map[best]
    return float((guesses == token_ids[2:]).float().mean())


def choose_taps(head: DraftHead, token_ids: Tensor, states: Mapping[int, Tensor]) -> None:
    """Takes those of its two choices of taps by which it guesses more. states: of each layer, [n, width]."""
    if not head.taps or len(head.other_taps) != len(head.taps):
        return
    # An output is the next layer's input.
    choices = dict(zip(("inputs", "outputs"), sorted((head.taps, head.other_taps)), strict=True))
    found = {
        name: agreement(head, token_ids, torch.cat([states[tap] for tap in taps], -1)) for name, taps in choices.items()
    }
    named, best = choices["inputs"], max(found, key=lambda name: (found[name], choices[name] == head.taps))
    head.taps = choices[best]
    log.info(
        "the head reads the %s of layers %s of its target: it guesses %.0f %% of a text, and %.0f %% from the %s",
        best,
        ", ".join(map(str, named)),
        100 * found[best],
        100 * min(found.values()),
        "outputs" if best == "inputs" else "inputs",
    )


def self_check(head: DraftHead, token_ids: Tensor, states: Tensor) -> float:
    """Warns when a text that the target wrote itself is strange to the head. Returns the agreement."""
    found = agreement(head, token_ids, states)
    if found < LEAST:
        log.warning(
            "this %s head guesses %.0f %% of a text that its target wrote: it may belong to another target, or its"
            " config.json may name other taps or norms than it was trained with",
            head.kind,
            100 * found,
        )
    return found
