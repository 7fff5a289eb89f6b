"""Distillation makes a draft that the engine loads and that has learned from its target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.backends.cpu import variants
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.engine.loading.draft_checkpoint import load_draft_model, read_embedding, read_head
from outrider.engine.loading.loader import load_engine
from outrider.heads import TargetParts, load_head
from outrider.heads.check import guess_logits
from outrider.heads.interface import ChainMemory
from outrider.sim.pair import Pair
from outrider.testing.tiny import tiny_checkpoint, tiny_tokenizer
from outrider.training import CorpusConfig, DistillConfig, LoopConfig, run
from outrider.training.conversation import ChatFormat, Conversation
from outrider.training.corpus import write_corpus
from outrider.training.head_student import HeadLearner, _Batch
from outrider.training.shards import Corpus, Sample, list_shards, read_corpus
from outrider.training.student import StudentConfig, TeacherHead, build_student, commonest_tokens, hidden_states, learn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=3, max_context_len=1024)


def distill(target: Path, root: Path, train_tokens: int) -> DistillConfig:
    return DistillConfig(
        out=root / "draft",
        work=root / "corpus",
        target=str(target),
        corpus=CorpusConfig(tokens=6_000, concurrency=16, max_len=200),
        student=StudentConfig(layers=(0, -1), head_tokens=300),
        training=LoopConfig(train_tokens=train_tokens, batch_tokens=1024, warmup_steps=5),
    )


@pytest.mark.slow
def test_a_longer_training_gives_a_draft_nearer_to_its_target(target: Path, tmp_path: Path) -> None:
    stages: set[str] = set()
    barely = run(distill(target, tmp_path, 1), lambda stage, done, total, note: stages.add(stage))
    longer = run(distill(target, tmp_path, 80_000), lambda *_: None)
    assert stages == {"corpus", "train", "measure"}
    assert longer.held_out_loss < 0.8 * barely.held_out_loss
    engine = load_engine(tmp_path / "draft", EngineConfig(dtype="float32", num_blocks=8))
    assert engine.forward([Row(engine.kv.open([5]), [5, 6], 1)]).shape == (1, 300)
    assert (tmp_path / "draft" / "recipe.json").exists()


@pytest.mark.slow
def test_a_target_whose_head_is_not_its_embedding_teaches_and_the_report_is_the_real_acceptance(tmp_path: Path) -> None:
    untied = tiny_checkpoint(tmp_path / "target", layers=2, max_context_len=1024, tied=False, seed=3)
    config = distill(untied, tmp_path, 30_000)
    reported = run(config, lambda *_: None)
    prompts = [sample.prompt for sample in Corpus(config.work, 384).held_out[:64]]
    pair = Pair(load_engine(untied, EngineConfig()), None, max_sequences=8)
    texts = [answer.token_ids for answer in pair.answer(prompts, 64, speculate=False)]
    model, token_map = load_draft_model(config.out, torch.float32)
    model.set_attn_implementation("sdpa")
    served = load_engine(config.out, EngineConfig(num_blocks=256))

    def by_transformers(ids: list[int]) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(torch.tensor([ids])).logits[0]
        return found

    def as_served(ids: list[int]) -> Tensor:
        return served.forward([Row(served.kv.open([]), ids, len(ids))])

    def real(logits_of: Callable[[list[int]], Tensor]) -> float:
        agreed: list[bool] = []
        for prompt, text in zip(prompts, texts, strict=True):
            guesses = token_map[logits_of([*prompt, *text]).argmax(-1)].tolist()
            at = 0
            while at < len(text):
                agreed.append(guesses[len(prompt) + at - 1] == text[at])
                # The token after an accepted one comes with it: nothing is drafted for it.
                at += 1 + agreed[-1]
        return sum(agreed) / len(agreed)

    assert reported.acceptance > 0.2, "it learnt nothing"
    assert reported.acceptance == pytest.approx(real(as_served), abs=0.02)
    # A model this small suffers from 8 bits.
    assert reported.acceptance == pytest.approx(real(by_transformers), abs=0.05)


def test_a_target_whose_logits_are_not_its_head_s_is_refused(tmp_path: Path) -> None:
    """Granite divides its logits: a student of the plain product would learn too sharp a distribution."""
    config = GraniteConfig(
        vocab_size=384, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, logits_scaling=8.0, tie_word_embeddings=True,
        eos_token_id=2,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(CheckpointError, match="logits are not its last hidden state"):
        run(distill(tmp_path / "target", tmp_path, 1), lambda *_: None)
    assert not (tmp_path / "corpus").exists()


class Multiplications(TorchFunctionMode):
    """The dtypes in which matrices are multiplied."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__"):
            self.dtypes.add(out.dtype)
        return out


