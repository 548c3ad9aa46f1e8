"""Whole words and frozen masks as two lines of a configuration ask for them, through examples, loader and phases."""

import dataclasses
import itertools
import random
from string import ascii_lowercase as LETTERS

import numpy as np
import pytest

from bert.analysis.examples import masked_examples
from bert.config import DataConfig, PretrainConfig, TrainingConfig
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.loader import Batch
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer
from bert.training.pretraining.data import open_phases
from tests.helpers import originals

B, T = 32, 64


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus of three-letter words in which each letter is one token."""
    folder = tmp_path_factory.mktemp("letters")
    draw = random.Random("words")
    documents = [
        "\n".join(" ".join("".join(draw.choices(LETTERS, k=3)) for _ in range(6)) for _ in range(12)) for _ in range(80)
    ]
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]))
    return folder


def batches(place, **data) -> list[list[Batch]]:
    """Batches of two epochs."""
    config = PretrainConfig(
        data=DataConfig(
            **{"train": str(place / "corpus.txt"), "sequence_length": T, "max_predictions_per_sequence": 20},
            **{"one_sentence_per_line": True, "num_workers": 1, **data},
        ),
        training=TrainingConfig(steps=1000, batch_size=B),
    )
    tokenizer = load_tokenizer(place / "vocab.txt")
    examples = build_examples(config.data, tokenizer, place / "cache")
    [phase] = open_phases(config, tokenizer, [examples], (0, 1))
    steps = examples.counts["train_rows"] // B
    return [[phase.loader.batch(step) for step in range(epoch * steps, (epoch + 1) * steps)] for epoch in (0, 1)]


def predicted(batch: Batch) -> np.ndarray:
    """[B, T], whether a token is predicted."""
    result = np.zeros(batch["input_ids"].shape, bool)
    rows, places = np.nonzero(batch["masked_lm_weights"])
    result[rows, batch["masked_lm_positions"][rows, places]] = True
    return result


@pytest.mark.parametrize("whole", [False, True])
def test_whole_words_by_one_line_each_token_still_80_10_10(place, whole) -> None:
    first_token, words, kinds = len(SPECIAL_TOKENS), [], []
    for batch in itertools.chain(*batches(place, whole_word_masking=whole)):
        before, chosen = originals(batch), predicted(batch)
        starts = (before >= first_token) & (before < first_token + len(LETTERS))
        for row, place_ in np.argwhere(starts[:, :-2]):
            if (before[row, place_ + 1 : place_ + 3] >= first_token + len(LETTERS)).all():  # else cut by the row's end
                words.append(chosen[row, place_ : place_ + 3].sum())
        after = batch["input_ids"][chosen]
        kinds += [np.mean(after == 4), np.mean(after == before[chosen])]
    parts = np.isin(words, (1, 2)).mean()
    assert parts == 0 if whole else parts > 0.2
    masked, kept = np.array(kinds).reshape(-1, 2).mean(axis=0)
    # Over 20,000 predicted tokens: a standard error of 0.003 and 0.002. One of 52 random tokens is the token itself.
    assert masked == pytest.approx(0.8, abs=0.012)
    assert kept == pytest.approx(0.1 + 0.1 / 57, abs=0.01)


def test_shown_examples_have_the_static_masks_of_training(place) -> None:
    data = DataConfig(train=str(place / "corpus.txt"), sequence_length=T, max_predictions_per_sequence=20)
    data = dataclasses.replace(data, one_sentence_per_line=True, num_workers=1, static_masking=True)
    config = PretrainConfig(data=data, training=TrainingConfig(steps=1000, batch_size=B))
    tokenizer = load_tokenizer(place / "vocab.txt")
    examples = build_examples(data, tokenizer, place / "cache")
    epoch = batches(place, static_masking=True)[0]
    trained = {tuple(row[row != 0].tolist()) for batch in epoch for row in batch["input_ids"]}
    shown = list(masked_examples(examples, tokenizer, config, 20))
    found = [tuple(tokenizer.token_to_id(token.text) for token in example.tokens) in trained for example in shown]
    assert sum(found) >= 18, "an epoch leaves out the rows of its last, incomplete batch"


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_masks_by_one_line(place, frozen) -> None:
    seen: list[dict[bytes, bytes]] = [{}, {}]
    for epoch, result in zip(seen, batches(place, static_masking=frozen), strict=True):
        for batch in result:
            for row, masked in zip(originals(batch), batch["input_ids"], strict=True):
                epoch[row.tobytes()] = masked.tobytes()
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 200
    same = np.mean([seen[0][row] == seen[1][row] for row in both])
    assert same == 1 if frozen else same < 0.05


@pytest.mark.parametrize("input_format", ["full_sentences", "doc_sentences", "blocks"])
def test_rows_without_pairs_are_not_duplicated_for_nothing(input_format) -> None:
    config = DataConfig(train="a.txt", input_format=input_format, dupe_factor=3)
    with pytest.raises(
        UserError, match=rf"dupe_factor is 3, but data\.input_format is {input_format}: .* data\.static"
    ):
        config.check()
    DataConfig(train="a.txt", input_format=input_format, dupe_factor=3, static_masking=True).check()


def test_passes_are_those_that_are_asked_for(place) -> None:
    """The last batch of a pass reads on into the next one."""
    data = DataConfig(train=str(place / "corpus.txt"), sequence_length=T, num_workers=1)
    tokenizer = load_tokenizer(place / "vocab.txt")
    examples = build_examples(data, tokenizer, place / "cache")
    rows = examples.counts["train_rows"]
    for batch_size, epochs in ((rows - 1, 4.0), (2 * rows // 3, 3.0), (8 * rows, 2.0), (1, 0.5)):
        training = TrainingConfig(epochs=epochs, batch_size=batch_size)
        [phase] = open_phases(PretrainConfig(data=data, training=training), tokenizer, [examples], (0, 1))
        assert phase.phase.end == max(1, round(epochs * rows / batch_size))


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"sequence_length": 128, "max_predictions_per_sequence": 5}, "5 allows 4.0% of the tokens of a full row"),
        ({"sequence_length": 32, "max_predictions_per_sequence": 5, "masked_lm_prob": 0.4}, "allows 16.7% of"),
        ({"sequence_length": 512, "max_predictions_per_sequence": 77}, None),
    ],
)
def test_fewer_predictions_than_the_share_are_told(values: dict, allowed: str | None) -> None:
    output = PretrainConfig(data=DataConfig(**values)).capped_predictions()
    assert output is None if allowed is None else allowed in output
    assert (
        PretrainConfig(data=DataConfig(**values), training=TrainingConfig(objective="clm")).capped_predictions() is None
    )
