"""Special tokens by their role. A vocabulary has one of some sets of names, and any role may be missing in it."""

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
"""Names by role. A vocabulary is of the set of which it has most tokens, and of the first of several such sets."""

HIDDEN = " "
"""Before the name of a special token that no text is to become. No token of a text holds a space."""

SPECIAL_TOKENS = tuple(BERT_TOKENS.values())
"""In the order in which a trained WordPiece vocabulary starts."""


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of the special tokens that a vocabulary has, by role. Raises UserError for one that is missing."""

    by_role: Mapping[str, int]

    @property
    def pad(self) -> int:
        """Fills rows up."""
        return self._require("pad")

    @property
    def unk(self) -> int:
        """Stands for what has no other token."""
        return self._require("unk")

    @property
    def cls(self) -> int:
        """Begins a row of a classifier."""
        return self._require("cls")

    @property
    def sep(self) -> int:
        """Ends a text."""
        return self._require("sep")

    @property
    def mask(self) -> int:
        """Hides a token that is to be predicted."""
        return self._require("mask")

    @property
    def bos(self) -> int:
        """Begins a text that is generated."""
        return self._require("bos")

    @property
    def eos(self) -> int:
        """Ends a text that is generated, and separates documents."""
        return self._require("eos")

    @property
    def end(self) -> int:
        """Stands between two documents: the token that ends a text that is generated, or, without one, any text."""
        return self.eos if "eos" in self.by_role else self.sep

    @property
    def padding(self) -> int:
        """Fills rows up: the padding token or, in a vocabulary without one, as that of GPT-2, the end token."""
        return self.pad if "pad" in self.by_role else self.end

    @property
    def all(self) -> tuple[int, ...]:
        """Every special id once."""
        return tuple(dict.fromkeys(self.by_role.values()))

    def find(self, role: str) -> int | None:
        """The id of a role; None if the vocabulary has no token for it."""
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
    """Ids of the special tokens that a vocabulary has."""
    # One by one: the whole vocabulary takes longer to copy than a short text to answer.
    names = {name for tokens in TOKEN_SETS for name in tokens.values()}
    candidates = {name: [tokenizer.token_to_id(text) for text in (name, HIDDEN + name)] for name in names}
    known = {name: next(i for i in ids if i is not None) for name, ids in candidates.items() if set(ids) != {None}}
    return SpecialTokenIds({role: known[name] for role, name in special_tokens(known).items()})


def special_tokens(vocab: Container[str]) -> dict[str, str]:
    """The special tokens that a vocabulary has, by role."""
    sets = [{role: name for role, name in tokens.items() if name in vocab} for tokens in TOKEN_SETS]
    return max(sets, key=lambda tokens: len(set(tokens.values())))