@pytest.mark.parametrize(("features", "dtype"), [({"avx2"}, torch.float32), ({"avx512_bf16"}, torch.bfloat16)])
def test_training_multiplies_in_what_the_machine_computes(
    target: Path, monkeypatch: pytest.MonkeyPatch, features: set[str], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(variants, "cpu_features", lambda: features)
    student = build_student(target, StudentConfig(layers=(0,)), torch.arange(300))
    sample = Sample(torch.arange(40, dtype=torch.int32), torch.randn(39, 64), torch.ones(39, dtype=torch.bool))
    with Multiplications() as seen:
        learn(hidden_states(student, [sample]), [sample], TeacherHead(target, torch.arange(300), "cpu"))
    assert seen.dtypes == {dtype}


def test_the_corpus_holds_what_the_target_s_head_saw(target: Path, tmp_path: Path) -> None:
    run(distill(target, tmp_path, 1), lambda *_: None)
    sample = max(read_corpus(next((tmp_path / "corpus").glob("*.safetensors"))), key=lambda s: len(s.token_ids))
    engine = load_engine(target, EngineConfig(num_blocks=32))
    ids = sample.token_ids[:-1].tolist()
    _, hidden = engine.forward_with_hidden([Row(engine.kv.open([]), ids, len(ids))])
    assert hidden.shape == sample.hidden.shape == (len(sample.answers), 64)
    similarity = torch.nn.functional.cosine_similarity(hidden.float(), sample.hidden.float())
    assert similarity.min() > 0.99  # bfloat16, and another batch


class OneAnswerEngine:
    """Says the same token wherever it is asked, so that no text depends on how floats round."""

    def __init__(self, token_id: int, vocab_size: int = 384) -> None:
        self.info = SimpleNamespace(max_context_len=10_000, device="cpu")
        self.kv = KVCacheManager(1, 1, prefix_cache=False)
        self._logits = torch.zeros(vocab_size)
        self._logits[token_id] = 1e4

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([token_id for row in rows for token_id in row.token_ids])
        # What was seen there tells which token it was seen after.
        return self._logits.repeat(sum(row.num_logits for row in rows), 1), ids[:, None].float()


def write(directory: Path, *, max_len: int) -> list[Path]:
    """A corpus in which every turn ends at once: what fills a conversation is mostly the template's."""
    tokenizer = tiny_tokenizer()
    engine = cast(Engine, OneAnswerEngine(tokenizer.eos_token_id))
    config = CorpusConfig(tokens=4_000, concurrency=8, max_len=max_len)
    write_corpus(engine, tokenizer, directory, config, lambda done, total: None)
    return list_shards(directory)


@pytest.mark.parametrize("max_len", [40, 90, 140])
def test_a_conversation_that_is_full_before_its_last_tokens_are_run_ends_with_what_was_seen(
    tmp_path: Path, max_len: int
) -> None:
    samples = [sample for shard in write(tmp_path, max_len=max_len) for sample in read_corpus(shard)]
    assert len(samples) > 20
    for sample in samples:
        assert len(sample.hidden) == len(sample.answers) == len(sample.token_ids) - 1 < max_len
        assert sample.hidden[:, 0].int().tolist() == sample.token_ids[:-1].tolist()


def test_a_shard_whose_rows_are_not_those_of_its_tokens_is_refused(tmp_path: Path) -> None:
    shard = write(tmp_path, max_len=90)[0]
    stored = load_file(shard)
    save_file({**stored, "hidden": stored["hidden"][1:].clone()}, shard)
    with pytest.raises(CheckpointError, match=r"shard_0000.*hidden states for"):
        read_corpus(shard)


def test_a_conversation_marks_exactly_its_answers() -> None:
    tokenizer = tiny_tokenizer()
    chat = ChatFormat.of(tokenizer)
    rng = random.Random(5)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    seen_answers = 0
    for _ in range(50):
        conversation = Conversation.begin(chat, encode, rng, 600)
        while not conversation.finished:
            conversation.accept(chat.end if rng.random() < 0.02 else rng.randrange(10, 200))
        ids = conversation.token_ids
        assert len(ids) <= 600
        header = list(chat.answer)
        starts = [i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header]
        assert [start for start, _ in conversation.answer_spans] == [s for s in starts if s < 600]
        for start, end in conversation.answer_spans:
            assert chat.end not in ids[start : end - 1]
        seen_answers += len(conversation.answer_spans)
    assert seen_answers > 50


def test_training_goes_on_from_its_checkpoint_and_only_from_one_of_the_same_student(
    target: Path, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    def stop_later(stage: str, done: int, total: int, note: str) -> None:
        if stage == "train" and done > 4_000:
            raise Stopped

    config = distill(target, tmp_path, 8_000)
    with pytest.raises(Stopped):
        run(config, stop_later)
    learned: list[int] = []
    run(config, lambda stage, done, total, note: learned.append(done) if stage == "train" else None)
    assert learned[0] > 4_000
    other = replace(config, student=replace(config.student, layers=(1,)))
    learned.clear()
    run(other, lambda stage, done, total, note: learned.append(done) if stage == "train" else None)
    assert learned[0] < 4_000


def test_a_corpus_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    run(distill(target, tmp_path, 1), lambda *_: None)
    other = tiny_checkpoint(tmp_path / "other", layers=3, max_context_len=1024, seed=1)
    with pytest.raises(CheckpointError, match="a corpus of another target"):
        run(distill(other, tmp_path, 1), lambda *_: None)


@pytest.mark.parametrize(
    "kind", [pytest.param("mtp", marks=pytest.mark.slow), pytest.param("eagle3", marks=pytest.mark.slow), "medusa"]
)
def test_a_head_comes_nearer_to_its_target_and_its_file_says_what_was_trained(tmp_path: Path, kind: str) -> None:
    # EAGLE-3 reads the states of three layers of its target.
    deep = tiny_checkpoint(tmp_path / "target", layers=6, max_context_len=1024, tied=False)
    config = replace(distill(deep, tmp_path, 1), kind=kind)
    config = replace(config, corpus=replace(config.corpus, tokens=3_000))
    barely = run(config, lambda *_: None)
    # A head in use needs no tokenizer.
    in_use = config.out.rename(tmp_path / "in use")
    assert not (in_use / "tokenizer.json").exists()
    config = replace(config, in_use=str(in_use))
    longer = run(replace(config, training=replace(config.training, train_tokens=12_000)), lambda *_: None)
    assert longer.acceptance_in_use == barely.acceptance
    assert longer.held_out_loss < 0.985 * barely.held_out_loss
    assert 0 <= longer.acceptance <= 1 and longer.bytes < 200_000
    parts = TargetParts(read_embedding(deep).float(), read_head(deep).float(), 6)
    head = load_head(config.out, parts, torch.float32)
    assert head.kind == kind and head.token_map is not None and len(head.token_map) == 300
    loss = weight = 0.0
    for sample in Corpus(config.work, 384).held_out:
        guess = guess_logits(head, sample.token_ids[:-1].long(), sample.states).log_softmax(-1)
        said = (sample.hidden[1:].float() @ parts.head[head.token_map].T).log_softmax(-1)
        weights = torch.where(sample.answers[1:], 1.0, 0.4)
        loss += float((((said - guess) * said.exp()).sum(-1) * weights).sum())
        weight += float(weights.sum())
    # What is left out of a text is its last two tokens: a batch unrolls three steps.
    assert longer.held_out_loss == pytest.approx(loss / weight, rel=0.05)


@pytest.mark.slow
def test_an_mtp_head_that_begins_as_a_draft_proposes_the_draft_s_tokens_whatever_the_corpus(
    target: Path, tmp_path: Path
) -> None:
    first = distill(target, tmp_path / "first", 1)
    first = replace(first, student=replace(first.student, head_tokens=40))
    run(first, lambda *_: None)
    other = replace(distill(target, tmp_path / "other", 1), kind="mtp", start=str(first.out))
    other = replace(other, corpus=replace(other.corpus, seed=5), student=first.student)
    run(other, lambda *_: None)
    _, known = load_draft_model(first.out, torch.float32)
    counts = Corpus(other.work, 384).token_counts
    assert commonest_tokens(counts, 40).tolist() != known.tolist(), "the corpora are alike"
    assert load_file(other.out / "head.safetensors")["token_map"].tolist() == known.tolist()


@pytest.mark.slow
def test_an_mtp_head_of_layers_begins_as_its_draft_and_learns_from_their_states(target: Path, tmp_path: Path) -> None:
    first = distill(target, tmp_path / "first", 1)
    draft = run(first, lambda *_: None)
    config = replace(distill(target, tmp_path / "head", 1), kind="mtp", start=str(first.out))
    config = replace(config, student=replace(config.student, taps=(1, 2)), in_use=str(first.out))
    barely = run(config, lambda *_: None)
    # The head says nothing in a text's first round, of which the draft knows the prompt.
    assert barely.acceptance == pytest.approx(draft.acceptance, abs=0.05)
    assert all(s.states.shape[1] == 2 * s.hidden.shape[1] for s in Corpus(config.work, 384).held_out)
    longer = run(replace(config, training=replace(config.training, train_tokens=30_000)), lambda *_: None)
    assert longer.held_out_loss < 0.985 * barely.held_out_loss
    parts = TargetParts(read_embedding(target).float(), read_head(target).float(), 3)
    head = load_head(config.out, parts, torch.float32)
    assert (head.kind, head.taps) == ("mtp", (1, 2))
    on = replace(config, start=str(config.out), out=tmp_path / "on", student=StudentConfig())
    went_on = run(on, lambda *_: None)
    assert went_on.held_out_loss == pytest.approx(longer.held_out_loss, rel=0.01)
    assert went_on.acceptance == pytest.approx(longer.acceptance, abs=0.05)
    stored, before = (read_config(out)["outrider_head"] for out in (on.out, config.out))
    assert stored == before and stored["taps"] == [1, 2]
    with pytest.raises(ValueError, match=r"taps: .* reads layers \(1, 2\)"):
        run(replace(on, student=replace(on.student, taps=(1,))), lambda *_: None)
    with pytest.raises(CheckpointError, match=r"a corpus without the states of layers \(1, 2, 3\)"):
        run(replace(config, student=replace(config.student, taps=(1, 2, 3))), lambda *_: None)


def test_a_head_of_another_kind_is_no_start(target: Path, tmp_path: Path) -> None:
    start = tmp_path / "head"
    start.mkdir()
    (start / "config.json").write_text('{"outrider_head": {"kind": "medusa"}}')
    config = replace(distill(target, tmp_path, 1), kind="mtp", start=str(start))
    with pytest.raises(CheckpointError, match=r"start: .* is not an MTP head made by outrider distill"):
        run(config, lambda *_: None)


def test_layers_to_read_are_the_target_s_and_of_a_head_that_reads_layers(target: Path, tmp_path: Path) -> None:
    config = distill(target, tmp_path, 1)
    student = replace(config.student, taps=(1, 9))
    with pytest.raises(ValueError, match=r"taps: \(1, 9\), and the target has 3 layers"):
        run(replace(config, kind="mtp", student=student), lambda *_: None)
    with pytest.raises(ValueError, match="taps: a draft of the kind"):
        replace(config, student=student)


@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_what_can_be_no_student_is_refused_before_the_target_writes(target: Path, tmp_path: Path, kind: str) -> None:
    config = replace(distill(target, tmp_path, 1), kind=kind)
    for layers in ((0, 3), (-4,)):
        with pytest.raises(ValueError, match=r"layers: .*, and the target has 3 layers"):
            run(replace(config, student=replace(config.student, layers=layers)), lambda *_: None)
    with pytest.raises(CheckpointError, match=r"start: .* is not a draft made by outrider distill"):
        run(replace(config, start=str(target)), lambda *_: None)
    if kind == "model":
        other = tiny_checkpoint(tmp_path / "other", vocab_size=500)
        with pytest.raises(CheckpointError, match="its tokens are not the target's"):
            run(replace(config, student_model=str(other)), lambda *_: None)
    assert not config.work.exists()


def test_steps_on_a_head_s_own_states_are_those_of_drafting(target: Path) -> None:
    """What training unrolls for all positions at once is, at each position, what a draft of three tokens computes."""
    torch.manual_seed(1)
    config = StudentConfig(layers=(0, -1))
    learner = HeadLearner("mtp", target, config, None, "cpu", None)
    torch.nn.init.normal_(learner.module.eh_proj.weight, std=0.1)
    count = 12
    sample = Sample(
        torch.randint(3, 300, (count,)), torch.randn(count - 1, 64), torch.ones(count - 1, dtype=torch.bool)
    )
    batch = _Batch.of([sample], "cpu")
    with torch.no_grad():
        outs = learner._unrolled(batch)
        for anchor in range(batch.anchors):
            memory, ids = ChainMemory(), sample.token_ids[None]
            features, position = sample.hidden[None, : anchor + 1], torch.arange(anchor + 1)[None]
            _, out = learner.module(ids[:, 1 : anchor + 2], features, position, memory)
            for step in range(3):
                torch.testing.assert_close(out[:, -1], outs[step][:, anchor], rtol=1e-3, atol=1e-3)
                token = ids[:, anchor + 2 + step, None]
                _, out = learner.module(token, out[:, -1:], torch.tensor([[anchor + 1 + step]]), memory)


def test_a_third_of_the_batches_is_learnt_in_all_steps_and_every_batch_in_the_first(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = HeadLearner("mtp", target, StudentConfig(layers=(0,)), None, "cpu", None)
    sample = Sample(torch.randint(3, 300, (12,)), torch.randn(11, 64), torch.ones(11, dtype=torch.bool))
    forward, calls = learner.module.forward, []
    monkeypatch.setattr(learner.module, "forward", lambda *args: calls.append(args[2]) or forward(*args))
    first_positions = []
    for _ in range(6):
        learner.score([sample])
        first_positions.append([int(positions[0, 0]) for positions in calls])
        calls.clear()
    assert first_positions == [[0], [0], [0, 1, 2]] * 2


@pytest.mark.slow
def test_another_model_with_the_target_s_tokens_learns_and_stays_an_ordinary_checkpoint(
    target: Path, tmp_path: Path
) -> None:
    """Its own width, depth and head: what it says is read with transformers alone."""
    student = tmp_path / "student"
    config = Qwen2Config(
        vocab_size=400, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(student)
    tiny_tokenizer().save_pretrained(student)
    asked = replace(distill(target, tmp_path, 1), student_model=str(student))

    def loss_after(tokens: int) -> float:
        run(replace(asked, training=replace(asked.training, train_tokens=tokens)), lambda *_: None)
        model = AutoModelForCausalLM.from_pretrained(asked.out, dtype=torch.float32)
        head, total = read_head(target).float(), []
        for sample in Corpus(asked.work, 384).held_out:
            with torch.no_grad():
                said = model(sample.token_ids[None, :-1].long()).logits[0, :, :384].log_softmax(-1)
            wanted = (sample.hidden.float() @ head.T).log_softmax(-1)
            total.append(((wanted - said) * wanted.exp()).sum(-1))
        return float(torch.cat(total).mean())

    before = loss_after(1)
    assert loss_after(25_000) < 0.97 * before
    assert (asked.out / "tokenizer.json").exists() and (asked.out / "recipe.json").exists()


@pytest.mark.slow
def test_a_draft_learns_on_from_where_another_ended_and_proposes_the_same_tokens(target: Path, tmp_path: Path) -> None:
    first = distill(target, tmp_path / "first", 40_000)
    learned = run(first, lambda *_: None)
    # Another corpus, whose commonest tokens are others.
    again = replace(
        distill(target, tmp_path / "again", 1), start=str(first.out), corpus=CorpusConfig(6_000, 16, 200, seed=9)
    )
    went_on = run(again, lambda *_: None)
    fresh = run(distill(target, tmp_path / "fresh", 1), lambda *_: None)
    assert went_on.held_out_loss < 0.9 * fresh.held_out_loss
    assert went_on.held_out_loss == pytest.approx(learned.held_out_loss, rel=0.3)
    assert torch.equal(load_draft_model(again.out, torch.float32)[1], load_draft_model(first.out, torch.float32)[1])
    with pytest.raises(ValueError, match="start: a head of the kind"):
        replace(again, kind="medusa")


@pytest.mark.slow
def test_an_adapter_of_a_draft_learns_and_the_draft_stays_as_it_is(target: Path, tmp_path: Path) -> None:
    first = distill(target, tmp_path, 1)
    run(first, lambda *_: None)
    kept = (first.out / "draft.safetensors").read_bytes()
    on = replace(first, start=str(first.out), adapter=4, work=tmp_path / "again")
    barely, longer = (
        run(replace(on, out=tmp_path / str(n), training=replace(on.training, train_tokens=n)), lambda *_: None)
        for n in (1, 40_000)
    )
    assert longer.held_out_loss < 0.98 * barely.held_out_loss
    assert (first.out / "draft.safetensors").read_bytes() == kept
    stored = load_file(tmp_path / "40000" / "adapter_model.safetensors")
    assert {len(one) for name, one in stored.items() if "lora_A" in name} == {4}
    with pytest.raises(ValueError, match="adapter: a rank"):
        replace(on, start="")
