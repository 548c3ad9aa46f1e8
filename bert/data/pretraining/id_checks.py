"""Token ids against the vocabulary, before anything is trained: an id beyond the embedding has no row there, and the
device would take another one's without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bert.data.corpus import documents
from bert.data.features import Rows
from bert.data.pretraining.builder import PretrainingDataset
from bert.data.pretraining.shards import open_rows
from bert.errors import UserError
from bert.tokenizer.wordpiece import SpecialTokenIds

ROWS_AT_ONCE = 8192


def check_token_ids(examples: PretrainingDataset, vocab_size: int) -> None:
    """Looks through every shard once; what it found is remembered by the state of the file.

    Raises:
        UserError: a shard, and the row, with an id that is not below ``vocab_size``.
    """
    memo = documents.DigestCache(examples.folder.parent)
    for path in (*examples.train, *examples.eval):
        state, modified = documents.file_signature(path)
        largest = int(memo.get((f"largest id|{state}", modified), lambda: str(_largest(path))))
        if largest >= vocab_size:
            raise UserError(
                f"{path} holds the token id {largest}, and the model's embedding ends at {vocab_size - 1} "
                f"(model.vocab_size {vocab_size}): take the vocabulary that belongs to the model (tokenizer.path, init)"
            )
    memo.save()


def share_of_unknown_pieces(examples: PretrainingDataset, special: SpecialTokenIds) -> float:
    """Of the training pieces, special ones but [UNK] left out, the share that the vocabulary does not know.

    Raises:
        UserError: it knows none, and so there is nothing to predict.
    """
    counts = examples.unigram_counts
    known, unknown = np.delete(counts, list(special.all)).sum(), counts[special.unk]
    if not known:
        raise UserError(
            "the vocabulary knows no piece of data.train: take one of the corpus' language (tokenizer.path, init), or "
            "train one"
        )
    return float(unknown / (known + unknown))


def require_known_ids_of_rows(rows: Rows, vocab_size: int, split: str) -> None:
    """Looks through the rows of a fine-tuning split.

    Raises:
        UserError: the first row with an id that is not in [0, ``vocab_size``).
    """
    for start in range(0, len(rows), ROWS_AT_ONCE):
        numbers = np.arange(start, min(start + ROWS_AT_ONCE, len(rows)))
        ids = rows.batch(numbers, int(rows.lengths[numbers].max()), len(numbers))["input_ids"]
        wrong = (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            row = np.flatnonzero(wrong.reshape(len(numbers), -1).any(axis=1))[0]
            raise UserError(
                f"row {numbers[row] + 1} of {split} holds the token id {ids[row][wrong[row]][0]}, and the model's "
                f"embedding has {vocab_size} rows (model.vocab_size): take the vocabulary that belongs to the model"
            )


def _largest(path: Path) -> int:
    rows = open_rows([path])
    starts = range(0, len(rows), ROWS_AT_ONCE)
    return max(
        (int(rows.take(np.arange(start, min(start + ROWS_AT_ONCE, len(rows))))["input_ids"].max()) for start in starts),
        default=0,
    )
