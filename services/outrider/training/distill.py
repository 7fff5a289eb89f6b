"""`outrider distill`: the target writes a corpus, a student learns it, and the draft is written with its recipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.engine import CheckpointError, Engine, EngineConfig, Row, resolve, tokenizer_fingerprint, weights_revision
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.draft_checkpoint import load_draft_model, read_head, write_recipe
from outrider.engine.loading.loader import load_engine
from outrider.heads.loading import is_head, load_head_of
from outrider.samples import Cipher
from outrider.training import acceptance
from outrider.training.adapter_student import AdapterLearner
from outrider.training.corpus import CorpusConfig, write_corpus
from outrider.training.head_student import KINDS, HeadLearner, taps_of, taps_of_start
from outrider.training.loop import Learner, LoopConfig, Training
from outrider.training.plain_student import PlainLearner
from outrider.training.shards import KEPT_BACK, Corpus, Sample, claim
from outrider.training.student import ModelLearner, StudentConfig, commonest_tokens

# What the finished draft is measured on: at most so many prompts, each answered with so many tokens.
_PROMPTS, _ANSWER_TOKENS = 64, 64
_RATE_OF_A_START = {"model": 0.3, "mtp": 0.5, "adapter": 5.0}
# An adapter has few weights, and what it learns from is little: more steps teach it more than surer ones.
_BATCH_OF_A_START = {"model": 2048, "mtp": 2048, "adapter": 512}

# The most that are quick: a step of 512 tokens has room for a prompt beside them.
_AT_ONCE_ON_A_GPU = 256

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, note)."""


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation, start to end."""

    out: Path
    """Directory of the finished draft."""
    work: Path
    """Directory of the corpus; kept, so that a second run continues from it."""
    target: str = "smollm2-135m-instruct"
    kind: str = "model"
    """model, mtp, eagle3 or medusa."""
    student_model: str = ""
    """A model with the target's tokens that learns in the place of a student of the target's layers."""
    start: str = ""
    """A draft of the target that a model or an MTP head begins as, or an MTP head that goes on to learn; empty: the
    layers are the target's."""
    adapter: int = 0
    """Rank of an adapter of `start`, which is made in the place of a draft of its own; 0: none."""
    in_use: str = ""
    """Another draft of the target, measured beside the new one; empty for none."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    device: str = "cpu"
    """Of target and student: a torch device."""
    threads: int = 0
    """torch's threads; 0 leaves its default."""
    seed: int = 0
    samples_of: str = ""
    """The tenant of whose samples it is made."""
    cipher: Cipher | None = None
    """Encrypts what `work` keeps."""

    def __post_init__(self) -> None:
        if self.kind not in ("model", *KINDS):
            raise ValueError(f"kind: {self.kind!r} is not one of model, {', '.join(KINDS)}")
        head = KINDS.get(self.kind)
        if self.start and head is not None and not head.starts:
            raise ValueError(f"start: a head of the kind {self.kind} begins as no other draft")
        if self.adapter < 0 or (self.adapter and (self.kind != "model" or not self.start)):
            raise ValueError("adapter: a rank, for kind model, and together with start")
        if self.student_model and (self.kind != "model" or self.start):
            raise ValueError("student: only for kind model, and not together with start")
        if self.student.taps and (head is None or not head.reads_layers):
            raise ValueError(f"taps: a draft of the kind {self.kind} reads no layers")


@dataclass(frozen=True, slots=True)
class DistillReport:
    """Results, measured on held-out conversations."""

    acceptance: float
    """Share of first drafted tokens that the target accepts at temperature 0, by the real verifier."""
    acceptance_sampled: float
    """The same at temperature 0.8."""
    acceptance_in_use: float | None
    acceptance_in_use_sampled: float | None
    """Both of the draft in use, on the same prompts; None without one."""
    held_out_loss: float
    steps: int
    train_tokens: int
    corpus_tokens: int
    seconds: float
    bytes: int


def conversations_at_once(device: str) -> int:
    """By a torch device."""
    return _AT_ONCE_ON_A_GPU if torch.device(device).type == "cuda" else CorpusConfig().concurrency


