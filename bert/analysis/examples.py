"""Statistics of pretraining examples, and examples as they are masked in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert.config import PretrainConfig
from bert.data.corpus.vocabulary import Losses
from bert.data.pretraining.dataset import PretrainingDataset, open_rows
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.data.pretraining.loader import (
    bits_of_static_masks,
    make_predictions,
    masked_batch,
    random_uint64s_per_row,
)
from bert.data.pretraining.masking import philox_uint64
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.tokenizer.library import special_ids


class MaskedToken(NamedTuple):
    """One input token of an example.

    ``original`` is the token to predict, for permuted tokens the number in their order, or None.
    """

    text: str
    original: str | None
    is_special: bool
    is_segment_b: bool


class MaskedExample(NamedTuple):
    """An example as it is masked.

    Attributes:
        position: index in a packed row, or None.
    """

    row: int
    position: int | None
    tokens: list[MaskedToken]
    predicted: int
    label: str


def loss_statistics(losses: Losses) -> list[tuple[str, str]]:
    """Returns names and values of the text that the vocabulary cannot represent, in a sample."""
    return [
        ("unknown text", f"{losses.unknown:.3%} of the characters of a sample"),
        ("removed marks", f"{losses.removed:.3%} of the characters of a sample"),
    ]


def example_statistics(dataset: PretrainingDataset, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Returns names and values: unknown tokens, and documents, sentences, tokens, rows and padding of each split."""
    unknown = dataset.unknown_rate(special_ids(tokenizer))
    lines = [("unknown tokens", f"{unknown:.3%} of the training tokens")]
    lines += dataset.filter_lines(with_samples=True)
    for split, paths in (("train", dataset.train), ("eval", dataset.eval)):
        documents, sentences, tokens = (
            dataset.counts[f"{split}_{name}"] for name in ("documents", "sentences", "tokens")
        )
        rows = open_rows(paths)
        blocks = (rows.take(np.arange(i, min(i + 4096, len(rows)))) for i in range(0, len(rows), 4096))
        columns = [(block["length"], block.get(EXAMPLE_LENGTH)) for block in blocks]
        lengths = np.concatenate([length for length, _ in columns])
        low, middle, high = np.percentile(lengths, [10, 50, 90])
        padding, packing = f"{_padding_share(lengths, dataset.sequence_length):.1%} of all positions", ""
        if columns[0][1] is not None:
            example_lengths = np.concatenate([length for _, length in columns])
            unpacked = example_lengths[example_lengths > 0]
            max_examples = np.count_nonzero(example_lengths, axis=1).max()
            packing = f" and {max_examples} examples, {len(unpacked):,} in all"
            padding += f"; with one example a row {_padding_share(unpacked, dataset.sequence_length):.1%}"
        lines += [
            (f"{split}: documents", f"{documents:,}, of {_of_sentences(sentences, documents)}"
                                    f"{tokens / documents:,.0f} tokens on average"),
            *([(f"{split}: sentences", f"{sentences:,}, of {tokens / sentences:,.1f} tokens on average")]
              if sentences else []),
            (f"{split}: tokens", f"{tokens:,}"),
            (f"{split}: rows", f"{len(rows):,} of up to {dataset.sequence_length} tokens{packing}; at the 10th, 50th, "
                               f"90th percentile {low:.0f}, {middle:.0f}, {high:.0f}"),
            (f"{split}: padding", padding),
        ]  # fmt: skip
        if (consecutive := dataset.consecutive_share(split)) is not None:
            lines.append((f"{split}: pairs", f"{consecutive:.1%} consecutive, the others with a random B"))
    return lines


def _of_sentences(sentences: int, documents: int) -> str:
    """Returns the number of sentences per document, if rows are built from sentences."""
    return f"{sentences / documents:,.1f} sentences and " if sentences else ""


def _padding_share(lengths: np.ndarray, sequence_length: int) -> float:
    return 1 - lengths.sum() / (len(lengths) * sequence_length)


def masked_examples(
    dataset: PretrainingDataset, tokenizer: Tokenizer, config: PretrainConfig, count: int
) -> Iterator[MaskedExample]:
    """Yields the examples of ``count`` rows, spread over the training rows.

    Masks are drawn as in training, and are the same as there with ``data.static_masking``.
    """
    rows, special = open_rows(dataset.train), special_ids(tokenizer)
    predictions = make_predictions(config.data, tokenizer, config.training.objective)
    input_format = INPUT_FORMATS[config.data.input_format]
    indices = np.unique(np.linspace(0, len(rows) - 1, count).astype(int))
    examples = rows.take(indices)
    words = random_uint64s_per_row(predictions, examples)
    if config.data.static_masking:
        random_bits = bits_of_static_masks(config.seed, indices, words)
    else:
        random_bits = philox_uint64((config.seed, 0), 0, len(indices), words)
    batch = masked_batch(examples, predictions, random_bits, 0)
    for at, index, start, end in _spans(batch):
        originals = {} if config.training.objective == "clm" else _masked_tokens(batch, at, tokenizer)
        places = range(start, end)
        predicted = sum(i in originals for i in places)
        if config.training.objective == "clm":
            predicted = int(batch["next_token_weights"][at, start:end].sum())
        label = "no label"
        if input_format.label:
            labels = batch[f"{input_format.label}_labels"][at]
            label = input_format.label_names[labels if index is None else labels[index]]
        ids, segments = batch["input_ids"][at].tolist(), batch["token_type_ids"][at].tolist()
        tokens = [
            MaskedToken(tokenizer.id_to_token(ids[i]) or "", originals.get(i), ids[i] in special.all, segments[i] == 1)
            for i in places
        ]
        yield MaskedExample(int(indices[at]), index, tokens, predicted, label)


def _masked_tokens(batch: dict[str, np.ndarray], at: int, tokenizer: Tokenizer) -> dict[int, str | None]:
    """Returns the original tokens of a row's masked positions, or the numbers of permuted tokens."""
    used = batch["masked_lm_weights"][at] > 0
    positions, targets = (batch[name][at, used].tolist() for name in ("masked_lm_positions", "masked_lm_ids"))
    if "query_ids" in batch:
        return {position: str(number) for number, position in enumerate(positions, 1)}
    return dict(zip(positions, map(tokenizer.id_to_token, targets), strict=True))


def _spans(batch: dict[str, np.ndarray]) -> Iterator[tuple[int, int | None, int, int]]:
    """Yields each example's row, index within a packed row, first position and end."""
    for at, length in enumerate(batch["attention_mask"].sum(axis=1).tolist()):
        if "example_ids" not in batch:
            yield at, None, 0, length
            continue
        owners = batch["example_ids"][at, :length]
        for index in range(int(owners.max())):
            start, end = owners.searchsorted([index + 1, index + 2]).tolist()
            yield at, index, start, end
