"""A draft model with another tokenizer: texts stay the target's, and what both vocabularies spell alike is drafted."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.draft.worker import DraftWorker
from outrider.drafters import ModelConfig, ModelDrafter, load_drafter
from outrider.drafters.other_vocabulary import OtherVocabulary
from outrider.drafters.sequence import DraftSequence
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import DraftSource, make_sources
from outrider.engine import CheckpointError, EngineConfig
from outrider.errors import Unavailable
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.sim.pair import DrafterSource
from outrider.speculation import Proposal, SamplingParams, VerificationMode, propose
from outrider.testing.tiny import tiny_checkpoint
from outrider.tree import DraftTree
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Drafter, Liar, opening

SIZE = 384
SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = [
    *("the", "unbelievable", "lighthouse", "keeper", "believed", "that", "light", "travels;", "a", "café", "in", "12"),
    *("Zürich", "served", "crêpes,", "naïve", "façade", "東京", "привет", "мир", "🙂", "water", "waters", "watering"),
    *("under", "understand", "understanding", "1234", ""),
]
OWN = Speculation(max_own_draft_tokens=4)
BOTH = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)
TREES = ModelConfig(min_confidence=0.0)
CHAINS = ModelConfig(min_confidence=0.0, num_alternatives=0)


def sentences(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 30))) for _ in range(count)]


def byte_level(size: int = SIZE) -> Tokenizer:
    """As GPT-2's: merges over bytes, learnt from some text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        sentences(200), trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    return made


def sentencepiece(prefix: bool = False) -> Tokenizer:
    """As Gemma's: characters with a fallback to bytes; with a prefix, as Llama 2's, a space comes before every text."""
    learnt = Tokenizer(models.BPE(unk_token="<unk>"))
    learnt.normalizer = normalizers.Replace(" ", "\u2581")
    learnt.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    learnt.train_from_iterator(sentences(200), trainers.BpeTrainer(vocab_size=SIZE - 256, special_tokens=SPECIALS))
    model = json.loads(learnt.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])  # type: ignore[arg-type]
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[arg-type]
    made.add_special_tokens(SPECIALS)
    return made


def characters(shift: int = 0) -> Tokenizer:
    """One token for each of some characters, no merges; the ids begin elsewhere."""
    pieces = [*SPECIALS, *map(chr, range(0x4E00, 0x4E00 + SIZE - len(SPECIALS)))]
    vocab = {piece: (i + shift) % SIZE for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])  # type: ignore[arg-type]
    made.add_special_tokens(SPECIALS)
    return made


TOKENIZERS = {"bytes": byte_level, "pieces": sentencepiece, "prefixed": lambda: sentencepiece(prefix=True)}


