"""Special tokens and token types of a row, read from the tokenizer's post-processor.

BERT's rows are ``[CLS] A [SEP]`` and ``[CLS] A [SEP] B [SEP]`` with token types 0 and 1, RoBERTa's ``<s> A </s>`` and
``<s> A </s></s> B </s>`` with token types 0 alone. Every module that lays out rows takes them from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bert.errors import UserError
from bert.tokenizer.special_tokens import ROBERTA_TOKENS, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.processors import PostProcessor

Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True)
class RowTemplate:
    """Special tokens around one text A, or around a pair of texts A and B.

    Attributes:
      prefix: ids before A.
      separator: ids between A and B; () for one text.
      suffix: ids after the last text.
      types_of_special: token type of each of these ids, in order: 0s, then 1s.
      type_of_second: token type of B; that of A is 0.
    """

    prefix: tuple[int, ...]
    separator: tuple[int, ...]
    suffix: tuple[int, ...]
    types_of_special: tuple[int, ...]
    type_of_second: int = 0

    @property
    def size(self) -> int:
        """Number of special tokens in a row."""
        return len(self.types_of_special)

    def room(self, max_length: int) -> int:
        """Tokens of the texts in a row of ``max_length`` tokens."""
        return max_length - self.size

    def segment_a_length(self, first: Count, second: Count) -> Count:
        """Tokens of type 0 in a row whose texts have so many tokens; those of type 1 follow them."""
        return first + second * (1 - self.type_of_second) + self.types_of_special.count(0)

    def row(self, first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray = ()) -> np.ndarray:
        """int32 ids of the row of one text, or of two."""
        parts = (self.prefix, first, self.separator, second, self.suffix)
        return np.concatenate([np.asarray(part, np.int32) for part in parts])


def row_template(tokenizer: Tokenizer, pair: bool = False) -> RowTemplate:
    """The template of a tokenizer's rows of one text, or of a pair.

    Raises:
      UserError: special tokens are missing, or token types other than 0s and then 1s.
    """
    from tokenizers import Tokenizer, models

    # The post-processor holds the ids it adds. Texts of one known token show where it adds them.
    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = post_processor(tokenizer)
    encoding = probe.encode("a", "a") if pair else probe.encode("a")
    texts = [column for column, owner in enumerate(encoding.sequence_ids) if owner is not None]
    types = encoding.type_ids
    if types[texts[0]] != 0 or set(types) - {0, 1} or types != sorted(types):
        raise UserError(
            f"the tokenizer's post-processor gives the tokens of a row the types {types}, and a row needs 0s, then 1s: "
            "use a tokenizer with BERT's or RoBERTa's post-processor"
        )
    ids, first, last = encoding.ids, texts[0], texts[-1]
    return RowTemplate(
        prefix=tuple(ids[:first]),
        separator=tuple(ids[first + 1 : last]),
        suffix=tuple(ids[last + 1 :]),
        types_of_special=tuple(type_id for column, type_id in enumerate(types) if column not in texts),
        type_of_second=types[last],
    )


def post_processor(tokenizer: Tokenizer) -> PostProcessor:
    """The tokenizer's own post-processor; BERT's or RoBERTa's, by its special tokens, if it has none."""
    from tokenizers.processors import BertProcessing, RobertaProcessing

    if tokenizer.post_processor is not None:
        return tokenizer.post_processor
    special = special_ids(tokenizer)
    separator, classifier = ((str(tokenizer.id_to_token(id)).strip(), id) for id in (special.sep, special.cls))
    if separator[0] == ROBERTA_TOKENS["sep"]:
        return RobertaProcessing(separator, classifier, add_prefix_space=False)
    return BertProcessing(separator, classifier)