def run(config: DistillConfig, progress: Progress) -> DistillReport:
    """Runs all stages; returns the measured results. A second run goes on where the first one stopped."""
    if config.threads:
        torch.set_num_threads(config.threads)
    # Serving keeps to oneDNN's vector code (`keep_to_vector_code`). Training has no text to keep equal, and is
    # 2.8 times as fast on AMX's tiles.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    torch.manual_seed(config.seed)
    target = resolve(config.target)
    config = _reads_as_its_start(config)
    # Before hours of writing: what cannot be a student.
    token_map = _tokens_of_its_start(config, target)
    _check_student(config, target)
    _write(config, target, progress)
    corpus = Corpus(config.work, len(read_head(target)), config.cipher)
    _check_states(corpus, taps_of(config.kind, config.student, target), config.work)
    if token_map is None:
        token_map = commonest_tokens(corpus.token_counts, config.student.head_tokens)
    recipe = _learn(config, target, corpus, token_map, progress)
    # What has learnt is no longer in memory.
    recipe["measured"] |= _acceptance(config, target, corpus.held_out, progress)
    write_recipe(config.out, recipe)
    size = sum(file.stat().st_size for file in config.out.iterdir())
    return DistillReport(bytes=size, **recipe["measured"])


def _learn(
    config: DistillConfig, target: Path, corpus: Corpus, token_map: Tensor, progress: Progress
) -> dict[str, Any]:
    """Writes the draft. Returns its recipe."""
    started = time.monotonic()
    learner, revision = _learner(config, target, token_map), weights_revision(target)
    student = _plain(asdict(config.student))
    same = [KEPT_BACK, learner.kind, revision, config.start, config.student_model, student, token_map.tolist()]
    file = config.work / f"training-{learner.kind}.pt"
    training = Training(learner, _loop(config), file, same, corpus.num_tokens, config.cipher)
    training.run(corpus, lambda done, total, note: progress("train", done, total, note))
    measured: dict[str, Any] = {
        "held_out_loss": round(training.evaluate(corpus.held_out).mean_loss, 4),
        "steps": training.steps,
        "train_tokens": training.learned,
        "corpus_tokens": corpus.num_tokens,
        "seconds": round(time.monotonic() - started, 1),
    }
    recipe = {"target_revision": revision, "config": _recipe(config), "measured": measured}
    if config.start:
        recipe["parent_revision"] = weights_revision(directory(config.start))
    learner.save(config.out, config.target, recipe)
    return recipe


def _reads_as_its_start(config: DistillConfig) -> DistillConfig:
    """A head that goes on reads the layers that it has learnt to read."""
    taps = taps_of_start(directory(config.start)) if config.kind in KINDS and config.start else ()
    if taps and config.student.taps not in ((), taps):
        raise ValueError(f"taps: {config.start} reads layers {taps}")
    return replace(config, student=replace(config.student, taps=taps or config.student.taps))


def _check_states(corpus: Corpus, taps: tuple[int, ...], directory: Path) -> None:
    """An earlier run may have kept those of other layers."""
    for sample in corpus.held_out if taps else ():
        if sample.taps is None or sample.taps.shape[1] != len(taps) * sample.hidden.shape[1]:
            raise CheckpointError(str(directory), f"a corpus without the states of layers {taps}, which the head reads")


def _tokens_of_its_start(config: DistillConfig, target: Path) -> Tensor | None:
    """The tokens that the draft proposes are those of the draft that it begins as; None: the commonest of the corpus.
    Raises CheckpointError for what is no start."""
    if not config.start:
        return None
    start = directory(config.start)
    if is_head(start) and config.kind in KINDS:
        kept: Tensor = load_file(start / "head.safetensors")["token_map"]
        return kept.long()
    if "outrider_draft" not in read_config(start):
        raise CheckpointError("start", f"{config.start} is not a draft made by outrider distill")
    if tokenizer_fingerprint(start) != tokenizer_fingerprint(target):
        raise CheckpointError("start", f"{config.start} has other tokens than the target")
    return load_draft_model(start, torch.float32)[1]


def _check_student(config: DistillConfig, target: Path) -> None:
    """Raises CheckpointError for a student with other tokens, ValueError for layers that the target lacks."""
    if config.student_model:
        student = resolve(config.student_model)
        if tokenizer_fingerprint(student) != tokenizer_fingerprint(target):
            raise CheckpointError(str(student), "its tokens are not the target's")
    depth, layers = int(read_config(target)["num_hidden_layers"]), config.student.layers
    # The default wraps around in a target of fewer layers.
    if layers != StudentConfig().layers and any(not -depth <= layer < depth for layer in layers):
        raise ValueError(f"layers: {layers}, and the target has {depth} layers")


def _learner(config: DistillConfig, target: Path, token_map: torch.Tensor) -> Learner:
    if config.student_model:
        return PlainLearner(target, resolve(config.student_model), config.device)
    start = directory(config.start) if config.start else None
    if config.adapter and start is not None:
        base = str(start.absolute()) if Path(config.start).is_dir() else config.start
        return AdapterLearner(target, token_map, config.device, start, base, config.adapter)
    if config.kind == "model":
        return ModelLearner(target, config.student, token_map, config.device, start)
    return HeadLearner(config.kind, target, config.student, token_map, config.device, start)