def checkpoint(directory: Path, tokenizer: Tokenizer, seed: int = 0) -> Path:
    tiny_checkpoint(directory, seed=seed)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {
        name: checkpoint(root / name, make(), seed) for seed, (name, make) in enumerate(TOKENIZERS.items(), start=1)
    }


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the same model under other ids."""
    root, shift = tmp_path_factory.mktemp("twins"), 100
    target = checkpoint(root / "target", characters(), seed=6)
    draft = root / "draft"
    shutil.copytree(target, draft)
    weights = load_file(target / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file({**weights, name: weights[name].roll(shift, 0).contiguous()}, draft / "model.safetensors")
    PreTrainedTokenizerFast(tokenizer_object=characters(shift), eos_token="</s>").save_pretrained(draft)
    return target, draft


def drafter_of(draft: Path, target: Path, config: ModelConfig = CHAINS) -> ModelDrafter:
    engine = EngineConfig(dtype="float32", num_blocks=600, block_size=8)
    found = load_drafter(draft, engine=engine, model=config, target=target)
    assert isinstance(found, ModelDrafter) and isinstance(found._vocabulary, OtherVocabulary)
    return found


def openings(target: Path, count: int, params: SamplingParams, speculation: Speculation) -> list[SequenceSpec]:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = sentences(count, seed=7)
    return [opening(tokenizer.encode(text).ids, params=params, speculation=speculation) for text in texts]


def answered(
    target: Path,
    what: Sequence[SequenceSpec],
    sources: Sequence[DraftSource] = (),
    drafter: Drafter = lambda sequence_id, tokens: (),
) -> Bench:
    bench = Bench(target, num_blocks=600, max_batch_tokens=512, sources=sources, row_price=lambda cost: 0.0)
    bench.answer(what, drafter)
    return bench


class Dying(DrafterSource):
    """Its process is killed after some rounds, while every answer is being written."""

    rounds = 5

    def poll(self) -> Any:
        self.rounds -= 1
        if self.rounds < 0:
            raise Unavailable("killed")
        yield from super().poll()


@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.slow), SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("how", [pytest.param("alone", marks=pytest.mark.slow), "merged", "killed"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("bytes", "pieces"),
        ("pieces", "bytes"),
        pytest.param("bytes", "prefixed", marks=pytest.mark.slow),
        pytest.param("prefixed", "bytes", marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_the_target_alone(
    models_by_name: dict[str, Path], target: str, draft: str, how: str, params: SamplingParams, count: int
) -> None:
    path = models_by_name[target]
    plain = answered(path, openings(path, count, params, Speculation()))
    worker = DraftWorker(drafter_of(models_by_name[draft], path, TREES), 40)
    source: DraftSource = Dying(worker) if how == "killed" else DrafterSource(worker)
    merged = how == "merged"
    sources = [source, *(make_sources(NAMES) if merged else ())]
    liar: Drafter = Liar(plain.texts, "beside") if merged else lambda sequence_id, tokens: ()
    bench = answered(path, openings(path, count, params, BOTH if merged else OWN), sources, liar)
    assert bench.tokens == plain.tokens and len(bench.tokens) == count
    assert bench.worker.stats.of_source("model").num_drafted > count
    assert bool(bench.worker.stats.num_source_failures) is (how == "killed")


class NoiseOfItsOwn(OtherVocabulary):
    """The fault: a token is drawn with the noise of the draft's id, and mapped afterwards."""

    def propose(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
        num_others: int,
    ) -> list[Proposal]:
        target_ids = dict(zip(self._logits.tolist(), self._token_map.tolist(), strict=True))
        drawn = propose(logits, params, modes, positions)
        return [Proposal(target_ids[each.token_id], each.confidence) for each in drawn]


def acceptance(twins: tuple[Path, Path], params: SamplingParams, kind: type[OtherVocabulary]) -> float:
    target, draft = twins
    drafter = drafter_of(draft, target)
    drafter._vocabulary = kind(draft, target, range(SIZE), "cpu")
    rng = random.Random(5)
    prompts = [[rng.randrange(3, SIZE) for _ in range(20)] for _ in range(12)]
    what = [opening(prompt, params=params, speculation=OWN) for prompt in prompts]
    stats = answered(target, what, [DrafterSource(DraftWorker(drafter, 40))]).worker.stats.of_source("model")
    return stats.num_accepted / stats.num_verified


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_the_same_model_under_other_ids_is_always_right(twins: tuple[Path, Path], params: SamplingParams) -> None:
    assert acceptance(twins, params, OtherVocabulary) > 0.99


def test_and_that_finds_a_mapped_id_with_the_draft_s_noise(twins: tuple[Path, Path]) -> None:
    assert acceptance(twins, GREEDY, NoiseOfItsOwn) > 0.99
    assert acceptance(twins, SAMPLED, NoiseOfItsOwn) < 0.9


def test_q_is_a_distribution_over_the_target_s_tokens(twins: tuple[Path, Path]) -> None:
    target, draft = twins
    params, ratio = replace(SAMPLED, top_k=20), VerificationMode.RATIO
    what = [opening(range(3 + n, 20 + n), params=params, mode=ratio, speculation=OWN) for n in range(8)]
    bench = answered(target, what, [DrafterSource(DraftWorker(drafter_of(draft, target), 40))])
    stats = bench.worker.stats.of_source("model")
    assert stats.num_accepted > 0.95 * stats.num_verified > 40


