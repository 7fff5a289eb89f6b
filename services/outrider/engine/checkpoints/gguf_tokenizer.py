"""Builds the tokenizer that a GGUF file describes in its metadata, which has no tokenizer.json.

Two kinds are known: `gpt2`, a BPE over bytes whose pre-tokenizer has a name, and `llama`, a BPE
as in SentencePiece, whose merges follow from the scores. Others are refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.engine.checkpoints.checkpoints import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

log = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens that differ from ordinary ones."""
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""GGUF's names of special tokens, and those of transformers."""
_ENDS = ("eos", "eot", "eom")
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""llama.cpp's, for a file of kind `llama` that names none."""
_MAX_CUTTING = 1 << 28
_ORDER_IS_RANK = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose scores do not follow the order in which tokens were merged; their order in the file does."""
_NO_RSTRIP = frozenset({"<unk>", "<s>", "<|endoftext|>"})

# Pre-tokenizers: how a text is split before merges apply. The names are llama.cpp's (src/llama-vocab.cpp), the
# expressions those of the tokenizer.json of the models that gave the names. Each splits what the one before it left.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One of them, with the settings that go with its name."""

    splits: tuple[str, ...]
    composes: bool = False
    """Texts are brought into Unicode's form NFC first, which a GGUF file does not say."""
    ignores_merges: bool = False
    """A piece that is a token is that token, whatever the merges."""
    adds_bos: bool = False
    """A text begins with the BOS token, unless the file says otherwise."""


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_FAMILIES = {
    ("default",): _DEFAULT,
    ("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum", "exaone4"): PreTokenizer(
        (_GPT2,)
    ),
    ("mpt", "olmo"): PreTokenizer((_GPT2,), composes=True),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"): PreTokenizer((r"\p{N}", _GPT2)),
    ("command-r",): PreTokenizer((r"\p{N}", _GPT2), composes=True),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("qwen2", "megrez"): PreTokenizer((_QWEN2,), composes=True),
    ("stablelm2", "deepseek-r1-qwen", "kormo", "hunyuan", "solar-open", "grok-2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), composes=True),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): PreTokenizer((_GPT4O,)),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
PRE_TOKENIZERS = {name: rule for names, rule in _FAMILIES.items() for name in names}
"""By name. A file that names another is refused."""


class GgufTokenizer:
    """The tokenizer of one file. Raises CheckpointError for a kind that is not known."""

    def __init__(self, file: Path, fields: Mapping[str, Any]) -> None:
        self._file = file
        self._fields = fields
        self._tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self._get("tokens", []))]
        if len(set(self._tokens)) != len(self._tokens) or not self._tokens:
            raise self._error("tokens", "missing, or one twice")
        self._types = self._get("token_type", [1] * len(self._tokens))

    @classmethod
    def read(cls, file: Path, reader: GGUFReader) -> GgufTokenizer:
        return cls(file, {name: field.contents() for name, field in reader.fields.items()})

    def build(self) -> Tokenizer:
        kind = self._get("model", None)
        if kind == "gpt2":
            made = self._byte_level()
        elif kind == "llama":
            made = self._sentencepiece()
        else:
            raise self._error("model", f"{kind!r} is none of gpt2, llama")
        self._add_tokens(made)
        return made

    def write(self, directory: Path) -> None:
        """tokenizer.json, tokenizer_config.json and the chat templates; adds the ends of turns to
        generation_config.json."""
        from transformers import PreTrainedTokenizerFast

        made = self.build()
        names = {f"{ours}_token": self._tokens[i] for name, ours in _NAMES.items() for i in self._named(name)}
        template = self._templates()
        PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names).save_pretrained(directory)
        # transformers may have added tokens.
        made.save(str(directory / "tokenizer.json"))
        self._write_ends(directory / "generation_config.json")

    def _byte_level(self) -> Tokenizer:
        name = self._get("pre", "")
        if not name:
            log.warning("%s names no pre-tokenizer; the default of llama.cpp is used", self._file.name)
        rule = PRE_TOKENIZERS.get(name or "default")
        if rule is None:
            raise self._error("pre", f"{name!r} is not a known pre-tokenizer")
        made = Tokenizer(models.BPE(self._vocabulary(), self._merges(), ignore_merges=rule.ignores_merges))
        if rule.composes:
            made.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in rule.splits]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
        made.decoder = decoders.ByteLevel()
        self._surround(made, adds_bos=rule.adds_bos)
        return made

    def _sentencepiece(self) -> Tokenizer:
        [unknown] = self._named("unknown")
        settings: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True, "unk_token": self._tokens[unknown]}
        bpe = models.BPE(self._vocabulary(), self._merges(), **settings)
        made = Tokenizer(bpe)
        prefixed = self._get("add_space_prefix", True)
        spaces = normalizers.Replace(" ", _SPACE)
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefixed else [spaces])
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
        self._surround(made, adds_bos=True)
        return made

    def _vocabulary(self) -> dict[str, int]:
        return {self._spelled(i): i for i in range(len(self._tokens))}

    def _spelled(self, token_id: int) -> str:
        token = self._tokens[token_id]
        # Gemma's files have runs of spaces as plain spaces.
        blank = self._types[token_id] == _USER_DEFINED and self._get("model", "") == "llama" and not token.strip(" ")
        return _SPACE * len(token) if blank else token

    def _merges(self) -> list[tuple[str, str]]:
        if (listed := self._get("merges", None)) is not None:
            return [(merge[:at], merge[at + 1 :]) for merge in listed if (at := merge.index(" ", 1))]
        if len(self._get("scores", [])) < len(self._tokens):
            raise self._error("merges", "missing, and no scores from which they follow")
        from transformers.tokenization_utils_base import generate_merges

        vocabulary = self._vocabulary()
        # Each token is tried at each place where it can be cut.
        if (work := sum(len(token) ** 2 for token in vocabulary)) > _MAX_CUTTING:
            raise self._error("tokens", f"too long: to cut them takes {work} steps; at most {_MAX_CUTTING} are taken")
        if self._fields.get("general.architecture") in _ORDER_IS_RANK:
            ranks = {token: -i for token, i in vocabulary.items()}
        else:
            scores = self._get("scores", None)
            ranks = {token: scores[i] for token, i in vocabulary.items()}
        fixed = {_CONTROL, _UNUSED, _BYTE}
        skipped = {token for token, i in vocabulary.items() if self._types[i] in fixed}
        return [(left, right) for left, right in generate_merges(vocabulary, ranks, skip_tokens=skipped)]

    def _surround(self, made: Tokenizer, *, adds_bos: bool) -> None:
        """BOS before a text and EOS after it, where the file wants them."""
        before = self._named("bos") if self._get("add_bos_token", adds_bos) else []
        after = self._named("eos") if self._get("add_eos_token", False) else []
        if not before and not after:
            return
        names = [self._tokens[i] for i in before], [self._tokens[i] for i in after]
        first, second = ([*names[0], part, *names[1]] for part in ("$A", "$B"))
        ids = [(self._tokens[i], i) for i in (*before, *after)]
        made.post_processor = processors.TemplateProcessing(single=first, pair=[*first, *second], special_tokens=ids)

    def _named(self, name: str) -> list[int]:
        """The id of this special token, or nothing."""
        default = _DEFAULT_IDS.get(name) if self._get("model", "") == "llama" else None
        found = self._get(f"{name}_token_id", default)
        if found is not None and not 0 <= found < len(self._tokens):
            raise self._error(f"{name}_token_id", f"{found} is none of {len(self._tokens)} tokens")
        return [] if found is None else [int(found)]

    def _add_tokens(self, made: Tokenizer) -> None:
        """Tokens that are found in a text whole, before it is split."""
        named = {i for name in (*_ENDS, "bos", "padding") for i in self._named(name)}
        special = [i for i, kind in enumerate(self._types) if kind in (_UNKNOWN, _CONTROL) or i in named]
        # Phi 3's marks swallow the spaces after them. A GGUF file cannot say so.
        phi3 = self._fields.get("general.architecture") == "phi3" and self._get("model", "") == "llama"
        swallows = {i for i in special if phi3 and self._tokens[i] not in _NO_RSTRIP}
        made.add_special_tokens([AddedToken(self._spelled(i), normalized=False, rstrip=i in swallows) for i in special])
        others = [i for i, kind in enumerate(self._types) if kind == _USER_DEFINED and i not in named]
        made.add_tokens([AddedToken(self._spelled(i), normalized=False) for i in others])

    def _templates(self) -> str | dict[str, str] | None:
        default = self._fields.get("tokenizer.chat_template")
        prefix = "tokenizer.chat_template."
        others = {key.removeprefix(prefix): text for key, text in self._fields.items() if key.startswith(prefix)}
        return {"default": default, **others} if default and others else default

    def _write_ends(self, file: Path) -> None:
        ends = sorted({i for name in _ENDS for i in self._named(name)})
        settings = json.loads(file.read_text()) if file.is_file() else {}
        if ends:
            file.write_text(json.dumps({**settings, "eos_token_id": ends}, indent=2) + "\n")

    def _get(self, name: str, default: Any) -> Any:
        return self._fields.get(_KEY + name, default)

    def _error(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(str(self._file), f"{_KEY}{name}: {message}")
