"""Finds the special tokens of a vocabulary by their role. Any role may be missing."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_TOKENS = {
    **{"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"},
    **{"bos": "<s>", "eos": "</s>"},
}
MPNET_TOKENS = {**ROBERTA_TOKENS, "unk": "[UNK]"}
ALBERT_TOKENS = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GPT2_TOKENS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<pad>"}

TOKEN_SETS: tuple[Mapping[str, str], ...] = (MPNET_TOKENS, ROBERTA_TOKENS, BERT_TOKENS, ALBERT_TOKENS, GPT2_TOKENS)
"""Names by role. A vocabulary belongs to the set with which it shares the most tokens, or to the first of equal sets.
"""

HIDDEN = " "
"""Prefix that hides a special token from texts: no token of a text contains a space."""

SPECIAL_TOKENS = tuple(BERT_TOKENS.values())
"""The first tokens of a trained WordPiece vocabulary."""


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of special tokens by role. The properties raise UserError if the vocabulary has no such token."""

    by_role: Mapping[str, int]

    @property
    def pad(self) -> int:
        """Pads rows."""
        return self._require("pad")

    @property
    def unk(self) -> int:
        """Replaces text that has no other token."""
        return self._require("unk")

    @property
    def cls(self) -> int:
        """Begins the row of a classifier."""
        return self._require("cls")

    @property
    def sep(self) -> int:
        """Ends a text."""
        return self._require("sep")

    @property
    def mask(self) -> int:
        """Replaces a token that is to be predicted."""
        return self._require("mask")

    @property
    def bos(self) -> int:
        """Begins a generated text."""
        return self._require("bos")

    @property
    def eos(self) -> int:
        """Ends a generated text, and separates documents."""
        return self._require("eos")

    @property
    def end(self) -> int:
        """Separates documents: eos or, without one, sep."""
        return self.eos if "eos" in self.by_role else self.sep

    @property
    def padding(self) -> int:
        """Pads rows: pad or, in a vocabulary without one such as GPT-2's, the end token."""
        return self.pad if "pad" in self.by_role else self.end

    @property
    def all(self) -> tuple[int, ...]:
        """Every special id once."""
        return tuple(dict.fromkeys(self.by_role.values()))

    def find(self, role: str) -> int | None:
        """Returns the id of a role; None if the vocabulary has no token for it."""
        return self.by_role.get(role)

    def _require(self, role: str) -> int:
        if role not in self.by_role:
            names = dict.fromkeys(tokens[role] for tokens in TOKEN_SETS if role in tokens)
            raise UserError(
                f"the vocabulary has no {role} token ({' or '.join(names)}), which is needed here: use a vocabulary "
                "that has one"
            )
        return self.by_role[role]


def special_ids(tokenizer: Tokenizer) -> SpecialTokenIds:
    """Returns the ids of the special tokens of a vocabulary."""
    # Looked up one by one, because copying the whole vocabulary is slow.
    names = {name for tokens in TOKEN_SETS for name in tokens.values()}
    candidates = {name: [tokenizer.token_to_id(text) for text in (name, HIDDEN + name)] for name in names}
    known = {name: next(i for i in ids if i is not None) for name, ids in candidates.items() if set(ids) != {None}}
    return SpecialTokenIds({role: known[name] for role, name in special_tokens(known).items()})


def special_tokens(vocab: Container[str]) -> dict[str, str]:
    """Returns the special tokens of a vocabulary by role."""
    sets = [{role: name for role, name in tokens.items() if name in vocab} for tokens in TOKEN_SETS]
    return max(sets, key=lambda tokens: len(set(tokens.values())))
