"""Tokenized rows of a fine-tuning task, without padding, and the padded batches taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing

ROWS_AT_ONCE = 4096
"""Texts tokenized in one call: enough to make calls cheap, few enough to bound memory."""


@dataclass(frozen=True)
class Features:
    """R rows of different lengths, one after the other."""

    ids: np.ndarray
    """[tokens of all rows] int32, special ones included."""
    offsets: np.ndarray
    """[R + 1] int64: row r is ids[offsets[r] : offsets[r + 1]]."""
    segment_a_lengths: np.ndarray
    """[R] int32: tokens of segment A, with [CLS] and its [SEP]; the others of the row are segment B."""
    labels: np.ndarray | None
    """[R] int32; None where the split has none."""
    pad_token_id: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The given rows, padded to T = ``length`` tokens and B = ``batch_size`` rows; fill rows weigh 0.

        Returns:
          input_ids, token_type_ids, attention_mask [B, T] int32, labels [B] int32 (0 where there are none),
          weights [B] float32, 1 for a row asked for.
        """
        rows = np.asarray(rows)
        lengths = self.lengths[rows]
        longest = lengths.max(initial=0)
        if len(rows) > batch_size or longest > length:
            raise ValueError(f"{len(rows)} rows of up to {longest} tokens do not fit a batch [{batch_size}, {length}]")
        used = slice(0, len(rows))
        place = np.arange(length)
        real = np.zeros((batch_size, length), bool)
        real[used] = place < lengths[:, None]
        starts = np.zeros((batch_size, 1), np.int64)
        starts[used, 0] = self.offsets[rows]
        segment_a = np.zeros((batch_size, 1), np.int64)
        segment_a[used, 0] = self.segment_a_lengths[rows]

        input_ids = np.full((batch_size, length), self.pad_token_id, np.int32)
        input_ids[real] = self.ids[(starts + place)[real]]
        labels = np.zeros(batch_size, np.int32)
        if self.labels is not None:
            labels[used] = self.labels[rows]
        weights = np.zeros(batch_size, np.float32)
        weights[used] = 1
        return {
            "input_ids": input_ids,
            "token_type_ids": (real & (place >= segment_a)).astype(np.int32),
            "attention_mask": real.astype(np.int32),
            "labels": labels,
            "weights": weights,
        }


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    max_length: int,
    labels: np.ndarray | None = None,
) -> Features:
    """Texts or pairs -> ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, at most ``max_length`` tokens.

    The longer text of a pair is cut first, as BERT's ``_truncate_seq_pair`` (google-research/bert,
    run_classifier.py). ``tokenizer`` stays as it is.
    """
    own = Tokenizer.from_str(tokenizer.to_str())  # truncation and padding are settings of the object itself
    own.no_padding()
    own.enable_truncation(max_length, strategy="longest_first")
    if own.post_processor is None:
        separator, classifier = ((token, own.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
        own.post_processor = BertProcessing(separator, classifier)

    ids = [np.zeros(0, np.int32)]
    lengths: list[int] = []
    segment_a_lengths: list[int] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        for encoding in own.encode_batch_fast(texts[start : start + ROWS_AT_ONCE]):
            ids.append(np.array(encoding.ids, np.int32))
            lengths.append(len(ids[-1]))
            segment_a_lengths.append(lengths[-1] - sum(encoding.type_ids))
    return Features(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        segment_a_lengths=np.array(segment_a_lengths, np.int32),
        labels=labels,
        pad_token_id=next((i for i in map(own.token_to_id, ("[PAD]", "<pad>")) if i is not None), 0),
    )