def _loop(config: DistillConfig) -> LoopConfig:
    if not config.start or (config.kind in KINDS and not is_head(directory(config.start))):
        return config.training
    # A draft that is good already forgets at the rate that one from nothing learns at. What it learns is little text.
    learns = "adapter" if config.adapter else config.kind
    return replace(
        config.training,
        learning_rate=config.training.learning_rate * _RATE_OF_A_START[learns],
        batch_tokens=min(config.training.batch_tokens, _BATCH_OF_A_START[learns]),
    )


def _recipe(config: DistillConfig) -> Any:
    """The options, without the texts that they name."""
    texts = {"prompts": len(config.corpus.prompts), "samples": len(config.corpus.samples)}
    corpus = replace(config.corpus, prompts=(), samples=())
    return _plain(asdict(replace(config, corpus=corpus, cipher=None))) | texts


def _acceptance(
    config: DistillConfig, target: Path, held_out: list[Sample], progress: Progress
) -> dict[str, float | None]:
    """Of the draft as it was written, and of the one in use."""
    # No more than it needs: a GPU's other memory is the draft's.
    blocks = acceptance.num_blocks([sample.prompt for sample in held_out[:_PROMPTS]], _ANSWER_TOKENS)
    engine = load_engine(target, EngineConfig(num_blocks=blocks, prefix_cache=False, device=config.device))
    longest = engine.info.max_context_len - _ANSWER_TOKENS
    prompts = [sample.prompt[:longest] for sample in held_out[:_PROMPTS]]
    drafts = {"": config.out} | ({"_in_use": directory(config.in_use)} if config.in_use else {})
    passes = [
        (f"acceptance{name}{ending}", draft, params)
        for name, draft in drafts.items()
        for ending, params in (("", acceptance.GREEDY), ("_sampled", acceptance.SAMPLED))
    ]
    measured: dict[str, float | None] = {"acceptance_in_use": None, "acceptance_in_use_sampled": None}
    tokens = _ANSWER_TOKENS * len(prompts)
    for number, (name, draft, params) in enumerate(passes):
        said = f"what is accepted of {draft.name} at temperature {params.temperature:g}"
        answered = [tokens * number]

        def report(num_tokens: int, said: str = said, answered: list[int] = answered) -> None:
            answered[0] += num_tokens
            progress("measure", answered[0], tokens * len(passes), said)

        report(0)
        if is_head(draft):
            head, _ = load_head_of(target, draft, config.device)
            measured[name] = acceptance.share_of_head(engine, head, prompts, _ANSWER_TOKENS, params, report)
        else:
            measured[name] = acceptance.share(engine, draft, prompts, _ANSWER_TOKENS, params, report)
    return measured


def _write(config: DistillConfig, target: Path, progress: Progress) -> None:
    corpus = replace(config.corpus, taps=taps_of(config.kind, config.student, target))
    blocks = config.corpus.concurrency * -(-config.corpus.max_len // 16)
    engine = load_engine(target, EngineConfig(num_blocks=blocks, prefix_cache=False, device=config.device))
    check_teacher(engine, read_head(target), target)
    claim(config.work, weights_revision(target))
    tokenizer = load_tokenizer(target)
    report = lambda done, total: progress("corpus", done, total, "")  # noqa: E731
    write_corpus(engine, tokenizer, config.work, corpus, report, config.cipher)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        # Paths are no part of the recipe.
        return {key: _plain(item) for key, item in value.items() if not isinstance(item, Path)}
    return list(value) if isinstance(value, tuple) else value


_TOKENS = 24
# bfloat16, or a head in 8 bits, moves logits by less than a hundredth of their length.
_TOLERANCE = 0.03


def check_teacher(engine: Engine, head: Tensor, path: Path) -> None:
    """A corpus keeps the head's inputs, and training multiplies them by `head` [vocab, width]. Raises CheckpointError
    when that is not what the target says: its logits may be scaled, capped or shifted, or its head be another."""
    sequence = engine.kv.open([])
    ids = [7 * number % engine.info.vocab_size for number in range(1, _TOKENS + 1)]
    logits, hidden = engine.forward_with_hidden([Row(sequence, ids, len(ids))])
    difference = torch.inf
    if hidden.shape[-1] == head.shape[-1] and logits.shape[-1] == head.shape[0]:
        said = hidden.float() @ head.to(hidden.device, torch.float32).T
        difference = float((said - logits).norm() / logits.norm())
    engine.kv.close(sequence)
    # Not a number is no agreement either.
    if not difference < _TOLERANCE:
        raise CheckpointError(
            str(path), "its logits are not its last hidden state times its vocabulary head: no draft can be distilled"
        )
