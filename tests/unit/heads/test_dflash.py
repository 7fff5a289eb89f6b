"""DFlash heads say what their formula says of the whole text: as published, and on the engine, over ragged texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import EngineConfig
from outrider.heads import HeadError, TargetParts, load_head
from outrider.heads.engine import BlockEngine, head_engine
from outrider.heads.interface import ChainMemory, DraftHead
from outrider.heads.loading import is_head
from outrider.heads.runner import HeadRunner
from outrider.heads.text import HeadText
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import SamplingParams, VerificationMode
from outrider.tree import DraftTree
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.drafters.whole_text import chain_of
from tests.unit.heads.dflash_formula import BLOCK, MASK, Formula
from tests.unit.heads.test_formats import KNOWN, LAYERS, VOCAB, WIDTH
from tests.unit.target.harness import opening

pytestmark = pytest.mark.usefixtures("interpreted")

TAPS = (2, 4, 5)
LENGTHS = (22, 2, 9, 41)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # So little does a random head know that its drafts would end at once.
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 0.0)


@pytest.fixture
def formula() -> Formula:
    return Formula.random(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))


def parts_of(formula: Formula) -> TargetParts:
    return TargetParts(formula.embedding, formula.rows, LAYERS)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[list[int], Tensor]]:
    """Token ids, and the states of all but the last."""
    return [(torch.randint(0, VOCAB, (n,)).tolist(), torch.randn(n - 1, 3 * WIDTH)) for n in lengths]


def said(head: Any, ids: list[int], states: Tensor) -> Tensor:
    """By the module alone: of each place of the text the logits of the block after it, [places, masks, logits]."""
    features, positions = head.features(states[None]), torch.arange(len(states))[None]
    _, hidden = head.forward(torch.tensor([ids[1:]]), features, positions, ChainMemory())
    found: Tensor = head.logits(hidden)[:, 0].transpose(0, 1)
    return found


def speculators(formula: Formula) -> Formula:
    """As speculators writes the same head, with an embedding and a small vocabulary of its own."""
    layer = {name: value for name, value in formula.config.items() if name not in ("block_size", "dflash_config")}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": {**layer, "architectures": ["Qwen3ForCausalLM"]},
        "draft_vocab_size": len(KNOWN),
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": list(TAPS),
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }
    more = {
        "embed_tokens.weight": formula.embedding,
        "lm_head.weight": torch.randn(len(KNOWN), WIDTH),
        "d2t": KNOWN - torch.arange(len(KNOWN)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, KNOWN, True),
        "verifier_norm.weight": torch.randn(WIDTH),
    }
    return replace(formula, config=config, tensors={**formula.tensors, **more}, rows=more["lm_head.weight"])


@pytest.mark.parametrize("form", ["its authors", "speculators"])
def test_a_head_as_it_is_published_says_what_its_formula_says(tmp_path: Path, formula: Formula, form: str) -> None:
    target = parts_of(formula)
    if form == "speculators":
        formula = speculators(formula)
        target = replace(target, embedding=torch.randn(VOCAB, WIDTH))
    path = formula.write(tmp_path / "head")
    assert is_head(path)
    head = load_head(path, target, torch.float32)
    assert (head.kind, head.taps, head.recurrent, head.lookahead) == ("dflash", TAPS, False, BLOCK - 1)
    assert (head.token_map is not None) is (form == "speculators")
    for ids, states in texts():
        found = said(head, ids, states)
        for place in range(len(states)):
            wanted = formula.logits(states[: place + 1], ids[place + 1])
            torch.testing.assert_close(found[place], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layers", "ids"), [(5, (1, 9, 17, 25, 33)), (2, (1, 33)), (1, (18,))])
def test_layers_that_are_not_stated_are_those_of_its_authors_code(
    tmp_path: Path, formula: Formula, layers: int, ids: tuple[int, ...]
) -> None:
    """Of 36 layers, as Qwen3-8B has them."""
    fields = {"num_target_layers": 36, "num_hidden_layers": layers, "dflash_config": {"mask_token_id": MASK}}
    width = len(ids) * WIDTH
    kept = {name: value for name, value in formula.tensors.items() if not name.startswith("layers.1.")}
    tensors = {**kept, "fc.weight": torch.randn(WIDTH, width)}
    path = replace(formula, config={**formula.config, **fields}, tensors=tensors).write(tmp_path / "head")
    assert load_head(path, replace(parts_of(formula), layers=36)).taps == tuple(layer + 1 for layer in ids)


def run(
    head: DraftHead, config: EngineConfig, context: int = 128, how: Any = GREEDY, mode: Any = VerificationMode.GREEDY
) -> tuple[HeadRunner, BlockEngine, list[HeadText], list[tuple[list[int], Tensor]]]:
    """Texts that a head has read in two parts, ragged, the first with the second."""
    engine = head_engine(head, config, context)
    assert isinstance(engine, BlockEngine)
    runner, of = HeadRunner(head, engine), texts()
    specs = [SequenceSpec(tuple(ids), how, mode, 32) for ids, _ in of]
    opened = [runner.open(spec, ids) for spec, (ids, _) in zip(specs, of, strict=True)]
    with torch.inference_mode():
        for begin, end in ((0, 1), (1, 41)):
            for text, (_, states) in zip(opened, of, strict=True):
                if len(states) > begin:
                    runner.see(text, begin, head.features(states[None, begin:end])[0])
            runner.read(opened)
    assert all(text.ready for text in opened)
    return runner, engine, opened, of


CONFIG = EngineConfig(execution="transformers", num_blocks=64, block_size=8)


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_on_the_engine_texts_are_drafted_together_as_the_formula_has_each(
    tmp_path: Path, formula: Formula, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_head(formula.write(tmp_path / "head"), parts_of(formula), torch.float32)
    runner, engine, opened, of = run(head, replace(CONFIG, attention=attention))
    logits, fill_in = list[Tensor](), engine._fill_in
    monkeypatch.setattr(engine, "_fill_in", lambda *which: logits.append(fill_in(*which)) or logits[-1])
    for _ in range(2):
        trees = runner.draft(opened, [BLOCK + 3, 2, BLOCK - 1, 0], [1e-30] * 4)
        wanted = torch.stack([formula.logits(states, ids[-1]) for ids, states in of])
        torch.testing.assert_close(logits[-1].view_as(wanted), wanted, rtol=1e-4, atol=1e-4)
        for tree, rows, count in zip(trees, wanted, (BLOCK - 1, 2, BLOCK - 1, 0), strict=True):
            assert chain_of(tree) == rows.argmax(-1).tolist()[:count] and tree.source == "dflash"
    engine.warm_up()
    # One pass for each proposal, however long, and for the start of a GPU; nothing of it stays.
    assert len(logits) == 3
    assert [text.kv.cached_len for text in opened] == [len(states) for _, states in of]
    for text in opened:
        runner.close(text)
    assert engine.kv.num_free_blocks == 64


def test_many_texts_are_filled_in_in_parts(tmp_path: Path, formula: Formula, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_head(formula.write(tmp_path / "head"), parts_of(formula), torch.float32)
    runner, engine, opened, _ = run(head, CONFIG)
    sizes, fill_in = list[int](), engine._fill_in
    monkeypatch.setattr(engine, "_fill_in", lambda *which: sizes.append(len(which[0])) or fill_in(*which))
    at_once = runner.draft(opened, [3] * 4, [1e-30] * 4)
    monkeypatch.setattr("outrider.heads.engine._READ_TOKENS", 3 * BLOCK + 1)
    in_parts = runner.draft(opened, [3] * 4, [1e-30] * 4)
    assert [tree.token_ids for tree in in_parts] == [tree.token_ids for tree in at_once] and sizes == [4, 3, 1]


def test_in_ratio_mode_each_token_is_drawn_from_its_own_place(tmp_path: Path, formula: Formula) -> None:
    head = load_head(formula.write(tmp_path / "head"), parts_of(formula), torch.float32)
    sampled = SamplingParams(temperature=1.5, seed=3)
    runner, _, opened, of = run(head, CONFIG, how=sampled, mode=VerificationMode.RATIO)
    trees = runner.draft(opened, [BLOCK - 1] * 4, [1e-30] * 4)
    for tree, (ids, states) in zip(trees, of, strict=True):
        chances = (formula.logits(states, ids[-1]) / 1.5).softmax(-1)
        assert len(tree.q) == len(tree.token_ids) == BLOCK - 1 and not tree.parents
        for q, exact, token in zip(tree.q, chances, tree.token_ids, strict=True):
            assert token in q.token_ids
            stated = torch.tensor(q.counts) / sum(q.counts)
            wanted = exact[list(q.token_ids)]
            torch.testing.assert_close(stated, wanted / wanted.sum(), rtol=0.02, atol=1e-3)


def test_a_block_that_has_no_room_is_not_drafted(tmp_path: Path, formula: Formula) -> None:
    head = load_head(formula.write(tmp_path / "head"), parts_of(formula), torch.float32)

    def drafted(config: EngineConfig, context: int) -> list[DraftTree]:
        runner, engine, opened, _ = run(head, config, context)
        trees = runner.draft(opened, [4] * 4, [1e-30] * 4)
        assert engine.kv.num_free_blocks == engine.info.num_blocks - sum(len(text.kv.blocks) for text in opened)
        return trees

    # Of 40 positions and a block of 6, 46 fit and 45 do not.
    assert [len(chain_of(tree)) for tree in drafted(CONFIG, 46)] == [4, 4, 4, 4]
    assert [len(chain_of(tree)) for tree in drafted(CONFIG, 45)] == [4, 4, 4, 0]
    # The texts have 3, 1, 1 and 5 blocks of 8, and room for 3 more in the first two.
    assert [len(chain_of(tree)) for tree in drafted(replace(CONFIG, num_blocks=11), 88)] == [4, 4, 0, 0]


def test_a_head_that_begins_late_has_the_formula_of_the_rest(tmp_path: Path, formula: Formula) -> None:
    """Of a text whose first features were lost, and are not waited for."""
    head = load_head(formula.write(tmp_path / "head"), parts_of(formula), torch.float32)
    engine = head_engine(head, CONFIG, 128)
    runner, [(ids, states)] = HeadRunner(head, engine), texts((30,))
    text = runner.open(opening(ids), ids)
    with torch.inference_mode():
        runner.see(text, 11, head.features(states[None, 11:])[0])
        runner.read([text])
        [tree] = runner.draft([text], [BLOCK - 1], [1e-30])
    assert chain_of(tree) == formula.logits(states[11:], ids[-1]).argmax(-1).tolist()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding windows": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
    "windows of all layers": ({"dflash_config": {"use_swa": True}}, "dflash_config.use_swa True"),
    "causal": ({"is_causal": True}, "is_causal True"),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, "dflash_config.attention_sink_bias"),
    "values that are scaled": ({"dflash_config": {"attention_value_scale": 0.6}}, "attention_value_scale 0.6"),
    "a token from the known place": ({"sample_from_anchor": True}, "sample_from_anchor True"),
    "pairs that lie side by side": ({"is_neox_style": False}, "is_neox_style False"),
    "logits that are scaled": ({"logit_scale": 0.5}, "logit_scale 0.5"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "another vocabulary": ({"vocab_size": VOCAB + 1}, f"vocab_size {VOCAB + 1}, the target's is {VOCAB}"),
    "another target": ({"target_hidden_size": 128}, "target_hidden_size 128, the target's is 64"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "mask_token_id None: must be from 0"),
    "a mask that is no token": ({"dflash_config": {"mask_token_id": VOCAB}}, f"mask_token_id {VOCAB}"),
    "no block": ({"block_size": 1}, "block_size 1: must be from 2"),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, "dflash_config.projector_type domino"),
    "the second DFlash": ({"speculators_model_type": "dflash2"}, "speculators_model_type dflash2"),
    "no layers": ({"dflash_config": {"mask_token_id": 7}}, "target_layer_ids: missing"),
    "the last layer's output": ({"dflash_config": {"target_layer_ids": [1, 2, LAYERS - 1]}}, "the target has 8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_our_dflash_does_not_do_is_refused_by_its_name(tmp_path: Path, formula: Formula, what: str) -> None:
    fields, message = REFUSED[what]
    own = {**formula.config["dflash_config"], **fields.get("dflash_config", {})}
    if what in ("no mask", "no layers"):
        own = fields["dflash_config"]
    path = replace(formula, config={**formula.config, **fields, "dflash_config": own}).write(tmp_path / "head")
    with pytest.raises(HeadError, match=message):
        load_head(path, parts_of(formula))


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.o_proj.bias", "markov_head.weight", "layers.1.mlp.experts.0.up_proj.weight"]
)
def test_a_tensor_that_dflash_has_not_is_refused_by_its_name(tmp_path: Path, formula: Formula, name: str) -> None:
    path = formula.write(tmp_path / "head")
    replace(formula, tensors={**load_file(path / "model.safetensors"), name: torch.zeros(3)}).write(path)
    with pytest.raises(HeadError, match=name):
        load_head(path, parts_of(formula))


def test_a_mask_of_its_own_file_is_refused(tmp_path: Path, formula: Formula) -> None:
    path = formula.write(tmp_path / "head")
    (path / "mask_embedding.pt").write_bytes(b"\x80")
    with pytest.raises(HeadError, match=r"mask_embedding\.pt"):
        load_head(path, parts_of(formula))