@pytest.mark.parametrize(("target", "draft"), [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "prefixed")])
def test_however_a_text_comes_the_draft_reads_it_as_its_own_tokenizer_does(
    models_by_name: dict[str, Path], target: str, draft: str
) -> None:
    vocabulary = OtherVocabulary(models_by_name[draft], models_by_name[target], range(SIZE), "cpu")
    theirs, own = (Tokenizer.from_file(str(models_by_name[name] / "tokenizer.json")) for name in (target, draft))
    rng, shrunk = random.Random(3), 0
    for text in sentences(20, seed=9):
        token_ids = theirs.encode(text).ids
        sequence = DraftSequence.start(_opening(token_ids[:1]))
        vocabulary.open(sequence)
        at = 1
        while at < len(token_ids):
            known, before = len(sequence.tokens), list(vocabulary.text(sequence))
            fresh = token_ids[at : at + rng.randint(1, 5)]
            sequence.tokens.extend(fresh)
            at += len(fresh)
            stays = vocabulary.commit(sequence, known)
            assert vocabulary.text(sequence)[:stays] == before[:stays]
            shrunk += stays < len(before)
        assert vocabulary.whole(sequence)
        assert vocabulary.text(sequence) == own.encode(text).ids
    assert shrunk


def test_within_a_character_nothing_is_proposed(models_by_name: dict[str, Path]) -> None:
    target, draft = models_by_name["bytes"], models_by_name["pieces"]
    drafter = drafter_of(draft, target)
    # No merge has a part of it, so each byte is a token.
    start, *parts = Tokenizer.from_file(str(target / "tokenizer.json")).encode("\U00012000").ids
    assert len(parts) == 3
    sequence = drafter.open(_opening([40, start]))
    for part in parts:
        assert drafter.draft([sequence]) == [DraftTree(sequence.committed_len, source="model")]
        drafter.commit(sequence, sequence.committed_len, [part])
    [drafted] = drafter.draft([sequence])
    assert drafted is not None and drafted.token_ids


def test_a_token_without_its_equal_is_never_proposed(models_by_name: dict[str, Path]) -> None:
    target, draft = models_by_name["bytes"], models_by_name["pieces"]
    drafter = drafter_of(draft, target)
    pieces = Tokenizer.from_file(str(draft / "tokenizer.json")).get_vocab()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    spelt = {piece.replace("\u2581", " ") for piece in pieces}
    for text in sentences(10, seed=2):
        [drafted] = drafter.draft([drafter.open(_opening(tokenizer.encode(text).ids))])
        assert drafted is not None
        for token_id in drafted.token_ids:
            decoded = tokenizer.decode([token_id], skip_special_tokens=False)
            # Each byte has its equal.
            assert decoded in spelt or decoded == "\ufffd" or len(decoded.encode()) == 1


def test_vocabularies_that_share_nothing_and_tokenizers_that_spell_no_bytes_are_refused(
    models_by_name: dict[str, Path], twins: tuple[Path, Path], tmp_path: Path
) -> None:
    empty = Tokenizer(models.BPE(vocab={"Ω": 0, "Ψ": 1}, merges=[], unk_token="Ω"))
    empty.decoder = decoders.ByteLevel()
    other = checkpoint(tmp_path / "other", empty)
    with pytest.raises(CheckpointError, match=r"target_model: .* has no token with the same text as one of"):
        OtherVocabulary(other, twins[0], range(SIZE), "cpu")
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.BPEDecoder()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder: BPEDecoder"):
        OtherVocabulary(checkpoint(tmp_path / "wordpiece", wordpiece), twins[0], range(SIZE), "cpu")


def _opening(prompt: Sequence[int]) -> SequenceSpec:
    return SequenceSpec(
        list(prompt), SamplingParams(temperature=0), VerificationMode.GREEDY, speculation=Speculation(4)
    )
