"""The corpus on disk, in shards: one is in memory at a time. That of encrypted samples is encrypted alike."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from outrider.engine import CheckpointError
from outrider.samples import Cipher

KEPT_BACK = 0.1
"""Share of all prompts that no training sees. One number for every corpus, so that none is kept back only sometimes."""
_HELD_OUT_LIMIT = 256
# A long prompt is cut at its start, for the room that its answer needs: this end of it is always there.
_END_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation to learn from."""

    token_ids: Tensor
    """[tokens] int32."""
    hidden: Tensor
    """[tokens - 1, width]: row i is the input of the target's head when it chose token i + 1."""
    answers: Tensor
    """[tokens - 1] bool: whether token i + 1 belongs to an answer."""
    taps: Tensor | None = None
    """[tokens - 1, taps * width]: the states of the layers that a head reads, of a corpus that keeps them."""

    @property
    def states(self) -> Tensor:
        """What a head reads: the taps, or else the inputs of the target's head."""
        return self.hidden if self.taps is None else self.taps

    def copied(self) -> Sample:
        """Apart from its shard, which a view would keep in memory."""
        taps = None if self.taps is None else self.taps.clone()
        return Sample(self.token_ids.clone(), self.hidden.clone(), self.answers.clone(), taps)

    @property
    def prompt(self) -> list[int]:
        """All before the first answer, and the first half of a sample without an answer."""
        # Row i of `answers` is about token i + 1.
        start = int(self.answers.int().argmax()) if bool(self.answers.any()) else len(self.answers) // 2
        return [int(token_id) for token_id in self.token_ids[: start + 1]]

    @property
    def place(self) -> float:
        """Of the prompt among all prompts, from 0 to 1. It is the same for each answer to it."""
        end = array("i", self.prompt[-_END_TOKENS:])
        return int.from_bytes(hashlib.sha256(end.tobytes()).digest()[:8], "little") / 2**64


class Corpus:
    """The shards of a directory: what is kept back, and the rest."""

    def __init__(self, directory: Path, vocab_size: int, cipher: Cipher | None = None) -> None:
        """Raises CheckpointError for a shard that is damaged, and where there is nothing to learn from."""
        self._directory, self._cipher = directory, cipher
        self.token_counts = torch.zeros(vocab_size)
        self.num_tokens = 0
        places = set[float]()
        for sample in self._samples():
            places.add(sample.place)
            self.token_counts += torch.bincount(sample.token_ids.long(), minlength=vocab_size)
            self.num_tokens += len(sample.token_ids)
        # Of a corpus that small that no prompt is below, one is: a corpus that grows never keeps back what was learnt.
        self._bound = max(KEPT_BACK, min(places, default=0.0))
        if max(places, default=0.0) <= self._bound:
            message = "all its prompts are kept back: there is nothing to learn from until it has more of them"
            raise CheckpointError(str(directory), message)
        kept = (sample.copied() for sample in self._samples() if sample.place <= self._bound)
        self.held_out = list(itertools.islice(kept, _HELD_OUT_LIMIT))

    def passes(self, rng: random.Random) -> Iterator[list[Sample]]:
        """The samples to learn from, a shard at a time, in an order of its own in each pass; endless. Raises
        CheckpointError once the shards are gone."""
        while shards := list_shards(self._directory):
            rng.shuffle(shards)
            for shard in shards:
                if found := [one for one in read_corpus(shard, self._cipher) if one.place > self._bound]:
                    yield found
        raise CheckpointError(str(self._directory), "the corpus is gone")

    def _samples(self) -> Iterator[Sample]:
        for shard in list_shards(self._directory):
            yield from read_corpus(shard, self._cipher)


def claim(directory: Path, revision: str) -> None:
    """Makes the directory of a corpus, with the revision of its target. Raises CheckpointError where another target's
    states are: they would be learnt as this one's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = directory / "target"
    if not file.is_file():
        write_private(file, revision.encode(), None)
    elif file.read_text() != revision:
        raise CheckpointError(str(directory), f"a corpus of another target, {file.read_text()}; delete it")


def list_shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard_*.safetensors"))


def stored_tokens(directory: Path, cipher: Cipher | None = None) -> int:
    """Tokens of the corpus in a directory; 0 when it does not exist."""
    return sum(_length(shard, "token_ids", cipher) for shard in list_shards(directory))


def count_samples(directory: Path, cipher: Cipher | None = None) -> int:
    return sum(_length(shard, "lengths", cipher) for shard in list_shards(directory))


def _length(shard: Path, name: str, cipher: Cipher | None) -> int:
    if cipher is not None:
        return len(load(read_private(shard, cipher))[name])
    try:
        with safe_open(shard, framework="pt") as stored:
            return int(stored.get_slice(name).get_shape()[0])
    except SafetensorError as error:
        raise CheckpointError(str(shard), f"cannot be read ({error}); is it encrypted?") from None


def read_corpus(file: Path, cipher: Cipher | None = None) -> list[Sample]:
    """The samples of one shard. Raises CheckpointError when its rows are not those of its tokens."""
    stored = load_file(file) if cipher is None else load(read_private(file, cipher))
    num_rows = len(stored["token_ids"]) - len(stored["lengths"])
    if not num_rows == len(stored["hidden"]) == len(stored["answers"]):
        raise CheckpointError(str(file), f"{len(stored['hidden'])} hidden states for {num_rows} tokens; delete it")
    samples = []
    start = 0
    for number, length in enumerate(stored["lengths"].tolist()):
        # Each sample has one hidden row fewer than tokens.
        rows = slice(start - number, start - number + length - 1)
        ids = stored["token_ids"][start : start + length]
        taps = stored["taps"][rows] if "taps" in stored else None
        samples.append(Sample(ids, stored["hidden"][rows], stored["answers"][rows], taps))
        start += length
    return samples


def save_shard(samples: list[Sample], directory: Path, number: int, cipher: Cipher | None = None) -> None:
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in samples]),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "hidden": torch.cat([s.hidden for s in samples]).cpu(),
        "answers": torch.cat([s.answers for s in samples]),
    }
    taps = [s.taps for s in samples if s.taps is not None]
    if taps:
        tensors["taps"] = torch.cat(taps).cpu()
    write_private(directory / f"shard_{number:04d}.safetensors", save(tensors), cipher)


def write_private(file: Path, data: bytes, cipher: Cipher | None) -> None:
    """For its owner alone, and whole or not at all."""
    scratch = file.with_suffix(".partial")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(data if cipher is None else cipher.encrypt(data))
    scratch.rename(file)


def read_private(file: Path, cipher: Cipher | None) -> bytes:
    """Raises CheckpointError where it was written with another key."""
    data = file.read_bytes()
    try:
        return data if cipher is None else cipher.decrypt(data)
    # Fernet's InvalidToken is no ValueError.
    except Exception as error:
        raise CheckpointError(str(file), "cannot be read; is it encrypted with another key?") from error
