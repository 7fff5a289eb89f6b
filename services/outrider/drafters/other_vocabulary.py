"""A draft model whose tokenizer is not the target's.

The model reads the target's text in its own tokens. It proposes the tokens that both vocabularies spell alike, byte for
byte, under the target's ids, so that sampling uses the noise of these ids and q is a distribution over them (the
intersection of vocabularies, Timor et al. 2025). A token without its equal is never proposed.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from outrider.drafters.sequence import DraftSequence
from outrider.engine import CheckpointError
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.checkpoints.tokenizer import load_tokenizer, num_tokens, tokenizer_of
from outrider.speculation import Proposal, SamplingParams, VerificationMode, propose
from outrider.token_bytes import TokenBytes, UnsupportedDecoder
from outrider.tree import common_len

# The last ids of a text are read anew with what follows, which may join them. So far back a place to begin is sought.
_LOOSE, _FAR = 8, 40
_UNKNOWN = -1
# Before a text in whose place a tokenizer would put a space.
_BEFORE = "\n"


@dataclass(slots=True)
class _Text:
    """One sequence's text, in bytes and in the model's ids."""

    num_begin: int
    """Ids before the text, such as the one that begins every text."""
    ids: list[int]
    ends: list[int]
    """Bytes of the text up to the end of each id; _UNKNOWN where the tokenizer has changed the text."""
    text: bytearray = field(default_factory=bytearray)

    def settled(self) -> int:
        """How many ids stay, whatever follows: up to the end of a word, or at least of a character."""
        last = len(self.ids) - _LOOSE
        if last <= self.num_begin:
            return self.num_begin
        places = [count for count in range(last, max(self.num_begin, last - _FAR), -1) if self._splits(count)]
        words = [count for count in places if self.text[self.ends[count - 1]] in b" \n"]
        return next(iter([*words, *places]), len(self.ids))

    def _splits(self, count: int) -> bool:
        end = self.ends[count - 1]
        return 0 <= end < len(self.text) and self.text[end] & 0xC0 != 0x80


class OtherVocabulary:
    """A `Vocabulary`, for one draft model and one target."""

    def __init__(self, own: Path, target: Path, logit_ids: Sequence[int], device: str) -> None:
        """Reads the tokenizers of both checkpoints. `logit_ids`: the model's id of each of its logits.

        Raises CheckpointError."""
        config = read_config(target)
        self.size = int(config.get("text_config", config).get("vocab_size") or num_tokens(target))
        self._tokenizer, self._bytes = _read(own)
        tokenizer, self._target_bytes = _read(target)
        known, wanted = _spelt(self._tokenizer, self._bytes), _spelt(tokenizer, self._target_bytes)
        alike = [spelling for spelling, i in wanted.items() if spelling in known and i < self.size]
        if all(special for _, special in alike):
            raise CheckpointError("target_model", f"{own} has no token with the same text as one of {target}")
        self._own_ids = {wanted[spelling]: known[spelling] for spelling in alike}
        logit_of = {own_id: logit for logit, own_id in enumerate(logit_ids)}
        pairs = sorted((i, logit_of[own_id]) for i, own_id in self._own_ids.items() if own_id in logit_of)
        self._token_map, self._logits = torch.tensor(pairs, device=device).T.contiguous()
        self._begin: list[int] = self._tokenizer.encode("").ids
        self._texts: dict[DraftSequence, _Text] = {}

    def open(self, sequence: DraftSequence) -> None:
        count = len(self._begin)
        self._texts[sequence] = _Text(count, list(self._begin), [0] * count)
        self.commit(sequence, 0)

    def commit(self, sequence: DraftSequence, known_len: int) -> int:
        found = self._texts[sequence]
        found.text += b"".join(map(self._target_bytes.of, sequence.tokens[known_len:]))
        settled = found.settled()
        start = found.ends[settled - 1] if settled else 0
        # An incomplete character is left for the next time.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(found.text[start:])
        end = len(found.text) - len(decoder.getstate()[0])
        fresh = self._encode(text, begins=settled == found.num_begin)
        stays = settled + common_len(found.ids[settled:], fresh)
        found.ids[settled:] = fresh
        found.ends[settled:] = self._ends(fresh, bytes(found.text[start:end]), start)
        return stays

    def close(self, sequence: DraftSequence) -> None:
        del self._texts[sequence]

    def text(self, sequence: DraftSequence) -> Sequence[int]:
        return self._texts[sequence].ids

    def whole(self, sequence: DraftSequence) -> bool:
        found = self._texts[sequence]
        return bool(found.ids) and found.ends[-1] == len(found.text)

    def ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [self._own_ids[token_id] for token_id in token_ids]

    def propose(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
        num_others: int,
    ) -> list[Proposal]:
        """A token's chance is that among all tokens of the model, those without their equal included."""
        shared = logits.index_select(-1, self._logits)
        shares = (shared.float().logsumexp(-1) - logits.float().logsumexp(-1)).exp().tolist()
        found = propose(shared, params, modes, positions, token_map=self._token_map, num_others=num_others)
        return [_scaled(proposal, share) for proposal, share in zip(found, shares, strict=True)]

    def _encode(self, text: str, *, begins: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if begins or self._spelling(ids) != b" " + text.encode():
            return ids
        # This tokenizer puts a space before every text.
        before = self._tokenizer.encode(_BEFORE, add_special_tokens=False).ids
        return list(self._tokenizer.encode(_BEFORE + text, add_special_tokens=False).ids[len(before) :])

    def _ends(self, ids: Sequence[int], text: bytes, start: int) -> list[int]:
        spelling = self._spelling(ids)
        if not spelling.endswith(text):
            return [*[_UNKNOWN] * (len(ids) - 1), start + len(text)][-len(ids) :] if ids else []
        before = start - (len(spelling) - len(text))
        return [before + end for end in itertools.accumulate(len(self._bytes.of(i)) for i in ids)]

    def _spelling(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes.of, ids))


def _read(path: Path) -> tuple[Tokenizer, TokenBytes]:
    """The tokenizer, and what each of its tokens spells, special ones included."""
    directory = tokenizer_of(path)
    tokenizer: Tokenizer = load_tokenizer(directory)._tokenizer
    try:
        table = TokenBytes.of_tokenizer(tokenizer)
    except UnsupportedDecoder as error:
        raise CheckpointError(f"{directory}/tokenizer.json", str(error)) from None
    return tokenizer, table.with_names({i: token.content for i, token in _specials(tokenizer).items()})


def _specials(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _spelt(tokenizer: Tokenizer, table: TokenBytes) -> dict[tuple[bytes, bool], int]:
    """Tokens by what they spell, special ones apart from others."""
    specials, found = _specials(tokenizer), dict[tuple[bytes, bool], int]()
    # A byte in hexadecimal spells what another token may spell too; that is the one which texts have.
    for i in sorted(range(len(table.table)), key=lambda i: str(tokenizer.id_to_token(i)).startswith("<0x")):
        if spelling := table.of(i):
            found.setdefault((spelling, i in specials), i)
    return found


def _scaled(proposal: Proposal, share: float) -> Proposal:
    others = tuple((token_id, chance * share) for token_id, chance in proposal.others)
    return replace(proposal, confidence=proposal.confidence * share, others=others)
