"""The comparison of whole answers: figures, bars, the picture, and our draft as a plain Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from outrider.engine import resolve
from outrider.engine.loading.draft_checkpoint import load_draft_model, save_draft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers import answer_figures as made
from benchmarks.peers import draft_export
from benchmarks.peers.answer_figures import Answered, Bar
from benchmarks.peers.peer_generate import KnownTokensHead

VOCAB, WIDTH = 40, 8
KNOWN = torch.tensor([3, 7, 8, 21, 39])


def answered(
    subject: str, prompt: str, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), steps: int = 2
) -> Answered:
    return Answered(subject, prompt, "qa" if prompt == "a" else "rag", tokens, seconds, 0.1, steps)


ANSWERS = [
    answered("ours", "a", 1.0),
    answered("vllm", "a", 2.0, (1, 2, 9, 4)),
    answered("vllm-draft", "a", 1.5),
    answered("assisted", "a", 4.0),
    answered("assisted", "b", 2.0),
    answered("vllm-draft", "b", 3.5),
    answered("vllm", "b", 2.0, steps=0),
    answered("ours", "b", 1.0),
]


def test_a_rate_is_all_tokens_over_all_seconds_so_long_answers_weigh_more() -> None:
    rates = made.rates(ANSWERS)
    assert rates["assisted"] == {"qa": 1.0, "rag": 2.0, "all": pytest.approx(8 / 6)}
    assert rates["ours"]["all"] == 4.0


def test_a_bar_is_held_against_the_fastest_of_those_it_names() -> None:
    (verdict,) = made.verdicts(ANSWERS, [Bar("a bar", ("vllm", "vllm-draft"), 1.9)])
    assert (verdict.subject, verdict.ratio, verdict.typical, verdict.met) == ("vllm", 2.0, 2.0, True)
    (missed,) = made.verdicts(ANSWERS, [Bar("a bar", ("vllm", "vllm-draft"), 2.1)])
    assert not missed.met


def test_a_bar_may_be_about_two_peers() -> None:
    answers = [*ANSWERS, answered("vllm-outrider", "a", 1.0), answered("vllm-outrider", "b", 1.0)]
    found = {verdict.bar.text: verdict.ratio for verdict in made.verdicts(answers)}
    assert found["vllm-outrider / vllm"] == 2.0 and found["vllm-outrider / vllm-draft"] == 2.5
    assert found["ours / best of vLLM"] == 2.0, "ours is not held against our own drafts"


def test_a_bar_whose_subjects_were_left_out_is_not_printed() -> None:
    assert made.verdicts(ANSWERS, [Bar("a bar", ("unknown",), 1.0)]) == []


def test_the_typical_ratio_is_of_answers_to_the_same_prompt() -> None:
    assert made.typical_ratio(ANSWERS, "assisted") == 3.0


def test_answers_are_equal_or_part_somewhere() -> None:
    assert made.first_difference([1, 2], [1, 2]) is None
    assert made.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert made.first_difference([1, 2], [1, 2, 3]) == 2
    assert made.differences(ANSWERS, "vllm") == [2, None]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft of ours in the form in which it is shipped, and the checkpoint it belongs to."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    base = tmp_path / "base"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(base)
    Tokenizer(models.BPE()).save(str(base / "tokenizer.json"))
    save_draft_model(tmp_path / "draft", model, KNOWN, base=str(base), recipe={})
    return tmp_path / "draft"


def test_the_exported_draft_has_our_logits_for_the_tokens_it_knows_and_zeros_elsewhere(draft: Path) -> None:
    exported = draft_export.export(resolve(draft), draft.parent / "plain")
    plain = LlamaForCausalLM.from_pretrained(exported, dtype=torch.bfloat16, attn_implementation="sdpa")
    ours, token_map = load_draft_model(draft, torch.bfloat16)
    ours.config._attn_implementation = "sdpa"
    token_ids = torch.tensor([[1, 5, 30, 2]])
    with torch.inference_mode():
        theirs, expected = plain(token_ids).logits, ours(token_ids).logits
    assert torch.equal(theirs[..., token_map], expected)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[token_map] = False
    assert not theirs[..., others].any() and expected.any()


def test_an_export_is_made_once_and_again_when_the_draft_is_newer(draft: Path) -> None:
    directory = draft_export.export(draft, draft.parent / "plain")
    settings = json.loads((directory / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and "outrider_draft" not in settings
    made_ns = (directory / "model.safetensors").stat().st_mtime_ns
    assert (draft_export.export(draft, directory) / "model.safetensors").stat().st_mtime_ns == made_ns
    (draft / "config.json").touch()
    assert draft_export.export(draft, directory) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns > made_ns


def test_an_assistants_head_computes_known_tokens_only_and_never_chooses_another() -> None:
    torch.manual_seed(1)
    rows = torch.randn(len(KNOWN), WIDTH)
    head = KnownTokensHead(draft_export.full_head(rows, KNOWN, VOCAB))
    hidden = torch.randn(2, 3, WIDTH)
    logits = head(hidden)
    assert logits.shape == (2, 3, VOCAB)
    assert torch.equal(logits[..., KNOWN], hidden @ rows.T)
    assert set(logits.argmax(-1).flatten().tolist()) <= set(KNOWN.tolist())
    # Even where all that it knows is unlikely.
    assert head(-hidden.sum(0, keepdim=True))[..., 0].eq(torch.finfo(torch.float32).min).all()
